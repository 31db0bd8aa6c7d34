"""The job: initializing and ending it, its processes, and facts about this library."""

from __future__ import annotations

import atexit
import os
import platform
import sys
import threading
import time

import unisono
from unisono import Communicator
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.compat.mpi4py.base.constants import CONSTANTS, SUBVERSION, VERSION
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.errors import UnisonoError
from unisono.foundation import streams

_MULTIPLE = CONSTANTS["THREAD_MULTIPLE"]
_PRECISION = 1e-9


class _Process:
    """What this process has of the job."""

    def __init__(self) -> None:
        self.world: Communicator | None = None
        self.is_own = self.is_initialized = self.is_finalized = False
        self.thread_level = _MULTIPLE
        self.main_thread = 0
        self.pid = 0


_process = _Process()


@translating
def Init_thread(required: int = _MULTIPLE) -> int:
    """Join the other ranks, and return the level of thread support."""
    if _process.is_initialized:
        raise fail("ERR_OTHER", "MPI has been initialized already")
    _process.world = unisono.init()
    _process.is_initialized, _process.thread_level = True, required
    _process.main_thread, _process.pid = threading.get_ident(), os.getpid()
    atexit.register(_finalize_at_exit)
    return required


def Init() -> None:
    """Join the other ranks."""
    Init_thread()


def Finalize() -> None:
    """Wait for the other ranks, and leave the job."""
    world, _process.world = _process.world, None
    if world is None or _process.is_finalized:
        raise fail("ERR_OTHER", "MPI is not initialized, or is finalized already")
    _process.is_finalized = True
    if os.getpid() != _process.pid:
        return  # a forked child: the job belongs to its parent
    try:
        if not reason_to_leave():
            world.barrier()
    except UnisonoError:
        pass  # another rank has failed, and tells it
    finally:
        world.close()


def _finalize_at_exit() -> None:
    if not _process.is_finalized:
        Finalize()


def native_world() -> Communicator:
    """Return the communicator of all ranks."""
    if _process.world is None:
        raise fail("ERR_OTHER", "MPI is not initialized (call MPI.Init), or is finalized")
    return _process.world


def own_number() -> int:
    """Return the rank of this process in the world."""
    return native_world().rank


def abort(errorcode: int = 1) -> None:
    """End all processes of the job."""
    try:
        native_world().abort(f"MPI.Comm.Abort({errorcode})")
    finally:
        streams.write(sys.stderr, f"rank {_process.world.rank if _process.world else 0} calls Abort({errorcode})\n")
        os._exit(errorcode or 1)


def Is_initialized() -> bool:
    """Return whether `Init` has been called."""
    return _process.is_initialized


def Is_finalized() -> bool:
    """Return whether `Finalize` has been called."""
    return _process.is_finalized


def Query_thread() -> int:
    """Return the level of thread support."""
    return _process.thread_level


def Is_thread_main() -> bool:
    """Return whether this thread has called `Init`."""
    return threading.get_ident() == _process.main_thread


def Get_version() -> tuple[int, int]:
    """Return the version of MPI's standard whose names there are."""
    return VERSION, SUBVERSION


def Get_library_version() -> str:
    """Return the name and version of this library."""
    return f"Unisono {unisono.__version__}"


def get_vendor() -> tuple[str, tuple[int, int, int]]:
    """Return the name and version of this library."""
    numbers = [int("".join(filter(str.isdigit, part)) or 0) for part in unisono.__version__.split(".")[:3]]
    major, minor, micro = [*numbers, 0, 0, 0][:3]
    return "Unisono", (major, minor, micro)


def Get_abi_version() -> tuple[int, int]:
    """Return (-1, -1): there is no binary interface."""
    return -1, -1


def Get_processor_name() -> str:
    """Return the name of this host."""
    return platform.node()


def Wtime() -> float:
    """Return the seconds since a moment in the past."""
    return time.perf_counter()


def Wtick() -> float:
    """Return the precision of `Wtime` in seconds."""
    return max(time.get_clock_info("perf_counter").resolution, _PRECISION)


def Pcontrol(level: int) -> None:
    """Do nothing: Unisono's own traces need no control."""
