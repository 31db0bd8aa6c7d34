"""The job: starting and ending, ranks, and process sets. All frameworks of a process share it."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, Protocol
from weakref import WeakValueDictionary

from unisono import Communicator, init as init_world
from unisono.compat.horovod.entries import StartedCall
from unisono.compat.horovod.negotiation import Negotiator
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.requests import ReadyCall
from unisono.compat.horovod.settings import Settings, read_settings
from unisono.compat.horovod.timeline import HorovodTimeline
from unisono.errors import UnisonoError, UsageError


class JoinedSteps(Protocol):
    """The steps of an optimizer that a rank takes part in after `join`, as long as other ranks still train."""

    step_in_progress: int

    def open(self, comm: Communicator) -> None:
        """Open the reducer of the optimizer for these ranks."""

    def catch_up(self, number: int) -> None:
        """Take part in the steps of the other ranks up to this number, without gradients."""


class HorovodJob:
    """The state between `init` and `shutdown`.

    Attributes:
        world: all ranks.
        settings: the settings.
        epoch: the number of worlds that this process had before; an optimizer with another number is out of date.
        timeline: records the times of calls.
    """

    def __init__(self, world: Communicator, settings: Settings, *, is_own: bool) -> None:
        self.world, self.settings = world, settings
        self.epoch = next(_epochs)
        self.timeline = HorovodTimeline()
        self._is_own, self._pid = is_own, os.getpid()
        self._lock = threading.Lock()
        self._sets: dict[int, ProcessSet] = {}
        self._next_id = 1
        if settings.timeline:
            self.timeline.start(settings.timeline, world.rank)
        global_process_set.ranks = list(range(world.size))
        self.calls = self._negotiator(range(world.size))
        global_process_set.register(0, world.rank, self.calls)

    def add(self, process_set: ProcessSet) -> ProcessSet:
        """Register a process set. All ranks call it, members or not, and wait for each other.

        Raises:
            UsageError: the set is registered already, has the ranks of another one, or has ranks that do not exist.
        """
        ranks = process_set.ranks or []
        if not ranks or ranks[0] < 0 or ranks[-1] >= self.world.size:
            raise UsageError(f"{process_set} must have ranks from 0 to {self.world.size - 1}")
        if len(ranks) == self.world.size or any(ranks == other.ranks for other in self._sets.values()):
            raise UsageError(f"there is already a process set of the ranks {ranks}: use that one")

        def register() -> None:
            number, self._next_id = self._next_id, self._next_id + 1
            negotiator = self._negotiator(ranks) if self.world.rank in ranks else None
            process_set.register(number, self.world.rank, negotiator)
            self._sets[number] = process_set

        self.together(f"add process set {ranks}", register)
        return process_set

    def remove(self, process_set: ProcessSet) -> bool:
        """Forget a process set, and return whether it was registered. All ranks call it, and wait for each other."""
        number = process_set.process_set_id
        if not number or number not in self._sets:
            return False
        self.together(f"remove process set {process_set.ranks}", lambda: self._sets.pop(number))
        negotiator = process_set.negotiator
        process_set.invalidate()
        if negotiator is not None:
            negotiator.close()
        return True

    def process_set(self, number: int) -> ProcessSet:
        """Return the process set of this number; raises `UsageError` if none is registered."""
        if number == 0:
            return global_process_set
        if number not in self._sets:
            raise UsageError(f"no process set has the number {number}: pass its process_set_id")
        return self._sets[number]

    def together(self, name: str, function: Any) -> Any:
        """Call a function on all ranks at the same place in the order of calls, and return its result."""
        return self.calls.make(StartedCall(ReadyCall("together", name), [function]))

    def close(self) -> None:
        """End all calls, on all ranks. In a forked child this does nothing, because the job belongs to the parent."""
        if os.getpid() != self._pid:
            return
        self.timeline.stop()
        for process_set in self._sets.values():
            if process_set.negotiator is not None:
                process_set.negotiator.close()
            process_set.invalidate()
        self.calls.close()
        global_process_set.negotiator = None
        if self._is_own:
            self.world.close()

    def _negotiator(self, ranks: Sequence[int]) -> Negotiator:
        settings = self.settings._replace(stall_s=self.settings.stall_s or self.world.timeout_s)
        return Negotiator(self.world.subgroup(ranks), settings, self.timeline.note, _open, _steps)


_epochs = itertools.count()
_starting = threading.Lock()
_job: HorovodJob | None = None
# By the name under which the ranks match it, each optimizer of this process.
optimizers: WeakValueDictionary[str, JoinedSteps] = WeakValueDictionary()
# The number of the last optimizer, by the digest of its signature and its process set. Other ranks create no optimizers
# of a set that they are not in, so their numbers in other sets must not depend on it.
_optimizer_numbers: dict[str, int] = {}


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks. All ranks call it; a second call does nothing.

    Args:
        comm: a `Communicator` that is already open; by default, or with a list of all ranks, `unisono.init` opens one.
        process_sets: process sets to register at once, the same on all ranks. "dynamic" is allowed and means none,
            because `add_process_set` always works here.

    Raises:
        UsageError: `comm` is neither, or a process set is wrong.
        RendezvousError: as in `unisono.init`.
    """
    global _job  # noqa: PLW0603  (a process has one job, because the API is functions of a module)
    with _starting:
        if _job is not None:
            return
        settings = read_settings()
        if isinstance(comm, Communicator):
            _job = HorovodJob(comm, settings, is_own=False)
        else:
            _job = HorovodJob(_world_of(comm), settings, is_own=True)
        atexit.register(shutdown)
    for process_set in process_sets if process_sets and not isinstance(process_sets, str) else ():
        _job.add(process_set)


def _world_of(comm: Any) -> Communicator:
    world = init_world()
    if not comm or (isinstance(comm, Iterable) and sorted(comm) == list(range(world.size))):
        return world
    world.close()
    raise UsageError(
        f"comm must be a unisono.Communicator or a list of all ranks, not {comm!r}: use a ProcessSet for some"
    )


def adopt(world: Communicator) -> None:
    """Continue with another communicator of the job, after `shrink` or `grow`. The old one is closed."""
    global _job  # noqa: PLW0603
    before = running()
    _job = None
    try:
        before.close()
    except UnisonoError:
        before.world.close()  # it has failed, which is why it is replaced
    _job = HorovodJob(world, before.settings._replace(timeline=""), is_own=True)


def shutdown() -> None:
    """Leave the other ranks. Calls that have no result yet fail on all ranks. After it, `init` may be called again."""
    global _job
    with _starting:
        job, _job = _job, None
        atexit.unregister(shutdown)
    if job is not None:
        job.close()


def running() -> HorovodJob:
    """Return the job.

    Raises:
        UsageError: `init` has not been called.
    """
    if _job is None:
        raise UsageError("Horovod has not been initialized; use hvd.init()")
    return _job


def raise_explained(error: UnisonoError) -> NoReturn:
    """Raise the error of Horovod for an error of a communicator of the job."""
    explained = running().calls.explain(error)
    raise explained from explained.__cause__


def register_optimizer(optimizer: JoinedSteps, signature: str, process_set: ProcessSet) -> str:
    """Return the name of a new optimizer.

    Args:
        optimizer: the optimizer.
        signature: a text about its parameters. The ranks of a process set match optimizers of the same signature by the
            order in which they create them.
        process_set: the ranks.
    """
    ranks = "all" if process_set is global_process_set else process_set.ranks
    digest = hashlib.blake2b(f"{ranks} {signature}".encode(), digest_size=8).hexdigest()
    number = _optimizer_numbers[digest] = _optimizer_numbers.get(digest, -1) + 1
    name = f"optimizer {digest}.{number}"
    optimizers[name] = optimizer
    return name


def _optimizer(name: str) -> JoinedSteps:
    optimizer = optimizers.get(name)
    if optimizer is None:
        raise UsageError("the other ranks average gradients of an optimizer that this rank has not created: create it")
    return optimizer


def _open(name: str, comm: Communicator) -> None:
    _optimizer(name).open(comm)


def _steps() -> dict[str, int]:
    steps = {name: optimizer.step_in_progress for name, optimizer in list(optimizers.items())}
    return {name: number for name, number in steps.items() if number}


def is_initialized() -> bool:
    """Return whether `init` has been called, and `shutdown` has not been called after it."""
    return _job is not None


def rank() -> int:
    """Return the rank of this process."""
    return running().world.rank


def size() -> int:
    """Return the number of ranks."""
    return running().world.size


def local_rank() -> int:
    """Return the index of this rank among the ranks of its host."""
    return running().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return len(_host())


def cross_rank() -> int:
    """Return the index of this host among the hosts that have a rank with this `local_rank`."""
    return [host[local_rank()] for host in _hosts_with_local_rank()].index(rank())


def cross_size() -> int:
    """Return the number of hosts that have a rank with this `local_rank`."""
    return len(_hosts_with_local_rank())


def is_homogeneous() -> bool:
    """Return whether all hosts have the same number of ranks."""
    return len({len(host) for host in running().world.hosts}) == 1


def join(device: int = -1) -> int:
    """Take part with zeros in the allreduces and optimizer steps of other ranks, until all ranks have joined.

    A rank calls it when its data has ended and other ranks still have some. An average divides by the number of all
    ranks, also those that have joined.

    Args:
        device: ignored here; the number of a GPU with Horovod.

    Returns:
        The rank that joined last. It has made the most steps, so its parameters are the ones to broadcast.

    Raises:
        HorovodInternalError: a call of the other ranks failed.
    """
    return running().calls.join(lambda optimizer, number: _optimizer(optimizer).catch_up(number))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the process set have called it."""
    calls = calls_of(process_set)
    calls.make(StartedCall(ReadyCall("barrier", calls.unnamed("barrier"))))


def calls_of(process_set: ProcessSet) -> Negotiator:
    """Return the calls of a process set on this rank.

    Raises:
        UsageError: `init` has not been called, the set is not registered, or this rank is not in it.
    """
    job = running()
    if process_set is global_process_set:
        return job.calls
    if not isinstance(process_set, ProcessSet):
        raise UsageError(f"process_set must be a ProcessSet, not {process_set!r}")
    if process_set.process_set_id is None:
        raise UsageError(f"{process_set} is not registered: pass it to init() or add_process_set() on all ranks")
    if process_set.negotiator is None:
        raise UsageError(f"rank {job.world.rank} is not in {process_set}: make this call on its ranks only")
    return process_set.negotiator


def communicator(process_set: ProcessSet = global_process_set) -> Communicator:
    """Return a new communicator of a process set. Its ranks call it at any time, and wait for each other."""
    calls = calls_of(process_set)
    request = ReadyCall("together", calls.unnamed("together"))
    new: Communicator = calls.make(StartedCall(request, [calls.comm.dup]))
    return new


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, or make and register one of these ranks. All ranks of the job call it.

    Raises:
        UsageError: there is a set of these ranks already, or a rank does not exist.
    """
    return running().add(process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set))


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set, and return whether it was registered. All ranks of the job call it."""
    return running().remove(process_set)


def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Begin to record the times of calls; `stop_timeline` writes them to a file, on rank 0.

    Args:
        file_path: the file, in Chrome's trace event format, which https://ui.perfetto.dev shows.
        mark_cycles: ignored here, because there are no cycles.

    Raises:
        UsageError: a timeline is being recorded, or the folder does not exist.
    """
    job = running()
    job.timeline.start(file_path, job.world.rank)


def stop_timeline() -> None:
    """Write the file of `start_timeline`."""
    running().timeline.stop()


def _host() -> Sequence[int]:
    job = running()
    return next(host for host in job.world.hosts if job.world.rank in host)


def _hosts_with_local_rank() -> list[Sequence[int]]:
    return [host for host in running().world.hosts if len(host) > local_rank()]


def _no() -> bool:
    return False


def gloo_built() -> bool:
    """Return True: Unisono's own transports do what Gloo does in Horovod, so code that asks for it works."""
    return True


def nccl_built() -> int:
    """Return 0: arrays on GPUs go through the host."""
    return 0


gloo_enabled = gloo_built
mpi_built = mpi_enabled = mpi_threads_supported = ddl_built = ccl_built = cuda_built = rocm_built = _no
