"""What the system refuses this process, as errors that name the limit and what to do about it."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable

from unisono.errors import TransportUnavailableError, UnisonoError

# The errors of a process, a user or a machine that has as much of something as it may have.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
_NO_THREAD = "can't start new thread"  # the text of Python's RuntimeError, which has no number


def _limit(kind: int) -> str:
    soft, hard = ("no limit" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(kind))
    return soft if soft == hard else f"{soft}, which you may raise to {hard}"


def _refused_by_system(error: Exception) -> str:
    return f"{_text(error)}; this system refuses what Unisono needs (`unisono doctor` tells what is missing here)"


_REASONS: dict[int, Callable[[Exception], str]] = {
    errno.EMFILE: lambda _: (
        f"this process has as many files open as it may (`ulimit -n`: {_limit(resource.RLIMIT_NOFILE)})"
    ),
    errno.ENFILE: lambda _: "this machine has as many files open as it may (/proc/sys/fs/file-max)",
    errno.EAGAIN: lambda _: (
        "no thread can be started, as this user or container has as many as it may "
        f"(`ulimit -u`: {_limit(resource.RLIMIT_NPROC)}; pids.max of the container)"
    ),
    errno.ENOMEM: lambda _: f"there is no memory for it (`ulimit -v`, in bytes: {_limit(resource.RLIMIT_AS)})",
    **dict.fromkeys((errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT), _refused_by_system),
}


def is_exhausted(error: BaseException) -> bool:
    """Return whether an error says that there is no more of something: descriptors, threads or memory."""
    return _number(error) in _EXHAUSTED


def is_refusal(error: BaseException) -> bool:
    """Return whether an error is the system's, and not one that Unisono has made of it."""
    return isinstance(error, OSError | RuntimeError) and _number(error) != 0 and not isinstance(error, UnisonoError)


def unavailable(
    what: str, error: Exception, rank: int | None = None, peer: int | None = None
) -> TransportUnavailableError:
    """Return the error for `what` ("a channel to rank 1 cannot be opened"), which the system refused by `error`."""
    explain = _REASONS.get(_number(error), _text)
    return TransportUnavailableError(f"{what}: {explain(error)}", rank=rank, peer=peer)


def _number(error: BaseException) -> int:
    if isinstance(error, RuntimeError) and str(error) == _NO_THREAD:
        return errno.EAGAIN
    return getattr(error, "errno", None) or 0


def _text(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
