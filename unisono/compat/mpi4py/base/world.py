"""The job: initializing and ending it, its processes, and facts about this library."""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import unisono
from unisono import Communicator
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.compat.mpi4py.base.constants import CONSTANTS, SUBVERSION, VERSION
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.errors import UnisonoError
from unisono.foundation import streams
from unisono.options import PARENT

if TYPE_CHECKING:
    from unisono.collectives.bootstrap.bridge import Bridge

_MULTIPLE = CONSTANTS["THREAD_MULTIPLE"]
_PRECISION = 1e-9


class Universe:
    """Processes that share a communicator of Unisono: those of this job, or those of two jobs that have met.

    Attributes:
        native: the communicator of all of them.
        numbers: the number of each of its ranks in this process. Processes of this job are numbered by their ranks.
    """

    def __init__(self, native: Communicator, numbers: Sequence[int], *, is_closed_after_use: bool = False) -> None:
        self.native, self.numbers = native, tuple(numbers)
        self._ranks = {number: rank for rank, number in enumerate(numbers)}
        self._uses, self._is_closed_after_use = 0, is_closed_after_use

    def ranks(self, members: Sequence[int]) -> list[int]:
        """Return the ranks in `native` of processes."""
        return [self._ranks[member] for member in members]

    def subgroup(self, members: Sequence[int]) -> Communicator:
        """Return a new communicator of some processes, which all call it in the same order."""
        self._uses += 1
        return self.native.subgroup(self.ranks(members))

    def close(self, subgroup: Communicator) -> None:
        """Close a communicator of `subgroup`; with the last one of two jobs also that of both."""
        subgroup.close()
        self._uses -= 1
        if self._is_closed_after_use and not self._uses:
            self.native.close()


class _Process:
    """What this process has of the job."""

    def __init__(self) -> None:
        self.world: Communicator | None = None
        self.universe: Universe | None = None
        self.parent: Bridge | None = None
        self.closing = contextlib.ExitStack()
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
    _process.world = world = unisono.init()
    _process.universe = Universe(world, range(world.size))
    _process.parent = _bridge_to_parent(world) if PARENT in os.environ else None
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
        _process.closing.close()
        world.close()


def _finalize_at_exit() -> None:
    if not _process.is_finalized:
        Finalize()


def native_world() -> Communicator:
    """Return the communicator of all ranks."""
    if _process.world is None:
        raise fail("ERR_OTHER", "MPI is not initialized (call MPI.Init), or is finalized")
    return _process.world


def own_universe() -> Universe:
    """Return the processes of this job."""
    native_world()
    assert _process.universe is not None, "a job that is initialized has processes"
    return _process.universe


def _bridge_to_parent(world: Communicator) -> Bridge | None:
    from unisono.launchers.spawn import parent

    bridge = parent(world)
    if bridge is not None:
        closing_at_end(bridge.close)
    return bridge


def closing_at_end(close: Callable[[], None]) -> None:
    """Call a function when `Finalize` leaves the job."""
    _process.closing.callback(close)


def parent_bridge() -> Bridge | None:
    """Return the bridge to the job that has spawned this one."""
    native_world()
    return _process.parent


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
