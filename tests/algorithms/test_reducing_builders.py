"""The builders of the collectives that reduce: the size of their plans, their proofs, messages and results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce as fold_left
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from support.builder_calls import REDUCING, ROOTED, call_on_integers, check_all
from support.covering import pairwise
from support.deadlines import DEADLINE_S
from support.harness import call_of
from support.ranks import LocalRanks

from unisono.algorithms.builders.folding import fold
from unisono.algorithms.builders.in_order_tree import in_order_height, in_order_node, in_order_top
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.encode import encode
from unisono.algorithms.ir.plan import Plan, Send, peers
from unisono.algorithms.verifier.verify import verify_plans
from unisono.transports.message.faulty import Faults

ALL = [algorithm for collective in REDUCING for algorithm in ALGORITHMS[collective].values()]


def cases(algorithms: Sequence[Algorithm]) -> list[Any]:
    return [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in algorithms]


EVERY_ALGORITHM = cases(ALL)
EVERY_REDUCE_SCATTER = cases([*ALGORITHMS["reduce_scatter"].values()])
PARAMETERS = [
    ("allreduce", "recursive_multiplying", "radix", 2),
    ("allreduce", "recursive_multiplying", "radix", 3),
    ("allreduce", "recursive_multiplying", "radix", 7),
    ("allreduce", "multi_lane_ring", "lanes", 1),
    ("allreduce", "multi_lane_ring", "lanes", 3),
    ("allreduce", "direct", "window", 1),
    ("allreduce", "direct", "window", 5),
    ("allreduce", "balanced_tree", "window", 5),
    ("allreduce", "all_pairs", "window", 5),
    ("reduce", "all_pairs", "window", 5),
    ("reduce", "knomial", "radix", 2),
    ("reduce", "knomial", "radix", 3),
    ("reduce", "knomial", "radix", 7),
    *(("reduce", "circulant_blocks", "blocks", blocks) for blocks in (1, 2, 5, 21)),
    ("allreduce", "swing", "lanes", 2),
    ("allreduce", "swing", "lanes", 3),
    ("allreduce", "swing_doubling", "lanes", 3),
    ("reduce_scatter", "pat", "aggregate", 1),
    ("reduce_scatter", "pat", "aggregate", 3),
    ("reduce_scatter", "pat", "aggregate", 8),
    ("reduce_scatter", "direct", "window", 5),
    ("reduce_scatter", "balanced_tree", "window", 5),
    ("scan", "direct", "window", 5),
    ("exscan", "direct", "window", 1),
]


def plans_of(algorithm: Algorithm, size: int, root: int = 0, **params: Any) -> list[Plan]:
    return [algorithm.build(size, rank, root, **params) for rank in range(size)]


def links(plans: Sequence[Plan]) -> Counter[tuple[int, int]]:
    """Return how often each (sender, receiver) exchanges a message."""
    return Counter(
        (plan.rank, step.peer)
        for plan in plans
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, Send)
    )


# Proofs with other parameters than in `test_verifier_sizes`.


@pytest.mark.parametrize(("collective", "name", "parameter", "value"), PARAMETERS)
def test_reducing_algorithm_is_proved_with_declared_cost_for_any_parameter(
    collective: str, name: str, parameter: str, value: int
) -> None:
    algorithm, params = find(collective, name), {parameter: value}
    for size in (*range(1, 18), 27, 28):
        report = verify_plans(plans_of(algorithm, size, **params), commutative=algorithm.commutative_only)
        cost = algorithm.cost(size, **params)
        assert (report.rounds, float(report.sent), float(report.reduced)) == (cost.rounds, cost.sent, cost.reduced)
        assert report.same_bits


# The size and the messages of the plans.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_plans_stay_small_at_any_number_of_ranks(algorithm: Algorithm) -> None:
    size = 16384
    # A plan that combines all contributions at once has an operand for each of them.
    limit = 100 * 1024 if algorithm.order != "at_once" else 64 * size + 100 * 1024
    if algorithm.name == "torus":
        limit *= 2  # it has groups for the steps along each of its dimensions
    for rank in (0, 1, size // 2, size - 1):
        plan = algorithm.build(size, rank, root=5)
        assert 8 * (len(encode(plan)) - len(plan.permutation)) < limit


@pytest.mark.parametrize(
    ("name", "params", "is_for_any_root"),
    [
        ("binomial", {}, False),
        *(("knomial", {"radix": radix}, False) for radix in (2, 3, 4, 7)),
        ("chain", {}, True),
        ("double_binary_tree", {}, True),
    ],
)
def test_reduce_uses_the_links_of_its_broadcast_backwards(
    name: str, params: dict[str, int], is_for_any_root: bool
) -> None:
    # A reduce along a k-nomial tree keeps the order of ranks for any root. So it reverses the broadcast only for rank
    # 0.
    for size in (1, 2, 5, 8, 13, 27):
        for root in range(size) if is_for_any_root else (0,):
            reduce, broadcast = (
                links(plans_of(find(collective, name), size, root, **params)) for collective in ("reduce", "broadcast")
            )
            assert reduce == Counter({(receiver, sender): times for (sender, receiver), times in broadcast.items()})


def test_binomial_reduce_equals_knomial_reduce_of_radix_two() -> None:
    for size in range(1, 20):
        for root in range(size):
            binomial, knomial = (find("reduce", name) for name in ("binomial", "knomial"))
            assert links(plans_of(binomial, size, root)) == links(plans_of(knomial, size, root, radix=2))


def test_rabenseifner_reduce_and_allreduce_use_the_same_pairs() -> None:
    for size in (2, 4, 8, 16):
        for root in range(size):
            reduce, allreduce = (
                plans_of(find(collective, "rabenseifner"), size, root) for collective in ("reduce", "allreduce")
            )
            rounds = size.bit_length() - 1
            halving = Counter({pair: times // 2 for pair, times in links(allreduce).items()})
            gathered = links(reduce) - halving
            assert all(plan.group_count(0) <= 2 * rounds for plan in reduce)
            assert halving - links(reduce) == Counter()
            assert sorted(sender for sender, _ in gathered) == [rank for rank in range(size) if rank != root]
            assert gathered.keys() <= halving.keys()


def test_circulant_allreduce_is_its_reduce_scatter_and_allgather() -> None:
    for size in (1, 2, 5, 8, 13):
        whole, *halves = (
            links(plans_of(find(collective, "circulant"), size))
            for collective in ("allreduce", "reduce_scatter", "allgather")
        )
        assert whole == halves[0] + halves[1]


def test_every_rank_sends_in_every_group_of_circulant_allreduce() -> None:
    for size in range(2, 40):
        for rank in range(size):
            groups = find("allreduce", "circulant").build(size, rank).groups(0)
            assert all(any(isinstance(step, Send) for step in group.steps) for group in groups)


def test_bidirectional_ring_uses_both_directions_to_both_neighbours() -> None:
    plans = plans_of(find("allreduce", "bidirectional_ring"), 6)
    assert peers(plans[2]) == [(0, 1), (0, 3), (1, 1), (1, 3)]
    assert set(links(plans).values()) == {10}


def test_every_rank_but_the_root_sends_once_in_a_tree_reduce() -> None:
    for name in ("binomial", "knomial", "binary", "chain"):
        for size in range(1, 20):
            for root in (0, size // 2, size - 1):
                sent = Counter(sender for sender, _ in links(plans_of(find("reduce", name), size, root)).elements())
                assert sent == Counter(rank for rank in range(size) if rank != root)


def test_in_order_tree_has_one_child_per_side_and_declared_depth() -> None:
    for size in range(1, 70):
        nodes = [in_order_node(size, position) for position in range(size)]
        assert max(node.depth for node in nodes) == in_order_height(size)
        assert [position for position in range(size) if not nodes[position].links.above] == [in_order_top(size)]
        for position, node in enumerate(nodes):
            assert len(node.links.below) == len({below > position for below in node.links.below})
            for below in node.links.below:
                assert nodes[below].links.above == (position,)
                assert nodes[below].depth == node.depth + 1


def test_folded_runs_are_consecutive_and_cover_all_ranks() -> None:
    for radix in (2, 3, 5):
        for size in range(1, 40):
            folding = fold(size, radix, root=size // 2)
            runs = [folding.run(position) for position in range(folding.positions)]
            assert [rank for run in runs for rank in run] == [*range(size)]
            assert all(folding.position(rank) == position for position, run in enumerate(runs) for rank in run)
            assert folding.leads(size // 2)
            assert folding.positions <= size < folding.positions * radix


# Results.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_the_generic_executor_reduces_in_every_form(algorithm: Algorithm) -> None:
    varying = (False, True) if algorithm.varying else (False,)
    for size in [size for size in range(1, 9) if algorithm.supports(size) is None]:
        roots = {size // 2, size - 1} if algorithm.collective in ROOTED else {0}
        forms = pairwise(sorted(roots), [(23, 1), (3, 1), (64, 3), (23, 2)], varying, (False, True))
        calls = [
            call_on_integers(algorithm, size, root, segments, elements, varying=differs, in_place=shares_memory)
            for root, (elements, segments), differs, shares_memory in forms
        ]
        check_all(LocalRanks(size), calls)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_generic_executor_reduces_late_and_reordered_messages(algorithm: Algorithm) -> None:
    for seed, size in enumerate(size for size in (3, 6, 8) if algorithm.supports(size) is None):
        check_all(LocalRanks(size, faults=Faults(seed, delay=0.5)), [call_on_integers(algorithm, size, 1, 3, 30)])


# Rounding follows the declared order.


def ascending(values: list[Any]) -> Any:
    return fold_left(np.add, values)


def descending(values: list[Any]) -> Any:
    return fold_left(lambda total, value: value + total, reversed(values))


def balanced(values: list[Any]) -> Any:
    """Return the sum in the canonical order: neighbours in pairs, then neighbouring pairs, and so on."""
    while len(values) > 1:
        values = [fold_left(np.add, values[index : index + 2]) for index in range(0, len(values), 2)]
    return values[0]


@pytest.mark.parametrize(
    ("collective", "name", "in_order"),
    [
        ("allreduce", "balanced_tree", balanced),
        ("reduce", "binomial", balanced),
        ("allreduce", "chain", descending),
        ("reduce", "chain", descending),
        ("scan", "linear", ascending),
    ],
)
def test_floating_point_sums_are_rounded_in_the_order_of_the_algorithm(
    collective: str, name: str, in_order: Callable[[list[Any]], Any]
) -> None:
    for size in range(1, 12):
        values = list(np.random.default_rng(size).standard_normal((size, 50)).astype(np.float32))

        def last_result(executor: Any, values: list[Any] = values) -> Any:
            target = np.zeros(50, np.float32)
            plan = find(collective, name).build(len(values), executor.rank)
            executor.start(call_of(plan, "float32", (50, 50), op="sum"), values[executor.rank], target).wait(DEADLINE_S)
            return target

        results = LocalRanks(size).run(last_result)
        assert results[-1 if collective == "scan" else 0].tolist() == in_order(values).tolist()


@pytest.mark.parametrize("op", ["sum", "avg", "prod"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_algorithms_of_the_canonical_order_give_the_same_bits(dtype: str, op: str) -> None:
    canonical = [
        candidate
        for candidate in ALL
        if candidate.order == "canonical" and CONTRACTS[candidate.collective].output is Cut.VECTOR
    ]
    assert len(canonical) > 1
    for size in (2, 3, 5, 7, 8, 13):
        values = np.random.default_rng(size).standard_normal((size, 40)).astype(dtype)

        def result(executor: Any, algorithm: Algorithm, values: Any = values) -> bytes:
            target = np.zeros(40, dtype)
            call = call_of(algorithm.build(len(values), executor.rank), dtype, (40, 40), op=op, segments=2)
            executor.start(call, values[executor.rank], target).wait(DEADLINE_S)
            return target.tobytes()

        assert len({LocalRanks(size).run(result, algorithm)[0] for algorithm in canonical}) == 1
