"""The messages of MPI, as mpi4py has loaded it, on the communicator by which the ranks have met.

Unisono enters MPI with one thread at a time, but not with the same one always, and a program may enter it besides: so
MPI must have been initialised for that. Errors come back as codes, for the communicator is a duplicate of our own.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path
from typing import Any

from unisono.errors import TransportUnavailableError
from unisono.transports import _core
from unisono.transports.mpi.library import library

_LIBRARY = re.compile(r"(/\S*/libmpi(?:ch|_abi)?\.so\S*)$", re.MULTILINE)
_POINTER_NBYTES = struct.calcsize("P")


def open_messenger(comm: Any) -> _core.Messenger:
    """Return what carries tagged messages on `comm`, a communicator of mpi4py, or None if the ranks have none.

    Raises:
        TransportUnavailableError: MPI cannot be used; it says what to do.
    """
    if comm is None:
        raise TransportUnavailableError(
            "the ranks have not met by MPI: start them by mpirun, or give un.init() an mpi_comm"
        )
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise TransportUnavailableError(
            "MPI was initialised for its main thread alone: set MPI4PY_RC_THREAD_LEVEL=multiple, or serialized if the "
            "program does not use MPI itself"
        )
    found = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if found is None:
        raise TransportUnavailableError(f"no library is found of {library(mpi)}")
    return _core.mpi_messenger(
        library=found[1],
        communicator=mpi._handleof(comm),
        byte=mpi._handleof(mpi.BYTE),
        pointers=mpi._sizeof(mpi.Comm) == _POINTER_NBYTES,
        most_tag=mpi.COMM_WORLD.Get_attr(mpi.TAG_UB),  # Open MPI 4 tells it of no other communicator
    )
