"""What calibration measures with: messages between two ranks of a communicator, work of one, calls of all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.algorithms.catalogue.registry import ALGORITHMS, algorithms_of
from unisono.algorithms.catalogue.variants import Variant
from unisono.algorithms.composition.phases import Composition
from unisono.collectives.api.reduce_local import reduce_local
from unisono.collectives.communicator import Communicator
from unisono.collectives.measurement.call_trials import Trials, rewriting
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.transports.reductions.definition import numpy_dtype
from unisono.tuning.decide.choice import Question, candidate
from unisono.tuning.machine.parameters import Parameters
from unisono.tuning.measure.calibrate import (
    LONG,
    SHORT,
    calibrate,
    calibrate_calls,
    calibrate_rounds,
    pairs_at_once,
    updated,
    with_rounds,
)
from unisono.tuning.measure.race import typical_s

_TRIED, _FEWEST, _MOST = 2, 5, 200
_DTYPES = {"short": ("float32", "bfloat16"), "long": ("float32", "float64", "int32", "float16", "bfloat16")}


# How often each collective is run for what rounds cost, and the bytes of the vectors, at most.
_RUNS = {"short": 2, "long": 4}
_LONGEST = 16 << 20
# The bytes of a share in calls of each algorithm: the fewest, and what matters; and the seconds of a ring, at most.
_OF_CALLS = (SHORT[0], *(512 << (2 * k) for k in range(7)))
_LONGEST_S = 0.02


def calibrated(comm: Communicator, known: Parameters, *, short: bool) -> Parameters:
    """Measure the links, the memory of rank 0 and rounds of all ranks; return the parameters.

    Links are measured between two ranks of rank 0's host and, if there are several hosts, to the one of the others that
    has most ranks: there also by how many pairs of ranks at once. The parameters are equal on all ranks. All ranks of
    `comm` call it, and nothing else should run meanwhile.

    Raises:
        UsageError: there is only one rank.
    """
    if comm.size < 2:
        raise UsageError("a calibration needs two ranks at least")
    for link, level, ranks in _ways(comm.explain("allreduce", 8).question):
        if comm.rank in ranks:
            with comm.subgroup(ranks) as team:
                known = _link_calibrated(team, known, link, level, short=short)
        known = comm.broadcast_object(known)
    return rounds_calibrated(comm, known, short=short)


def _ways(asked: Question) -> list[tuple[str, str, list[int]]]:
    """Return the links to measure, each with its level, and the ranks between which it is: pairs, one after the other.

    Of one host these are the first two ranks; of two, as many pairs as both have ranks.
    """
    if len(asked.hosts) < 2:
        return [(asked.link, "", [0, 1])]
    here, *others = asked.hosts
    inside = [(asked.inside, "", [*here[:2]])] if len(here) > 1 and asked.inside != asked.link else []
    there: tuple[int, ...] = max(others, key=len)
    pairs = zip(here, there, strict=False)
    return [*inside, (asked.link, asked.level, [rank for pair in pairs for rank in pair])]


def _link_calibrated(team: Communicator, known: Parameters, link: str, level: str, *, short: bool) -> Parameters:
    """Return the parameters with those of a link between pairs of ranks, as its first pair knows them."""
    first = team.rank - team.rank % 2
    with team.subgroup([first, first + 1]) as pair:
        probes = _Probes(team, pair, 0.004 if short else 0.04)
        if first > 0:
            pairs_at_once(probes)
            return known
        sizes, dtypes = (SHORT, _DTYPES["short"]) if short else (LONG, _DTYPES["long"])
        return updated(known, calibrate(probes, link, sizes, dtypes, level))


def rounds_calibrated(
    comm: Communicator, known: Parameters, *, short: bool, collectives: Sequence[str] = tuple(ALGORITHMS)
) -> Parameters:
    """Return the parameters with what rounds among all ranks of `comm` cost, and whole calls.

    In the short form, calls are of compositions alone, of which rounds tell nothing, so only where there are several
    hosts. All ranks of `comm` call it, and nothing else should run meanwhile. `collectives` are those of the calls.
    """
    trials, asked = Trials(comm), comm.explain("allreduce", 8).question

    def run_s(collective: str, algorithm: str, nbytes: int) -> float:
        nbytes = trials.nbytes(collective, nbytes)
        if (reason := trials.prepare(collective, nbytes, algorithm)) is not None:
            raise UsageError(f"{algorithm} cannot be calibrated: {reason}")
        return typical_s(trials.run(collective, nbytes, algorithm)[0])

    def least_s(*call: Any) -> float:
        return min(run_s(*call) for _ in range(_RUNS["short" if short else "long"]))

    fitting = _fitting(comm)
    sizes = [nbytes for nbytes in SHORT[:: 2 if short else 1] if nbytes in fitting]
    found = calibrate_rounds(least_s, asked.size, asked.ranks_per_host, sizes)
    shares = [n for n in _OF_CALLS if n <= fitting[-1] and comm.size * found.step.at(n) <= _LONGEST_S] or sizes[:1]
    algorithms = _predicted(trials, collectives, compositions_only=short)
    calls = calibrate_calls(run_s, algorithms, [nbytes * comm.size for nbytes in shares])
    return with_rounds(known, asked.link, found._replace(calls=calls))


def _fitting(comm: Communicator) -> tuple[int, ...]:
    """Return the bytes of shares of vectors that are not too long."""
    return tuple(nbytes for nbytes in SHORT if nbytes * comm.size <= _LONGEST) or SHORT[:1]


def _predicted(trials: Trials, collectives: Sequence[str], *, compositions_only: bool) -> dict[str, list[str]]:
    """Return the algorithms that the model predicts, by collective; compositions where hosts have several ranks."""
    found = dict[str, list[str]]()
    for collective in collectives:
        asked = trials.question(collective, SHORT[0])
        for name, each in algorithms_of(collective).items():
            is_composed = isinstance(each, Composition)
            row = candidate(Variant(name), asked, trials.known, None, is_named=not is_composed)
            if row.refusal is None and row.predicted_s is not None and (is_composed or not compositions_only):
                found.setdefault(collective, []).append(name)
    return found


class _Probes:
    """See `tuning.calibrate.Probes`; both ranks of `pair` make the same probes, of which rank 0's times count.

    `team` is of this pair and others, which take part in those of several pairs only.
    """

    def __init__(self, team: Communicator, pair: Communicator, probe_s: float) -> None:
        self._team = team
        self._pair = pair
        self._probe_s = probe_s
        self.pairs = team.size // 2

    def exchange(self, nbytes: int) -> float:
        exchange, rewrite = self._exchange(nbytes)
        return self._timed(exchange, self._pair, rewrite=rewrite)

    def together(self, nbytes: int, pairs: int) -> float:
        exchange = self._exchange(nbytes)[0] if self._team.rank // 2 < pairs else None

        def until_all_have_ended() -> None:
            if exchange is not None:
                exchange()
            self._team.barrier()

        return self._timed(until_all_have_ended, self._team)

    def one_way(self, nbytes: int) -> float:
        return self.burst(nbytes, 1) / 2

    def burst(self, nbytes: int, messages: int) -> float:
        x, out = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        there, back = (self._pair.plan("broadcast", x, root=root, out=out, algorithm="binomial") for root in (0, 1))

        def both_ways() -> None:
            for _ in range(messages):
                there()
            back()

        return self._timed(both_ways, self._pair)

    def around(self, nbytes: int, segment_nbytes: int) -> float:
        x = np.zeros(nbytes, np.uint8)
        algorithm = f"ring(segment_nbytes={segment_nbytes})"
        around = self._pair.plan("allreduce", x, op="max", out=x, algorithm=algorithm)
        return self._timed(around, self._pair, rewrite=rewriting(x))

    def reduce(self, dtype: str, nbytes: int) -> float:
        vectors = [np.ones(nbytes // DTYPES[dtype].itemsize, numpy_dtype(DTYPES[dtype])) for _ in range(2)]
        return self._timed(lambda: reduce_local(*vectors, op="max"), self._pair, alone=True)

    def copy(self, nbytes: int) -> float:
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return self._timed(lambda: np.copyto(target, source), self._pair, alone=True)

    def _exchange(self, nbytes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return an exchange, and what writes anew what is sent."""
        x, out = np.zeros(nbytes, np.uint8), np.zeros(2 * nbytes, np.uint8)
        return self._pair.plan("allgather", x, out=out, algorithm="ring"), rewriting(x)

    def _timed(
        self,
        call: Callable[[], Any],
        group: Communicator,
        *,
        alone: bool = False,
        rewrite: Callable[[], Any] = lambda: None,
    ) -> float:
        """Return the usual time of `call` on rank 0 of a group; all make it, or wait if it is for one rank `alone`.

        Each rewrites what it sends before.
        """
        once_s = max(1e-9, min(_times(call, _TRIED, group, alone, rewrite)))
        calls = max(_FEWEST, min(_MOST, round(self._probe_s / once_s)))
        calls = int(group.broadcast(np.array(calls), algorithm="binomial"))
        times = _times(call, calls, group, alone, rewrite)
        # What one rank does is only ever slowed down by others; of messages, the time is what is usual.
        return max(min(times) if alone else typical_s(times), 1e-9)


def _times(
    call: Callable[[], Any], calls: int, group: Communicator, alone: bool, rewrite: Callable[[], Any]
) -> list[float]:
    if alone and group.rank > 0:
        return [1.0]
    times = list[float]()
    for _ in range(calls):
        rewrite()
        if not alone:
            group.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times
