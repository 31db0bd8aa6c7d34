"""`init`: from what the launcher has told this process to a communicator of all ranks."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from unisono import log
from unisono.collectives.bootstrap.environment import MPI_WORLD, Launch, detect, job_of_key, key_of_file
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.collectives.bootstrap.rendezvous import Meeting, meeting_of
from unisono.collectives.bootstrap.shared_settings import SHARED_OPTIONS, adopted, offered, report_differences
from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.errors import UnisonoError, UsageError
from unisono.options import Options, strange_variables
from unisono.transports import _core
from unisono.transports.contracts.executor import Executor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.host.system_limits import is_refusal, unavailable
from unisono.transports.links.preference import resolved
from unisono.transports.links.session import Identity, Session
from unisono.transports.rendezvous.roster import Member, Roster
from unisono.transports.rendezvous.tcp_store import StoreServer

_log = log.get(log.NAME)

_FORKED = "this process was forked from a rank; call unisono in the rank itself, or start ranks with it"


class _Job:
    """What a world communicator holds open.

    It is closed with the communicator; when the communicator and all that needs its links are garbage; or at exit.

    Attributes:
        native: the executor by which a transport of a third party was opened, or None.
    """

    def __init__(self, session: Session, meeting: Meeting, server: StoreServer | None) -> None:
        self.session = session
        self.meeting = meeting
        self.native: NativeExecutor | None = None
        self._server = server
        self._closing = threading.RLock()
        self._is_closed = False

    def belong_to(self, world: Communicator, executor: Executor) -> None:
        """Be what `world` holds open, which works and plans need as well, as long as there is its `executor`."""
        self._world = weakref.ref(world)
        self._finalizer = weakref.finalize(executor, self._drop)
        self._finalizer.atexit = False
        _jobs.add(self)

    def close(self) -> None:
        """Close everything; if another thread does so, wait until it has."""
        with self._closing, contextlib.ExitStack() as parts:
            if self._is_closed:
                return
            self._is_closed = True
            self._finalizer.detach()
            parts.callback(_jobs.discard, self)
            if self._server is not None:
                parts.callback(self._server.close)
            parts.callback(self.meeting.close)
            parts.callback(self.session.close, reason_to_leave())
            if self.native is not None:
                parts.callback(self.native.close)

    def end(self) -> None:
        """At exit: close the communicator, if there still is one, or what it has held open."""
        world = self._world()
        (self if world is None else world).close()

    def abandon(self) -> None:
        """In a forked child: make calls raise, and let nothing be closed that is the parent's."""
        self._finalizer.detach()
        if (world := self._world()) is not None:
            world._abandon(_FORKED)
        self.session.abandon()

    def _drop(self) -> None:
        """Close everything in another thread, because the garbage collector calls this, in any thread and at any time.

        What MPI has made stays until exit: it must be freed in the thread that has initialised MPI.
        """
        if self.meeting.comm is None:
            self.session.call_soon(self._close_unless_another_does)

    def _close_unless_another_does(self) -> None:
        """Close everything; but a thread that does so already waits for the listener's thread, which runs this."""
        if self._closing.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._closing.release()


# How often this process has met others by a key that it was given, as a rank of a job.
_meetings: defaultdict[tuple[bytes, bytes, int], Iterator[int]] = defaultdict(itertools.count)
# Sentences about strange variables that this process has logged.
_reported: set[str] = set()
_jobs: set[_Job] = set()  # those that are open


def init(
    options: Options | None = None,
    *,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    mpi_comm: Any = None,
) -> Communicator:
    """Meet the other ranks of the job and return the communicator of all of them.

    Rank, size and store come from the launcher's environment (`unisono run`, torchrun, the four variables of torch,
    mpirun, srun), or from the arguments; without either, the communicator has one rank. All ranks must call it equally
    often. It is closed by `Communicator.close`, by ``with``, at exit, or soon after it has become garbage together with
    its plans and works.

    Args:
        options: settings; by default those of the ``UNISONO_*`` variables. All ranks adopt rank 0's `transports`,
            `algorithm`, `table`, `segment_nbytes`, `tcp_streams` and `tcp_checksum`, and say so where theirs differ.
        store: where the ranks meet, ``tcp://host:port`` (served by rank 0) or ``file:///directory``; or a store of
            torch.distributed, which the ranks of this job alone use at its prefix, and which hands over the job's key.
        rank: this rank; with `store` only.
        size: the number of ranks; with `store` only.
        mpi_comm: an intracommunicator of mpi4py, all ranks of which call this: they become the ranks, in its order.

    Raises:
        UsageError: an argument or an environment variable cannot be used.
        RendezvousError: ranks did not arrive within the option `rendezvous_timeout_s` (the message names them), gave up
            (it says why), or the store cannot be used.
        TransportUnavailableError: the system refuses what ranks need: descriptors, threads, system calls.
    """
    settings = Options.from_environment(os.environ) if options is None else options
    if settings.load:
        from unisono.collectives.bootstrap.user_algorithms import load_all

        load_all(settings.load)
    launch = _launch(store, rank, size, mpi_comm)
    if not _jobs:  # of several, the first gives the process its name
        log.configure(settings.log, launch.rank, launch.size)
    _report_strange_variables(launch.rank)
    began = time.perf_counter()
    meeting: Meeting | None = None
    session: Session | None = None
    try:
        meeting = meeting_of(launch, settings, store if mpi_comm is None else mpi_comm)
        key = meeting.key
        # A key that was made for this meeting is never used again, and need not be remembered.
        number = 0 if launch.key is None else next(_meetings[launch.key, launch.job, launch.rank])
        identity = Identity(key, launch.job or job_of_key(key), 0, launch.rank, launch.size, number)
        session = Session(identity, settings.bind_address, settings.heartbeat_timeout_s, settings.rendezvous_timeout_s)
        world = join_world(session, meeting, settings)
        meeting.end()
        _report_trust(launch)
    except BaseException as error:
        failed = _failure_of(launch, error)
        if session is not None:
            session.close(reason_to_leave())
        if meeting is not None:
            meeting.give_up(f"rank {launch.rank} gave up: {getattr(failed, 'message', None) or repr(failed)}")
            meeting.close()
        if isinstance(failed, UnisonoError):
            raise failed.with_traceback(None) from None  # how the ranks meet is nothing that the caller could mend
        raise
    _log.info("%d rank(s) met in %.1f ms, launched by: %s", launch.size, _ms_since(began), launch.launcher)
    return world


def _report_strange_variables(rank: int) -> None:
    """Log variables that look like settings, once; as a warning on rank 0 alone, since ranks mostly share them."""
    for sentence in strange_variables(os.environ):
        if sentence not in _reported:
            _reported.add(sentence)
            (_log.warning if rank == 0 else _log.info)("%s", sentence)


def _report_trust(launch: Launch) -> None:
    if launch.size > 1 and launch.rank == 0 and _log.shows("info"):
        from unisono.collectives.bootstrap.trust import trust_of

        _log.info("%s", trust_of(launch))


def _launch(store: Any, rank: int | None, size: int | None, mpi_comm: Any) -> Launch:
    given = (store is not None, rank is not None, size is not None)
    if mpi_comm is not None:
        if any(given):
            raise UsageError("mpi_comm says rank and size, and where to meet: give it without store, rank and size")
        from unisono.transports.mpi.library import checked

        comm = checked(mpi_comm)
        return Launch(comm.Get_rank(), comm.Get_size(), MPI_WORLD, b"", None, "a program with MPI")
    if not any(given):
        return detect(os.environ)
    if not all(given):
        raise UsageError("store, rank and size must be given together, or none of them")
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise UsageError(f"rank must be an integer from 0 to size - 1; got rank={rank!r} and size={size!r}")
    if not isinstance(store, str):
        return Launch(rank, size, None, b"", key_of_file(os.environ), "a program with a store")
    return detect({"UNISONO_RANK": str(rank), "UNISONO_SIZE": str(size), "UNISONO_STORE": store})


def _failure_of(launch: Launch, error: BaseException) -> BaseException:
    """Return an error of `init` as people are to see it: what the system refuses is told with its limit."""
    if not (isinstance(error, Exception) and is_refusal(error)):
        return error
    return unavailable(f"rank {launch.rank} of {launch.size} cannot take part in the job", error, rank=launch.rank)


def join_world(session: Session, meeting: Meeting, options: Options, server: StoreServer | None = None) -> Communicator:
    """Meet the other ranks and return the communicator of all of them, which closes all three when it is closed.

    Raises:
        UnisonoError: the ranks could not meet; nothing has been closed.
    """
    job = _Job(session, meeting, server)
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    me = Member(session.identity.rank, session.addresses, f"{cores:x}", session.surroundings)
    roster = meeting.join(me, options.rendezvous_timeout_s, offered(options, session.identity.rank))
    with _core.DefaultFloatEnvironment():  # all ranks must read the same numbers, because these decide what is chosen
        known = adopted(roster.settings)
    report_differences(options, roster.settings)
    try:
        agreed = options.adopting({name: roster.settings[name] for name in SHARED_OPTIONS})
    except UsageError:  # a transport that is installed elsewhere: the others are to hear of it
        session.meet(roster, options.adopting({"transports": "auto"}), meeting.comm)
        raise
    executor, place = _executor(roster, agreed, job)
    world = Communicator(executor, place, agreed, job.close, known)
    job.belong_to(world, executor)
    return world


def _executor(roster: Roster, options: Options, job: _Job) -> tuple[Executor, HostLayout]:
    """Return what runs the calls of all ranks, and where they are; the control links are there then."""
    name, session, comm = options.third_party, job.session, job.meeting.comm
    if name is None:
        session.meet(roster, options, comm)
        executor = NativeExecutor(session, mpi=job.meeting.collectives())
        return executor, _place(roster, options.preference)
    from unisono.collectives.bootstrap.plugin_transport import open_executor

    ours = options.adopting({"transports": ",".join(resolved(("auto",)))})
    session.meet(roster, ours, comm)
    job.native = NativeExecutor(session)
    opened = open_executor(name, session, job.native, ours)
    return opened, _place(roster, ("local" if opened.maps_memory else "tcp",))


def _place(roster: Roster, preference: tuple[str, ...]) -> HostLayout:
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    masks: defaultdict[str, int] = defaultdict(int)
    for member in roster.members:
        hosts[member.addresses.host_id].append(member.rank)
        masks[member.addresses.host_id] |= int(member.cores, 16)
    near = preference[0]
    far = next((name for name in preference if name != "shm"), near)
    cores = tuple(mask.bit_count() for mask in masks.values())
    return HostLayout(tuple(tuple(ranks) for ranks in hosts.values()), near if len(hosts) == 1 else far, cores, near)


def _ms_since(began: float) -> float:
    return (time.perf_counter() - began) * 1e3


def _close_all() -> None:
    for job in list(_jobs):
        job.end()


def _abandon_all() -> None:
    for job in list(_jobs):
        job.abandon()
    _jobs.clear()


_core.set_package_directory(os.path.normpath(os.path.join(__file__, "..", "..", "..")))
atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
