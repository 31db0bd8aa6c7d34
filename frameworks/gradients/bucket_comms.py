"""Bucket communicators: the communicators that carry the buckets of a `GradientReducer`.

A bucket communicator reduces one bucket after the other. A slow reduction, as over a link with a long delay, holds up
the buckets behind it. With several bucket communicators the reductions of buckets overlap, because each has an order of
its own.

A thread of the native core moves the bytes of each communicator. It sleeps until something has arrived, and can be
bound to a core. Compression runs in the thread that passes a gradient to the reducer or waits for one, because it takes
less time than moving the bytes that it saves.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from unisono import AbortedError, Communicator, UnisonoError, UsageError, wait_all
from unisono.frameworks.arrays import Array
from unisono.frameworks.gradients.compression import COMPRESSIONS
from unisono.frameworks.gradients.two_stage_reduction import ReductionQueue
from unisono.frameworks.pending import Pending

# How long `cause_of` waits for the error of each reduction.
_ERROR_WAIT_S = 1.0


class Teams(NamedTuple):
    """How many bucket communicators a reducer has, and on which cores their threads run.

    Attributes:
        lanes: the number of bucket communicators, the same on every rank; None for the default.
        cores: the cores that the threads are bound to: thread k gets core k modulo their number. If it is empty, no
            thread is bound.
    """

    lanes: int | None = None
    cores: tuple[int, ...] = ()


def resolved_teams(teams: Teams | int | None, hosts: int, lag: int, compression: str | None) -> Teams:
    """Return the `Teams` for the argument `teams` of a reducer, with the number of bucket communicators filled in.

    By default each training step in flight has a bucket communicator, so that no training step waits for the delays of
    another. One more is added if there are several hosts or compression. A bucket then waits for the network or for a
    thread that compresses, and another bucket can use that time.

    Raises:
        UsageError: an argument has a value that it cannot have.
    """
    if compression is not None and compression not in COMPRESSIONS:
        raise UsageError(f"compression must be one of {', '.join(COMPRESSIONS)}, or None, not {compression!r}")
    requested = teams if isinstance(teams, Teams) else Teams(teams)
    count = 1 + lag + (hosts > 1 or compression is not None) if requested.lanes is None else requested.lanes
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"teams must be a positive number of bucket communicators, or Teams, not {teams!r}")
    allowed_cores = os.sched_getaffinity(0)
    if not allowed_cores.issuperset(requested.cores):
        raise UsageError(f"teams names the cores {requested.cores}, and this process may use {sorted(allowed_cores)}")
    return Teams(count, tuple(requested.cores))


class _BucketComm(NamedTuple):
    """One bucket communicator: a communicator for each collective of a reduction, and the queue between the two."""

    communicators: Sequence[Communicator]
    queue: ReductionQueue

    def bind(self, core: int) -> None:
        """Bind the threads of the communicators to a core.

        A thread starts at the first call of its communicator, and inherits the cores of the calling thread. So this
        method binds the calling thread for a moment, and calls a barrier.
        """
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            wait_all([communicator.barrier(wait=False) for communicator in self.communicators])
        finally:
            os.sched_setaffinity(0, allowed)


class BucketComms:
    """The bucket communicators of a reducer: duplicates of `world`, which this object opens and closes.

    Args:
        world: the ranks.
        teams: how many bucket communicators to open, and the cores of their threads.
        op: "avg" or "sum".
        compression: a key of `COMPRESSIONS`, or None.
        timeout_s: the time limit of each reduction; None for that of `world`.
    """

    def __init__(
        self, world: Communicator, teams: Teams, op: str, compression: str | None, timeout_s: float | None
    ) -> None:
        self._op, self._compression, self._timeout_s = op, compression, timeout_s
        self._world, self._count = world, teams.lanes or 1
        self._cores = teams.cores
        self._comms: list[_BucketComm] = []

    def open(self) -> None:
        """Open the bucket communicators that are not open yet. All ranks call it, after agreeing on their number."""
        collectives = 2 if self._compression == "int8" else 1
        while len(self._comms) < self._count:
            comm = _BucketComm([self._world.dup() for _ in range(collectives)], ReductionQueue())
            if self._cores:
                comm.bind(self._cores[len(self._comms) % len(self._cores)])
            self._comms.append(comm)

    def compresses(self, dtype: str) -> bool:
        """Return whether buckets of this dtype are compressed: only if compression makes an element smaller."""
        return self._compression is not None and np.dtype(self._compression).itemsize < np.dtype(dtype).itemsize

    def reduction(self, step: int, place: int, memory: Array, residual: Array | None) -> Callable[[], Pending]:
        """Return a function that starts the reduction of `memory` in place.

        The function can be called once in every training step that uses this memory.

        Args:
            step: the number of the `StepMemory` that `memory` belongs to. Bucket communicator `step + place`, modulo
                their number, carries the bucket, so training steps in flight begin with different ones.
            place: the place of the bucket in the order in which the buckets of a training step are started.
            memory: the elements of the bucket.
            residual: the residual of the bucket, float32; None if the bucket is not compressed.
        """
        communicators, queue = self._comms[(step + place) % len(self._comms)]
        if residual is None:
            plan = communicators[0].plan("allreduce", memory, op=self._op, out=memory, timeout_s=self._timeout_s)
            return partial(plan, wait=False)
        compression = COMPRESSIONS[self._compression or ""]
        return partial(queue.start, compression(communicators, memory, residual, self._op, self._timeout_s))

    def nbytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far over all bucket communicators."""
        return sum(
            traffic.sent_nbytes for communicator in self._communicators() for traffic in communicator.stats().values()
        )

    def algorithm(self, nbytes: int, dtype: str) -> str:
        """Return the name of the algorithm that reduces a bucket of this size."""
        if not self.compresses(dtype):
            return self._comms[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.algorithm
        return "int8 alltoall, allgather" if self._compression == "int8" else f"{self._compression} allreduce"

    def predicted_s(self, nbytes: int, dtype: str) -> float:
        """Return the seconds that the tuner predicts for an uncompressed bucket of this size; 0 if it predicts none."""
        return self._comms[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.predicted_s or 0.0

    def close(self) -> None:
        """Close all communicators. Reductions in flight end with an error."""
        for communicator in self._communicators():
            communicator.close()

    def _communicators(self) -> Iterator[Communicator]:
        return itertools.chain.from_iterable(comm.communicators for comm in self._comms)


def cause_of(error: UnisonoError, works: Sequence[Pending]) -> UnisonoError:
    """Return the error that made a communicator fail, or `error` itself if no work in `works` has a better one.

    When a communicator fails, only one of its calls raises the cause, and all others raise `AbortedError`.
    """
    if isinstance(error, AbortedError):
        for work in works:
            try:
                work.wait(_ERROR_WAIT_S)
            except (AbortedError, TimeoutError):
                continue
            except UnisonoError as first:
                return first
    return error
