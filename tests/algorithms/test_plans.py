import itertools
import subprocess
import sys
from collections import defaultdict

import pytest
from hypothesis import given, strategies as st
from support.covering import pairwise
from support.deadlines import DEADLINE_S

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.binding import Shape, bounds, pieces, split
from unisono.algorithms.ir.plan import (
    Buffer,
    Group,
    Plan,
    Recv,
    RecvReduce,
    Repeat,
    Send,
    canonical_order,
    even,
    input_block,
    output_block,
    peers,
    scratch_like,
)
from unisono.errors import NoAlgorithmError

EVERY_ALGORITHM = [
    pytest.param(algorithm, id=f"{collective}_{name}")
    for collective, by_name in ALGORITHMS.items()
    for name, algorithm in by_name.items()
]


def rows(plan: Plan) -> int:
    """Return the number of steps in a plan. The steps of a repeated group count once."""
    groups = [
        group
        for lane in plan.lanes
        for item in lane
        for group in (item.groups if isinstance(item, Repeat) else (item,))
    ]
    return sum(len(group.steps) for group in groups)


def shape_of(plan: Plan, elements: int) -> Shape:
    """Return the shape of a call on vectors of `elements`.

    Collectives with shares get shares of that length instead.
    """
    if plan.collective not in {"allgather", "gather", "scatter", "alltoall", "reduce_scatter"}:
        return Shape((elements, elements), {})
    return Shape((elements * plan.input.blocks, elements * plan.output.blocks), {})


def message_lengths(plan: Plan, elements: int, segments: int) -> dict[tuple[int, int], list[int]]:
    """Return the lengths of the messages that this rank posts, by (sender, receiver), in canonical order."""
    shape = shape_of(plan, elements)
    lengths: dict[tuple[int, int], list[int]] = defaultdict(list)
    for lane in range(len(plan.lanes)):
        groups = list(plan.groups(lane))
        for group, segment in canonical_order(len(groups), segments):
            for step in groups[group].steps:
                if isinstance(step, (Send, Recv, RecvReduce)):
                    span = step.src if isinstance(step, Send) else step.dst
                    ends = (plan.rank, step.peer) if isinstance(step, Send) else (step.peer, plan.rank)
                    cut = pieces(plan, span, bounds(plan, span.buffer, shape), segment, segments)
                    lengths[ends].append(sum(length for _, length in cut))
    return lengths


def test_a_ring_plan_is_a_few_rows_long_at_any_number_of_ranks() -> None:
    plans = [find("allreduce", "ring").build(16384, rank) for rank in (0, 1, 16383)]
    assert {rows(plan) for plan in plans} == {8}
    assert plans[0].group_count(0) == 2 * 16383
    assert plans[0].scratch.blocks == 0


def test_ring_of_two_ranks_exchanges_halves_twice() -> None:
    groups = list(find("allreduce", "ring").build(2, 0).groups(0))
    assert [[type(step) for step in group.steps] for group in groups] == [[Send, RecvReduce], [Send, Recv]]


def test_ring_plans_talk_to_the_two_neighbours_only() -> None:
    assert peers(find("allreduce", "ring").build(7, 6)) == [(0, 0), (0, 5)]


@pytest.mark.parametrize("name", ["recursive_doubling", "direct"])
def test_short_vector_plans_of_allreduce_exchange_the_vector_as_one_block(name: str) -> None:
    plan = find("allreduce", name).build(6, 5)
    assert (plan.input, plan.output) == (even(1), even(1))


@pytest.mark.parametrize("size", [1000, 1024, 16384])
def test_logarithmic_plans_have_logarithmically_many_rows(size: int) -> None:
    rounds = (size - 1).bit_length()
    for collective, name in (
        ("allreduce", "recursive_doubling"),
        ("broadcast", "binomial"),
        ("barrier", "dissemination"),
    ):
        for rank in (0, 1, size // 2, size - 1):
            assert rows(find(collective, name).build(size, rank)) <= 2 * rounds + 3


def test_only_the_root_of_a_broadcast_has_an_input() -> None:
    plans = [find("broadcast", "binomial").build(5, rank, root=3) for rank in range(5)]
    assert [plan.input.blocks for plan in plans] == [0, 0, 0, 1, 0]


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_builders_are_deterministic_and_name_collective_and_algorithm(algorithm: Algorithm) -> None:
    plan = algorithm.build(8, 4, 2)
    assert plan == algorithm.build(8, 4, 2)
    assert (plan.collective, plan.algorithm, plan.size, plan.rank, plan.root) == (
        algorithm.collective,
        algorithm.name,
        8,
        4,
        2,
    )
    assert algorithm.reference


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_both_ends_of_every_message_have_the_same_number_of_elements(algorithm: Algorithm) -> None:
    sizes = [size for size in (1, 2, 5, 8) if algorithm.supports(size) is None]
    for size, segments, elements in pairwise(sizes, [1, 3], [0, 1, 5, 64, 67]):
        sides = [message_lengths(algorithm.build(size, rank), elements, segments) for rank in range(size)]
        for sender, receiver in itertools.permutations(range(size), 2):
            ends = (sender, receiver)
            assert sides[sender].get(ends) == sides[receiver].get(ends)


def test_find_lists_algorithms_when_name_is_unknown() -> None:
    with pytest.raises(NoAlgorithmError, match=r"broadcast has no algorithm 'bionmial': it has .*binomial, knomial"):
        find("broadcast", "bionmial")
    with pytest.raises(NoAlgorithmError, match=r"'alreduce': there are allreduce, .*broadcast, .*barrier"):
        find("alreduce", "ring")


def test_repeat_advances_peers_modulo_ranks_and_spans_modulo_blocks() -> None:
    send = Send(1, output_block(1, advance=-2), peer_advance=2)
    plan = Plan("allreduce", "test", 4, 0, 0, even(3), even(3), lanes=((Repeat(3, (Group((send,)),)),),))
    steps = [step for group in plan.groups(0) for step in group.steps]
    assert [(step.peer, plan.physical_blocks(step.src)) for step in steps if isinstance(step, Send)] == [
        (1, [1]),
        (3, [2]),
        (1, [0]),
    ]
    assert plan.group_count(0) == 3


def test_permutation_applies_only_to_buffers_with_as_many_blocks() -> None:
    scratch = scratch_like(Buffer.OUTPUT, even(3), copies=2)
    plan = Plan("allreduce", "test", 1, 0, 0, even(3), even(3), scratch, permutation=(2, 0, 1))
    assert plan.physical_blocks(input_block(1, count=3)) == [0, 1, 2]
    assert plan.physical_blocks(output_block(0, count=2)) == [2, 0]
    assert plan.physical_blocks(input_block(0)) == [2]
    assert [plan.partition(buffer).blocks for buffer in Buffer] == [3, 3, 6]


@given(st.integers(0, 1000), st.integers(1, 40))
def test_split_gives_near_equal_parts_that_cover_the_length(length: int, parts: int) -> None:
    results = [split(length, parts, part) for part in range(parts)]
    ends = [0, *itertools.accumulate(size for _, size in results)]
    assert [offset for offset, _ in results] == ends[:-1]
    assert ends[-1] == length
    assert max(size for _, size in results) - min(size for _, size in results) <= 1


@given(st.integers(0, 12), st.integers(1, 5))
def test_canonical_order_posts_every_instance_once_after_its_dependencies(groups: int, segments: int) -> None:
    order = list(canonical_order(groups, segments)) if groups else []
    assert sorted(order) == sorted(itertools.product(range(groups), range(segments)))
    position = {instance: index for index, instance in enumerate(order)}
    for group, segment in order:
        for before in ((group - 1, segment), (group, segment - 1)):
            assert position.get(before, -1) < position[group, segment]


def test_the_algorithms_are_imported_without_numpy_or_the_native_module() -> None:
    program = (
        "import sys, unisono.algorithms as a; a.find('allreduce', 'ring').build(4, 0); a.verify_plans; "
        "print([name for name in sys.modules if name.startswith(('numpy', 'unisono.transports', 'unisono.coll'))])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=sys.prefix
    )
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("[]", "", 0)


def test_builders_of_one_file_have_the_same_file_attribute() -> None:
    builders = [find("allreduce", name).build for name in ("ring", "multi_lane_ring", "hierarchical")]
    assert [build.file for build in builders if isinstance(build, Builder)] == ["ring", "ring", "hierarchical"]
