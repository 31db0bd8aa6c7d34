"""The transports that `transports=auto` means on this host, in order of preference."""

from __future__ import annotations

import os

from unisono.errors import TransportUnavailableError
from unisono.foundation import log
from unisono.transports.host.bind_address import interface_of

_log = log.get("links")

_AUTO = ("shm", "tcp")
_AUTO_WITH_UCX = ("shm", "ucx", "tcp")
_UCX_BY_ITS_PACKAGE = ("ucx_core",)
# The kernel lists the devices for remote memory access here.
_DEVICES = "/sys/class/infiniband"


def resolved(preference: tuple[str, ...], *, is_encrypted: bool = False) -> tuple[str, ...]:
    """Return the names of the transports that `preference` means on this host.

    `is_encrypted` says that all messages between hosts must be encrypted, as only TCP's are.

    ("auto",) becomes ("shm", "tcp"), with "ucx" between them if a device for remote memory access is present. ("ucx",)
    becomes ("ucx_core",) if the native core cannot use the installed UCX. Anything else stays as it is.
    """
    if preference == ("ucx",):
        return _UCX_BY_ITS_PACKAGE if _ucx_cannot_be_entered() else preference
    if preference != ("auto",):
        return preference
    return _AUTO_WITH_UCX if not is_encrypted and has_remote_memory_access() else _AUTO


def _ucx_cannot_be_entered() -> bool:
    from unisono.transports.ucx import library

    try:
        library.check_entered()
    except library.NotEnteredError as error:
        _log.warning("%s", error.message)
        return True
    except TransportUnavailableError:  # the error is raised later, when a rank opens its first channel
        pass
    return False


def tcp_interface_of_ucx(preference: tuple[str, ...], hosts: int, tcp_host: str) -> str:
    """Return the network interface on which UCX may listen for TCP; empty if it must not.

    TCP of UCX does not ask who connects. So UCX may use it only if nothing else reaches other hosts: Unisono's own TCP
    is not among the transports, and this host has no device for remote memory access. On a single host UCX needs no
    TCP, and no other host reaches loopback.

    Args:
        preference: the names of the transports.
        hosts: the number of hosts of the job.
        tcp_host: the address on which this rank listens for TCP.
    """
    if hosts == 1 or "ucx" not in preference or "tcp" in preference or has_remote_memory_access():
        return ""
    return interface_of(tcp_host)


def has_remote_memory_access() -> bool:
    """Return whether this host has a device for remote memory access that UCX can drive."""
    if not (os.path.isdir(_DEVICES) and os.listdir(_DEVICES)):
        return False
    from unisono.transports.ucx import library

    return library.drives_infiniband()
