"""The declared order in which algorithms combine contributions equals the order that is derived from their plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.plan_edits import changed, flat_plans, groups_of, step_at, with_groups, with_step

from unisono.algorithms.catalogue.algorithm import Algorithm, Order
from unisono.algorithms.catalogue.registration import prove
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Copy, Group, Plan, Reduce
from unisono.algorithms.verifier.combine_order import Expressions, check_order, combinations
from unisono.errors import PlanError

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


def cases(*orders: Order) -> list[Any]:
    return [
        pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}")
        for algorithm in ALL
        if algorithm.order in orders and CONTRACTS[algorithm.collective].reduces
    ]


def keeps(algorithm: Algorithm, order: Order, most: int) -> bool:
    """Return whether the algorithm keeps an order of combination for every number of ranks up to `MOST_RANKS`."""
    try:
        for size in (size for size in range(1, most + 1) if algorithm.supports(size) is None):
            check_order(replace(algorithm, order=order), size)
    except PlanError:
        return False
    return True


def lowered_later(plan: Plan) -> Plan:
    """Return the plan with its lowered combination split into a combination and a lowering copy."""
    groups: list[Group] = []
    for group in groups_of(plan):
        step = group.steps[0]
        is_last = isinstance(step, Reduce) and step.lower
        groups.append(Group((replace(step, lower=False),)) if is_last else group)
        groups += [Group((Copy(step.dst, step.dst, lower=True),))] if is_last else []
    return with_groups(plan, groups)


def test_only_reducing_algorithms_declare_an_order() -> None:
    assert {
        algorithm.name for algorithm in ALL if (algorithm.order == "none") == CONTRACTS[algorithm.collective].reduces
    } == set()


@pytest.mark.parametrize("algorithm", cases("rank", "at_once", "canonical"))
def test_every_algorithm_combines_in_the_order_that_it_declares(algorithm: Algorithm) -> None:
    for size in (*range(1, 10), 13, 16, 17, 31, 32):
        check_order(algorithm, size)


@pytest.mark.parametrize("algorithm", cases("fixed"))
def test_algorithm_with_fixed_order_keeps_no_stricter_order(algorithm: Algorithm) -> None:
    for better in ("rank", "at_once", "canonical"):
        assert not keeps(algorithm, better, 9)


@pytest.mark.parametrize(
    ("collective", "name", "ring_of_block"),
    [
        ("allreduce", "ring", lambda block, _: (block, 1)),
        ("allreduce", "multi_lane_ring", lambda block, _: (block // 2, 1)),
        ("allreduce", "bidirectional_ring", lambda block, _: (block // 2, -1 if block % 2 else 1)),
        ("reduce_scatter", "ring", lambda _, rank: (rank + 1, 1)),
    ],
)
def test_ring_combines_a_block_in_the_order_in_which_it_travels(
    collective: str, name: str, ring_of_block: Callable[[int, int], tuple[int, int]]
) -> None:
    for size in (2, 3, 5, 8):
        plans = [find(collective, name).build(size, rank, 0) for rank in range(size)]
        for rank, blocks in enumerate(combinations(plans)):
            for block, combination in blocks.items():
                first, direction = ring_of_block(block, rank)
                travelled = [(first + direction * hop) % size for hop in range(size)]
                expressions = Expressions()
                assert combination == expressions.text(expressions.in_sequence(travelled)), (size, rank, block)


@pytest.mark.parametrize(
    ("order", "collectives"),
    [
        ("canonical", {"allreduce", "reduce", "reduce_scatter"}),
        ("at_once", {"allreduce", "reduce", "reduce_scatter", "scan", "exscan"}),
        ("rank", {"scan", "exscan"}),
    ],
)
def test_expected_collectives_have_an_algorithm_for_each_order(order: Order, collectives: set[str]) -> None:
    assert {
        algorithm.collective for algorithm in ALL if algorithm.order == order and not algorithm.mapped
    } == collectives


def test_canonical_order_is_one_balanced_tree() -> None:
    expressions = Expressions()
    assert expressions.text(expressions.in_pairs(range(7))) == "((0∘1)∘(2∘3))∘((4∘5)∘6)"
    assert expressions.in_pairs(range(6)) != expressions.in_sequence(range(6))
    assert expressions.in_pairs([3]) == 3


@pytest.mark.parametrize("other", ["rank", "canonical"])
def test_order_check_distinguishes_at_once_from_stepwise_combining(other: Order) -> None:
    direct = find("allreduce", "direct")
    check_order(direct, 3)
    with pytest.raises(
        PlanError, match=rf"rank 0: block 0 of OUTPUT is 0∘1∘2, but the declared order '{other}' demands \(0∘1\)∘2"
    ):
        check_order(replace(direct, order=other), 3)


@pytest.mark.parametrize("name", ["direct", "balanced_tree"])
def test_order_check_refuses_lowering_after_the_last_combination(name: str) -> None:
    plans = [lowered_later(plan) for plan in flat_plans(find("allreduce", name), 2)]
    with pytest.raises(
        PlanError, match=r"rank 0: block 0 of OUTPUT is lowered \(0∘1\), but the declared order .* demands 0∘1"
    ):
        check_order(replace(find("allreduce", name), build=lambda size, rank, root: plans[rank]), 2)


def test_declared_order_that_holds_for_powers_of_two_only_is_refused() -> None:
    doubling = replace(find("allreduce", "recursive_doubling"), order="canonical")
    for size in (1, 2, 4, 8, 16):
        check_order(doubling, size)
    message = (
        r"allreduce recursive_doubling on 5 ranks: rank 0: .* is \(\(0∘1\)∘2\)∘\(3∘4\), but .* \(\(0∘1\)∘\(2∘3\)\)∘4"
    )
    with pytest.raises(PlanError, match=message):
        prove(doubling, 5)


def test_declared_order_that_holds_for_one_root_only_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 1: block 0 of OUTPUT is 1∘0"):
        check_order(replace(find("reduce", "chain"), order="rank"), 2)


def test_order_check_names_one_rank_that_combines_in_another_order() -> None:
    direct = find("allreduce", "direct")
    plans = flat_plans(direct, 4)
    last = step_at(plans, 2, 1, 0)
    assert isinstance(last, Reduce)
    turned = replace(last, sources=(last.sources[1], last.sources[0], *last.sources[2:]))
    plans = changed(plans, 2, lambda plan: with_step(plan, 1, 0, turned))
    with pytest.raises(PlanError, match=r"rank 2: block 0 of OUTPUT is 1∘0∘2∘3"):
        check_order(replace(direct, build=lambda size, rank, root: plans[rank]), 4)
