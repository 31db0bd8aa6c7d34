"""Lanes: what carries buckets. Each is a communicator of its own, and so an order of its own, which does not wait.

On one lane buckets are reduced one after the other; what takes long in one, as on a link with a long delay, holds up
those behind it. Several lanes let them overlap. What moves the bytes of a lane is a thread of the native core, which
wakes when something has arrived, and is bound to a core where that is wanted. Compressing is done by the thread that
gives a gradient or waits for it, for it takes less than moving the bytes that it saves.
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
from unisono.frameworks.gradients.two_stage_reduction import Chains, Pending

# How long a reduction that has failed may take to say so.
_PATIENCE_S = 1.0


class Teams(NamedTuple):
    """How gradients are carried.

    Attributes:
        lanes: how many communicators share the buckets, the same on every rank; None for the default.
        cores: which cores the threads that carry gradients are bound to, in turns; none if they are not bound.
    """

    lanes: int | None = None
    cores: tuple[int, ...] = ()


def lanes_for(teams: Teams | int | None, hosts: int, lag: int, compression: str | None) -> Teams:
    """Return how gradients are carried if a user wants it so.

    By default there is a lane for each step in flight, so that none waits for another one's delays. There is one more
    where buckets wait for something within a step that another could use: for the network, or for being compressed.

    Raises:
        UsageError: that cannot be.
    """
    if compression is not None and compression not in COMPRESSIONS:
        raise UsageError(f"compression must be one of {', '.join(COMPRESSIONS)}, or None, not {compression!r}")
    wanted = teams if isinstance(teams, Teams) else Teams(teams)
    lanes = 1 + lag + (hosts > 1 or compression is not None) if wanted.lanes is None else wanted.lanes
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise UsageError(f"teams must be a positive number of lanes, or Teams, not {teams!r}")
    there = os.sched_getaffinity(0)
    if not there.issuperset(wanted.cores):
        raise UsageError(f"teams names the cores {wanted.cores}, and this process may use {sorted(there)}")
    return Teams(lanes, tuple(wanted.cores))


class _Lane(NamedTuple):
    """A communicator for each collective of a reduction, and those that are of several."""

    communicators: Sequence[Communicator]
    chains: Chains

    def bind(self, core: int) -> None:
        """Bind the threads that carry what goes over it to a core: they begin with a call, as this thread may run."""
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {core})
        try:
            wait_all([communicator.barrier(wait=False) for communicator in self.communicators])
        finally:
            os.sched_setaffinity(0, allowed)


class Lanes:
    """The lanes of a reducer: duplicates of `world`, which this makes and closes.

    Args:
        world: the ranks.
        teams: how many, and the cores of their threads.
        op: "avg" or "sum".
        compression: a key of `COMPRESSIONS`, or None.
        timeout_s: of each reduction; None for that of `world`.
    """

    def __init__(
        self, world: Communicator, teams: Teams, op: str, compression: str | None, timeout_s: float | None
    ) -> None:
        self._op, self._compression, self._timeout_s = op, compression, timeout_s
        self._world, self._count = world, teams.lanes or 1
        self._cores = teams.cores
        self._lanes: list[_Lane] = []

    def open(self) -> None:
        """Make the lanes, if they are not there; to be called when all ranks are known to want as many."""
        collectives = 2 if self._compression == "int8" else 1
        while len(self._lanes) < self._count:
            lane = _Lane([self._world.dup() for _ in range(collectives)], Chains())
            if self._cores:
                lane.bind(self._cores[len(self._lanes) % len(self._cores)])
            self._lanes.append(lane)

    def compresses(self, dtype: str) -> bool:
        """Return whether what is of this dtype is compressed: where that makes it smaller."""
        return self._compression is not None and np.dtype(self._compression).itemsize < np.dtype(dtype).itemsize

    def reduction(self, step: int, turn: int, memory: Array, residual: Array | None) -> Callable[[], Pending]:
        """Return what starts to reduce `memory` in place, again and again.

        Args:
            step: number of the memory of a step. Steps in flight take lanes in turns.
            turn: of the bucket in the step.
            memory: of the bucket.
            residual: of the bucket, float32; None where it is not compressed.
        """
        communicators, chains = self._lanes[(step + turn) % len(self._lanes)]
        if residual is None:
            plan = communicators[0].plan("allreduce", memory, op=self._op, out=memory, timeout_s=self._timeout_s)
            return partial(plan, wait=False)
        compression = COMPRESSIONS[self._compression or ""]
        return partial(chains.start, compression(communicators, memory, residual, self._op, self._timeout_s))

    def nbytes_sent(self) -> int:
        """Return the bytes that this rank has sent over all lanes so far."""
        return sum(traffic.sent_nbytes for each in self._communicators() for traffic in each.stats().values())

    def algorithm(self, nbytes: int, dtype: str) -> str:
        """Return what reduces a bucket of this size."""
        if not self.compresses(dtype):
            return self._lanes[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.algorithm
        return "int8 alltoall, allgather" if self._compression == "int8" else f"{self._compression} allreduce"

    def predicted_s(self, nbytes: int, dtype: str) -> float:
        """Return how long the tuner expects a bucket to take, uncompressed; 0 where it cannot tell."""
        return self._lanes[0].communicators[0].explain("allreduce", nbytes, dtype, self._op).choice.predicted_s or 0.0

    def close(self) -> None:
        """Leave all lanes; reductions that go on end with an error."""
        for communicator in self._communicators():
            communicator.close()

    def _communicators(self) -> Iterator[Communicator]:
        return itertools.chain.from_iterable(lane.communicators for lane in self._lanes)


def cause(error: UnisonoError, works: Sequence[Pending]) -> UnisonoError:
    """Return the error that one of the works has failed with, if `error` only tells that something has.

    Of all that fail with a communicator, one call gets the cause, whichever asks first.
    """
    if isinstance(error, AbortedError):
        for work in works:
            try:
                work.wait(_PATIENCE_S)
            except (AbortedError, TimeoutError):
                continue
            except UnisonoError as first:
                return first
    return error
