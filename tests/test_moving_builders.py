"""The builders of the collectives that only move data: proved, refused where they must be, small, and run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import LocalRanks, call_of

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.encode import encode
from unisono.algorithms.plan import Counts, Plan, Send
from unisono.algorithms.registry import ALGORITHMS, find
from unisono.algorithms.verify import Report, verify_plans
from unisono.errors import UsageError
from unisono.transports.faulty import Faults

WAIT_S = 20.0
ROOTED = ("broadcast", "gather", "scatter")
MOVING = (*ROOTED, "allgather", "alltoall", "barrier")
ALL = [algorithm for collective in MOVING for algorithm in ALGORITHMS[collective].values()]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL]
EVERY_ALGORITHM_WITH_COUNTS = [
    pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL if algorithm.varying
]
PARAMETERS = [
    ("broadcast", "knomial", "radix", 3),
    ("broadcast", "knomial", "radix", 7),
    ("allgather", "bruck", "radix", 3),
    ("allgather", "bruck", "radix", 5),
    ("allgather", "direct", "window", 1),
    ("allgather", "direct", "window", 3),
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


def prove(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, **params: Any) -> Report:
    return verify_plans(plans_of(algorithm, size, root, **params), segments, in_place=algorithm.in_place)


def sizes_of(algorithm: Algorithm, sizes: range) -> list[int]:
    return [size for size in sizes if algorithm.supports(size) is None]


# They are proved.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_builder_is_proved_and_costs_what_it_declares(algorithm: Algorithm) -> None:
    for size in sizes_of(algorithm, range(1, 33)):
        report, cost = prove(algorithm, size), algorithm.cost(size)
        assert (report.rounds, float(report.sent), report.reduced) == (cost.rounds, cost.sent, cost.reduced), size


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM_WITH_COUNTS)
def test_every_builder_is_proved_with_counts_per_rank(algorithm: Algorithm) -> None:
    for size in sizes_of(algorithm, range(1, 25)):
        prove(algorithm, size, root=size // 2, varying=True)


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_builder_is_proved_for_every_root_in_segments(algorithm: Algorithm) -> None:
    for size in sizes_of(algorithm, range(1, 11)):
        for root in range(size if algorithm.collective in (*ROOTED, "barrier") else 1):
            prove(algorithm, size, root, segments=3)


@pytest.mark.parametrize(("collective", "name", "parameter", "value"), PARAMETERS)
def test_every_radix_and_window_is_proved_and_costs_what_is_declared(
    collective: str, name: str, parameter: str, value: int
) -> None:
    algorithm, params = find(collective, name), {parameter: value}
    for size in range(1, 29):
        report, cost = prove(algorithm, size, root=size - 1, **params), algorithm.cost(size, **params)
        assert (report.rounds, float(report.sent)) == (cost.rounds, cost.sent), size


# They have the shape that their ideas promise.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_plans_stay_small_at_any_number_of_ranks(algorithm: Algorithm) -> None:
    size = 16384
    for rank in (0, 1, size // 2, size - 1):
        if algorithm.supports(size) is None:
            assert 8 * len(encode(algorithm.build(size, rank, root=5))) < 100 * 1024


def test_algorithms_that_declare_shares_of_different_lengths_are_those_whose_builders_take_them() -> None:
    for algorithm in (algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()):
        assert algorithm.varying == ("varying" in inspect.signature(algorithm.build).parameters), algorithm.name


def test_a_binomial_broadcast_is_the_k_nomial_one_of_radix_two() -> None:
    for rank in range(6):
        binomial, knomial = (find("broadcast", name) for name in ("binomial", "knomial"))
        assert binomial.build(6, rank, 1).lanes == knomial.build(6, rank, 1, radix=2).lanes


def test_an_interior_rank_of_one_of_the_two_trees_is_a_leaf_of_the_other() -> None:
    for size in range(2, 40):
        for rank in range(1, size):
            plan = find("broadcast", "double_binary_tree").build(size, rank)
            steps = [(lane, step) for lane in (0, 1) for group in plan.groups(lane) for step in group.steps]
            sending = [lane for lane, step in steps if isinstance(step, Send)]
            assert len(set(sending)) <= 1
            assert len(sending) <= 2


def test_a_rank_of_a_binomial_gather_has_scratch_for_those_that_it_heads_only() -> None:
    plans = plans_of(find("gather", "binomial"), 8, root=3)
    assert [plan.scratch.blocks for plan in plans] == [0, 2, 0, 0, 0, 2, 0, 4]


# What cannot be built is refused.


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_ranks_and_roots_that_do_not_exist_are_refused(algorithm: Algorithm) -> None:
    for arguments, message in (
        ((0, 0, 0), "at least one rank, not 0"),
        ((4, 4, 0), "rank 4 is out of range: there are 4 ranks"),
        ((4, -1, 0), "rank -1 is out of range"),
        ((4, 0, 4), "root 4 is out of range"),
    ):
        with pytest.raises(UsageError, match=message):
            algorithm.build(*arguments)


@pytest.mark.parametrize(("collective", "name", "parameter"), sorted({case[:3] for case in PARAMETERS}))
def test_a_radix_below_two_and_a_window_below_one_are_refused(collective: str, name: str, parameter: str) -> None:
    least = {"radix": 2, "window": 1}[parameter]
    with pytest.raises(UsageError, match=f"{parameter} is {least - 1}, and must be at least {least}"):
        find(collective, name).build(4, 0, 0, **{parameter: least - 1})


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_a_number_of_ranks_that_is_not_supported_is_refused_in_the_words_of_the_declaration(
    algorithm: Algorithm,
) -> None:
    for size in range(1, 10):
        if refusal := algorithm.supports(size):
            with pytest.raises(UsageError, match=refusal):
                algorithm.build(size, 0)
        else:
            assert algorithm.build(size, 0).size == size


# They move the data.

Block = tuple[int, int]  # data from a rank to a rank; to 0 if it is for all


def block(source: int, target: int, count: int) -> Any:
    return np.arange(count, dtype=np.int32) + 100 * source + 10000 * target


# What each collective has in INPUT and OUTPUT of (size, rank, root).
INPUT_BLOCKS: dict[str, Callable[[int, int, int], list[Block]]] = {
    "broadcast": lambda size, rank, root: [(root, 0)] if rank == root else [],
    "allgather": lambda size, rank, root: [(rank, 0)],
    "gather": lambda size, rank, root: [(rank, 0)],
    "scatter": lambda size, rank, root: [(root, target) for target in range(size)] if rank == root else [],
    "alltoall": lambda size, rank, root: [(rank, target) for target in range(size)],
}
OUTPUT_BLOCKS: dict[str, Callable[[int, int, int], list[Block]]] = {
    "broadcast": lambda size, rank, root: [(root, 0)],
    "allgather": lambda size, rank, root: [(source, 0) for source in range(size)],
    "gather": lambda size, rank, root: [(source, 0) for source in range(size)] if rank == root else [],
    "scatter": lambda size, rank, root: [(root, rank)],
    "alltoall": lambda size, rank, root: [(source, rank) for source in range(size)],
}


def equal(source: int, target: int) -> int:
    return 7


def differing(source: int, target: int) -> int:
    return (3 * source + 5 * target) % 4


@dataclass(frozen=True)
class Move:
    """One call: `counts` is how many elements go from a rank to a rank."""

    algorithm: Algorithm
    size: int
    root: int = 0
    segments: int = 1
    counts: Callable[[int, int], int] = equal
    in_place: bool = False

    def data(self, table: dict[str, Callable[[int, int, int], list[Block]]], rank: int) -> list[Any]:
        blocks = table[self.algorithm.collective](self.size, rank, self.root)
        return [block(*ends, self.counts(*ends)) for ends in blocks]

    def run(self, executor: Any) -> tuple[Any, Any]:
        """Run it on one rank; return what is in OUTPUT and what should be."""
        rank, varying = executor.rank, self.counts is differing
        inputs, outputs = self.data(INPUT_BLOCKS, rank), self.data(OUTPUT_BLOCKS, rank)
        source, expected = (np.concatenate([np.zeros(0, np.int32), *blocks]) for blocks in (inputs, outputs))
        target = np.full_like(expected, -1)
        if self.in_place:
            source, target = shared(rank, inputs, source, outputs, target)
        plan = self.algorithm.build(self.size, rank, self.root, **({"varying": True} if varying else {}))
        elements = (source.size, target.size) if varying else self.elements()
        call = call_of(
            plan, "int32", elements, root=self.root, segments=self.segments, counts=self.all_counts(rank, varying)
        )
        executor.start(call, source, target).wait(WAIT_S)
        return target, expected

    def elements(self) -> tuple[int, int]:
        """Return the elements of INPUT and OUTPUT, where they are equal on all ranks that have them."""
        share = equal(0, 0)
        whole = share * self.size
        return {
            "broadcast": (share, share),
            "allgather": (share, whole),
            "gather": (share, whole),
            "scatter": (whole, share),
            "alltoall": (whole, whole),
        }[self.algorithm.collective]

    def all_counts(self, rank: int, varying: bool) -> dict[Counts, list[int]]:
        ranks = range(self.size)
        if not varying:
            return {}
        if self.algorithm.collective == "alltoall":
            send, receive = ([self.counts(rank, peer) for peer in ranks], [self.counts(peer, rank) for peer in ranks])
            return {Counts.SEND: send, Counts.RECEIVE: receive}
        scatters = self.algorithm.collective == "scatter"
        return {Counts.RANKS: [self.counts(self.root, peer) if scatters else self.counts(peer, 0) for peer in ranks]}


def shared(rank: int, inputs: list[Any], source: Any, outputs: list[Any], target: Any) -> tuple[Any, Any]:
    """Return INPUT and OUTPUT in the same memory, where a rank has both: the shorter is block `rank` of the longer."""
    if not inputs or not outputs:
        return source, target
    longer, blocks = (source, inputs) if len(inputs) > len(outputs) else (target, outputs)
    start = sum(each.size for each in blocks[:rank]) if len(blocks) > 1 else 0
    part = longer[start : start + min(source.size, target.size)]
    if longer is source:
        return source, part
    part[...] = source
    return part, target


def check(move: Move, faults: Faults | None = None) -> None:
    for rank, (found, expected) in enumerate(LocalRanks(move.size, faults=faults).run(move.run)):
        assert found.tolist() == expected.tolist(), f"rank {rank}"


MOVING_DATA = [case for case in EVERY_ALGORITHM if case.id and not case.id.startswith("barrier")]


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("algorithm", MOVING_DATA)
def test_the_generic_executor_moves_equal_shares(algorithm: Algorithm, segments: int) -> None:
    for size in sizes_of(algorithm, range(1, 8)):
        check(Move(algorithm, size, root=size // 2, segments=segments))


@pytest.mark.parametrize("algorithm", [case for case in MOVING_DATA if case.values[0].in_place])
def test_the_generic_executor_moves_data_in_place(algorithm: Algorithm) -> None:
    for size in sizes_of(algorithm, range(1, 8)):
        check(Move(algorithm, size, root=size - 1, segments=2, in_place=True))


@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM_WITH_COUNTS)
def test_the_generic_executor_moves_shares_of_any_length_even_none(algorithm: Algorithm, segments: int) -> None:
    for size in sizes_of(algorithm, range(1, 8)):
        check(Move(algorithm, size, root=size // 2, segments=segments, counts=differing))


@pytest.mark.parametrize("algorithm", MOVING_DATA)
def test_the_generic_executor_moves_data_in_messages_that_are_late_and_out_of_order(algorithm: Algorithm) -> None:
    for seed, size in enumerate(sizes_of(algorithm, range(4, 9))):
        check(Move(algorithm, size, root=1, segments=3), Faults(seed, delay=0.5))
