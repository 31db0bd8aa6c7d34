"""Turns refusals of the system, such as too many open files, into errors that name the limit and the remedy."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable

from unisono.errors import TransportUnavailableError, UnisonoError

# The errors of a process, a user or a machine that has reached a limit.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_NO_THREAD = "can't start new thread"  # the text of a RuntimeError of Python, which has no errno


def _limit(kind: int) -> str:
    limits = resource.getrlimit(kind)
    soft, hard = ("no limit" if limit == resource.RLIM_INFINITY else str(limit) for limit in limits)
    return soft if soft == hard else f"{soft}, which you may raise to {hard}"


def _refused_by_system(error: Exception) -> str:
    return f"{_text(error)}; this system refuses what Unisono needs (`unisono doctor` shows what is missing)"


_REASONS: dict[int, Callable[[Exception], str]] = {
    errno.EMFILE: lambda _: (
        f"this process has as many files open as its limit allows (`ulimit -n`: {_limit(resource.RLIMIT_NOFILE)})"
    ),
    errno.ENFILE: lambda _: "this machine has as many files open as its limit allows (/proc/sys/fs/file-max)",
    errno.EAGAIN: lambda _: (
        "no thread can be started, because this user or container has as many as its limit allows "
        f"(`ulimit -u`: {_limit(resource.RLIMIT_NPROC)}; pids.max of the container)"
    ),
    errno.ENOMEM: lambda _: f"there is not enough memory (`ulimit -v`, in bytes: {_limit(resource.RLIMIT_AS)})",
    **dict.fromkeys((errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT), _refused_by_system),
}


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that descriptors, threads or memory are used up."""
    return _number(error) in _EXHAUSTED


def is_refusal(error: BaseException) -> bool:
    """Return whether an error comes from the system, and not from Unisono."""
    return isinstance(error, OSError | RuntimeError) and _number(error) != 0 and not isinstance(error, UnisonoError)


def unavailable(
    problem: str, error: Exception, rank: int | None = None, peer: int | None = None
) -> TransportUnavailableError:
    """Return the error for a `problem`, such as "a channel to rank 1 cannot be opened", that `error` has caused."""
    explain = _REASONS.get(_number(error), _text)
    return TransportUnavailableError(f"{problem}: {explain(error)}", rank=rank, peer=peer)


def _number(error: BaseException) -> int:
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return errno.EAGAIN
    return getattr(error, "errno", None) or 0


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
