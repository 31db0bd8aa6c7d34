"""The measurements of a calibration: messages between two ranks, work of one rank, and calls of all ranks.

Used by: ``unisono calibrate`` and `topology_probes.py`. `tuning.measure.calibrate` computes the parameters from the
times.
"""

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
from unisono.collectives.measurement.call_trials import CallTrials, rewriting
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

# Calls of one probe: two first, to estimate their time; then as many as fit in the time of a probe, within limits.
_TRIED, _FEWEST, _MOST = 2, 5, 200
_DTYPES = {"short": ("float32", "bfloat16"), "long": ("float32", "float64", "int32", "float16", "bfloat16")}


# How often each collective is run to measure the cost of rounds, and the most bytes of its vector.
_RUNS = {"short": 2, "long": 4}
_LONGEST = 16 << 20
# Bytes of a share in calls of each algorithm: the least, and 512 bytes to 2 MiB by factors of 4. A share at which a
# ring would take longer than `_LONGEST_S` is left out.
_OF_CALLS = (SHORT[0], *(512 << (2 * k) for k in range(7)))
_LONGEST_S = 0.02


def calibrated(comm: Communicator, parameters: Parameters, *, short: bool) -> Parameters:
    """Measure the links, the memory of rank 0 and rounds of all ranks; return `parameters` with the results.

    One link is measured between two ranks of rank 0's host. If there are several hosts, a second link is measured, to
    the other host with the most ranks. Several pairs of ranks use that one at once, to see how they share it.

    All ranks of `comm` call this, and nothing else should run meanwhile. The parameters are equal on all ranks.

    Raises:
        UsageError: there is only one rank.
    """
    if comm.size < 2:
        raise UsageError("a calibration needs at least two ranks")
    for link, level, ranks in _links(comm.explain("allreduce", 8).question):
        if comm.rank in ranks:
            with comm.subgroup(ranks) as pairs:
                parameters = link_calibrated(pairs, parameters, link, level, short=short)
        parameters = comm.broadcast_object(parameters)
    return rounds_calibrated(comm, parameters, short=short)


def _links(question: Question) -> list[tuple[str, str, list[int]]]:
    """Return the links to measure, each with its level and the ranks that use it; two consecutive ranks are a pair.

    On one host, the ranks are the first two. Between two hosts, there are as many pairs as both hosts have ranks.
    """
    if len(question.hosts) < 2:
        return [(question.link, "", [0, 1])]
    here, *others = question.hosts
    inside = [(question.inside, "", [*here[:2]])] if len(here) > 1 and question.inside != question.link else []
    there: tuple[int, ...] = max(others, key=len)
    pairs = zip(here, there, strict=False)
    return [*inside, (question.link, question.level, [rank for pair in pairs for rank in pair])]


def link_calibrated(pairs: Communicator, parameters: Parameters, link: str, level: str, *, short: bool) -> Parameters:
    """Return `parameters`, to which the first pair of ranks adds those of a link. Other pairs only help to measure."""
    first = pairs.rank - pairs.rank % 2
    with pairs.subgroup([first, first + 1]) as pair:
        probes = PairProbes(pairs, pair, 0.004 if short else 0.04)
        if first > 0:
            pairs_at_once(probes)
            return parameters
        sizes, dtypes = (SHORT, _DTYPES["short"]) if short else (LONG, _DTYPES["long"])
        return updated(parameters, calibrate(probes, link, sizes, dtypes, level))


def rounds_calibrated(
    comm: Communicator, parameters: Parameters, *, short: bool, collectives: Sequence[str] = tuple(ALGORITHMS)
) -> Parameters:
    """Return the parameters with the costs of rounds among all ranks of `comm`, and of whole calls of `collectives`.

    The short form measures calls of composed algorithms only, because their times do not follow from those of rounds.
    So with one host it measures no calls. All ranks of `comm` call this, and nothing else should run meanwhile.
    """
    trials, question = CallTrials(comm), comm.explain("allreduce", 8).question

    def run_s(collective: str, algorithm: str, nbytes: int) -> float:
        nbytes = trials.nbytes(collective, nbytes)
        if (reason := trials.prepare(collective, nbytes, algorithm)) is not None:
            raise UsageError(f"{algorithm} cannot be calibrated: {reason}")
        return typical_s(trials.run(collective, nbytes, algorithm)[0])

    def least_s(*call: Any) -> float:
        return min(run_s(*call) for _ in range(_RUNS["short" if short else "long"]))

    fitting = _fitting(comm)
    sizes = [nbytes for nbytes in SHORT[:: 2 if short else 1] if nbytes in fitting]
    rounds = calibrate_rounds(least_s, question.size, question.ranks_per_host, sizes)
    shares = [n for n in _OF_CALLS if n <= fitting[-1] and comm.size * rounds.step.at(n) <= _LONGEST_S] or sizes[:1]
    algorithms = _predicted(trials, collectives, compositions_only=short)
    calls = calibrate_calls(run_s, algorithms, [nbytes * comm.size for nbytes in shares])
    return with_rounds(parameters, question.link, rounds._replace(calls=calls))


def _fitting(comm: Communicator) -> tuple[int, ...]:
    """Return the sizes of shares whose whole vector has at most `_LONGEST` bytes; at least the smallest size."""
    return tuple(nbytes for nbytes in SHORT if nbytes * comm.size <= _LONGEST) or SHORT[:1]


def _predicted(trials: CallTrials, collectives: Sequence[str], *, compositions_only: bool) -> dict[str, list[str]]:
    """Return, by collective, the algorithms whose time the model predicts (or only the composed ones of them)."""
    names = dict[str, list[str]]()
    for collective in collectives:
        question = trials.question(collective, SHORT[0])
        for name, algorithm in algorithms_of(collective).items():
            is_composed = isinstance(algorithm, Composition)
            row = candidate(Variant(name), question, trials.known, None, is_named=not is_composed)
            if row.refusal is None and row.predicted_s is not None and (is_composed or not compositions_only):
                names.setdefault(collective, []).append(name)
    return names


class PairProbes:
    """The probes of a pair of ranks. Implements `tuning.measure.calibrate.Probes`.

    Both ranks make the same probes. The times of the pair's rank 0 count, and the mean of both for an exchange. The
    communicator `all_pairs` holds this pair and the others, which take part only in the probes of several pairs.
    """

    def __init__(self, all_pairs: Communicator, pair: Communicator, probe_s: float) -> None:
        self._all_pairs = all_pairs
        self._pair = pair
        self._probe_s = probe_s
        self.pairs = all_pairs.size // 2

    def exchange(self, nbytes: int) -> float:
        exchange, rewrite = self._exchange(nbytes)
        taken_s = self._timed(exchange, self._pair, rewrite=rewrite)
        # Over a far link, one rank leaves the barrier a delay after the other. It then waits for no message, and the
        # other waits for two delays.
        return float(self._pair.allreduce(np.array(taken_s))) / 2

    def together(self, nbytes: int, pairs: int) -> float:
        exchange = self._exchange(nbytes)[0] if self._all_pairs.rank // 2 < pairs else None

        def exchange_and_barrier() -> None:
            if exchange is not None:
                exchange()
            self._all_pairs.barrier()

        return self._timed(exchange_and_barrier, self._all_pairs)

    def one_way(self, nbytes: int) -> float:
        return self.burst(nbytes, 1) / 2

    def burst(self, nbytes: int, messages: int) -> float:
        return self._timed(self._burst(nbytes, messages), self._pair)

    def _burst(self, nbytes: int, messages: int) -> Callable[[], Any]:
        """Return messages from rank 0 of the pair one after the other, and one reply."""
        x, out = np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        there, back = (self._pair.plan("broadcast", x, root=root, out=out, algorithm="binomial") for root in (0, 1))

        def both_ways() -> None:
            for _ in range(messages):
                there()
            back()

        return both_ways

    def around(self, nbytes: int, segment_nbytes: int) -> float:
        x = np.zeros(nbytes, np.uint8)
        algorithm = f"ring(segment_nbytes={segment_nbytes})"
        around = self._pair.plan("allreduce", x, op="max", out=x, algorithm=algorithm)
        return self._timed(around, self._pair, rewrite=rewriting(x))

    def least_one_way(self, nbytes: int) -> float:
        """Return half the least time of a message and an equal reply, which other work disturbs the least."""
        return self._timed(self._burst(nbytes, 1), self._pair, pick=min) / 2

    def reduce(self, dtype: str, nbytes: int) -> float:
        vectors = [np.ones(nbytes // DTYPES[dtype].itemsize, numpy_dtype(DTYPES[dtype])) for _ in range(2)]
        return self._timed(lambda: reduce_local(*vectors, op="max"), self._pair, alone=True)

    def copy(self, nbytes: int) -> float:
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return self._timed(lambda: np.copyto(target, source), self._pair, alone=True)

    def _exchange(self, nbytes: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Return an exchange between the pair, and a function that writes its input anew."""
        x, out = np.zeros(nbytes, np.uint8), np.zeros(2 * nbytes, np.uint8)
        return self._pair.plan("allgather", x, out=out, algorithm="ring"), rewriting(x)

    def _timed(
        self,
        call: Callable[[], Any],
        group: Communicator,
        *,
        alone: bool = False,
        rewrite: Callable[[], Any] = lambda: None,
        pick: Callable[[list[float]], float] = typical_s,
    ) -> float:
        """Return the time of `call` on rank 0 of a group that `pick` picks, usually the typical one.

        All ranks of the group make the call, each after `rewrite`. If `alone`, only rank 0 makes it and the others
        wait; the result is then the least time.
        """
        once_s = max(1e-9, min(_times(call, _TRIED, group, alone, rewrite)))
        longest_s = float(group.allreduce(np.array(once_s), "max"))
        calls = max(_FEWEST, min(_MOST, round(self._probe_s / longest_s)))
        times = _times(call, calls, group, alone, rewrite)
        # Other work can only slow a single rank down, so its least time is the best estimate. For messages, the typical
        # time counts.
        return max(min(times) if alone else pick(times), 1e-9)


def _times(
    call: Callable[[], Any], calls: int, group: Communicator, alone: bool, rewrite: Callable[[], Any]
) -> list[float]:
    if alone and group.rank > 0:
        return [0.0]
    times = list[float]()
    for _ in range(calls):
        rewrite()
        if not alone:
            group.barrier()
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times
