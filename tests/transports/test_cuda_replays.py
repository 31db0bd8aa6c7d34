"""Persistent calls on device memory as graphs: results, order, failures, and the rule that their flags need."""

from __future__ import annotations

import itertools
import signal
import time
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.device_ranks import WAIT_S, DeviceCall, DeviceRank, device_rank
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.testing.device_double import DeviceTrapError, GpuDouble
from unisono.transports.cuda.executors import replays
from unisono.transports.cuda.executors.replays import can_replay

pytestmark = pytest.mark.timeout(120)

MAPPED = [
    (collective, name)
    for collective, by_name in ALGORITHMS.items()
    for name, algorithm in by_name.items()
    if algorithm.mapped and collective != "barrier"
]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PATIENCE_S = 20.0
USES = 8


ranks = ranks_fixture((2, "shm"), (3, "shm"))


two = ranks_fixture((2, "shm"))


class Launches:
    """Counts the graphs that a rank's device captures and launches."""

    def __init__(self, patch: pytest.MonkeyPatch, rank: DeviceRank) -> None:
        self.made: list[str] = []
        for name in ("capture", "launch"):
            patch.setattr(rank.device, name, partial(self._run, name, getattr(rank.device, name)))

    def _run(self, name: str, run: Any, *arguments: Any) -> Any:
        self.made.append(name)
        return run(*arguments)

    def counts(self) -> tuple[int, int]:
        return self.made.count("capture"), self.made.count("launch")


class Persistent:
    """A persistent call of a rank on its own arrays, whose input changes with each use."""

    def __init__(self, rank: DeviceRank, call: DeviceCall) -> None:
        self.rank, self.call = rank, call
        self.replays = rank.collectives.new_replays()
        self.source, self.target = rank.operands(call)
        self.inputs = call.inputs(rank.size)
        self.expected = call.expected(rank.size, rank.rank)
        self.zeros = rank.array(np.zeros_like(self.inputs[rank.rank]))
        self.values = rank.array(self.inputs[rank.rank])
        self.is_zero = False

    def use(self) -> None:
        """Use the call, on zeros and its own input in turn."""
        source = self.zeros if self.is_zero else self.values
        self.rank.device.copy(self.source, source, self.inputs[0].nbytes, self.rank.stream)
        self.rank.start(self.call, self.source, self.target, self.replays).wait(WAIT_S)

    def check(self) -> None:
        """Wait for the result of the last use, and let the next ones have the other input."""
        result = self.rank.values(self.target, self.call.lengths(self.rank.size)[1], self.call.dtype)
        if self.expected is not None:
            expected = np.zeros_like(self.expected) if self.is_zero else self.expected
            np.testing.assert_array_equal(result, expected, f"{self.call} on rank {self.rank.rank}")
        self.is_zero = not self.is_zero


def use_all(executor: Any, seed: int) -> list[Any]:
    """Use persistent calls of all collectives in random order, among other calls; return the counts of graphs."""
    agreed, own = Random(seed), Random(seed * 10 + executor.rank)
    with device_rank(executor, seed) as rank, pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch, rank)
        calls = [
            Persistent(rank, DeviceCall(collective, name, "int32", count=17, root=1 if collective in ROOTED else None))
            for collective, name in MAPPED
        ]
        order = [call for call in calls for _ in range(USES)]
        agreed.shuffle(order)
        for number, call in enumerate(order):
            if own.random() < 0.1:
                time.sleep(0.002)
            call.use()
            if agreed.random() < 0.5:
                call.check()
            if number % 20 == 0:
                rank.check(DeviceCall("allreduce", count=50))
        for call in calls:
            call.use()
            call.check()
    return [len(calls), *launches.counts()]


@pytest.mark.parametrize("seed", [1, 2])
def test_persistent_calls_of_all_collectives_are_replayed_as_graphs(ranks: Ranks, seed: int) -> None:
    for calls, captured, launched in ranks.run(use_all, seed):
        # One graph for each third of the numbers; the first use is no replay.
        assert (captured, launched) == (3 * calls, USES * calls)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_all_plans_over_mapped_memory_can_be_replayed(size: int) -> None:
    for collective, name in MAPPED:
        plans = [find(collective, name).build(size, rank, 0) for rank in range(size)]
        assert can_replay(plans), (collective, name)


def replay_after_growth(executor: Any) -> tuple[int, int]:
    """Replay a call, let the slabs grow, and replay it again."""
    with device_rank(executor, 3) as rank, pytest.MonkeyPatch.context() as patch:
        launches = Launches(patch, rank)
        call = Persistent(rank, DeviceCall("allreduce", "two_shot", dtype="int64", count=300))
        for use in range(6):
            call.use()
            call.check()
            if use == 3:
                rank.check(DeviceCall(count=1 << 19))
        return launches.counts()


def test_graphs_are_captured_again_after_slabs_have_grown(two: Ranks) -> None:
    assert two.run(replay_after_growth) == [(5, 5)] * 2


def replay_beside_others(executor: Any) -> None:
    """Replay a call among calls on another stream that use the same slabs; only the calls order the streams."""
    with device_rank(executor, 4) as rank:
        one, other = rank.stream, rank.device.new_stream()
        replayed = Persistent(rank, DeviceCall("allreduce", "two_shot", dtype="int64", count=300))
        call = DeviceCall("allreduce", "two_shot", dtype="int64", count=200)
        operands = rank.operands(call)
        for _ in range(6):
            rank.stream = other
            rank.start(call, *operands).wait(WAIT_S)
            rank.stream = one
            replayed.use()
        replayed.check()
        rank.stream = other
        np.testing.assert_array_equal(rank.values(operands[1], 200, "int64"), call.expected(rank.size, rank.rank))
        rank.stream = one
        rank.device.end_stream(other)


def test_replays_are_ordered_with_calls_on_other_streams(two: Ranks) -> None:
    two.run(replay_beside_others)


def use_what_has_no_graph(executor: Any, has_graphs: list[bool]) -> list[tuple[int, int]]:
    """Use persistent calls of several segments and with factors; return the counts of graphs of each."""
    counts = []
    gpu = GpuDouble(executor.rank, graphs=has_graphs[executor.rank])
    rank = DeviceRank(executor, gpu, slab_nbytes=1024)
    for call in (DeviceCall(count=1000), DeviceCall(op="premul_sum"), DeviceCall(count=5)):
        with pytest.MonkeyPatch.context() as patch:
            launches, operands, graphs = Launches(patch, rank), rank.operands(call), rank.collectives.new_replays()
            for _ in range(3):
                rank.start(call, *operands, graphs).wait(WAIT_S)
            result = rank.values(operands[1], call.count, call.dtype)
            np.testing.assert_array_equal(result, call.expected(rank.size, rank.rank))
            counts.append(launches.counts())
    rank.close()
    assert gpu.leaks() == []
    gpu.close()
    return counts


def test_persistent_calls_of_several_segments_or_with_factors_have_no_graphs(two: Ranks) -> None:
    assert two.run(use_what_has_no_graph, [True, True]) == [[(0, 0), (0, 0), (2, 2)]] * 2


def test_ranks_have_no_graphs_if_the_device_of_one_has_none(two: Ranks) -> None:
    assert two.run(use_what_has_no_graph, [True, False]) == [[(0, 0)] * 3] * 2


def use_many(executor: Any) -> list[bool]:
    with device_rank(executor, 1) as rank:
        return [rank.collectives.new_replays() is not None for _ in range(replays.MOST_CALLS + 2)]


def test_persistent_calls_beyond_the_flags_have_no_graphs(two: Ranks) -> None:
    assert two.run(use_many) == [[True] * replays.MOST_CALLS + [False] * 2] * 2


def replay_in(executor: Any, parts: int, part: int) -> None:
    """Replay a call with other parts of the numbers."""
    rank = DeviceRank(executor, GpuDouble(executor.rank))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replays, "_PARTS", parts)
        patch.setattr(replays, "_PART", part)
        call = Persistent(rank, DeviceCall("allreduce", "one_shot"))
        for _ in range(5):
            call.use()
            rank.synchronize()


@pytest.mark.parametrize(("parts", "part"), [(1, 0), (2, 1 << 20)])
def test_graphs_whose_numbers_do_not_rise_break_the_rules(parts: int, part: int) -> None:
    with start_ranks(2, "shm") as ranks, pytest.raises(DeviceTrapError, match=r"a flag is set|without being ordered"):
        ranks.run(replay_in, parts, part)


def be_lost(world: un.Communicator, say: Any, calls: int) -> None:
    """Replay until a rank is killed, with many replays on the stream.

    Report the error, the error of the next use, and whether the collectives closed in time.
    """
    gpu = GpuDouble(world.rank)
    rank = DeviceRank(world._executor, gpu)
    persistent = [Persistent(rank, DeviceCall("allreduce", "two_shot", count=5000)) for _ in range(calls)]

    def use_for_ever() -> None:
        for number in itertools.count():
            for plan in persistent:
                plan.use()
            if number == 4:
                say("ready")
            if number % 30 == 0:
                rank.synchronize()

    outcome = error_of(use_for_ever)
    later = error_of(persistent[0].use)
    rank.synchronize()
    say((outcome, later, rank.collectives.close(PATIENCE_S)))


@pytest.mark.parametrize(("size", "victim", "calls"), [(2, 1, 1), (3, 0, 2)])
def test_killed_rank_fails_replays_of_others_without_a_hang(tmp_path: Path, size: int, victim: int, calls: int) -> None:
    with Job(be_lost, size, tmp_path, calls) as job:
        job.hear_all()
        job.signal(victim, signal.SIGKILL)
        for (kind, text), later, has_closed in job.hear_all(but=victim):
            assert kind == "PeerLostError", text
            assert f"rank {victim}" in text
            assert later[0] == "AbortedError"
            assert has_closed
        job.exit_code(victim)
