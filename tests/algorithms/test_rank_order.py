"""Plans in another order of ranks: the verifier proves them, and wrong orders are refused."""

from __future__ import annotations

import random
from functools import partial

import pytest

from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.composition.rank_order import IN_RANK_ORDER, build_in_order
from unisono.algorithms.verifier.verify import verify_plans
from unisono.errors import UsageError

SIZES = (2, 5, 8)
# They keep several vectors of shares, whose blocks no single permutation names.
REFUSED = {("reduce_scatter", "hierarchical"), ("alltoall", "bruck")}


def shuffled(size: int, seed: int = 1) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(seed * size).shuffle(order)
    return tuple(order)


@pytest.mark.parametrize("collective", [name for name in ALGORITHMS if name not in IN_RANK_ORDER])
def test_plans_in_any_order_are_proved(collective: str) -> None:
    for name, algorithm in ALGORITHMS[collective].items():
        for size in SIZES:
            if algorithm.supports(size) or (collective, name) in REFUSED:
                continue
            for varying in (False, True) if algorithm.varying else (False,):
                build = partial(build_in_order, algorithm.build, order=shuffled(size))
                form = {"varying": True} if varying else {}
                plans = [build(size, rank, size - 1, **form) for rank in range(size)]
                verify_plans(plans, 2, in_place=algorithm.in_place)
                assert [plan.rank for plan in plans] == list(range(size))


def test_ring_leads_along_the_order() -> None:
    order = (2, 0, 3, 1)
    build = find("allreduce", "ring").build
    for at, rank in enumerate(order):
        plan = build_in_order(build, 4, rank, order=order)
        (send, *_), *_ = [group.steps for group in plan.groups(0)]
        assert send.peer == order[(at + 1) % 4]


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 1), (0, 1, 3), ("0", 1, 2), 3])
def test_order_that_does_not_name_each_rank_once_is_refused(order: object) -> None:
    with pytest.raises(UsageError, match="does not name each of the ranks 0 to 2 once"):
        build_in_order(find("allreduce", "ring").build, 3, 0, order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "name", "size"),
    [("scan", "linear", 3), ("exscan", "direct", 3), ("alltoall", "bruck", 4)],
)
def test_plan_that_is_only_right_in_the_order_of_ranks_takes_no_other(collective: str, name: str, size: int) -> None:
    with pytest.raises(UsageError, match="its ranks cannot be reordered"):
        build_in_order(find(collective, name).build, size, 0, order=shuffled(size))
