"""UCX, as a Python package has loaded it: ucxx, or ucx-py under its own names.

The package makes the context and the worker, so that its settings, and those of the user (``UCX_TLS`` and all others of
UCX), hold; the native core does the rest by their handles. Endpoints are not the package's, which would be an object of
Python for each, with UCX's error handling, and that keeps UCX from shared memory. A process has one worker, which stays
until it ends: making one takes as long as thousands of messages.

UCX's `cma`, by which a process reads another's memory, is left out unless the user names transports himself: where the
other one has been killed, it calls abort(), and what should raise `PeerLostError` would be dead too.
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

from unisono.errors import TransportUnavailableError
from unisono.transports import _core
from unisono.transports.base import MemoryType

# The modules of the core interface, which has the same names in both packages.
_PROVIDERS = ("ucxx._lib.libucxx", "ucp._libs.ucx_api")
# `cma` ends a process whose peer has died while it copies from it.
_TLS_UNLESS_SET = "^cma"
# What says which of UCX's transports and devices may be used.
_SETTINGS = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SHM_DEVICES")
_LIBRARY = re.compile(r"(/\S*/libucp(?:-[^/]*)?\.so\S*)$", re.MULTILINE)


class NotEnteredError(TransportUnavailableError):
    """There is a UCX, but the native core cannot enter it; `ucx_core` may use it."""


def open_messenger() -> _core.Messenger:
    """Return what carries tagged messages by UCX; the same in all of the process.

    Raises:
        TransportUnavailableError: there is no UCX here that can be used; it says what to do.
    """
    return _messenger(os.getpid())


def report() -> str:
    """Return the version of UCX, whether it knows CUDA, and what carries messages between two processes of this host.

    Raises:
        TransportUnavailableError: as `open_messenger` does.
    """
    try:
        here, there = _new_messenger(), _new_messenger()
    except NotEnteredError as error:
        return error.message
    with_cuda = " with cuda" if here.knows(MemoryType.CUDA) else ""
    return f"UCX {here.version()}{with_cuda}, which chooses {here.carriers(there.address()) or 'what it does not tell'}"


def drives_infiniband() -> bool:
    """Return whether UCX is there, with what it needs for devices of remote memory access."""
    try:
        open_messenger()
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
def _messenger(process: int) -> _core.UcxMessenger:
    """Return that of the process of this number: a forked child can use nothing of its parent's."""
    return _new_messenger()


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


def settings() -> dict[str, str]:
    """Return what a context of UCX is to be made with."""
    return {} if "UCX_TLS" in os.environ else {"TLS": _TLS_UNLESS_SET}


def unusable(error: Exception) -> TransportUnavailableError:
    """Return the error that UCX cannot be used, with what the user has set of it."""
    mine = [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    advice = f" with {', '.join(mine)}: unset that, or name what this host has" if mine else ""
    return TransportUnavailableError(f"UCX cannot be used{advice} ({error})")


def _new_messenger() -> _core.UcxMessenger:
    package, provider = imported()
    try:
        features = (provider.Feature.TAG, provider.Feature.WAKEUP)
        context = provider.UCXContext(settings(), feature_flags=features)
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
