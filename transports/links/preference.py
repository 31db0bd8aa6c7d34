"""Which transports are tried, in which order."""

from __future__ import annotations

import os

from unisono import log
from unisono.errors import TransportUnavailableError

_log = log.get()

_AUTO = ("shm", "tcp")
_AUTO_WITH_UCX = ("shm", "ucx", "tcp")
_UCX_BY_ITS_PACKAGE = ("ucx_core",)
# Has an entry for each device for remote memory access.
_DEVICES = "/sys/class/infiniband"


def resolved(preference: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of transports that `preference` stands for on this host, or itself.

    That is what ("auto",) is, and ("ucx_core",) for ("ucx",) where the native core cannot enter the UCX that there is.
    """
    if preference == ("ucx",):
        return _UCX_BY_ITS_PACKAGE if _ucx_cannot_be_entered() else preference
    if preference != ("auto",):
        return preference
    return _AUTO_WITH_UCX if has_remote_memory_access() else _AUTO


def _ucx_cannot_be_entered() -> bool:
    from unisono.transports.ucx import library

    try:
        library.check_entered()
    except library.NotEnteredError as error:
        _log.warning("%s", error.message)
        return True
    except TransportUnavailableError:  # the ranks say so when they want to use it
        pass
    return False


def has_remote_memory_access() -> bool:
    """Return whether this host has a device for remote memory access that UCX can drive."""
    if not (os.path.isdir(_DEVICES) and os.listdir(_DEVICES)):
        return False
    from unisono.transports.ucx import library

    return library.drives_infiniband()
