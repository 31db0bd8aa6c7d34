"""Moves messages between ranks and runs plans over them.

`contracts/`    calls, executors and transports, as protocols and values
`executors/`    the generic executor, in Python, and the native one
`message/`      message transports: `FramedTransport`, `LocalTransport`, wrappers, and the loading of plugins
`links/`        the session of a rank: handshake, listener, dialer, control links, channels, the table of transports
`host/`         the host of a rank: which ranks share memory, addresses to bind, limits of the system
`recorder/`     the flight recorder of a rank: dumps, and how other processes read it
`rendezvous/`   stores, and the roster
`reductions/`   elementwise reductions, and the wire formats of compressed gradients
`nccl/`         collectives between GPUs by NCCL
`native/`       the C++ core, `unisono.transports._core`

Each value of `UNISONO_TRANSPORTS` has a folder:

`shm/`          `shm`: memory that two ranks of a host share
`tcp/`          `tcp`: TCP, with TLS
`ucx/`          `ucx` and `ucx_core`: the library UCX, through the native core and through Python
`mpi/`          `mpi`: the library MPI, and its own collectives
`tagged/`       the common part of `ucx` and `mpi`
`cuda/`         `cuda_ipc`: collectives between GPUs by CUDA IPC

Authors of transports import the names of `__all__` from here. Import the core as ``from unisono.transports import
_core``: if it is missing, the error says why and what to do.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unisono.transports.contracts.call import Signature as Signature
    from unisono.transports.contracts.transport import (
        Capabilities as Capabilities,
        Identity as Identity,
        MappedTransport as MappedTransport,
        MessageTransport as MessageTransport,
        Published as Published,
        Request as Request,
        Traffic as Traffic,
    )
    from unisono.transports.message.delegating import DelegatingTransport as DelegatingTransport
    from unisono.transports.message.framed import FramedTransport as FramedTransport, FrameLinks as FrameLinks
    from unisono.transports.message.plugin import Bootstrap as Bootstrap, Factory as Factory

CORE = f"{__name__}._core"

# Public name → the module that defines it.
_NAMES = {
    **dict.fromkeys(("Bootstrap", "Factory"), "unisono.transports.message.plugin"),
    **dict.fromkeys(("FramedTransport", "FrameLinks"), "unisono.transports.message.framed"),
    "DelegatingTransport": "unisono.transports.message.delegating",
    **dict.fromkeys(
        ("Capabilities", "Identity", "MappedTransport", "MessageTransport", "Published", "Request", "Traffic"),
        "unisono.transports.contracts.transport",
    ),
    "Signature": "unisono.transports.contracts.call",
}

__all__ = [*_NAMES]  # noqa: PLE0604

if not TYPE_CHECKING:  # the stub of _core declares its names

    def __getattr__(name: str) -> object:
        if name == "_core":
            return _import_core()
        if name not in _NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_NAMES[name]), name)


def core_path() -> str:
    """Return the path of the native core, without loading it.

    Raises:
        ImportError: this copy of Unisono has no native core; the message says what to do.
    """
    from importlib.util import find_spec  # a rank's start does not need it

    spec = find_spec(CORE)
    if spec is None or spec.origin is None:
        raise ImportError(_explanation(), name=CORE)
    return spec.origin


def _import_core() -> object:
    """Import the native core; raises as `core_path` does."""
    try:
        return importlib.import_module(CORE)
    except ModuleNotFoundError as error:
        if error.name != CORE:
            raise
        raise ImportError(_explanation(), name=CORE) from None


def _explanation() -> str:
    folder = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    if os.path.exists(os.path.join(folder, "pyproject.toml")):
        return (
            f"Unisono was imported from its source folder {folder}, where its native core has not been built. Run from "
            f"another directory to use the installed one, or install this one: pip install --editable {folder}"
        )
    return f"Unisono in {folder} is incomplete: its native core is missing. Install it again"
