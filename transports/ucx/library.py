"""Opens UCX through a Python package that has loaded it: ucxx, or ucx-py, whose package is `ucp`.

The package makes the context and the worker. So its settings hold, and so do those of the user (``UCX_TLS`` and all
other variables of UCX). The native core uses the handles of both. It makes the endpoints itself: each endpoint of the
package would be a Python object with UCX's error handling, which keeps UCX from using shared memory. A process has one
worker for each set of settings until it ends, because making one takes as long as thousands of messages.

Some of UCX's own transports are excluded, unless the user names transports by ``UCX_TLS``:

- `cma`, by which a process reads another's memory. If the other process has been killed, it calls abort(), so the rank
  that should raise `PeerLostError` dies too.
- `sysv`, because processes of other users in the same group can attach to its segments. `posix` does the same work.
- `tcp`, because it listens on a port of its own and does not check who connects. 13 bytes from a stranger end the rank.
  UCX may use TCP, on one interface, only if it has no other way to reach another host. A warning says so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono.errors import TransportUnavailableError
from unisono.foundation import log
from unisono.foundation.once import once_per_process
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType
from unisono.transports.host.listening_ports import listening

_log = log.get("links")

# The module of the core interface of each package; both have the same names.
_PROVIDERS = ("ucxx._lib.libucxx", "ucp._libs.ucx_api")
_WITHOUT_TCP, _WITH_TCP = "^cma,sysv,tcp", "^cma,sysv"
# The settings of a context that opens nothing, to check whether the native core can use UCX.
_ENTERED_BY = {"TLS": "self"}
# The variables that choose UCX's transports and devices.
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")
_LIBRARY = re.compile(r"(/\S*/libucp(?:-[^/]*)?\.so\S*)$", re.MULTILINE)


class NotEnteredError(TransportUnavailableError):
    """UCX is installed, but the native core cannot use it. The transport `ucx_core` may."""


def open_messenger(interface: str = "") -> _core.Messenger:
    """Return the messenger for tagged messages over UCX; one object per process and interface.

    Args:
        interface: the network interface on which UCX may listen for TCP; empty if it must not.

    Raises:
        TransportUnavailableError: UCX cannot be used here; the message says what to do.
    """
    return _messenger(interface)


def check_entered() -> None:
    """Check that the native core can use the UCX of this process, without opening anything.

    Raises:
        TransportUnavailableError: UCX cannot be used here. Its subclass `NotEnteredError` says that the native
            core cannot, but that UCX's Python package can (the transport `ucx_core`).
    """
    _messenger_with(_ENTERED_BY)


def report() -> str:
    """Return the version of UCX, whether it supports CUDA, and the transports that it chooses within this host.

    Raises:
        TransportUnavailableError: UCX cannot be used here; the message says what to do.
    """
    before = listening()
    try:
        here, there = (_messenger_with(settings()) for _ in range(2))
    except NotEnteredError as error:
        return error.message
    with_cuda = (
        "with cuda" if here.supports(MemoryType.CUDA) else "without cuda (arrays of a GPU pass through the host)"
    )
    carriers = here.carriers(there.address()) or "transports that it does not name"
    return f"UCX {here.version()} {with_cuda}, which chooses {carriers}{_new_listeners(before)}"


def drives_infiniband() -> bool:
    """Return whether UCX is installed with its module for devices of remote memory access."""
    try:
        imported()
    except TransportUnavailableError:
        return False
    return any(Path(library_path()).parent.glob("ucx/libuct_ib*"))


def library_path() -> str:
    """Return the path of the UCX library that this process has loaded."""
    loaded = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if loaded is None:
        raise TransportUnavailableError("the package of UCX has loaded no libucp")
    return loaded[1]


@once_per_process
def _messenger(interface: str) -> _core.UcxMessenger:
    """Return the messenger of this process: a forked child must not use its parent's."""
    with warning_of_listeners():
        return _messenger_with(settings(interface))


def imported() -> tuple[str, Any]:
    """Return the name of the first installed package of UCX, and the module of its core interface.

    Raises:
        TransportUnavailableError: none can be imported; the message says what to do.
    """
    reasons = []
    for name in _PROVIDERS:
        package = name.partition(".")[0]
        try:
            with _unchanged_environment():
                return package, importlib.import_module(name)
        except ImportError as error:
            reasons.append(f"{package}: {error}")
        except Exception as error:  # any error of UCX or its package, or of two versions that do not fit together
            raise unusable(error) from error
    raise TransportUnavailableError(f"UCX cannot be loaded ({'; '.join(reasons)}): `pip install ucxx-cu13` installs it")


def settings(interface: str = "") -> dict[str, str]:
    """Return the settings for a context of UCX. ``UCX_TLS`` and ``UCX_NET_DEVICES`` of the user take precedence.

    Args:
        interface: the network interface, such as ``eth0``, on which UCX may listen for TCP; empty if it must not.
    """
    if "UCX_TLS" in os.environ:
        return {}
    if not interface:
        return {"TLS": _WITHOUT_TCP}
    return {"TLS": _WITH_TCP} | ({} if "UCX_NET_DEVICES" in os.environ else {"NET_DEVICES": interface})


@contextlib.contextmanager
def warning_of_listeners() -> Iterator[None]:
    """Warn if UCX has begun to listen for TCP during the block."""
    before = listening()
    yield
    text = _new_listeners(before)
    if text:
        _log.warning("UCX%s", text.removeprefix(","))


def _new_listeners(before: frozenset[str]) -> str:
    """Return a text about the addresses on which UCX listens since `before`; empty if there are none."""
    addresses = sorted(listening() - before)
    if not addresses:
        return ""
    is_set = "UCX_TLS" in os.environ
    advice = "set UCX_TLS without tcp" if is_set else "name tcp among the transports, so that UCX does not need it"
    return (
        f", listens on {', '.join(addresses)} and does not check who connects: any process that reaches it can end "
        f"this one or send it messages; {advice}"
    )


def unusable(error: Exception) -> TransportUnavailableError:
    """Return the error that UCX cannot be used, with the variables that the user has set for it."""
    variables = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    advice = (
        f" with {', '.join(variables)}: unset that, or name transports and devices of this host" if variables else ""
    )
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
            f"the native core cannot enter the UCX of {package} ({error}): with transports=ucx_core, or ucx alone, its "
            "Python interface is used instead"
        ) from error


@contextlib.contextmanager
def _unchanged_environment() -> Iterator[None]:
    """Remove the variables that an import sets: ucxx sets one of which UCX without CUDA warns."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
