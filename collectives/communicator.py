"""The Communicator: what a rank calls. The collectives are in `equal_shares` and `counted_shares`; the rest is here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS, VECTOR_CALLS, Cut
from unisono.collectives.api.mpi_names import MpiNames
from unisono.collectives.api.objects import Objects
from unisono.collectives.api.point_to_point import Messages
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import LISTS
from unisono.collectives.bootstrap.exit_reason import reason_to_leave
from unisono.collectives.calls.dispatch import CallArguments, checked_integer
from unisono.collectives.calls.groups import Groups
from unisono.collectives.calls.planning import HostLayout, algorithm_request
from unisono.collectives.calls.prepared import CheckedCall
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import Op, operation
from unisono.options import Options
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES, Executor, Operation
from unisono.tuning.decide.choice import NO_STATE, Explanation, TunerState, explain

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import ArrayOrBuffer
    from unisono.collectives.calls.statistics import Statistics
    from unisono.collectives.custom_ops.reducer import Reductions
    from unisono.collectives.device.work import CheckedDeviceCall

_INT64 = -(1 << 63), (1 << 63) - 1
# Held by a thread that makes the communicator over which objects travel: others may send or receive objects then.
_making = threading.Lock()


class Communicator(Groups, Objects, Messages, MpiNames):
    """Ranks of a job, as seen by one of them; a context manager.

    That of all ranks, the world, is made by `unisono.init` and `unisono.launch`, and others from it by `split`,
    `subgroup`, `dup`, `local` and `leaders`. Each has ranks, calls and links of its own.

    All its ranks must make the same calls on it in the same order. An error ends all communicators of the job on every
    rank: it is raised as what it is once, and as `AbortedError` by every later call. It names ranks by their number in
    the world.

    Attributes:
        rank, size: this rank, and the number of ranks.
        hosts: the ranks of each host, in the order of their lowest ranks.
        local_rank: this rank's place among those of its host.
        world_ranks: the number in the world of each rank.
    """

    def __init__(
        self,
        executor: Executor,
        place: HostLayout,
        options: Options,
        on_close: Callable[[], None] = lambda: None,
        known: TunerState = NO_STATE,
    ) -> None:
        super().__init__(executor, place, options, known)
        self.hosts = place.hosts
        self.world_ranks = executor.members
        self._place = place
        self._children: list[Communicator] = []
        self.local_rank = next(host.index(self.rank) for host in place.hosts if self.rank in host)
        self._on_close = on_close
        self._closing = threading.RLock()
        self._is_closed = False
        self._spare_of_devices: Communicator | None = None
        self._of_objects: Communicator | None = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<unisono.Communicator rank {self.rank} of {self.size}>"

    def plan(
        self,
        collective: str,
        x: ArrayOrBuffer | Sequence[ArrayOrBuffer] | None = None,
        *,
        op: str | Op | None = None,
        root: int | None = None,
        out: ArrayOrBuffer | Sequence[ArrayOrBuffer] | None = None,
        counts: Sequence[int] | None = None,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
        algorithm: str | None = None,
        reproducible: bool = False,
        accumulate: str | None = None,
        timeout_s: float | None = None,
    ) -> Callable[..., Any]:
        """Return a call that is checked and chosen once, to be made again and again on the same arrays.

        Calling what is returned is the same as calling the method of the name `collective` with these arguments: it
        reads what `x` holds then, overwrites `out`, or the new array that it made in the beginning, and returns it.
        Called with ``wait=False``, it returns a `Work`, and must not be called again until that has ended.
        Planning is no call: ranks may mix plans and methods, as long as they make the same calls in the same order. It
        keeps the arrays alive, and must not be called by two threads at a time.

        The arguments are those of the method, with its defaults; but an `x` that is read must be contiguous, in C order
        where its rows are shared out.

        Raises:
            UsageError: there is no such collective, or the call is wrong; so does calling it on a closed communicator.
            NoAlgorithmError: there is no algorithm of this name, or it cannot be used here.

        >>> import numpy as np, unisono as un
        >>> def accumulate(world):
        ...     x = np.ones(3)
        ...     double = world.plan("allreduce", x, out=x)
        ...     return [double().tolist() for _ in range(3)]
        >>> un.launch(accumulate, 2)[0]
        [[2.0, 2.0, 2.0], [4.0, 4.0, 4.0], [8.0, 8.0, 8.0]]
        """
        name = VECTOR_CALLS.get(collective, collective)
        if name not in CONTRACTS:
            raise UsageError(
                f"there is no collective {collective!r}: there are {', '.join((*CONTRACTS, *VECTOR_CALLS))}"
            )
        given = {"counts": counts, "send_counts": send_counts, "recv_counts": recv_counts}
        rows = _rows_of(collective, {kind: each for kind, each in given.items() if each is not None})
        contract = CONTRACTS[name]
        if contract.input_at_root or contract.output_at_root:
            root = 0 if root is None else root
        elif root is not None:
            raise UsageError(f"{collective} has no root")
        if contract.reduces:
            op = "sum" if op is None else op
        elif op is not None or reproducible or accumulate is not None:
            raise UsageError(f"{collective} has no op: it combines nothing, and rounds nothing")
        wanted = algorithm_request(algorithm, reproducible, accumulate)
        x = x if contract.input is not Cut.SHARES or contract.has_input(self.rank, root or 0) else None
        call = CallArguments(name, x, out, op, root, rows, wanted)
        limit_s = self._limit_s(timeout_s)
        if on_device(x, out):
            on_gpu = self._on_device(call)
            _check_lasting(on_gpu.checked, x)
            return partial(self._on_device_again, on_gpu, limit_s)
        if is_by_function(op):
            reductions = self._reductions(call)
            _check_lasting(reductions, x)
            return partial(self._reduce_again, reductions, reductions.finish(), limit_s)
        made = self._prepare(call)
        _check_lasting(made, x)
        stages = made.sources()
        on_start = partial(_work_of, self._works, limit_s)
        again = self._executor.persistent(made.call, stages, made.targets, limit_s, made.finish(), on_start)
        lifts = any(part.lifting is not None for part in made.parts)
        return again if not lifts else lambda wait=True: (made.sources(stages), again(wait))[1]

    def _on_device_again(self, call: CheckedDeviceCall, limit_s: float, wait: bool = True) -> Any:
        """Make a planned call on arrays of a device."""
        self._check_usable()
        work = self._devices.calls.start(call, limit_s, here=wait)
        return work.wait() if wait else work

    def _reduce_again(self, reductions: Reductions, result: Any, limit_s: float, wait: bool = True) -> Any:
        """Make a planned reduction by a function."""
        if not wait:
            return self._works.add(self._reducer.start(reductions, limit_s), result, limit_s, is_counted=False)
        self._reducer.run(reductions, limit_s)
        return result

    def split(
        self, color: int | None, key: int | None = None, *, timeout_s: float | None = None
    ) -> Communicator | None:
        """Return a communicator of the ranks that give the same `color`, by one allgather of all ranks.

        Args:
            color: any integer of 64 bits; None on a rank that is to be in none, which gets None.
            key: the place among them, an integer of 64 bits, of which the lowest comes first and equal ones come in the
                order of this communicator; by default, this rank.
            timeout_s: as in `barrier`.

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
        kind = 0 if color is None else checked_integer(color, "color", *_INT64)
        order = self.rank if key is None else checked_integer(key, "key", *_INT64)
        rows = self.allgather(np.array([[color is not None, kind, order]], np.int64), timeout_s=timeout_s).tolist()
        if color is None:
            return None
        like_me = [rank for rank, (is_in, its_kind, _) in enumerate(rows) if is_in and its_kind == kind]
        return self.subgroup(sorted(like_me, key=lambda rank: rows[rank][2]))

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of these ranks, which become its ranks 0, 1, … in this order. Nothing is sent.

        It is called by just those ranks, with the same `ranks` in the same order. Of communicators made of the same
        ranks, the first here is the first on every rank, and so on. It is closed by its own `close`, or with this one.

        Raises:
            UsageError: `ranks` are not different ranks of this communicator, or this rank is not among them.

        >>> import numpy as np, unisono as un
        >>> def reversed_sum(world):
        ...     if world.rank == 0:
        ...         return None
        ...     with world.subgroup([2, 1]) as pair:
        ...         return pair.rank, int(pair.allreduce(np.array(world.rank)))
        >>> un.launch(reversed_sum, 3)
        [None, (1, 3), (0, 3)]
        """
        self._check_usable()
        members = [self._rank_of(rank, "each of ranks") for rank in ranks]
        if len(set(members)) != len(members):
            raise UsageError(f"ranks are not all different: {members}")
        if self.rank not in members:
            raise UsageError(f"this rank, {self.rank}, is not among the ranks {members}: only those call subgroup")
        return self._made(self._executor.subgroup(members), self._place.of(members), self._options)

    def _made(self, executor: Executor, place: HostLayout, options: Options) -> Communicator:
        """Return the communicator of an executor, which is closed with this one."""
        child = Communicator(executor, place, options, lambda: self._children.remove(child), self.known)
        self._children.append(child)
        return child

    def dup(self) -> Communicator:
        """Return another communicator of the same ranks, whose calls have nothing to do with those of this one.

        All ranks call it; nothing is sent.
        """
        return self.subgroup(range(self.size))

    def local(self) -> Communicator:
        """Return a communicator of the ranks of this host, in their order. All of them call it; nothing is sent."""
        return self.subgroup(next(host for host in self.hosts if self.rank in host))

    def leaders(self) -> Communicator | None:
        """Return a communicator of the first rank of each host, on those, and None on the others.

        The ranks are in the order of `hosts`. All of the leaders call it, and others may; nothing is sent.
        """
        return self.subgroup([host[0] for host in self.hosts]) if self.local_rank == 0 else None

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: str = "float32",
        op: str | Op = "sum",
        *,
        reproducible: bool = False,
        accumulate: str | None = None,
    ) -> Explanation:
        """Return which algorithm a call would use, and why, and by which transport each rank is reached; print it.

        Nothing is communicated. Calls with counts, such as ``"allgatherv"``, are explained by the bytes of all shares.

        Raises:
            UsageError: `nbytes`, `dtype` or `accumulate` cannot be, or `op` is a function.
            NoAlgorithmError: no algorithm carries out such a call.
        """
        nbytes = checked_integer(nbytes, "nbytes", 0, _INT64[1])
        if dtype not in DTYPES:
            raise UsageError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
        if is_by_function(op):
            raise UsageError("a reduction by a function has no algorithm: it is an allgather or an alltoall at first")
        wanted = algorithm_request(None, reproducible, accumulate)
        reduced = [(DTYPES[dtype], operation(op))]
        name, varying = VECTOR_CALLS.get(collective, collective), collective in VECTOR_CALLS
        found = explain(self._calls.question(name, nbytes, reduced, wanted, varying=varying), self.known)
        return replace(found, links=self._executor.links(), on_device=self._devices.route(name))

    def stats(self) -> Statistics:
        """Return what has been sent to and received from each peer so far, and by which transport; and the calls.

        Objects are counted with the arrays of their peer, though over UCX and MPI they take shared memory or TCP.

        It is a dict, by peer, whose attribute `calls` counts the collective calls by algorithm and size, with bytes and
        time. Its attribute `on_device` is about calls on arrays of a GPU: what has gone by CUDA IPC, by peer, and how
        many bytes have been copied to the host and from there, where they went on as calls of the host, or as messages.

        >>> import numpy as np, unisono as un
        >>> def called(world):
        ...     for _ in range(3):
        ...         world.broadcast(np.zeros(8), algorithm="binomial")
        ...     return [each[:5] for each in world.stats().calls]
        >>> un.launch(called, 2)[0]
        [('broadcast', 'binomial', 64, 3, 192)]
        """
        totals = dict(self._executor.traffic())
        host_traffic = {} if self._spare_of_devices is None else self._spare_of_devices.stats()
        of_functions = {} if self._reducer_if_any is None else self._reducer_if_any.traffic()
        of_objects = {} if self._of_objects is None else self._of_objects.stats()
        for peer, traffic in (*of_functions.items(), *host_traffic.items(), *of_objects.items()):
            totals[peer] = totals[peer] + traffic if peer in totals else traffic
        from unisono.collectives.calls.statistics import Statistics

        return Statistics(totals, self._executor.usage(), self._devices.statistics())

    def abort(self, reason: str) -> None:
        """Make every call in progress, and every later one, raise `AbortedError` with `reason`, on all ranks."""
        self._executor.abort(reason)

    def shrink(self, *, timeout_s: float | None = None) -> Communicator:
        """Return a communicator of the ranks that are left after a failure, in their order, numbered anew from 0.

        All ranks that live and have not closed this communicator call it, once a call has failed; what calls they were
        in before does not matter. Ranks that have died, rank 0 too, or that die meanwhile, are not waited for. The new
        communicator has links of its own and outlives this one, which stays as it is: to be closed.

        Args:
            timeout_s: seconds to wait for ranks that live; by default the option `rendezvous_timeout_s`.

        Raises:
            UsageError: nothing has failed, or the communicator is closed.
            RendezvousError: a rank lives and did not call it in time; or the others have gone on without this one,
                because it did not answer (a process that is stopped, or cut off).
        """
        from unisono.collectives.bootstrap.shrink import shrink

        self._check_usable()
        limit_s = self._options.rendezvous_timeout_s if timeout_s is None else self._limit_s(timeout_s)
        return shrink(self._executor, self._options, limit_s)

    def close(self) -> None:
        """Leave the communicator, and those that were made of it; calls of other ranks that still need this one fail.

        They raise `PeerLostError`; or `CollectiveTimeoutError` on a communicator that was made of another one, where
        the two ranks had not exchanged anything before. Calls that go on are ended, and their callbacks have been
        called when it returns, unless they take seconds. It may be called more than once, and by several threads: each
        returns when the communicator is closed. Any other call after it raises `UsageError`.

        The root of a broadcast ends the call before the others begin it. So if such a call was the last one, `close`
        waits up to 5 seconds until the others have made it.

        Raises:
            MismatchError: the ranks disagree on their last call; all is closed.
        """
        with self._closing, ExitStack() as closing:  # Another thread that closes it waits here.
            if self._is_closed:
                return
            self._is_closed = True
            self._devices.stop()
            closing.callback(self._close)
            for child in reversed(self._children):
                closing.callback(child.close)
            if not reason_to_leave():
                self._executor.settle()

    def _close(self) -> None:
        self._refuse("this communicator is closed: call unisono.init() for a new one")
        self._works.close()
        if self._reducer_if_any is not None:
            self._reducer_if_any.close()
        self._devices.close()
        self._on_close()

    def _spare(self) -> Communicator:
        """See `Dispatcher._spare`."""
        self._spare_of_devices = self.dup()
        return self._spare_of_devices

    def _for_objects(self) -> Communicator:
        """See `Objects._for_objects`."""
        with _making:
            if self._of_objects is None:
                executor = self._executor.authenticated()
                if executor is self._executor:
                    return self
                self._of_objects = self._made(executor, self._place, self._options.adopting({"algorithm": "auto"}))
        return self._of_objects

    def _abandon(self, why: str) -> None:
        """In a forked child: make every later call raise `UsageError(why)`, and `close` do nothing."""
        for child in self._children:
            child._abandon(why)
        self._closing, self._is_closed = threading.RLock(), True  # A thread of the parent may hold the old lock.
        self._refuse(why)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._cache, self._messages = NO_CACHE, NO_MESSAGES


def _work_of(works: Works, limit_s: float, operation: Operation, result: Any) -> Work[Any]:
    return works.add(operation, result, limit_s)


def _check_lasting(call: CheckedCall, x: Any) -> None:
    """Check that a call can be made again and again on the memory of its arrays.

    Raises:
        UsageError: it reads a copy of one, or what one has held until now, or makes another one of its result.
    """
    if any(part.is_packed for part in call.parts):
        raise UsageError("x is not contiguous, and a plan would keep a copy of it: pass a contiguous array")
    if any(part.convert is not None for part in call.parts):
        what = f"which a {type(x).__name__} cannot bear"
        raise UsageError(f"a plan overwrites its result, {what}: pass an array that can be written as out")
    for each in x if type(x) in LISTS else (x,):
        if each is not None and not adapters.adapter_of(each, "x").lasts:
            what = f"what is assigned to a {type(each).__name__}"
            raise UsageError(f"a plan would not see {what}: pass an array of numpy that it is copied to")


def _rows_of(collective: str, given: Mapping[str, Sequence[int]]) -> tuple[Sequence[int], ...] | None:
    """Return the counts of a planned collective, which must be those that it has."""
    wanted: tuple[str, ...] = ()
    if collective in VECTOR_CALLS:
        wanted = ("send_counts", "recv_counts") if collective == "alltoallv" else ("counts",)
    if set(given) != set(wanted):
        raise UsageError(
            f"{collective} takes {' and '.join(wanted) or 'no counts'}; got {' and '.join(given) or 'none'}"
        )
    return tuple(given[name] for name in wanted) or None
