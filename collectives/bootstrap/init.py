"""`init`: detects the launcher, lets the ranks of the job meet, and returns the communicator of all ranks.

It also closes open communicators at exit, and makes calls fail in a forked child.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import os
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unisono.collectives.bootstrap import shared_settings
from unisono.collectives.bootstrap.environment import (
    MPI_WORLD,
    Launch,
    detect,
    is_restarted,
    job_of_key,
    key_of_file,
    waiting_place,
)
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.collectives.bootstrap.rendezvous import Rendezvous, rendezvous_of
from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.communicator import Communicator
from unisono.errors import UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.options import Options, unknown_variables
from unisono.transports import _core
from unisono.transports.contracts.executor import Executor
from unisono.transports.executors.native import NativeExecutor
from unisono.transports.host.system_limits import is_refusal, unavailable
from unisono.transports.links.preference import resolved
from unisono.transports.links.session import RankIdentity, Session
from unisono.transports.recorder.recorder import dump_of_start
from unisono.transports.rendezvous.roster import Roster, RosterMember, tls_of
from unisono.transports.rendezvous.tcp_store import StoreServer
from unisono.tuning.decide.choice import TunerState
from unisono.tuning.machine.parameters import NETWORK, at_level

if TYPE_CHECKING:
    from unisono.collectives.bootstrap.grow import Growth

_log = log.get()

_FORKED = "this process was forked from a rank; call unisono in the rank itself, or start ranks with it"


class _Job:
    """Everything that a communicator of all ranks holds open.

    It is closed with the communicator, at exit, or when the communicator and every object that needs its links are
    garbage.

    Attributes:
        native: the executor over Unisono's own links through which a plugin transport was opened, or None.
    """

    def __init__(self, session: Session, rendezvous: Rendezvous, options: Options, server: StoreServer | None) -> None:
        self.session = session
        self._options = options
        self.rendezvous = rendezvous
        self.native: NativeExecutor | None = None
        self._server = server
        self._growth: Growth | None = None
        self._closing = threading.RLock()
        self._is_closed = False

    def belong_to(self, world: Communicator, executor: Executor) -> None:
        """Stay open as long as `executor` exists, which `world`, its works and its plans refer to."""
        self._world = weakref.ref(world)
        self._finalizer = weakref.finalize(executor, self._drop)
        self._finalizer.atexit = False
        _jobs.add(self)

    def world(self) -> Communicator | None:
        """Return the world; None if it is garbage."""
        return self._world()

    def grow(self, world: Communicator, count: int | None, timeout_s: float) -> Communicator:
        """Return the communicator of the members of `world` and of processes that join; see `Growth`."""
        from unisono.collectives.bootstrap.grow import Growth

        if self.native is not None:
            raise UsageError("a communicator over a plugin transport cannot grow: use shm and tcp")
        self._growth = self._growth or Growth(self.session, self._options, join_world)
        grown = self._growth.grow(world, count, timeout_s)
        if grown is not world:
            _export_on(grown, self._options.metrics)
        return grown

    def close(self) -> None:
        """Close all communicators and links of the job. If another thread is closing them, wait until it has."""
        with self._closing, contextlib.ExitStack() as parts:
            if self._is_closed:
                return
            self._is_closed = True
            self._finalizer.detach()
            parts.callback(_jobs.discard, self)
            if self._server is not None:
                parts.callback(self._server.close)
            parts.callback(self.rendezvous.close)
            parts.callback(self.session.close, reason_to_leave())
            if self.native is not None:
                parts.callback(self.native.close)
            if self._growth is not None:
                parts.callback(self._growth.close)

    def end(self) -> None:
        """Close the communicator at exit; if it is garbage, close the objects that it held open."""
        world = self._world()
        (self if world is None else world).close()

    def abandon(self) -> None:
        """Make calls raise in a forked child, and close nothing there that belongs to the parent."""
        self._finalizer.detach()
        if (world := self._world()) is not None:
            world._abandon(_FORKED)
        self.session.abandon()

    def _drop(self) -> None:
        """Close everything in another thread. The garbage collector calls this, in any thread and at any time.

        Objects of MPI stay open until exit, because only the thread that initialised MPI may free them.
        """
        if self.rendezvous.comm is None:
            self.session.call_soon(self._close_unless_another_does)

    def _close_unless_another_does(self) -> None:
        """Close everything, unless another thread is doing so.

        The listener's thread runs this method. The other thread waits for the listener's thread, so waiting for the
        other thread would be a deadlock.
        """
        if self._closing.acquire(blocking=False):
            try:
                self.close()
            finally:
                self._closing.release()


# By key, job and rank: how often this process has met other ranks with a key from its launcher or a file.
_rendezvous_counts: defaultdict[tuple[bytes, bytes, int], Iterator[int]] = defaultdict(itertools.count)
# Sentences about unknown variables that this process has logged.
_reported: set[str] = set()
_jobs: set[_Job] = set()  # the open ones


def init(
    options: Options | None = None,
    *,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    mpi_comm: Any = None,
    **settings: Any,
) -> Communicator:
    """Meet the other ranks of the job and return the communicator of all of them.

    Rank, size and store come from the environment of the launcher (`unisono run`, torchrun, the four variables of
    torch, mpirun, srun), or from the arguments. Without either, the communicator has one rank. Every rank must call
    this equally often.

    The communicator is closed by `Communicator.close`, by ``with``, at exit, or soon after it has become garbage
    together with its plans and works.

    Args:
        options: settings. Each one that the program does not pass comes from its ``UNISONO_*`` variable, such as
            ``UNISONO_TIMEOUT_S``, or else from its default. All ranks use rank 0's `transports`,
            `algorithm`, `table`, `tune`, `segment_nbytes`, `tcp_streams`, `tcp_checksum` and `verify_results`. A rank
            whose own values differ logs a warning. If the option `tls` differs, all ranks raise an error.
        store: the place where the ranks meet: ``tcp://host:port`` (served by rank 0), ``file:///directory``, or a store
            of torch.distributed. Only the ranks of this job may use a torch store under its prefix, because it passes
            them the key of the job.
        rank: this rank; only with `store`.
        size: the number of ranks; only with `store`.
        mpi_comm: an intracommunicator of mpi4py. All its ranks must call this, and become the ranks in its order.
        settings: fields of `Options`, such as ``timeout_s=30``, as in ``un.Options(timeout_s=30)``.

    Raises:
        TypeError: there is no setting of that name.
        UsageError: an argument or an environment variable cannot be used.
        RendezvousError: ranks did not arrive within the option `rendezvous_timeout_s` (the message names them), a rank
            gave up (the message says why), or the store cannot be used.
        TransportUnavailableError: the system refuses descriptors, threads or system calls that ranks need.
    """
    if sys.is_finalizing():  # nothing can be imported any more
        raise UsageError("Python is ending, and can start no rank any more: call init() earlier")
    if settings:
        options = Options(**settings) if options is None else dataclasses.replace(options, **settings)
    if store is None and mpi_comm is None and is_restarted(os.environ):
        return join(options)
    return meet(_launch(store, rank, size, mpi_comm), options, store if mpi_comm is None else mpi_comm)


def meet(launch: Launch, options: Options | None = None, passed: Any = None) -> Communicator:
    """Meet the other ranks of a job whose facts are known; `init` finds them in the environment or its arguments.

    Args:
        launch: the facts.
        options: as of `init`.
        passed: a store of torch.distributed, or an intracommunicator of mpi4py, if `launch` names neither.

    It raises the errors of `init`.
    """
    settings = _settings(options)
    if not _jobs:  # the first job of a process decides about its log
        log.configure(settings.log, launch.rank, launch.size)
    _report_unknown_variables(launch.rank)
    began = time.perf_counter()
    rendezvous: Rendezvous | None = None
    session: Session | None = None
    try:
        rendezvous = rendezvous_of(launch, settings, passed)
        key = rendezvous.key
        # A key made for this rendezvous is used once, so only keys of launchers and files are counted.
        number = 0 if launch.key is None else next(_rendezvous_counts[launch.key, launch.job, launch.rank])
        job = launch.job or job_of_key(key)
        identity = RankIdentity(key, job, 0, launch.rank, launch.size, number, launch.rank, launch.lasting_store)
        session = Session(identity, settings)
        world = join_world(session, rendezvous, settings, measures_network=True)
        rendezvous.end()
    except BaseException as error:
        failure = _failure_of(launch, error)
        if session is not None:
            session.close(reason_to_leave())
        if rendezvous is not None:
            rendezvous.give_up(f"rank {launch.rank} gave up: {getattr(failure, 'message', None) or repr(failure)}")
            rendezvous.close()
        if isinstance(failure, UnisonoError):
            if settings.dump and not isinstance(failure, UsageError) and failure.dump is None:
                failure.dump = _dump(settings.dump, launch, rendezvous, failure)
            raise failure.with_traceback(None) from None  # the internals of the rendezvous do not help the caller
        raise
    if launch.rank == 0 and _log.shows("info"):
        _report(launch, session, world, settings, _ms_since(began))
    if settings.metrics:
        _export(world, settings.metrics)
    return world


def join(options: Options | None = None, *, timeout_s: float | None = None) -> Communicator:
    """Join a running job from a process that is new, and return the communicator of the members and of this process.

    The process waits until the members of the job call `Communicator.grow`. It is started with the variables of the
    job, as its ranks were; rank and size are not used. In a rank that `unisono run --max-restarts` has started anew,
    `un.init` does the same. The process has no state of the program: the members send it, on the new communicator.

    Args:
        options: as of `init`.
        timeout_s: seconds to wait; by default the option `rendezvous_timeout_s`.

    Raises:
        UsageError: there is no job to join: the variables name no store that outlives ranks, or no key.
        RendezvousError: the members did not call `grow` in time, or refuse this process (the message says why); or the
            store of the job cannot be used.
        TransportUnavailableError: the system refuses descriptors, threads or system calls that ranks need.
    """
    from unisono.collectives.bootstrap.join import joined

    settings = _settings(options)
    _report_unknown_variables(0)
    limit_s = settings.rendezvous_timeout_s if timeout_s is None else checked_timeout_s(timeout_s)
    try:
        world = joined(waiting_place(os.environ), settings, limit_s, join_world)
    except (OSError, RuntimeError) as error:
        if is_refusal(error):
            raise unavailable("this process cannot join the job", error) from None
        raise
    if settings.metrics:
        _export(world, settings.metrics)
    return world


def _settings(options: Options | None) -> Options:
    """Return the options of this process, and load the algorithms of the user that they name."""
    settings = (options or Options()).resolved(os.environ)
    if settings.load:
        from unisono.collectives.bootstrap.user_algorithms import load_all

        load_all(settings.load)
    return settings


def _dump(directory: str, launch: Launch, rendezvous: Rendezvous | None, failure: UnisonoError) -> str | None:
    """Write the dump of a rank that could not meet other ranks; return its path, or None if it cannot be written."""
    job = launch.job or (job_of_key(rendezvous.key) if rendezvous is not None else b"")
    return dump_of_start(directory, job.hex() or "unknown", launch.rank, launch.size, failure) or None


def _export(world: Communicator, directory: str) -> None:
    """Start to write the metrics of `world` to a directory. If that fails, close `world` and raise the error."""
    try:
        _write_metrics(world, directory)
    except UsageError:
        world.close()
        raise


def _write_metrics(world: Communicator, directory: str) -> None:
    from unisono.collectives.calls.metrics import write_textfile

    write_textfile(world, directory)


def _report_unknown_variables(rank: int) -> None:
    """Log each unknown ``UNISONO_*`` variable once: as a warning on rank 0 only, because ranks mostly share them."""
    for sentence in unknown_variables(os.environ):
        if sentence not in _reported:
            _reported.add(sentence)
            (_log.warning if rank == 0 else _log.debug)("%s", sentence)


def _report(launch: Launch, session: Session, world: Communicator, options: Options, took_ms: float) -> None:
    from unisono.collectives.bootstrap.job_report import job_report

    for line in job_report(launch, session, world.hosts, options, took_ms):
        _log.info("%s", line)


def _launch(store: Any, rank: int | None, size: int | None, mpi_comm: Any) -> Launch:
    are_present = (store is not None, rank is not None, size is not None)
    if mpi_comm is not None:
        if any(are_present):
            raise UsageError("mpi_comm determines rank, size and store: pass it without store, rank and size")
        from unisono.transports.mpi.library import checked

        comm = checked(mpi_comm)
        return Launch(comm.Get_rank(), comm.Get_size(), MPI_WORLD, b"", None, "a program with MPI")
    if not any(are_present):
        return detect(os.environ)
    if not all(are_present):
        raise UsageError("pass store, rank and size together, or none of them")
    if not (isinstance(rank, int) and isinstance(size, int) and 0 <= rank < size):
        raise UsageError(f"rank must be an integer from 0 to size - 1; got rank={rank!r} and size={size!r}")
    if not isinstance(store, str):
        return Launch(rank, size, None, b"", key_of_file(os.environ), "a program with a store")
    return detect({"UNISONO_RANK": str(rank), "UNISONO_SIZE": str(size), "UNISONO_STORE": store})


def _failure_of(launch: Launch, error: BaseException) -> BaseException:
    """Return the error that `init` raises: for a refusal of the system, one that names the limit."""
    if not (isinstance(error, Exception) and is_refusal(error)):
        return error
    return unavailable(f"rank {launch.rank} of {launch.size} cannot take part in the job", error, rank=launch.rank)


def open_world() -> Communicator:
    """Return the open world of this process.

    Raises:
        UsageError: there is none, or there are several.
    """
    worlds = [world for job in list(_jobs) if (world := job.world()) is not None]
    if len(worlds) != 1:
        raise UsageError(
            f"this process has {len(worlds) or 'no'} open worlds: call unisono.init(), and pass one as comm"
        )
    return worlds[0]


def join_world(
    session: Session,
    rendezvous: Rendezvous,
    options: Options,
    server: StoreServer | None = None,
    deadline: Deadline | None = None,
    *,
    measures_network: bool = False,
) -> Communicator:
    """Meet the other ranks and return the communicator of all ranks. It closes session, rendezvous and server.

    The ranks have `options.rendezvous_timeout_s` seconds for that, or until `deadline`. With `measures_network`, hosts
    that are far apart measure their network.

    Raises:
        UnisonoError: the ranks could not meet; nothing has been closed.
    """
    job = _Job(session, rendezvous, options, server)
    cores = sum(1 << core for core in os.sched_getaffinity(0))
    identity = session.identity
    me = RosterMember(
        identity.rank,
        session.addresses,
        f"{cores:x}",
        session.surroundings,
        identity.launch_rank,
        tls_of(options),
    )
    timeout_s = options.rendezvous_timeout_s if deadline is None else deadline.remaining_s()
    deadline = deadline or Deadline(timeout_s)
    roster = rendezvous.join(me, timeout_s, shared_settings.collect(options, identity.rank))
    with _core.DefaultFloatEnvironment():  # all ranks must read the same numbers, because these decide about algorithms
        tuner_state = shared_settings.apply(roster.settings)
    shared_settings.report_differences(options, roster.settings)
    try:
        agreed = options.adopting({name: roster.settings[name] for name in shared_settings.SHARED_OPTIONS})
    except UsageError:  # a plugin that this rank lacks: meet the others first, so that they get the error
        _link(job, roster, options.adopting({"transports": "auto"}), deadline)
        raise
    executor, host_layout = _executor(roster, agreed, job, deadline, measures_network)
    tuner_state = _following_network(session, agreed, tuner_state)
    world = Communicator(
        executor,
        host_layout,
        agreed,
        job.close,
        tuner_state,
        _shrink,
        job.grow,
        identity.epoch,
        tuple(member.launch_rank for member in roster.members),
    )
    if agreed.tune and world.size > 1:
        world._try_algorithms()
    job.belong_to(world, executor)
    return world


def _shrink(executor: Executor, options: Options, timeout_s: float) -> Communicator:
    """Return a communicator of the survivors. `Communicator` cannot import `shrink`, which makes communicators."""
    from unisono.collectives.bootstrap.shrink import shrink

    world = shrink(executor, options, timeout_s, join_world)
    _export_on(world, options.metrics)
    return world


def _export_on(world: Communicator, directory: str) -> None:
    """Write the metrics of a communicator that replaces another one, as the option `metrics` says."""
    try:
        if directory:
            _write_metrics(world, directory)
    except UsageError as error:
        _log.warning("%s", error.message)


def _link(job: _Job, roster: Roster, options: Options, deadline: Deadline, measures_network: bool = False) -> None:
    """Open the control links. If that fails, tell the other ranks why."""
    rendezvous = job.rendezvous
    try:
        job.session.meet(
            roster,
            options,
            rendezvous.comm,
            deadline=deadline,
            failure=rendezvous.failure,
            measures_network=measures_network,
        )
    except UnisonoError as error:
        rendezvous.report_failure(error.message)
        raise


def _following_network(session: Session, options: Options, tuner_state: TunerState) -> TunerState:
    """Let the TCP channels and the tuner follow the network that the hosts have measured, if they have."""
    if session.network is None:
        return tuner_state
    from unisono.tuning.machine.network_map import NetworkMap

    network = NetworkMap.of(*session.network)
    if not options.sets("tcp_streams"):
        session.channels.tcp.use_streams(network.streams())
    return tuner_state.over(network, at_level("tcp", NETWORK))


def _executor(
    roster: Roster, options: Options, job: _Job, deadline: Deadline, measures_network: bool
) -> tuple[Executor, HostLayout]:
    """Open the control links; return the executor for the calls of all ranks, and the host layout."""
    name, session = options.third_party, job.session
    if name is None:
        _link(job, roster, options, deadline, measures_network and _far_transport(options.preference) == "tcp")
        executor = NativeExecutor(session, mpi=job.rendezvous.collectives())
        return executor, _host_layout(roster, options.preference)
    from unisono.collectives.bootstrap.plugin_transport import open_executor

    own_links = options.adopting({"transports": ",".join(resolved(("auto",)))})
    _link(job, roster, own_links, deadline)
    job.native = NativeExecutor(session)
    plugin_executor = open_executor(name, session, job.native, own_links)
    return plugin_executor, _host_layout(roster, ("local" if plugin_executor.maps_memory else "tcp",))


def _host_layout(roster: Roster, preference: tuple[str, ...]) -> HostLayout:
    hosts: defaultdict[str, list[int]] = defaultdict(list)
    masks: defaultdict[str, int] = defaultdict(int)
    for member in roster.members:
        hosts[member.addresses.host_id].append(member.rank)
        masks[member.addresses.host_id] |= int(member.cores, 16)
    near, far = preference[0], _far_transport(preference)
    cores = tuple(mask.bit_count() for mask in masks.values())
    return HostLayout(tuple(tuple(ranks) for ranks in hosts.values()), near if len(hosts) == 1 else far, cores, near)


def _far_transport(preference: tuple[str, ...]) -> str:
    """Return the transport between hosts: the first that is not shared memory, if there is one."""
    return next((name for name in preference if name != "shm"), preference[0])


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
