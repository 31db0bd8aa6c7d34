"""How long collective calls take: what the campaigns of `tuning` are handed to measure with.

All ranks of a communicator make the same trials at the same time. Every rank starts from a barrier, and a call takes
from when the first rank of a host begins until the last one there has ended, on the host where that is longest. These
times are exchanged after each run, so all ranks know the same ones, to the bit.

What a call sends is written anew before it, as a program does that has computed it: on data that has lain in the
caches since the last call, other algorithms are the fastest. Where an array lies decides how well caches hold it, for
as long as it lives, and makes up to a third of a call's time: so all algorithms get the same arrays, of which there are
several, and each run has the next. Where that can be, vectors are replaced by their results.

Each rank's own time would say less where ranks share cores. They leave the barrier one after the other, and a rank that
still is in it makes the call of all others longer: in which order they leave it, which may stay the same for thousands
of calls and be another one in the next job, made a short call take 5 us or 9 us. Clocks of several hosts have nothing
in common, so each host counts for itself. The barrier is the same whatever the tuner would take.

After calls of another size, the first ones find nothing that they need in the caches, and messages of 4 KiB through
shared memory take until the 400th to have been everywhere in their ring: so these calls are not measured. Nor are the
first that are timed: whichever algorithm came first after vectors of 4 MiB took 0.36 us with 16 bytes, and 0.30 later,
no matter how many calls without timing went before.
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
from unisono.tuning.measure.campaign import Placed

# Calls of one run. More runs of few calls tell more than few runs of many: what disturbs a run disturbs all of it.
_FEWEST, _MOST = 3, 64
# How many bytes of vectors calls warm up with at most, and which part of the time of a run.
_WARMING_NBYTES, _WARMING = 4 << 20, 0.25
# How often ranks that share cores meet after these have measured, until each has had its share of them again.
_SETTLING = 20
# How long to wait before the cores are measured again.
_PAUSE_S = 0.05
# What carries the times themselves, and what ranks meet by; they are the same whatever is measured.
_EXCHANGE = "recursive_doubling"
_MEETING = "direct"


# How many arrays take turns.
_SETS = 3


class PlannedCall(NamedTuple):
    """A call to be measured: its plan, and what writes anew what it sends, if it sends anything."""

    plan: Callable[[], Any]
    rewrite: Callable[[], Any] = lambda: None


# A call on each of the sets of arrays that take turns, for ever; all ranks take them together.
Turns = Iterator[PlannedCall]


def rewriting(sent: Any) -> Callable[[], Any]:
    """Return what writes an array anew, from one that holds the same."""
    return partial(np.copyto, sent, sent.copy())


class Trials:
    """Runs of calls on a communicator; see `tuning.campaign.Trials`.

    Args:
        comm: the communicator, which nothing else uses meanwhile.
        dtype: of the elements.
        run_s: about how long the calls of one run take together.
        known: what is known of the machine, if it is more than the communicator knows.
    """

    def __init__(
        self, comm: Communicator, dtype: str = "float32", run_s: float = 0.002, known: TunerState | None = None
    ) -> None:
        self._comm = comm
        self._known = known or comm.known
        self._dtype = numpy_dtype(DTYPES[dtype])
        self._run_s = run_s
        self._calls: dict[tuple[str, int, str], Turns] = {}
        self._estimates: dict[tuple[str, int, str], float] = {}
        self._warm: set[tuple[str, int, str]] = set()
        self._arrays: list[tuple[Any, Any, Callable[[], Any]]] = []
        self._of_arrays: tuple[str, int] | None = None
        self._seen = time.perf_counter()

    @property
    def known(self) -> TunerState:
        """What the communicator's tuner knows."""
        return self._known

    def question(self, collective: str, nbytes: int) -> Question:
        """Return what the tuner is asked about such calls."""
        return replace(self._comm.explain(collective, nbytes, self._dtype.name).question, algorithm="auto")

    def nbytes(self, collective: str, nbytes: int) -> int:
        """Return the nearest size, not below `nbytes`, of which all ranks have equal shares of whole elements."""
        if CONTRACTS[collective].input is Cut.TOKEN:
            return 1
        unit = self._dtype.itemsize * (self._comm.size if self._is_shared(collective) else 1)
        return max(1, -(-nbytes // unit)) * unit

    def prepare(self, collective: str, nbytes: int, variant: str) -> str | None:
        """Let such calls be run; return None, or why they cannot be, the same on all ranks."""
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

    def planned(self, collective: str, nbytes: int, variant: str) -> Turns:
        """Return such calls, on the arrays that the last ones had, if they were alike.

        Raises:
            NoAlgorithmError, UsageError, TransportUnavailableError: these ranks cannot make it.
        """
        if self._of_arrays != (collective, nbytes):
            self._of_arrays, self._arrays = (collective, nbytes), self._made(collective, nbytes)
        if not self._arrays:
            return cycle([PlannedCall(self._comm.plan(collective, algorithm=variant))])
        plan = partial(self._comm.plan, collective, algorithm=variant)
        return cycle([PlannedCall(plan(sent, out=out), rewrite) for sent, out, rewrite in self._arrays])

    def run(self, collective: str, nbytes: int, variant: str) -> tuple[list[float], float]:
        """Run prepared calls; return the seconds of each, and the seconds since the last run has ended."""
        key = collective, nbytes, variant
        if key not in self._warm:
            self._warm.add(key)
            self._make_warm(key)
        times, cost_s = self._timed(next(self._calls[key]), max(_FEWEST, self._fitting(key, self._run_s)))
        self._note(key, times)
        return times, cost_s

    def _make_warm(self, key: tuple[str, int, str]) -> None:
        """Make calls that do not count until later ones are no quicker: first timed ones, as a run has them."""
        _, nbytes, _ = key
        calls, run_s = self._calls[key], _WARMING * self._run_s
        if key not in self._estimates:
            next(calls).plan()
            self._note(key, self.times(calls, 1))
        self._note(key, self.times(calls, self._fitting(key, run_s)))
        self.warm_up(calls, nbytes, round(run_s / self._estimates[key]))

    def _fitting(self, key: tuple[str, int, str], seconds: float) -> int:
        """Return how many timed calls take so long together, up to the most of a run."""
        return min(_MOST, round(seconds / self._estimates[key]))

    def _note(self, key: tuple[str, int, str], times: Sequence[float]) -> None:
        """Keep the least time ever: after a disturbed run, the next one would have too few calls to be better."""
        self._estimates[key] = min((self._estimates.get(key, math.inf), *times))

    def warm_up(self, calls: Turns, nbytes: int, most: int) -> None:
        """Make the next call until caches hold all that they can of what such calls need, or so many times."""
        call = next(calls)
        for _ in range(min(_WARMING_NBYTES // nbytes, most)):
            call.plan()

    def times(self, calls: Turns, count: int) -> list[float]:
        """Let all ranks meet and make the next call, so many times.

        Returns:
            The seconds of each time, the same on all ranks.
        """
        return self._timed(next(calls), count)[0]

    def placement(self) -> str:
        """Return how far apart two cores of the ranks on rank 0's host are now, as `transports.cores` labels it.

        Nothing if it has one.

        It is the same on all ranks.
        """
        cores, label = self._cores, ""
        if self._comm.rank == 0 and (found := measure(cores)) != UNKNOWN:
            label = found.label
        label = str(self._comm.broadcast_object(label))
        for _ in range(_SETTLING):
            self._meet()
        return label

    def await_placement(self, wanted: str, most_s: float) -> Placed:
        """Wait until the cores are as far apart as `wanted`, "any" for no matter how far, or for `most_s` seconds.

        If there are not two of them, there is nothing to wait for.

        What has passed since the last run is not of the cost of the next one then.
        """
        label = self.placement()
        passed_s, waited_s = self._passed_s(), 0.0
        while label and wanted not in {"any", label} and waited_s < most_s:
            time.sleep(_PAUSE_S)
            label = self.placement()
            waited_s += self._passed_s()
        return Placed(label, passed_s, waited_s)

    @cached_property
    def _cores(self) -> list[int]:
        """Two cores of the ranks on rank 0's host, or one if they have one."""
        of_rank = self._comm.allgather_object(os.sched_getaffinity(0))
        return sorted(set[int]().union(*(of_rank[rank] for rank in self._comm.hosts[0])))[:2]

    @cached_property
    def _host(self) -> int:
        return next(at for at, ranks in enumerate(self._comm.hosts) if self._comm.rank in ranks)

    @cached_property
    def _meet(self) -> Callable[[], Any]:
        return self._comm.plan("barrier", algorithm=_MEETING)

    def _timed(self, call: PlannedCall, count: int) -> tuple[list[float], float]:
        """Return the seconds of each of so many calls, and the seconds since the last exchange."""
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
        """Return how long each span takes all ranks of a host, on the host where that is longest."""
        found = np.full((2, len(spans), len(self._comm.hosts)), -np.inf)
        found[:, :, self._host] = np.multiply(spans, (-1, 1)).T
        minus_first, last = self._comm.allreduce(found, "max", out=found, algorithm=_EXCHANGE)
        longest: list[float] = (last + minus_first).max(axis=1).tolist()
        return longest

    def _is_shared(self, collective: str) -> bool:
        contract = CONTRACTS[collective]
        return Cut.SHARES in (contract.input, contract.output)

    def _made(self, collective: str, nbytes: int) -> list[tuple[Any, Any, Callable[[], Any]]]:
        """Return sets of what is sent, where results go, and what rewrites the first; none of a barrier."""
        contract = CONTRACTS[collective]
        if contract.output is None:
            return []
        whole = nbytes // self._dtype.itemsize
        counts = {Cut.SHARES: whole, Cut.VECTOR: whole, Cut.SHARE: whole // self._comm.size}
        in_place = contract.input is contract.output is Cut.VECTOR
        found = []
        for _ in range(_SETS):
            sent = np.ones(counts[contract.input], self._dtype)
            out = sent if in_place else np.ones(counts[contract.output], self._dtype)
            found.append((sent, out, rewriting(sent)))
        return found
