"""The `Communicator` class, on which a rank makes all its calls.

Its collectives are in `api/collectives.py` and `api/vector_collectives.py`, its messages in `api/point_to_point.py`,
its persistent calls in `api/persistent.py`, and its calls on Python objects in `api/objects.py`. This file adds
subcommunicators, statistics and closing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from unisono.collectives.api.alltoallw import BlockExchange
from unisono.collectives.api.grids import GridPlaces
from unisono.collectives.api.mpi_names import MpiNames
from unisono.collectives.api.neighbours import Neighbours
from unisono.collectives.api.objects import Objects
from unisono.collectives.api.observation import Observation
from unisono.collectives.api.persistent import PersistentCalls
from unisono.collectives.api.windows import Windows
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.collectives.calls.arguments import checked_integer
from unisono.collectives.calls.groups import Groups
from unisono.collectives.calls.host_side import HostSide
from unisono.collectives.calls.planning import HostLayout
from unisono.collectives.neighbourhoods.names import NEIGHBOUR_CALLS
from unisono.errors import UsageError
from unisono.foundation.uncopyable import uncopyable
from unisono.options import Options
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES, Executor, WindowExecutor
from unisono.tuning.decide.choice import NO_STATE, TunerState

if TYPE_CHECKING:
    from typing_extensions import Self

    from unisono.algorithms.ir.neighbourhood import Neighbourhood
    from unisono.collectives.calls.programs import ProgramCalls
    from unisono.collectives.calls.statistics import Statistics
    from unisono.collectives.neighbourhoods.edges import Weights
    from unisono.collectives.neighbourhoods.grid_shape import GridShape
    from unisono.transports.links.session import Session
    from unisono.tuning.machine.network_map import NetworkMap

# Makes the communicator of the survivors: `shrink` of `bootstrap.shrink`, which needs `Communicator` itself.
Shrink: TypeAlias = "Callable[[Executor, Options, float], Communicator]"

AnyCommunicator = TypeVar("AnyCommunicator", bound="Communicator")

_INT64 = -(1 << 63), (1 << 63) - 1
_MOST_JOINERS = 1 << 20
# Makes the communicator of the members and the joiners, from a world, a count and a time limit: `Growth.grow` of
# `bootstrap.grow`.
Grow: TypeAlias = "Callable[[Communicator, int | None, float], Communicator]"

# Held while a communicator for objects is made, because several threads may send their first object at the same time.
_making = threading.Lock()


def _refuse_to_shrink(executor: Executor, options: Options, timeout_s: float) -> Communicator:
    raise UsageError("this communicator cannot shrink, because un.init() did not make it: call un.init() again")


def _refuse_to_grow(world: Communicator, count: int | None, timeout_s: float) -> Communicator:
    raise UsageError("only the communicator of all ranks can grow, which init, shrink, grow or join has made")


@uncopyable("it belongs to this process; dup() makes another one of the same ranks")
class Communicator(Groups, Objects, PersistentCalls, BlockExchange, Windows, Observation, MpiNames, HostSide):
    """Some or all ranks of a job, which make calls together; a context manager that closes it at its end.

    `unisono.init` and `unisono.launch` make the *world*, the communicator of all ranks. `split`, `subgroup`, `dup`,
    `local` and `leaders` make further communicators. Each communicator has ranks, calls and links of its own.

    All ranks of a communicator must make the same calls on it in the same order. An error ends all communicators of the
    job. Every rank raises it once, and every later call raises `AbortedError`. Errors name ranks by their numbers in
    the world.

    Attributes:
        rank, size: this rank, and the number of ranks.
        hosts: the ranks of each host, in the order of their lowest ranks.
        local_rank: the index of this rank among the ranks of its host.
        world_ranks: for each rank, its number in the world.
        launch_ranks: for each rank, its number when it was launched (``UNISONO_RANK``). `shrink` and `grow` number the
            ranks of the world anew, but their metrics, counters and labels keep these numbers. A process that joins in
            place of a lost rank has the number of that one.
        epoch: 0 for the first membership of the job; each `shrink` and each `grow` that changes it makes a higher one.
    """

    def __init__(
        self,
        executor: Executor,
        host_layout: HostLayout,
        options: Options,
        on_close: Callable[[], None] = lambda: None,
        tuner_state: TunerState = NO_STATE,
        shrink: Shrink = _refuse_to_shrink,
        grow: Grow = _refuse_to_grow,
        epoch: int = 0,
        launch_ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(executor, host_layout, options, tuner_state)
        self.hosts = host_layout.hosts
        self.world_ranks = executor.members
        self._host_layout = host_layout
        self._children: list[Communicator] = []
        self.local_rank = next(host.index(self.rank) for host in self.hosts if self.rank in host)
        self._on_close = on_close
        self._shrink = shrink
        self._grow = grow
        self.epoch = epoch
        self._of_launch = launch_ranks  # by the number in the world
        self.launch_ranks = (
            self.world_ranks if launch_ranks is None else tuple(map(launch_ranks.__getitem__, self.world_ranks))
        )
        self._closing = threading.RLock()
        self._is_closed = False
        self._devices_comm: Communicator | None = None
        self._objects_comm: Communicator | None = None
        self._programs: ProgramCalls | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call without a limit of its own fails: the option `timeout_s`."""
        return self._options.timeout_s

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._is_closed

    def __repr__(self) -> str:
        return f"<unisono.Communicator rank {self.rank} of {self.size}>"

    def split(
        self,
        color: int | None = None,
        key: int | None = None,
        *,
        type: str | None = None,
        timeout_s: float | None = None,
    ) -> Communicator | None:
        """Return a communicator of the ranks that pass the same `color`. All ranks call it; it makes one allgather.

        Args:
            color: an integer of 64 bits. A rank that passes None is in no new communicator, and gets None.
            key: an integer of 64 bits. Ranks are numbered by ascending key, and ranks with equal keys in their order
                here. The default is this rank.
            type: in place of a color, what the ranks of a new communicator share: "shared" memory, through which they
                exchange messages, a "host" (a machine, whose containers may share no memory), or the "numa" nodes whose
                cores they may use.
            timeout_s: seconds until the allgather fails; by default the option `timeout_s`.

        Raises:
            UsageError, MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.

        >>> import unisono as un
        >>> def even_and_odd(world):
        ...     half = world.split(world.rank % 2, key=-world.rank)
        ...     return half.world_ranks, half.rank
        >>> un.launch(even_and_odd, 3)
        [((2, 0), 1), ((1,), 0), ((2, 0), 0)]
        """
        self._check_alone()
        if type is not None:
            if color is not None:
                raise UsageError("pass a color or a type to split(), not both")
            color = self._color_of_place(type)
        wire_color = 0 if color is None else checked_integer(color, "color", *_INT64)
        order = self.rank if key is None else checked_integer(key, "key", *_INT64)
        row = np.array([[color is not None, wire_color, order]], np.int64)
        rows = self.allgather(row, timeout_s=timeout_s).tolist()
        if color is None:
            return None
        members = [rank for rank, (is_member, other, _) in enumerate(rows) if is_member and other == wire_color]
        return self.subgroup(sorted(members, key=lambda rank: rows[rank][2]))

    def _color_of_place(self, kind: str) -> int:
        """Return an integer that is equal on two ranks exactly if they are in one place; see `split`."""
        from unisono.collectives.calls.places import color_of_place

        is_apart = kind == "shared" and not self._shares_memory()
        return color_of_place(kind, [[rank] for rank in range(self.size)] if is_apart else self.hosts, self.rank)

    def _shares_memory(self) -> bool:
        """Return whether the ranks of this host exchange messages through shared memory, or this rank is alone."""
        host = next(host for host in self.hosts if self.rank in host)
        return len(host) == 1 or self._executor.shares_memory_with(host)

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of these ranks, which become its ranks 0, 1, … in this order. Nothing is sent.

        Exactly these ranks call it, with the same `ranks` in the same order. If they call it several times, they must
        do so in the same order, because the nth communicator of these ranks on one rank belongs to the nth on another.
        The new communicator is closed by its own `close`, or together with this one.

        Raises:
            UsageError: `ranks` are not distinct ranks of this communicator, or this rank is not among them.

        >>> import numpy as np, unisono as un
        >>> def reversed_sum(world):
        ...     if world.rank == 0:
        ...         return None
        ...     with world.subgroup([2, 1]) as pair:
        ...         return pair.rank, int(pair.allreduce(np.array(world.rank)))
        >>> un.launch(reversed_sum, 3)
        [None, (1, 3), (0, 3)]
        """
        return self._subgroup(ranks, Communicator)

    def _subgroup(self, ranks: Sequence[int], make: Callable[..., AnyCommunicator]) -> AnyCommunicator:
        """Return ``make(...)`` for these ranks, with the arguments of `Communicator`; see `subgroup`."""
        self._check_usable()
        members = [self._rank_of(rank, f"ranks[{index}]") for index, rank in enumerate(ranks)]
        if len(set(members)) != len(members):
            raise UsageError(f"ranks must be different, but a rank occurs twice in {members}")
        if self.rank not in members:
            raise UsageError(f"rank {self.rank} is not among the ranks {members}: call subgroup only on these ranks")
        layout = self._host_layout.of(members)
        hosts = [next(n for n, ranks in enumerate(self.hosts) if members[host[0]] in ranks) for host in layout.hosts]
        tuner_state = self.tuner_state.among(hosts)
        child = self._make_child(make, self._executor.subgroup(members), layout, self._options, tuner_state)
        if self._checker.trials is not None and 0 in child.world_ranks and child.size > 1:
            child._try_algorithms()
        return child

    def _child(self, executor: Executor, host_layout: HostLayout, options: Options) -> Communicator:
        """Return a communicator of the same ranks over `executor` that is closed together with this one."""
        return self._make_child(Communicator, executor, host_layout, options, self.tuner_state)

    def _make_child(
        self,
        make: Callable[..., AnyCommunicator],
        executor: Executor,
        host_layout: HostLayout,
        options: Options,
        tuner_state: TunerState,
    ) -> AnyCommunicator:
        child: AnyCommunicator = make(
            executor,
            host_layout,
            options,
            lambda: self._children.remove(child),
            tuner_state,
            self._shrink,
            epoch=self.epoch,
            launch_ranks=self._of_launch,
        )
        self._children.append(child)
        return child

    def dup(self) -> Communicator:
        """Return another communicator of the same ranks, whose calls are independent of the calls on this one.

        All ranks call it; nothing is sent.
        """
        return self.subgroup(range(self.size))

    def local(self) -> Communicator:
        """Return a communicator of the ranks on this host, in their order. All of them call it; nothing is sent."""
        return self.subgroup(next(host for host in self.hosts if self.rank in host))

    def leaders(self) -> Communicator | None:
        """Return a communicator of the first rank of each host, in the order of `hosts`; None on other ranks.

        All first ranks must call it, and other ranks may. Nothing is sent.
        """
        return self.subgroup([host[0] for host in self.hosts]) if self.local_rank == 0 else None

    def grid(
        self, dims: int | Sequence[int | None], *, periodic: bool | Sequence[bool] = False, reorder: bool = True
    ) -> Grid:
        """Return a communicator of all ranks in a Cartesian grid. All ranks call it; nothing is sent.

        Args:
            dims: the number of ranks along each dimension, where None or 0 stands for a number to choose, or only the
                number of dimensions; see `unisono.grid_dims`. The product is the number of ranks.
            periodic: whether the first and the last rank along a dimension are neighbours: for all dimensions, or for
                each.
            reorder: whether ranks get places so that neighbours share hosts. The grid then numbers the ranks anew,
                unless all are on one host. Otherwise each rank keeps its number.

        Raises:
            UsageError: `dims` or `periodic` is wrong, or the communicator is closed.

        >>> import unisono as un
        >>> def place(world):
        ...     with world.grid(2, periodic=[True, False]) as grid:
        ...         return grid.dims, grid.coordinates(), grid.shift(0)
        >>> un.launch(place, 4)[2]
        ((2, 2), (1, 0), (0, 0))
        """
        from unisono.collectives.neighbourhoods.grid_shape import checked_shape
        from unisono.collectives.neighbourhoods.placement import rank_at_each_place

        shape = checked_shape(self.size, dims, periodic)
        ranks = rank_at_each_place(shape, self.hosts) if reorder else range(self.size)
        return self._subgroup(ranks, partial(Grid, shape))

    def graph(
        self,
        neighbours: Sequence[int] | None = None,
        *,
        sources: Sequence[int] | None = None,
        destinations: Sequence[int] | None = None,
        weights: Sequence[Any] | None = None,
        timeout_s: float | None = None,
    ) -> Graph:
        """Return a communicator of all ranks with a graph of neighbours. All ranks call it; it makes two collectives.

        Each rank passes its own neighbours: `neighbours`, or `sources` and `destinations` if directions differ. Their
        order is that of the blocks in collectives among neighbours. A rank may be its own neighbour, and may occur
        several times: the nth edge that one end names belongs to the nth that the other end names.

        Args:
            neighbours: the ranks to which this rank sends and from which it receives.
            sources: the ranks from which it receives.
            destinations: the ranks to which it sends.
            weights: a number for each of `neighbours`, or one list for `sources` and one for `destinations`. The graph
                only keeps them.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.

        Raises:
            UsageError: an argument is wrong. If the two ends of an edge do not name it equally often, all ranks raise
                this error, which names the edge, and the communicator stays usable.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.

        >>> import numpy as np, unisono as un
        >>> def star(world):
        ...     with world.graph([1, 2] if world.rank == 0 else [0]) as graph:
        ...         return graph.neighbor_allgather(np.array([world.rank])).tolist()
        >>> un.launch(star, 3)
        [[1, 2], [0], [0]]
        """
        from unisono.collectives.neighbourhoods import edges

        self._check_alone()
        own = edges.named_neighbourhood(neighbours, sources, destinations, self.size)
        checked = edges.checked_weights(weights, own, are_of_both=neighbours is not None)
        limit_s = self._limit_s(timeout_s)

        def gather(integers: Sequence[int]) -> Sequence[int]:
            return list(map(int, self.allgather(np.array(integers, np.int64), timeout_s=limit_s)))

        def gather_counted(integers: Sequence[int], counts: Sequence[int]) -> Sequence[int]:
            return list(map(int, self.allgatherv(np.array(integers, np.int64), counts, timeout_s=limit_s)))

        edges.check_edges(edges.gathered(own, gather, gather_counted))
        return self._subgroup(range(self.size), partial(Graph, own, checked))

    def program_calls(self) -> ProgramCalls:
        """Return the registry of calls that compiled programs make on this communicator; `unisono.jax` uses it.

        Raises:
            UsageError: the communicator is closed, or its transport cannot run calls without Python.
        """
        self._check_usable()
        with _making:
            if self._programs is None:
                from unisono.collectives.calls.programs import ProgramCalls

                executor = self._executor.for_programs()
                child = self._child(executor, self._host_layout, self._options)
                self._programs = ProgramCalls(
                    executor,
                    child._planner,
                    self._options,
                    lambda: child.subgroup(range(child.size - 1, -1, -1)),
                )
        return self._programs

    def session_and_options(self) -> tuple[Session, Options]:
        """Return the session of this rank and the options of the job; `bootstrap.bridge` uses them.

        Raises:
            UsageError: the communicator is closed, or is over a plugin transport.
        """
        from unisono.transports.executors.native import NativeExecutor

        self._check_usable()
        if not isinstance(self._executor, NativeExecutor):
            raise UsageError("a communicator over a plugin transport cannot meet another job: use shm and tcp")
        return self._executor.session, self._options

    def stats(self) -> Statistics:
        """Return counters: traffic by peer and transport, collective calls, and bytes of arrays on a GPU.

        The result is a dict from each peer to its `Traffic` so far. Its attribute `calls` has a row for each
        collective, algorithm and size class, with the number of calls, bytes and seconds. Its attribute `on_device`
        counts the bytes of arrays on a GPU that went over CUDA IPC, by peer. It also counts the bytes that were copied
        to the host and back, for calls and messages that went through the host. Pickled objects count as traffic with
        their peer, although over UCX and MPI they travel by shared memory or TCP.

        >>> import numpy as np, unisono as un
        >>> def called(world):
        ...     for _ in range(3):
        ...         world.broadcast(np.zeros(8), algorithm="binomial")
        ...     return [calls[:5] for calls in world.stats().calls]
        >>> un.launch(called, 2)[0]
        [('broadcast', 'binomial', 64, 3, 192)]
        """
        totals = dict(self._executor.traffic())
        by_devices = {} if self._devices_comm is None else self._devices_comm.stats()
        by_rails = self._devices.between_hosts()
        by_custom_ops = {} if self._checker.reducer_if_any is None else self._checker.reducer_if_any.traffic()
        by_objects = {} if self._objects_comm is None else self._objects_comm.stats()
        by_verifier = {} if self._checker.verifier is None else self._checker.verifier.traffic()
        for more in (by_custom_ops, by_devices, by_rails, by_objects, by_verifier):
            for peer, traffic in more.items():
                totals[peer] = totals[peer] + traffic if peer in totals else traffic
        if sys.is_finalizing():  # nothing can be imported any more
            raise UsageError("Python is ending, and can import nothing any more: call stats() earlier")
        from unisono.collectives.calls.statistics import Statistics

        return Statistics(totals, self._executor.usage(), self._devices.statistics())

    def abort(self, reason: str) -> None:
        """Abort the job: on all ranks, calls in progress and all later calls raise `AbortedError` with `reason`."""
        self._executor.abort(reason)

    def shrink(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the surviving ranks after a failure, in their old order, numbered from 0.

        After a call has failed, all ranks that are alive and have not closed this communicator call `shrink`. They may
        have been in different calls before. `shrink` does not wait for dead ranks, rank 0 included, or for ranks that
        die meanwhile. The new communicator has links of its own and outlives this one, which must still be closed.

        Args:
            timeout_s: seconds to wait for ranks that are alive; by default the option `rendezvous_timeout_s`.

        Raises:
            UsageError: nothing has failed, or the communicator is closed.
            RendezvousError: a rank is alive and did not call `shrink` in time. Or the other ranks have gone on without
                this one, because it did not answer: its process was stopped, for example, or cut off.
        """
        self._check_usable()
        limit_s = self._options.rendezvous_timeout_s if timeout_s is None else self._limit_s(timeout_s)
        return self._shrink(self._executor, self._options, limit_s)

    def measure_network(self, *, timeout_s: float | None = None) -> NetworkMap | None:
        """Measure the network between the hosts again, because a link has changed; return the map that is now known.

        All ranks call it, on the communicator of all ranks, while no other call is in progress. Each pair of hosts
        exchanges data for some round trips, up to a few seconds in all. Later calls on this communicator, and on
        communicators that are made from it later, follow the new map. Communicators and persistent calls that exist
        keep their choices, and connections keep their number of streams. If the hosts are near each other, or if one of
        them fails or is late in measuring, the map stays as it is.

        Raises:
            UsageError: this is not the communicator of all ranks, or no TCP leads from host to host.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.
        """
        self._check_alone()
        from unisono.collectives.bootstrap.measuring import measured_again

        limit_s = self._options.rendezvous_timeout_s if timeout_s is None else self._limit_s(timeout_s)
        state = measured_again(self, self._executor, len(self.hosts), self._host_layout.link, limit_s)
        if state is not None:
            self._follow(state)
        return self.network

    def grow(self, count: int | None = None, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of these ranks and of processes that join the job; if none joins, this communicator.

        All ranks call it, on the communicator of all ranks. They keep their numbers, and the processes that join by
        `un.join`, or as restarted ranks by `un.init`, come behind them. The new communicator has links of its own. This
        one stays usable, and must still be closed. Without a process that waits, the call costs about two small
        collectives.

        Args:
            count: the number of processes to wait for; None admits those that wait now, and waits for no other.
            timeout_s: seconds to wait for `count` processes, once all ranks have called `grow`; by default the option
                `rendezvous_timeout_s`. Processes that wait then have 2 seconds to meet the ranks, or the rest of the
                time if that is longer.

        Raises:
            UsageError: the communicator is not of all ranks, or the job has no place where processes could wait.
            MismatchError: ranks pass different counts. The communicator stays usable.
            RendezvousError: fewer than `count` processes came in time, or the store of the job has failed. The
                communicator stays usable.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.
        """
        self._check_alone()
        number = None if count is None else checked_integer(count, "count", 1, _MOST_JOINERS)
        limit_s = self._options.rendezvous_timeout_s if timeout_s is None else self._limit_s(timeout_s)
        return self._grow(self, number, limit_s)

    def close(self) -> None:
        """Close this communicator and all communicators that were made from it.

        If another rank still needs this rank in a call, that call raises `PeerLostError`. On a subcommunicator over
        which the two ranks have exchanged nothing yet, it raises `CollectiveTimeoutError` instead. Calls in progress
        here end, and their callbacks are called before `close` returns, unless the callbacks take longer than 2
        seconds. `close` may be called several times and by several threads; each call returns when the communicator is
        closed. Any other call after that raises `UsageError`.

        The root of a broadcast ends its call before the other ranks begin theirs. If the last call was such a call,
        `close` waits up to 5 seconds until the other ranks have made it.

        Raises:
            MismatchError: the ranks disagree on their last call; everything is closed nevertheless.
        """
        with self._closing, ExitStack() as closing:  # a second thread that closes the communicator waits here
            if self._is_closed:
                return
            self._is_closed = True
            self._devices.stop()
            closing.callback(self._close)
            for child in reversed(self._children):
                closing.callback(child.close)
            for window in self._windows:
                closing.callback(window.close)
            if not reason_to_leave():
                self._executor.settle()

    def _close(self) -> None:
        try:
            if self._checker.trials is not None and self.world_ranks[self.rank] == 0:
                self._checker.trials.write(self._options.tune)
            if self._options.stats:
                self._report_statistics(self._options.stats)
            self._refuse("this communicator is closed: call unisono.init() for a new one")
            if self._programs is not None:
                self._programs.close()
            self._works.close()
            if self._checker.reducer_if_any is not None:
                self._checker.reducer_if_any.close()
            if self._checker.verifier is not None:
                self._checker.verifier.close()
            self._devices.close()
        finally:
            self._on_close()  # else threads and connections would stay

    def _report_statistics(self, directory: str) -> None:
        """Add the counters of this communicator alone to the file of this rank."""
        from unisono.collectives.calls.statistics import append_to

        rank, names = self.launch_ranks[self.rank], self.launch_ranks
        by_custom_ops = {} if self._checker.reducer_if_any is None else self._checker.reducer_if_any.traffic()
        by_peer = [(names[peer], each) for peer, each in self._executor.traffic().items()]
        by_peer += [(names[peer], each) for peer, each in by_custom_ops.items()]
        append_to(directory, rank, by_peer, self._executor.usage())

    def _host_calls(self) -> Communicator:
        self._devices_comm = self.dup()
        return self._devices_comm

    def _for_objects(self) -> Communicator:
        with _making:
            if self._objects_comm is None:
                executor = self._executor.authenticated()
                if executor is self._executor:
                    return self
                self._objects_comm = self._child(
                    executor, self._host_layout, self._options.adopting({"algorithm": "auto"})
                )
        return self._objects_comm

    def _for_window(self) -> tuple[Communicator, WindowExecutor]:
        executor = self._executor.for_windows()
        child = self._child(executor, self._host_layout, self._options.adopting({"algorithm": "auto"}))
        return child, executor

    def _abandon(self, why: str) -> None:
        """In a forked child, make every later call raise ``UsageError(why)``, and make `close` do nothing."""
        for child in self._children:
            child._abandon(why)
        for window in self._windows:
            window.abandon(why)
        self._closing, self._is_closed = threading.RLock(), True  # a thread of the parent may hold the old lock
        self._refuse(why)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._cache, self._messages = NO_CACHE, NO_MESSAGES


class _WithNeighbours(Neighbours, Communicator):
    """A communicator whose ranks have neighbours."""

    def plan(self, collective: str, x: Any = None, **options: Any) -> Callable[..., Any]:
        """Return a persistent call, as `Communicator.plan` does, also of a collective among neighbours.

        >>> import numpy as np, unisono as un
        >>> def around(world):
        ...     with world.grid([2], periodic=True) as ring:
        ...         x, out = np.full(2, ring.rank), np.zeros(2, int)
        ...         exchange = ring.plan("neighbor_alltoall", x, out=out)
        ...         return [exchange().tolist() for _ in range(2)]
        >>> un.launch(around, 2)
        [[[1, 1], [1, 1]], [[0, 0], [0, 0]]]
        """
        if collective in NEIGHBOUR_CALLS:
            return self._plan_among_neighbours(collective, x, **options)
        return super().plan(collective, x, **options)


@uncopyable("it belongs to this process; dup() makes another one of the same ranks")
class Grid(GridPlaces, _WithNeighbours):
    """A communicator of ranks in a Cartesian grid, which `Communicator.grid` makes.

    Its neighbours are, in each dimension, first the rank below and then the rank above.
    """

    def __init__(self, shape: GridShape, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._take_shape(shape)

    def __repr__(self) -> str:
        return f"<unisono.Grid {' × '.join(map(str, self.dims))}, rank {self.rank} of {self.size}>"

    def dup(self) -> Grid:
        return self._subgroup(range(self.size), partial(Grid, self._shape))

    def subgrid(self, keep: Sequence[int]) -> Grid:
        """Return the grid of the ranks that differ from this one at most in the dimensions `keep`. Nothing is sent.

        All ranks call it with the same dimensions, in ascending order. So they all get a grid, such as that of their
        row.

        Raises:
            UsageError: there is no such dimension, or they are not in ascending order.

        >>> import unisono as un
        >>> def rows(world):
        ...     return world.grid([2, 2]).subgrid(keep=[1]).world_ranks
        >>> un.launch(rows, 4)
        [(0, 1), (0, 1), (2, 3), (2, 3)]
        """
        kept = self._kept(keep)
        return self._subgroup(self._ranks_along(kept), partial(Grid, self._shape.along(kept)))


@uncopyable("it belongs to this process; dup() makes another one of the same ranks")
class Graph(_WithNeighbours):
    """A communicator of ranks with a graph of neighbours, which `Communicator.graph` makes.

    Attributes:
        weights: the weights of `sources` and of `destinations`; None without weights.
    """

    def __init__(self, neighbourhood: Neighbourhood, weights: Weights, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.weights = weights
        self._neighbourhood = neighbourhood
        self._meet(neighbourhood)

    def __repr__(self) -> str:
        return f"<unisono.Graph rank {self.rank} of {self.size}>"

    def dup(self) -> Graph:
        return self._subgroup(range(self.size), partial(Graph, self._neighbourhood, self.weights))
