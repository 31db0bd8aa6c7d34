"""The builders of the collectives that only move data: their proofs, messages and results."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.builder_calls import ROOTED, call_on_integers, check_all
from support.covering import pairwise
from support.ranks import LocalRanks

from unisono.algorithms.builders import block_schedule
from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.encode import encode
from unisono.algorithms.ir.plan import Plan, Recv, Send
from unisono.algorithms.verifier.verify import verify_plans
from unisono.transports.message.faulty import Faults

MOVING = ("broadcast", "gather", "scatter", "allgather", "alltoall", "barrier")
ALL = [algorithm for collective in MOVING for algorithm in ALGORITHMS[collective].values()]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL]
PARAMETERS = [
    ("broadcast", "knomial", "radix", 3),
    ("broadcast", "knomial", "radix", 7),
    *(("broadcast", "circulant_blocks", "blocks", blocks) for blocks in (1, 2, 5, 21)),
    ("allgather", "bruck", "radix", 3),
    ("allgather", "bruck", "radix", 5),
    ("allgather", "direct", "window", 1),
    ("allgather", "direct", "window", 3),
    ("allgather", "pat", "aggregate", 1),
    ("allgather", "pat", "aggregate", 3),
    ("allgather", "pat", "aggregate", 8),
    ("gather", "linear", "window", 3),
    ("scatter", "linear", "window", 3),
    ("alltoall", "direct", "window", 3),
    ("alltoall", "bruck", "radix", 3),
    ("alltoall", "bruck", "radix", 7),
    ("barrier", "dissemination", "radix", 3),
    ("barrier", "tree", "radix", 4),
]


def plans_of(algorithm: Algorithm, size: int, root: int = 0, **params: Any) -> list[Plan]:
    return [algorithm.build(size, rank, root, **params) for rank in range(size)]


def sizes_of(algorithm: Algorithm, sizes: range) -> list[int]:
    return [size for size in sizes if algorithm.supports(size) is None]


# Proofs with other parameters than in `test_verifier_sizes`.


@pytest.mark.parametrize(("collective", "name", "parameter", "value"), PARAMETERS)
def test_moving_algorithm_is_proved_with_declared_cost_for_any_parameter(
    collective: str, name: str, parameter: str, value: int
) -> None:
    algorithm, params = find(collective, name), {parameter: value}
    for size in (*range(1, 18), 27, 28):
        report = verify_plans(plans_of(algorithm, size, size - 1, **params), in_place=algorithm.in_place)
        cost = algorithm.cost(size, **params)
        assert (report.rounds, float(report.sent)) == (cost.rounds, cost.sent), size


# The messages of the plans.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_plans_stay_small_at_any_number_of_ranks(algorithm: Algorithm) -> None:
    size = 16384
    for rank in (0, 1, size // 2, size - 1):
        if algorithm.supports(size) is None:
            plan = algorithm.build(size, rank, root=5)
            assert 8 * (len(encode(plan)) - len(plan.permutation)) < 100 * 1024


def test_algorithm_is_varying_exactly_if_its_builder_takes_varying() -> None:
    for algorithm in (algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()):
        assert algorithm.varying == ("varying" in inspect.signature(algorithm.build).parameters), algorithm.name


def test_binomial_broadcast_equals_knomial_broadcast_of_radix_two() -> None:
    for rank in range(6):
        binomial, knomial = (find("broadcast", name) for name in ("binomial", "knomial"))
        assert binomial.build(6, rank, 1).lanes == knomial.build(6, rank, 1, radix=2).lanes


def test_rank_of_double_binary_tree_is_interior_in_one_tree_at_most() -> None:
    for size in range(2, 40):
        for rank in range(1, size):
            plan = find("broadcast", "double_binary_tree").build(size, rank)
            steps = [(lane, step) for lane in (0, 1) for group in plan.groups(lane) for step in group.steps]
            sending = [lane for lane, step in steps if isinstance(step, Send)]
            assert len(set(sending)) <= 1
            assert len(sending) <= 2


@pytest.mark.parametrize("size", [*range(2, 80), 127, 128, 129, 500])
def test_block_schedules_give_each_rank_every_block_from_a_rank_that_has_it(size: int) -> None:
    skips = block_schedule.skips(size)[:-1]
    phase = len(skips)
    assert phase == (size - 1).bit_length()
    received = [block_schedule.receive_schedule(size, rank) for rank in range(size)]
    for rank in range(1, size):
        base = block_schedule.base_block(size, rank)
        assert {block % phase for block in received[rank]} == set(range(phase))
        assert sorted(received[rank])[:-1] == sorted({*range(-phase, 0)} - {base - phase})
        for number, skip in enumerate(skips):
            sender = (rank - skip) % size
            before = block_schedule.base_block(size, sender) - phase
            has = {number} if sender == 0 else {before, *received[sender][:number]}
            block = received[rank][number]
            assert (block in has) or (sender == 0 and block < 0)
            assert sender == 0 or block_schedule.send_schedule(size, sender)[number] == block


def test_blocks_arrive_as_the_file_of_their_builder_shows() -> None:
    algorithm = find("broadcast", "circulant_blocks")
    arriving = [
        [[step.dst.start for step in group.steps if isinstance(step, Recv)] for group in plan.groups(0)]
        for plan in plans_of(algorithm, 5, blocks=3)
    ]
    assert arriving == [
        [[], [], [], [], []],
        [[], [], [2], [1], [0]],
        [[0], [], [], [2], [1]],
        [[], [1], [0], [], [2]],
        [[], [], [1], [0], [2]],
    ]


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_plans_of_more_blocks_only_repeat_more_often(collective: str) -> None:
    algorithm = find(collective, "circulant_blocks")
    for size in (5, 6, 8, 33):
        phase = (size - 1).bit_length()
        for rank in range(size):
            few, many = (algorithm.build(size, rank, 1, blocks=4 * phase + more) for more in (1, 1 + 100 * phase))
            assert len(encode(few)) == len(encode(many))
            assert many.group_count(0) == few.group_count(0) + 100 * phase


def test_root_sends_the_blocks_in_order_and_the_last_one_until_the_end() -> None:
    for size, blocks in ((5, 3), (12, 7), (16, 1)):
        plan = find("broadcast", "circulant_blocks").build(size, 0, blocks=blocks)
        sent = [step.src.start for group in plan.groups(0) for step in group.steps if isinstance(step, Send)]
        assert sent == [*range(blocks), *[blocks - 1] * ((size - 1).bit_length() - 1)]


def test_binomial_gather_has_scratch_for_its_subtree_only() -> None:
    plans = plans_of(find("gather", "binomial"), 8, root=3)
    assert [plan.scratch.blocks for plan in plans] == [0, 2, 0, 0, 0, 2, 0, 4]


# Results.


MOVING_DATA = [case for case in EVERY_ALGORITHM if case.id and not case.id.startswith("barrier")]


@pytest.mark.parametrize("algorithm", MOVING_DATA)
def test_the_generic_executor_moves_data_in_every_form(algorithm: Algorithm) -> None:
    varying = (False, True) if algorithm.varying else (False,)
    in_place = (False, True) if algorithm.in_place else (False,)
    for size in sizes_of(algorithm, range(1, 8)):
        roots = {size // 2, size - 1} if algorithm.collective in ROOTED else {0}
        forms = pairwise(sorted(roots), (1, 2, 3), varying, in_place)
        calls = [
            call_on_integers(algorithm, size, root, segments, varying=differs, in_place=shares_memory)
            for root, segments, differs, shares_memory in forms
        ]
        check_all(LocalRanks(size), calls)


@pytest.mark.parametrize("algorithm", MOVING_DATA)
def test_generic_executor_moves_data_with_late_and_reordered_messages(algorithm: Algorithm) -> None:
    for seed, size in enumerate(sizes_of(algorithm, range(4, 9, 2))):
        check_all(LocalRanks(size, faults=Faults(seed, delay=0.5)), [call_on_integers(algorithm, size, 1, 3)])
