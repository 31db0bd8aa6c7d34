"""UCX, as a Python package has loaded it: ucxx, or ucx-py under its own names.

The package makes the context and the worker, so that its settings, and those of the user (``UCX_TLS`` and all others of
UCX), hold; the native core does the rest by their handles. Endpoints are not the package's, which would be an object of
Python for each, with UCX's error handling, and that keeps UCX from shared memory. A process has one worker for each
set of settings, which stays until it ends: making one takes as long as thousands of messages.

Some of UCX's own transports are left out, unless the user names transports by ``UCX_TLS``:

- `cma`, by which a process reads another's memory. Where the other one has been killed, it calls abort(), so that the
  rank that should raise `PeerLostError` dies too.
- `sysv`, because processes of other users in the same group can attach to its segments. `posix` does the same work.
- `tcp`, because it listens on a port of its own and does not ask who connects. 13 bytes from a stranger end the rank.
  Only where UCX has no other way to another host may it use TCP, on one interface, and a warning says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono import log
from unisono.errors import TransportUnavailableError
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType
from unisono.transports.host.listening_ports import listening

_log = log.get()

# The modules of the core interface, which has the same names in both packages.
_PROVIDERS = ("ucxx._lib.libucxx", "ucp._libs.ucx_api")
_WITHOUT_TCP, _WITH_TCP = "^cma,sysv,tcp", "^cma,sysv"
# Enough to see whether the native core can enter UCX. It opens nothing.
_ENTERED_BY = {"TLS": "self"}
# What says which of UCX's transports and devices may be used.
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")
_LIBRARY = re.compile(r"(/\S*/libucp(?:-[^/]*)?\.so\S*)$", re.MULTILINE)


class NotEnteredError(TransportUnavailableError):
    """There is a UCX, but the native core cannot enter it; `ucx_core` may use it."""


def open_messenger(interface: str = "") -> _core.Messenger:
    """Return what carries tagged messages by UCX; the same in all of the process for the same interface.

    Args:
        interface: on which UCX may listen for TCP, as `settings` takes it.

    Raises:
        TransportUnavailableError: there is no UCX here that can be used; it says what to do.
    """
    return _messenger(os.getpid(), interface)


def check_entered() -> None:
    """Check that the native core can enter the UCX of this process; nothing is opened.

    Raises:
        TransportUnavailableError: there is none; `NotEnteredError` if there is one that only `ucx_core` may use.
    """
    _messenger_with(_ENTERED_BY)


def report() -> str:
    """Return the version of UCX, whether it knows CUDA, and what carries messages between two processes of this host.

    Raises:
        TransportUnavailableError: as `open_messenger` does.
    """
    before = listening()
    try:
        here, there = (_messenger_with(settings()) for _ in range(2))
    except NotEnteredError as error:
        return error.message
    with_cuda = " with cuda" if here.knows(MemoryType.CUDA) else ""
    carriers = here.carriers(there.address()) or "what it does not tell"
    return f"UCX {here.version()}{with_cuda}, which chooses {carriers}{_doors_since(before)}"


def drives_infiniband() -> bool:
    """Return whether UCX is there, with what it needs for devices of remote memory access."""
    try:
        imported()
    except TransportUnavailableError:
        return False
    return any(Path(library_path()).parent.glob("ucx/libuct_ib*"))


def library_path() -> str:
    """Return the path of the UCX library that this process has loaded."""
    found = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if found is None:
        raise TransportUnavailableError("the package of UCX has loaded no libucp")
    return found[1]


@functools.cache
def _messenger(process: int, interface: str) -> _core.UcxMessenger:
    """Return that of the process of this number: a forked child can use nothing of its parent's."""
    with warning_of_doors():
        return _messenger_with(settings(interface))


def imported() -> tuple[str, Any]:
    """Return the name of the first package of UCX that is here, and the module of its core interface.

    Raises:
        TransportUnavailableError: there is none that can be imported; it says what to do.
    """
    reasons = []
    for name in _PROVIDERS:
        package = name.partition(".")[0]
        try:
            with _unchanged_environment():
                return package, importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{package}: {error}")
        except Exception as error:  # of UCX, whatever its package makes of it; or of two that do not fit together
            raise unusable(error) from error
    raise TransportUnavailableError(f"UCX cannot be loaded ({'; '.join(reasons)}): `pip install ucxx-cu13` brings it")


def settings(interface: str = "") -> dict[str, str]:
    """Return what a context of UCX is to be made with.

    Args:
        interface: the network interface, such as ``eth0``, on which UCX may listen for TCP; empty if it must not. What
            the user has set by ``UCX_TLS`` and ``UCX_NET_DEVICES`` holds in any case.
    """
    if "UCX_TLS" in os.environ:
        return {}
    if not interface:
        return {"TLS": _WITHOUT_TCP}
    return {"TLS": _WITH_TCP} | ({} if "UCX_NET_DEVICES" in os.environ else {"NET_DEVICES": interface})


@contextlib.contextmanager
def warning_of_doors() -> Iterator[None]:
    """Warn if UCX listens for TCP after what is done in the block."""
    before = listening()
    yield
    doors = _doors_since(before)
    if doors:
        _log.warning("UCX%s", doors.removeprefix(","))


def _doors_since(before: frozenset[str]) -> str:
    """Return the words that UCX listens where nobody listened before, or nothing if it does not."""
    doors = sorted(listening() - before)
    if not doors:
        return ""
    given = "UCX_TLS" in os.environ
    advice = "set UCX_TLS without tcp" if given else "name tcp among the transports, so that UCX does without"
    return (
        f", listens on {', '.join(doors)} and does not ask who connects: any process that reaches it can end this "
        f"one or send it messages; {advice}"
    )


def unusable(error: Exception) -> TransportUnavailableError:
    """Return the error that UCX cannot be used, with what the user has set of it."""
    mine = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    advice = f" with {', '.join(mine)}: unset that, or name what this host has" if mine else ""
    return TransportUnavailableError(f"UCX cannot be used{advice} ({error})")


def _messenger_with(chosen: dict[str, str]) -> _core.UcxMessenger:
    package, provider = imported()
    try:
        features = (provider.Feature.TAG, provider.Feature.WAKEUP)
        context = provider.UCXContext(chosen, feature_flags=features)
        worker = provider.UCXWorker(context)
    except Exception as error:
        raise unusable(error) from error
    try:
        return _core.UcxMessenger(library_path(), context.handle, worker.handle, (context, worker))
    except (AttributeError, RuntimeError, TransportUnavailableError) as error:
        raise NotEnteredError(
            f"the native core cannot enter the UCX of {package} ({error}): its Python interface is used instead where "
            "transports is ucx alone, or ucx_core"
        ) from error


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Take back what an import sets: ucxx sets what UCX without CUDA warns of."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
