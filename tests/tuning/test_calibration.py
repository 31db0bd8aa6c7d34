"""Calibration: its results on simulated machines with known costs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import ClassVar

import pytest

from unisono.algorithms.catalogue.registry import find
from unisono.tuning.decide.choice import Question, TunerState, explain
from unisono.tuning.machine.parameters import PRIORS, Parameters, curve, from_json, to_json
from unisono.tuning.measure.calibrate import (
    LONG,
    SHORT,
    calibrate,
    calibrate_calls,
    calibrate_rounds,
    updated,
    with_rounds,
)


class SimulatedProbes:
    """A link of 2 µs and 1 GB/s, 0.5 µs of work for each message, and memory of 10 GB/s.

    Up to `room` of the `pairs` pairs of ranks reach the full bandwidth at the same time. A vector in segments of
    `segment_nbytes` takes 0.8 times as long as in others.
    """

    def __init__(self, pairs: int = 1, room: float = 1.0, segment_nbytes: int = 0) -> None:
        self.pairs = pairs
        self.room = room
        self.segment_nbytes = segment_nbytes

    def around(self, nbytes: int, segment_nbytes: int) -> float:
        return 2 * self.exchange(nbytes // 2) * (0.8 if segment_nbytes == self.segment_nbytes else 1.0)

    def together(self, nbytes: int, pairs: int) -> float:
        assert pairs <= self.pairs
        return 2.5e-6 + nbytes / 1e9 * max(1.0, pairs / self.room)

    def exchange(self, nbytes: int) -> float:
        return 2.5e-6 + nbytes / 1e9

    def one_way(self, nbytes: int) -> float:
        return 2e-6 + nbytes / 1e9

    def burst(self, nbytes: int, messages: int) -> float:
        return 2 * self.one_way(nbytes) + (messages - 1) * 0.5e-6

    def reduce(self, dtype: str, nbytes: int) -> float:
        return 3e-6 + nbytes / 10e9

    def copy(self, nbytes: int) -> float:
        return 1e-6 + nbytes / 10e9


@pytest.mark.parametrize("sizes", [SHORT, LONG])
def test_calibration_recovers_the_costs_of_a_simulated_machine(sizes: Sequence[int]) -> None:
    result = updated(PRIORS, calibrate(SimulatedProbes(), "shm", sizes, ["float32", "bfloat16"]))
    link = result.links["shm"]
    assert link.latency_s == pytest.approx(2e-6, rel=0.02)
    assert link.overhead_s == pytest.approx(0.5e-6, rel=0.02)
    assert link.per_byte_s == pytest.approx(1e-9, rel=0.02)
    assert link.step_s(64 << 10) == pytest.approx(SimulatedProbes().exchange(64 << 10), rel=0.1)
    assert result.reduce["float32"].at(1 << 20) == pytest.approx((1 << 20) / 10e9, rel=0.01)
    assert result.links["tcp"] == PRIORS.links["tcp"]


@pytest.mark.parametrize(
    ("pairs", "room", "expected"),
    [(1, 1.0, math.inf), (2, 1.0, 1.0), (8, 1.0, 1.0), (8, 2.5, 2.5), (2, 0.4, 1.0), (8, 8.0, math.inf)],
)
def test_calibration_recovers_how_many_pairs_a_link_carries_at_once(pairs: int, room: float, expected: float) -> None:
    calibration = calibrate(SimulatedProbes(pairs, room), "tcp", SHORT, ["float32"], "network")
    assert calibration.link.pairs == pytest.approx(expected, rel=0.01)
    known = updated(PRIORS, calibration)
    assert known.link("tcp", "network") is calibration.link
    assert known.link("tcp") is PRIORS.link("tcp")


@pytest.mark.parametrize("fastest", [128 << 10, 256 << 10, 8 << 20])
def test_calibration_finds_the_fastest_segment_size(fastest: int) -> None:
    known = updated(PRIORS, calibrate(SimulatedProbes(segment_nbytes=fastest), "shm", SHORT, ["float32"]))
    rows = explain(Question("allreduce", 4 << 20, 2, "shm"), TunerState(None, known)).candidates
    ring = next(row for row in rows if row.algorithm == "ring")
    assert ring.segments == max(1, (2 << 20) // fastest)
    assert from_json(to_json(known)) == known


def test_calibration_finds_up_to_which_size_whole_blocks_are_fastest() -> None:
    class Cached(SimulatedProbes):
        """Caches of 1 MiB, so that longer messages are faster in segments."""

        def around(self, nbytes: int, segment_nbytes: int) -> float:
            is_slow = segment_nbytes > (1 << 20) or segment_nbytes < min(nbytes // 2, 1 << 20)
            return super().around(nbytes, segment_nbytes) * (1.0 + 0.2 * is_slow - 0.15 * (segment_nbytes == 128 << 10))

    link = calibrate(Cached(), "shm", SHORT, ["float32"]).link
    assert (link.segment_nbytes, link.whole_nbytes) == (128 << 10, 1 << 20)


def test_calibration_measures_the_same_points_whatever_the_times() -> None:
    class Noted(SimulatedProbes):
        def around(self, nbytes: int, segment_nbytes: int) -> float:
            noted.append((nbytes, segment_nbytes))
            return super().around(nbytes, segment_nbytes)

    results = []
    for fastest in (0, 128 << 10, 2 << 20):
        noted = list[tuple[int, int]]()
        calibrate(Noted(segment_nbytes=fastest), "shm", SHORT, ["float32"])
        results.append(noted)
    assert results[0] == results[1] == results[2] != []


def test_calibration_keeps_prior_segments_of_a_tcp_link() -> None:
    calibration = calibrate(SimulatedProbes(segment_nbytes=128 << 10), "tcp", SHORT, ["float32"])
    assert calibration.link.segment_nbytes == PRIORS.links["tcp"].segment_nbytes


class CrowdedRanks:
    """Times of collectives on a simulated machine. A call takes 9 µs, or 6 µs if it has a root.

    A round takes 3 µs, and each further message in it 1 µs. A byte takes 2 ns to send and 0.5 ns to combine.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def time_s(self, collective: str, algorithm: str, nbytes: int) -> float:
        cost = find(collective, algorithm).cost_of(self.ranks, {})
        assert cost is not None
        messages = max(cost.rounds, cost.sent, cost.most_messages)
        call_s = 6e-6 if collective == "broadcast" else 9e-6
        moved_s = cost.rounds * 3e-6 + (messages - cost.rounds) * 1e-6 + nbytes * cost.sent * 2e-9
        return call_s + moved_s + nbytes * cost.reduced * 0.5e-9


@pytest.mark.parametrize("ranks", [3, 4, 7])
@pytest.mark.parametrize("nbytes", [840, 84 << 10, 84 << 16])
def test_calibrated_rounds_predict_times_of_collectives(ranks: int, nbytes: int) -> None:
    crowded = CrowdedRanks(ranks)
    sizes = [1 << power for power in range(3, 23)]
    parameters = with_rounds(PRIORS, "shm", calibrate_rounds(crowded.time_s, ranks, ranks, sizes))
    for collective in ("allreduce", "allgather", "reduce_scatter", "broadcast"):
        asked = Question(collective, nbytes, ranks, "shm")
        for row in explain(asked, TunerState(None, parameters)).candidates:
            if row.refusal is None and row.algorithm in {"ring", "direct", "bruck", "recursive_doubling", "pairwise"}:
                assert row.predicted_s == pytest.approx(crowded.time_s(collective, row.algorithm, nbytes), rel=0.05)


class Unequal(CrowdedRanks):
    """Ranks whose algorithms take a factor of their own longer than their closed forms.

    The factor grows slowly with bytes.
    """

    def time_s(self, collective: str, algorithm: str, nbytes: int) -> float:
        factor = 0.7 if algorithm == "bruck" else 1.6
        return super().time_s(collective, algorithm, nbytes) * factor * nbytes**0.01


@pytest.mark.parametrize("asked_of", [4, 6])
@pytest.mark.parametrize("nbytes", [24, 6720, 84 << 14])
def test_calibrated_calls_distinguish_algorithms_of_equal_cost(asked_of: int, nbytes: int) -> None:
    calibrated_on, sizes = Unequal(4), [1 << power for power in range(3, 23, 3)]
    algorithms = {"allgather": ["bruck", "circulant"]}
    rounds = calibrate_rounds(CrowdedRanks(4).time_s, 4, 4, sizes)
    calls = calibrate_calls(calibrated_on.time_s, algorithms, [4 * sizes[0], 4 * sizes[3], 4 * sizes[6]])
    known = TunerState(None, with_rounds(PRIORS, "shm", rounds._replace(calls=calls)))
    asked = Question("allgather", nbytes, asked_of, "shm")
    rows = {row.algorithm: row.predicted_s for row in explain(asked, known).candidates}
    for name in algorithms["allgather"]:
        assert rows[name] == pytest.approx(Unequal(asked_of).time_s("allgather", name, nbytes), rel=0.1), name


class Unsteady:
    """A machine whose speed changes before each turn. It disturbs each algorithm once at each length."""

    factors: ClassVar = {"direct": 1.0, "ring": 1.02, "bruck": 1.04}

    def __init__(self) -> None:
        self._draw, self._slower, self._turns = Random(1), 1.0, Counter[int]()

    def time_s(self, _: str, algorithm: str, nbytes: int) -> float:
        if algorithm == "direct":
            self._slower = self._draw.uniform(1, 4)
            self._turns[nbytes] += 1
        is_disturbed = list(self.factors).index(algorithm) + 1 == self._turns[nbytes]
        return self._slower * self.factors[algorithm] * nbytes * (10e-6 if is_disturbed else 1e-6)


def test_calibrated_calls_have_right_ratios_when_speed_changes() -> None:
    names = list(Unsteady.factors)
    calls = calibrate_calls(Unsteady().time_s, {"allgather": names}, [16, 64])["allgather"]
    for nbytes in (16, 64):
        ratios = [calls[name].at(nbytes) / calls["direct"].at(nbytes) for name in names]
        assert ratios == pytest.approx(list(Unsteady.factors.values()))
    assert 16e-6 < calls["direct"].at(16) < 64e-6


def test_calibrated_calls_correct_compositions_on_as_many_hosts_only() -> None:
    def predicted(known: Parameters, nbytes: int, size: int = 4) -> dict[str, float | None]:
        hosts = tuple((first, first + 1) for first in range(0, size, 2))
        explanation = explain(Question("allreduce", nbytes, size, "tcp", hosts=hosts), TunerState(None, known))
        return {candidate.algorithm: candidate.predicted_s for candidate in explanation.candidates}

    rounds = calibrate_rounds(CrowdedRanks(4).time_s, 4, 2, SHORT)
    before = with_rounds(PRIORS, "tcp", rounds)
    thrice = curve((nbytes, 3 * predicted(before, nbytes)["full_lane"]) for nbytes in (64, 1 << 20))  # type: ignore[operator]
    after = with_rounds(PRIORS, "tcp", rounds._replace(calls={"allreduce": {"full_lane": thrice}}))
    for nbytes in (8, 64, 9000, 1 << 20, 1 << 24):
        old, new = predicted(before, nbytes), predicted(after, nbytes)
        assert new.pop("full_lane") == pytest.approx(3 * (old.pop("full_lane") or 0.0))
        assert new == old
    assert predicted(after, 9000, size=6) == predicted(before, 9000, size=6)


def test_calibrated_rounds_replace_rounds_of_the_same_rank_count_only() -> None:
    result = PRIORS
    for ranks in (3, 4, 3):
        result = with_rounds(result, "shm", calibrate_rounds(CrowdedRanks(ranks).time_s, ranks, ranks, SHORT))
    assert sorted(row.ranks for row in result.rounds["shm"]) == [3, 4]
