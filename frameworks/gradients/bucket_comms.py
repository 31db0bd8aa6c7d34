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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono import AbortedError, Communicator, UnisonoError, UsageError, wait_all
from unisono.collectives.device.workspace import Workspace
from unisono.frameworks.arrays import FlatArray
from unisono.frameworks.gradients.compression import compression_of
from unisono.frameworks.gradients.layout import Piece
from unisono.frameworks.gradients.on_device import (
    DeviceBucketComm,
    GradientMemory,
    is_compressible_on_device,
    reduction_on,
)
from unisono.frameworks.gradients.stages import Flat
from unisono.frameworks.gradients.two_stage_reduction import ReductionQueue
from unisono.frameworks.pending import Pending
from unisono.frameworks.sparse_sums import SparseSums

# How long `cause_of` waits for the error of each reduction.
_ERROR_WAIT_S = 1.0


class Teams(NamedTuple):
    """How many bucket communicators a reducer has, and on which cores their threads run.

    Attributes:
        bucket_comms: the number of bucket communicators, the same on every rank; None for the default.
        cores: the cores that the threads are bound to: thread k gets core k modulo their number. If it is empty, no
            thread is bound.
    """

    bucket_comms: int | None = None
    cores: tuple[int, ...] = ()


def resolved_teams(teams: Teams | int | None, hosts: int, lag: int, compression: str | None) -> Teams:
    """Return the `Teams` for the argument `teams` of a reducer, with the number of bucket communicators filled in.

    By default each training step in flight has a bucket communicator, so that no training step waits for the delays of
    another. One more is added if there are several hosts or compression. A bucket then waits for the network or for a
    thread that compresses, and another bucket can use that time.

    Raises:
        UsageError: an argument has a value that it cannot have.
    """
    if compression is not None:
        compression_of(compression)
    requested = teams if isinstance(teams, Teams) else Teams(teams)
    count = requested.bucket_comms
    if count is None:
        count = 1 + lag + (hosts > 1 or compression is not None)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(f"teams must be a positive number of bucket communicators, or Teams, not {teams!r}")
    allowed_cores = os.sched_getaffinity(0)
    if not allowed_cores.issuperset(requested.cores):
        raise UsageError(f"teams names the cores {requested.cores}, and this process may use {sorted(allowed_cores)}")
    return Teams(count, tuple(requested.cores))


class _BucketComm(NamedTuple):
    """One bucket communicator: a communicator for each collective of a reduction, the queue between the two, and sums.

    For buckets on a device it is one communicator, with a stream and a thread in `on_device`.
    """

    communicators: Sequence[Communicator]
    queue: ReductionQueue
    sparse_sums: SparseSums
    on_device: DeviceBucketComm | None = None

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
        compression: the argument of a reducer.
        timeout_s: the time limit of each reduction; None for that of `world`.
    """

    def __init__(
        self, world: Communicator, teams: Teams, op: str, compression: str | None, timeout_s: float | None
    ) -> None:
        self._op, self._compression, self._timeout_s = op, compression, timeout_s
        self._form = None if compression is None else compression_of(compression)
        self._world, self._count = world, teams.bucket_comms or 1
        self._cores = teams.cores
        self._comms: list[_BucketComm] = []

    def open(self, workspace: Workspace | None = None) -> None:
        """Open the bucket communicators that are not open yet. All ranks call it, after agreeing on their number.

        With a workspace, they are for buckets on its device.
        """
        collectives = len(self._form.calls) if self._form is not None and workspace is None else 1
        while len(self._comms) < self._count:
            communicators = [self._world.dup() for _ in range(collectives)]
            on_device = None if workspace is None else DeviceBucketComm(communicators[0], workspace)
            sums = SparseSums(communicators[0], is_own=True)
            comm = _BucketComm(communicators, ReductionQueue(), sums, on_device)
            if self._cores:
                comm.bind(self._cores[len(self._comms) % len(self._cores)])
            self._comms.append(comm)

    def compresses(self, dtype: str) -> bool:
        """Return whether buckets of this dtype are compressed: only if compression makes an element smaller."""
        return self._form is not None and self._form.itemsize < np.dtype(dtype).itemsize

    @property
    def kinds_of_state(self) -> tuple[str, ...]:
        """The kinds of state that compression keeps for each element."""
        return self._form.state if self._form is not None else ()

    def reduction(
        self, step: int, place: int, memory: Any, state: Mapping[str, Any] | None, pieces: Sequence[Piece] = ()
    ) -> Callable[[], Pending]:
        """Return a function that starts the reduction of `memory` in place.

        The function can be called once in every training step that uses this memory.

        Args:
            step: the number of the `StepMemory` that `memory` belongs to. Bucket communicator `step + place`, modulo
                their number, carries the bucket, so training steps in flight begin with different ones.
            place: the place of the bucket in the order in which the buckets of a training step are started.
            memory: the elements of the bucket.
            state: by kind, the state of the bucket, float32; None if the bucket is not compressed.
            pieces: the gradients in the bucket.
        """
        communicators, queue, sparse_sums, on_device = self._comms[(step + place) % len(self._comms)]
        if on_device is not None:
            residual = None if state is None else state["residuals"]
            return reduction_on(on_device, memory, residual, self._compression, self._op, self._timeout_s)
        if state is None or self._form is None:
            plan = communicators[0].plan("allreduce", memory, op=self._op, out=memory, timeout_s=self._timeout_s)
            return partial(plan, wait=False)
        flat = Flat(communicators, sparse_sums, memory, state, pieces, self._op, self._timeout_s)
        return partial(queue.start, self._form.stages(flat))

    def nbytes_sent(self) -> int:
        """Return the bytes that this rank has sent so far over all bucket communicators."""
        return sum(
            traffic.sent_nbytes for communicator in self._communicators() for traffic in communicator.stats().values()
        )

    def algorithm(self, nbytes: int, dtype: str) -> str:
        """Return the name of the algorithm that reduces a bucket of this size."""
        if self._form is None or not self.compresses(dtype):
            return self._comms[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.algorithm
        return f"{self._compression} {self._form.described(self._world.size)}"

    def predicted_s(self, nbytes: int, dtype: str) -> float:
        """Return the seconds that the tuner predicts for an uncompressed bucket of this size; 0 if it predicts none."""
        return self._comms[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.predicted_s or 0.0

    def close(self) -> None:
        """Close all communicators. Reductions in flight end with an error."""
        for communicator in self._communicators():
            communicator.close()
        for comm in self._comms:
            if comm.on_device is not None:
                comm.on_device.close()
        self._comms = []

    def _communicators(self) -> Iterator[Communicator]:
        return itertools.chain.from_iterable(comm.communicators for comm in self._comms)


class DeviceAverages:
    """Averages of whole buckets in place on a GPU, compressed. Of ranks that pass the same buckets in the same order.

    Args:
        world: the ranks.
        compression: one that GPUs compress to.
    """

    def __init__(self, world: Communicator, compression: str) -> None:
        self._where = GradientMemory()
        self._comms = BucketComms(world, Teams(1), "avg", compression, None)
        self._started: dict[int, tuple[tuple[int, int], Any, Callable[[], Pending]]] = {}

    def start(self, array: Any, index: int) -> tuple[Pending, Callable[[], None]] | None:
        """Start the average of a bucket, behind the current stream of its library.

        Returns:
            The reduction, and a function that lets the current stream wait for its result when it has been issued;
            None if the array is not on a GPU, or cannot be compressed there.
        """
        lent = self._where.taken(array, f"bucket {index}")
        if lent is None or not is_compressible_on_device(lent.flat.dtype.name):
            return None
        return self._start(lent, index), partial(self._deliver, lent)

    def _start(self, lent: FlatArray, index: int) -> Pending:
        place = lent.flat.ctypes.data, lent.flat.size
        workspace = self._where.workspace
        assert workspace is not None, "a gradient on a device opens it"
        self._comms.open(workspace)
        before = self._started.get(index)
        if before is None or before[0] != place:  # torch may allocate a bucket anew
            has_residual = before is not None and before[0][1] == place[1]
            residual = before[1] if before and has_residual else workspace.zeros(place[1], np.float32)
            memory = workspace.at(*place, lent.flat.dtype, lent.array)
            self._started[index] = place, residual, self._comms.reduction(0, 0, memory, {"residuals": residual})
        return self._started[index][2]()

    def _deliver(self, lent: FlatArray) -> None:
        assert self._where.workspace is not None, "a reduction has been started there"
        assert lent.streams is not None, "it has been started there"
        for stream in lent.streams():
            self._where.workspace.order(stream, self._where.workspace.stream)


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
