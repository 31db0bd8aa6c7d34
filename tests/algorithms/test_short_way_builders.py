"""The builders that shorten the ways of messages: Swing, Bine trees, aggregated trees, and rings on a torus."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import pytest
from support.covering import pairwise
from support.harness import call_of
from support.ranks import LocalRanks

from unisono.algorithms.builders.swing import swing_distance, swing_partner
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.plan import Plan, Send
from unisono.algorithms.verifier.verify import Report, verify_algorithm, verify_plans
from unisono.errors import UsageError

SHORT = ("swing", "swing_doubling", "bine", "pat", "torus")
BY_SHORT_WAYS = [by_name[name] for by_name in ALGORITHMS.values() for name in SHORT if name in by_name]
ON_GRIDS = [algorithm for algorithm in BY_SHORT_WAYS if "dims" in algorithm.parameters()]
IDS = {"ids": lambda algorithm: f"{algorithm.collective}_{algorithm.name}"}
POWERS = [(2, 2), (4, 8), (8, 4), (2, 4, 4), (1, 8), (16,)]
ANY = [(3, 5), (2, 3, 4), (6, 1), (7, 3)]


def plans_of(algorithm: Algorithm, size: int, root: int = 0, **params: Any) -> list[Plan]:
    return [algorithm.build(size, rank, root, **params) for rank in range(size)]


def messages(plan: Plan) -> list[tuple[int, int, int]]:
    """Return the (lane, receiver, blocks) of each message that a rank sends, in order."""
    return [
        (lane, step.peer, step.src.count)
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, Send)
    ]


def hops(length: int, here: int, there: int) -> int:
    """Return the hops between two places on a ring."""
    return min((here - there) % length, (there - here) % length)


# --- Proofs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ON_GRIDS, **IDS)
@pytest.mark.parametrize("lanes", [1, 2, 3, 6])
def test_algorithm_on_a_grid_is_proved_with_its_declared_cost(algorithm: Algorithm, lanes: int) -> None:
    for dims in (*POWERS, *ANY) if algorithm.name == "torus" else POWERS:
        if algorithm.supports(prod(dims)) is None:
            for form in ({}, {"varying": True}) if algorithm.varying else ({},):
                report = verify_algorithm(algorithm, prod(dims), dims=dims, lanes=lanes, **form)
                assert report.same_bits


def test_scratch_of_bounded_aggregated_trees_is_bounded() -> None:
    for size in range(2, 41):
        for aggregate in (1, 2, 3, 4, 8):
            report: Report = verify_algorithm(find("reduce_scatter", "pat"), size, aggregate=aggregate)
            subtree = 1
            while -(-size // subtree) > aggregate:
                subtree *= 2
            assert report.scratch_live <= -(-size // subtree) * max(1, subtree.bit_length() - 1)


def test_messages_of_bounded_aggregated_trees_are_bounded() -> None:
    for collective in ("allgather", "reduce_scatter"):
        for size in range(1, 41):
            for aggregate in (1, 2, 3, 8, None):
                plan = find(collective, "pat").build(size, size // 2, aggregate=aggregate)
                assert max((blocks for _, _, blocks in messages(plan)), default=0) <= (aggregate or size)


def test_an_algorithm_by_name_only_never_costs_less_than_all_that_the_tuner_may_choose() -> None:
    for algorithm in BY_SHORT_WAYS:
        others = [each for each in ALGORITHMS[algorithm.collective].values() if not each.by_name_only]
        for size in range(1, 65):
            if algorithm.supports(size) is None:
                costs = [each.cost_of(size, {}) for each in others if each.cost and each.supports(size) is None]
                own = algorithm.cost_of(size, {})
                assert own is not None
                assert any(
                    cost.rounds <= own.rounds and cost.sent <= own.sent and cost.reduced <= own.reduced
                    for cost in costs
                    if cost
                ), (algorithm.name, size)


# --- Distances -----------------------------------------------------------------------------------------------------


def test_distances_of_swing_are_those_of_the_paper() -> None:
    assert [swing_distance(step) for step in range(7)] == [1, -1, 3, -5, 11, -21, 43]
    assert all(swing_distance(step) == sum((-2) ** power for power in range(step + 1)) for step in range(20))


def test_partners_of_swing_are_mutual_in_both_directions() -> None:
    for length in (2, 4, 8, 16, 32):
        for step in range(length.bit_length() - 1):
            for direction in (1, -1):
                for place in range(length):
                    partner = swing_partner(length, place, step, direction)
                    assert swing_partner(length, partner, step, direction) == place


@pytest.mark.parametrize("name", ["swing", "bine"])
def test_data_travels_a_third_less_far_than_by_rabenseifner(name: str) -> None:
    def travelled(name: str) -> int:
        """Return the blocks times hops of an allreduce on a ring of 256 ranks."""
        plans = plans_of(find("allreduce", name), 256)
        return sum(blocks * hops(256, plan.rank, peer) for plan in plans for _, peer, blocks in messages(plan))

    assert 0.6 < travelled(name) / travelled("rabenseifner") < 0.75


def test_links_of_bine_trees_are_shorter_than_those_of_binomial_trees() -> None:
    for collective in ("broadcast", "reduce", "gather", "scatter"):
        bine, binomial = (
            sum(
                hops(256, plan.rank, peer)
                for plan in plans_of(find(collective, name), 256)
                for _, peer, _ in messages(plan)
            )
            for name in ("bine", "binomial")
        )
        assert bine < 0.8 * binomial


def test_messages_of_bine_collectives_are_runs_of_blocks() -> None:
    for collective in ("gather", "scatter", "allgather", "reduce_scatter"):
        for plan in plans_of(find(collective, "bine"), 16, root=5 if collective in ("gather", "scatter") else 0):
            steps = [step for group in plan.groups(0) for step in group.steps if isinstance(step, Send)]
            assert plan.permutation == ()
            assert all(step.src.stride == 1 for step in steps)


def test_longest_messages_of_aggregated_trees_go_to_neighbours() -> None:
    for collective in ("allgather", "reduce_scatter"):
        sent = messages(find(collective, "pat").build(64, 0))
        distances = [hops(64, 0, peer) for _, peer, _ in sorted(sent, key=lambda message: message[2])]
        assert distances == [32, 16, 8, 4, 2, 1]


@pytest.mark.parametrize("algorithm", ON_GRIDS, **IDS)
def test_lanes_use_all_directions_of_a_torus_at_once(algorithm: Algorithm) -> None:
    firsts = Counter(
        next(step.peer for group in plan.groups(lane) for step in group.steps if isinstance(step, Send))
        for plan in [algorithm.build(64, 9, dims=(8, 8), lanes=4)]
        for lane in range(4)
        if algorithm.collective != "allgather" and algorithm.name != "swing_doubling"
    )
    if firsts:
        assert firsts == Counter({8: 1, 10: 1, 1: 1, 17: 1})


def test_torus_sends_only_to_neighbours() -> None:
    for collective in ("allreduce", "reduce_scatter", "allgather"):
        peers = {peer for _, peer, _ in messages(find(collective, "torus").build(24, 0, dims=(4, 6), lanes=4))}
        assert peers == {1, 3, 4, 20}


# --- Bad arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ON_GRIDS, **IDS)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dims": (4, 4)}, r"dims \(4, 4\) make a grid of 16 places, but there are 8 ranks"),
        ({"dims": 8}, "dims is 8, but must be a tuple of lengths"),
        ({"dims": (-2, -4)}, "must be a tuple of lengths"),
        ({"dims": (2.0, 4)}, "must be a tuple of lengths"),
        ({"dims": (2, 4), "lanes": 0}, "lanes is 0, but must be at least 1"),
    ],
)
def test_grid_that_does_not_fit_the_ranks_is_refused(
    algorithm: Algorithm, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        algorithm.build(8, 0, **params)


@pytest.mark.parametrize("algorithm", [each for each in ON_GRIDS if each.name != "torus"], **IDS)
def test_swing_refuses_lengths_that_are_no_powers_of_two(algorithm: Algorithm) -> None:
    with pytest.raises(UsageError, match=r"dims \(3, 4\): Swing needs lengths that are powers of two"):
        algorithm.build(12, 0, dims=(3, 4))


@pytest.mark.parametrize("collective", ["allgather", "reduce_scatter"])
def test_aggregated_trees_refuse_messages_of_no_blocks(collective: str) -> None:
    with pytest.raises(UsageError, match="aggregate is 0, but must be at least 1"):
        find(collective, "pat").build(8, 0, aggregate=0)


# --- Results -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["swing", "swing_doubling", "torus"])
def test_allreduce_on_a_grid_gives_the_sum(name: str) -> None:
    for dims, lanes in pairwise([(2, 4), (4, 2), (2, 2, 2)], [1, 2, 4]):
        build = find("allreduce", name).build
        results = LocalRanks(8).run(allreduce_of_ranks, [build(8, rank, dims=dims, lanes=lanes) for rank in range(8)])
        assert results == [[36 + 8 * element for element in range(21)]] * 8


def allreduce_of_ranks(executor: Any, plans: list[Plan]) -> list[int]:
    """Return the sum of the vectors (rank + 1) + 0, 1, … of all ranks."""
    import numpy as np
    from support.deadlines import DEADLINE_S

    vector = np.arange(21) + executor.rank + 1
    executor.start(call_of(plans[executor.rank], "int64", (21, 21), op="sum"), vector, vector).wait(DEADLINE_S)
    return [int(element) for element in vector]


def test_plans_for_equal_grids_are_equal_to_those_for_a_ring_where_a_grid_is_one() -> None:
    for collective in ("allreduce", "reduce_scatter", "allgather"):
        swing = find(collective, "swing")
        assert verify_plans(plans_of(swing, 8, dims=(8,))) == verify_plans(plans_of(swing, 8))
