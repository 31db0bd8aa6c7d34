"""Properties that relate algorithms, or the plans of all ranks: reversal, composition, matching messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from support.builder_calls import ROOTED, assert_right, call_on_integers
from support.deadlines import DEADLINE_S
from support.harness import call_of
from support.ranks import LocalRanks

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.binding import Shape, bounds, pieces, split
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    peers,
    scratch_block,
    scratch_like,
)
from unisono.algorithms.verifier.verify import verify_plans

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
MESSAGES = [algorithm for algorithm in ALL if not algorithm.mapped]
ALLGATHERS = list(ALGORITHMS["allgather"])
# The parameters of builders that a test chooses, with values that differ in their effect.
CHOICES = {
    **{"radix": (2, 3, 4, 7), "window": (1, 3, 32), "lanes": (1, 2, 3, 5), "aggregate": (1, 2, 5, None)},
    "blocks": (1, 2, 8, 30),
}
bounded = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def plans(draw: st.DrawFn, algorithms: Sequence[Algorithm] = MESSAGES, most: int = 40) -> tuple[Algorithm, list[Plan]]:
    """Draw an algorithm, and its plans for a random number of ranks, root, parameters and form."""
    algorithm = draw(st.sampled_from(algorithms))
    size = draw(st.sampled_from([size for size in range(1, most + 1) if algorithm.supports(size) is None]))
    root = draw(st.integers(0, size - 1)) if algorithm.collective in ROOTED else 0
    chosen = [name for name in signature(algorithm.build).parameters if name in CHOICES]
    params: dict[str, Any] = {name: draw(st.sampled_from(CHOICES[name])) for name in chosen}
    if algorithm.varying and draw(st.booleans()):
        params["varying"] = True
    return algorithm, [algorithm.build(size, rank, root, **params) for rank in range(size)]


# Properties of every algorithm.


@bounded
@given(drawn=plans(ALL), segments=st.sampled_from([1, 1, 2, 5]))
def test_verifier_proves_drawn_plans_of_every_algorithm(drawn: tuple[Algorithm, list[Plan]], segments: int) -> None:
    algorithm, results = drawn
    few = segments if len(results) <= 24 else 1
    report = verify_plans(results, few, in_place=algorithm.in_place, commutative=algorithm.commutative_only)
    assert report.same_bits or not algorithm.same_bits


@bounded
@given(
    algorithm=st.sampled_from(MESSAGES),
    size=st.integers(1, 12),
    root=st.integers(0, 11),
    segments_and_elements=st.tuples(st.integers(1, 4), st.integers(0, 40)),
    form=st.tuples(st.booleans(), st.booleans()),
)
def test_algorithm_gives_right_result_for_any_number_of_elements(
    algorithm: Algorithm, size: int, root: int, segments_and_elements: tuple[int, int], form: tuple[bool, bool]
) -> None:
    assume(algorithm.supports(size) is None)
    varying, in_place = form[0] and algorithm.varying, form[1] and algorithm.in_place
    call = call_on_integers(algorithm, size, root % size, *segments_and_elements, varying=varying, in_place=in_place)
    assert_right(LocalRanks(size).run(call.run))


# The plans of all ranks agree.


@bounded
@given(drawn=plans())
def test_every_send_has_a_receive_in_the_same_lane_and_group_of_the_peer(drawn: tuple[Algorithm, list[Plan]]) -> None:
    _, results = drawn
    sent = {place: blocks for plan in results for place, blocks in messages(plan, Send).items()}
    received = {
        (sender, receiver, lane, group): blocks
        for plan in results
        for (receiver, sender, lane, group), blocks in messages(plan, Recv, RecvReduce).items()
    }
    assert sent == received
    for plan in results:
        of_rank = {(lane, peer) for rank, peer, lane, _ in [*messages(plan, Send), *messages(plan, Recv, RecvReduce)]}
        assert peers(plan) == sorted(of_rank)


def messages(plan: Plan, *kinds: type) -> dict[tuple[int, int, int, int], int]:
    """Return the number of blocks of each message of a kind, by (rank, peer, lane, group as run)."""
    return {
        (plan.rank, step.peer, lane, number): (step.src if isinstance(step, Send) else step.dst).count
        for lane in range(len(plan.lanes))
        for number, group in enumerate(plan.groups(lane))
        for step in group.steps
        if isinstance(step, kinds)
    }


# An algorithm is the reversal of another one, or two others in sequence.


@pytest.mark.parametrize(
    ("name", "params"), [("binomial", {}), *(("knomial", {"radix": radix}) for radix in (2, 3, 4, 7)), ("binary", {})]
)
def test_tree_broadcast_run_backwards_is_a_reduce(name: str, params: dict[str, int]) -> None:
    broadcast = find("broadcast", name)
    for size in range(1, 25):
        for root in {0, size // 3, size - 1}:
            broadcasts = [broadcast.build(size, rank, root, **params) for rank in range(size)]
            last = max(plan.group_count(0) for plan in broadcasts)
            report = verify_plans([backwards(plan, last) for plan in broadcasts])
            assert (report.rounds, report.messages) == (broadcast.cost_of(size, params).rounds, size - 1)


@pytest.mark.parametrize(("name", "params"), [("binomial", {}), ("knomial", {"radix": 3}), ("knomial", {"radix": 4})])
def test_tree_reduce_costs_as_much_as_its_broadcast(name: str, params: dict[str, int]) -> None:
    for size in range(1, 40):
        up, down = (find(collective, name).cost_of(size, params) for collective in ("reduce", "broadcast"))
        assert (up.rounds, up.reduced) == (down.rounds, down.sent)


def backwards(broadcast: Plan, groups: int) -> Plan:
    """Return the reversed plan: a reduce that receives where `broadcast` sends, and sends where it receives.

    The broadcast ends after `groups` groups. Each becomes two groups, and the second one combines the received blocks.
    The partial result of a rank is in INPUT before the first combination, and afterwards in the last block of SCRATCH.
    """
    reversed_ = list(reversed(list(broadcast.groups(0))))
    stages = max(sum(isinstance(step, Send) for step in group.steps) for group in reversed_) if reversed_ else 0
    own = input_block()
    lane = [Group(())] * 2 * (groups - len(reversed_))
    for group in reversed_:
        sends = [Send(step.peer, own) for step in group.steps if isinstance(step, Recv)]
        peers_below = [step.peer for step in group.steps if isinstance(step, Send)]
        arriving: list[Step] = [Recv(peer, scratch_block(stage)) for stage, peer in enumerate(peers_below)]
        operands = (own, *(scratch_block(stage) for stage in range(len(peers_below))))
        combine: tuple[Step, ...] = (Reduce(scratch_block(stages), operands),) if peers_below else ()
        own = scratch_block(stages) if peers_below else own
        lane += [Group((*sends, *arriving)), Group(combine)]
    is_root = broadcast.rank == broadcast.root
    finish = Group((Copy(output_block(), own, lower=True),) if is_root else ())
    return replace(
        broadcast,
        collective="reduce",
        input=even(1),
        output=even(1) if is_root else Partition(0),
        scratch=scratch_like(Buffer.INPUT, even(1), copies=stages + 1),
        lanes=((*lane, finish),),
    )


@pytest.mark.parametrize("gathering", ALLGATHERS)
@pytest.mark.parametrize("reducing", ALGORITHMS["reduce_scatter"])
def test_reduce_scatter_followed_by_allgather_equals_allreduce(reducing: str, gathering: str) -> None:
    for size in (1, 2, 4, 6):
        if find("allgather", gathering).supports(size) is find("reduce_scatter", reducing).supports(size) is None:
            expected = sum(np.arange(21) * (rank + 1) for rank in range(size)).tolist()
            assert LocalRanks(size).run(reduce_scatter_and_allgather, reducing, gathering) == [expected] * size


def reduce_scatter_and_allgather(executor: Any, reducing: str, gathering: str) -> list[int]:
    """Reduce-scatter into the rank's share of the vector, and then allgather the vector in place; return it."""
    rank, size = executor.rank, executor.size
    vector, counts = np.arange(21) * (rank + 1), [split(21, size, part)[1] for part in range(size)]
    own = vector[sum(counts[:rank]) :][: counts[rank]]
    scatter = find("reduce_scatter", reducing).build(size, rank)
    executor.start(call_of(scatter, "int64", (21, own.size), op="sum"), vector, own).wait(DEADLINE_S)
    gather = find("allgather", gathering).build(size, rank, varying=True)
    call = call_of(gather, "int64", (own.size, 21), counts={Counts.RANKS: counts})
    executor.start(call, own, vector).wait(DEADLINE_S)
    return [int(element) for element in vector]


@pytest.mark.parametrize(
    ("reducing", "gathering", "whole"), [("ring", "ring", "ring"), ("circulant", "circulant", "circulant")]
)
def test_reduce_scatter_plus_allgather_cost_as_much_as_the_allreduce(reducing: str, gathering: str, whole: str) -> None:
    for size in (1, 2, 5, 8, 13, 24):
        first, second, both = (
            find(collective, name).cost(size)
            for collective, name in (("reduce_scatter", reducing), ("allgather", gathering), ("allreduce", whole))
        )
        assert first.rounds + second.rounds == both.rounds
        assert (first.sent + second.sent, first.reduced) == (pytest.approx(both.sent), pytest.approx(both.reduced))


# Blocks cut vectors.


@bounded
@given(drawn=plans(most=24), elements=st.integers(0, 60), segments=st.integers(1, 6))
def test_segments_of_all_blocks_cover_each_element_once(
    drawn: tuple[Algorithm, list[Plan]], elements: int, segments: int
) -> None:
    _, result = drawn
    plan = result[-1]
    differing = [(3 * rank + elements) % 4 for rank in range(plan.size)]
    counts: dict[Counts, Sequence[int]] = dict.fromkeys(Counts, differing)
    for buffer in Buffer:
        total = plan.partition(buffer).blocks
        blocks = bounds(plan, buffer, Shape((elements, elements), counts))
        span = Span(buffer, count=total)
        covered = [
            element
            for segment in range(segments)
            for offset, length in pieces(plan, span, blocks, segment, segments)
            for element in range(offset, offset + length)
        ]
        assert sorted(covered) == list(range(sum(length for _, length in blocks)))


@given(length=st.integers(0, 1 << 40), parts=st.integers(1, 50))
def test_split_gives_adjacent_near_equal_parts(length: int, parts: int) -> None:
    cut = [split(length, parts, part) for part in range(parts)]
    assert [offset for offset, _ in cut] == [sum(size for _, size in cut[:part]) for part in range(parts)]
    assert sum(size for _, size in cut) == length
    assert max(size for _, size in cut) - min(size for _, size in cut) <= 1
