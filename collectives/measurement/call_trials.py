"""Measures how long collective calls take on a communicator, for campaigns (`tuning.measure.campaign`).

Theory of operation
-------------------
All ranks make the same trials at the same time. For each call, every rank waits in a barrier and then begins. The time
of the call on one host is from the moment when the first rank of the host begins to the moment when its last rank ends.
The time of the call is that of the slowest host. The ranks exchange the times after each run, so all ranks have the
same times, to the bit.

Why not the time of each rank alone: ranks that share cores leave the barrier one after the other. A rank that is still
in the barrier delays the call of all others. The order in which ranks leave may stay the same for thousands of calls
and be another one in the next job: it made a short call take 5 us or 9 us. Clocks of several hosts cannot be compared,
so each host is measured alone. The barrier always uses the same algorithm, whatever the tuner would choose.

Before each call, its input is written anew, as a program does that has just computed it. With data that has stayed in
the caches since the last call, other algorithms would be the fastest.

The address of an array decides how well the caches hold it, as long as it lives, and changes the time of a call by up
to a third. So all algorithms use the same arrays. There are several sets of them, and each run takes the next set.
Where the collective allows it, calls are in place.

Calls before a measurement
--------------------------
After calls of another size, the first calls find nothing in the caches. With messages of 4 KiB through shared memory,
it takes up to 400 calls until the messages have been everywhere in their ring. Such calls are made and not measured.

The first timed calls are discarded too: after vectors of 4 MiB, the algorithm that came first took 0.36 us with 16
bytes, and later 0.30 us, no matter how many calls without timing went before.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.communicator import Communicator
from unisono.dtypes import DTYPES
from unisono.errors import NoAlgorithmError, TransportUnavailableError, UsageError
from unisono.transports.host.core_distance import UNKNOWN, measure
from unisono.transports.reductions.definition import numpy_dtype
from unisono.tuning.decide.choice import Question, TunerState
from unisono.tuning.measure.campaign import PlacementWait

# Calls of one run. Many runs of few calls are better than the reverse, because a disturbance affects a whole run.
_FEWEST, _MOST = 3, 64
# Limits of the calls before a measurement: bytes of vectors in all, and a fraction of the time of a run.
_WARMING_NBYTES, _WARMING = 4 << 20, 0.25
# How many barriers follow a measurement of the cores, so that each rank that shares a core gets its time there again.
_SETTLING = 20
# How long to wait before the cores are measured again.
_PAUSE_S = 0.05
# The algorithms for the exchange of times and for the barrier. They do not depend on the calls that are measured.
_EXCHANGE = "recursive_doubling"
_MEETING = "direct"


# How many sets of arrays take turns.
_SETS = 3


class PlannedCall(NamedTuple):
    """A call to be measured: its plan, and a function that writes its input anew (a barrier has none)."""

    plan: Callable[[], Any]
    rewrite: Callable[[], Any] = lambda: None


# An endless iterator over one call on each set of arrays. All ranks advance it together.
CallCycle = Iterator[PlannedCall]


def rewriting(sent: Any) -> Callable[[], Any]:
    """Return a function that writes the elements of `sent` anew, from a copy."""
    return partial(np.copyto, sent, sent.copy())


class CallTrials:
    """Runs of calls on a communicator. Implements `tuning.measure.campaign.Trials`.

    Args:
        comm: the communicator; nothing else may use it meanwhile.
        dtype: the dtype of the elements.
        run_s: the approximate time of all calls of one run together.
        tuner_state: the state that predictions use; by default that of the communicator.
    """

    def __init__(
        self, comm: Communicator, dtype: str = "float32", run_s: float = 0.002, tuner_state: TunerState | None = None
    ) -> None:
        self._comm = comm
        self._tuner_state = tuner_state or comm.tuner_state
        self._dtype = numpy_dtype(DTYPES[dtype])
        self._run_s = run_s
        self._calls: dict[tuple[str, int, str], CallCycle] = {}
        self._estimates: dict[tuple[str, int, str], float] = {}
        self._warm: set[tuple[str, int, str]] = set()
        self._arrays: list[tuple[Any, Any, Callable[[], Any]]] = []
        self._arrays_key: tuple[str, int] | None = None
        self._seen = time.perf_counter()

    @property
    def known(self) -> TunerState:
        """The tuner state that predictions use."""
        return self._tuner_state

    def question(self, collective: str, nbytes: int) -> Question:
        """Return the question to the tuner about a collective at a size."""
        return replace(self._comm.explain(collective, nbytes, self._dtype.name).question, algorithm="auto")

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the smallest size, at least `nbytes`, at which all ranks have equal shares of whole elements."""
        if CONTRACTS[collective].input is Cut.TOKEN:
            return 1
        unit = self._dtype.itemsize * (self._comm.size if self._is_shared(collective) else 1)
        return max(1, -(-nbytes // unit)) * unit

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Prepare calls to be run. Return None, or the reason why they cannot be made; it is the same on all ranks."""
        key = collective, nbytes, variant
        if key not in self._calls:
            if len(self._calls) and next(iter(self._calls))[:2] != key[:2]:
                self._calls.clear()
                self._warm.clear()
            try:
                self._calls[key] = self.planned(*key)
            except (NoAlgorithmError, UsageError, TransportUnavailableError) as error:
                return error.message
        return None

    def planned(self, collective: str, nbytes: int, variant: str) -> CallCycle:
        """Return the persistent calls of a variant, one for each set of arrays.

        The arrays of the last use of this method are used again if collective and size are the same.

        Raises:
            NoAlgorithmError, UsageError, TransportUnavailableError: these ranks cannot make the call.
        """
        if self._arrays_key != (collective, nbytes):
            self._arrays_key, self._arrays = (collective, nbytes), self._new_arrays(collective, nbytes)
        if not self._arrays:
            return cycle([PlannedCall(self._comm.plan(collective, algorithm=variant))])
        plan = partial(self._comm.plan, collective, algorithm=variant)
        return cycle([PlannedCall(plan(sent, out=out), rewrite) for sent, out, rewrite in self._arrays])

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Run prepared calls; return the seconds of each, and the seconds since the end of the last run."""
        key = collective, nbytes, variant
        if key not in self._warm:
            self._warm.add(key)
            self._make_warm(key)
        times, cost_s = self._timed(next(self._calls[key]), max(_FEWEST, self._fitting(key, self._run_s)))
        self._note(key, times)
        return times, cost_s

    def _make_warm(self, key: tuple[str, int, str]) -> None:
        """Make calls that do not count, until later calls are no faster. The first of them are timed, as in a run."""
        _, nbytes, _ = key
        calls, run_s = self._calls[key], _WARMING * self._run_s
        if key not in self._estimates:
            next(calls).plan()
            self._note(key, self.times(calls, 1))
        self._note(key, self.times(calls, self._fitting(key, run_s)))
        self.warm_up(calls, nbytes, round(run_s / self._estimates[key]))

    def _fitting(self, key: tuple[str, int, str], seconds: float) -> int:
        """Return how many calls fit into `seconds` by their least time, at most as many as a run may have."""
        return min(_MOST, round(seconds / self._estimates[key]))

    def _note(self, key: tuple[str, int, str], times: Sequence[float]) -> None:
        """Record the time of a call if it is the least so far.

        By the time of a disturbed run, the next run would have too few calls.
        """
        self._estimates[key] = min((self._estimates.get(key, math.inf), *times))

    def warm_up(self, calls: CallCycle, nbytes: int, most: int) -> None:
        """Repeat the next call, so that the caches hold the memory that it uses; at most `most` times."""
        call = next(calls)
        for _ in range(min(_WARMING_NBYTES // nbytes, most)):
            call.plan()

    def times(self, calls: CallCycle, count: int) -> list[float]:
        """Make the next call `count` times, each after a barrier.

        Returns:
            The seconds of each call, the same on all ranks.
        """
        return self._timed(next(calls), count)[0]

    def placement(self) -> str:
        """Return the placement of two cores of rank 0's host, as `transports.host.core_distance` labels it.

        The text is empty if the host has one core. It is the same on all ranks.
        """
        cores, label = self._cores, ""
        if self._comm.rank == 0 and (placement := measure(cores)) != UNKNOWN:
            label = placement.label
        label = str(self._comm.broadcast_object(label))
        for _ in range(_SETTLING):
            self._meet()
        return label

    def await_placement(self, wanted: str, most_s: float) -> PlacementWait:
        """Wait until the cores have the placement `wanted` ("any" accepts all), for at most `most_s` seconds.

        With fewer than two cores, this does not wait. The time since the last run is returned, and does not count as a
        cost of the next run.
        """
        label = self.placement()
        passed_s, waited_s = self._passed_s(), 0.0
        while label and wanted not in {"any", label} and waited_s < most_s:
            time.sleep(_PAUSE_S)
            label = self.placement()
            waited_s += self._passed_s()
        return PlacementWait(label, passed_s, waited_s)

    @cached_property
    def _cores(self) -> list[int]:
        """Two cores of the ranks on rank 0's host; one if the ranks have only one."""
        cores_by_rank = self._comm.allgather_object(os.sched_getaffinity(0))
        return sorted(set[int]().union(*(cores_by_rank[rank] for rank in self._comm.hosts[0])))[:2]

    @cached_property
    def _host(self) -> int:
        return next(index for index, ranks in enumerate(self._comm.hosts) if self._comm.rank in ranks)

    @cached_property
    def _meet(self) -> Callable[[], Any]:
        return self._comm.plan("barrier", algorithm=_MEETING)

    def _timed(self, call: PlannedCall, count: int) -> tuple[list[float], float]:
        """Return the seconds of each of `count` calls, and the seconds since the last exchange of times."""
        spans = []
        for _ in range(count):
            call.rewrite()
            self._meet()
            began = time.perf_counter()
            call.plan()
            spans.append((began, time.perf_counter()))
        *times, passed_s = self._longest([*spans, self._since_last()])
        return times, passed_s

    def _passed_s(self) -> float:
        return self._longest([self._since_last()])[0]

    def _since_last(self) -> tuple[float, float]:
        before, self._seen = self._seen, time.perf_counter()
        return 0.0, self._seen - before

    def _longest(self, spans: Sequence[tuple[float, float]]) -> list[float]:
        """Return the length of each span: from its first begin to its last end on a host, on the slowest host."""
        # One maximum gives both: with the sign changed, the first begin is the largest.
        extremes = np.full((2, len(spans), len(self._comm.hosts)), -np.inf)
        extremes[:, :, self._host] = np.multiply(spans, (-1, 1)).T
        minus_first, last = self._comm.allreduce(extremes, "max", out=extremes, algorithm=_EXCHANGE)
        longest: list[float] = (last + minus_first).max(axis=1).tolist()
        return longest

    def _is_shared(self, collective: str) -> bool:
        contract = CONTRACTS[collective]
        return Cut.SHARES in (contract.input, contract.output)

    def _new_arrays(self, collective: str, nbytes: int) -> list[tuple[Any, Any, Callable[[], Any]]]:
        """Return sets of an input, an output, and a function that writes the input anew; no set for a barrier."""
        contract = CONTRACTS[collective]
        if contract.output is None:
            return []
        whole = nbytes // self._dtype.itemsize
        counts = {Cut.SHARES: whole, Cut.VECTOR: whole, Cut.SHARE: whole // self._comm.size}
        in_place = contract.input is contract.output is Cut.VECTOR
        sets = []
        for _ in range(_SETS):
            sent = np.ones(counts[contract.input], self._dtype)
            out = sent if in_place else np.ones(counts[contract.output], self._dtype)
            sets.append((sent, out, rewriting(sent)))
        return sets
