"""Opens the native messenger for tagged messages over MPI, on the communicator on which the ranks have met.

Unisono calls MPI from one thread at a time, but not always from the same one, and the program may call MPI too. So MPI
must have been initialised for several threads. MPI returns errors as codes, because the communicator is a duplicate
with an error handler of its own.
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
    """Return the messenger of `comm`, the communicator of mpi4py on which the ranks have met, or None if they have not.

    Raises:
        TransportUnavailableError: MPI cannot be used; the message says what to do.
    """
    if comm is None:
        raise TransportUnavailableError(
            "the ranks have not met by MPI: start them with mpirun, or pass mpi_comm to un.init()"
        )
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED:
        raise TransportUnavailableError(
            "MPI was initialised for its main thread alone: set MPI4PY_RC_THREAD_LEVEL=multiple, or serialized if the "
            "program does not use MPI itself"
        )
    loaded = _LIBRARY.search(Path("/proc/self/maps").read_text(encoding="utf-8"))
    if loaded is None:
        raise TransportUnavailableError(f"this process has no loaded library of {library(mpi)}")
    return _core.mpi_messenger(
        library=loaded[1],
        communicator=mpi._handleof(comm),
        byte=mpi._handleof(mpi.BYTE),
        pointers=mpi._sizeof(mpi.Comm) == _POINTER_NBYTES,
        most_tag=mpi.COMM_WORLD.Get_attr(mpi.TAG_UB),  # Open MPI 4 has this attribute on no other communicator
    )
