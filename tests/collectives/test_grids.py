"""Grids of ranks: their shapes, the places of ranks, and the collectives among neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.outcomes import error_of
from support.ranks import LocalRanks, Ranks, communicator_of, ranks_fixture

import unisono as un
from unisono.collectives.neighbourhoods.grid_shape import GridShape, checked_shape, grid_dims
from unisono.collectives.neighbourhoods.placement import rank_at_each_place

pytestmark = pytest.mark.timeout(120)
bounded = settings(max_examples=100, deadline=None, derandomize=True)


four = ranks_fixture((4, "generic"), (4, "shm"), (4, "tcp"))
# Start ranks for one test, which may end their job.
fresh = ranks_fixture((2, "shm"), (2, "tcp"), scope="function")


# --- shapes --------------------------------------------------------------------------------------------------------


@bounded
@given(st.integers(1, 240), st.integers(1, 4))
def test_grid_dims_differ_least(size: int, dimensions: int) -> None:
    divisors = [each for each in range(1, size + 1) if size % each == 0]
    factors = [each for each in itertools.product(divisors, repeat=dimensions) if prod(each) == size]
    dims = grid_dims(size, dimensions)
    assert list(dims) == sorted(dims, reverse=True)
    assert dims in factors
    assert max(dims) - min(dims) == min(max(each) - min(each) for each in factors)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ([0, 3], (4, 3)),
        ([None, None, 3], (2, 2, 3)),
        ([12], (12,)),
        ([12, 1], (12, 1)),
        (2, (4, 3)),
        ([2, 0, 1], (2, 6, 1)),
    ],
)
def test_grid_dims_keep_fixed_lengths(dims: Any, expected: tuple[int, ...]) -> None:
    assert grid_dims(12, dims) == expected


def test_grid_takes_arrays_of_numpy() -> None:
    assert grid_dims(12, np.array([2, 0])) == (2, 6)
    shape = checked_shape(4, np.array([2, 2]), np.array([True, False]))
    assert shape == checked_shape(4, [2, 2], [True, False]) == GridShape((2, 2), (True, False))
    assert checked_shape(4, np.int64(1), np.bool_(True)) == GridShape((4,), (True,))


@pytest.mark.parametrize(
    ("dims", "text"),
    [
        ([5, None], "dims [5, None] do not fit 4 ranks: the product of the dims must divide 4"),
        ([2], "dims [2] do not fit 4 ranks: the product of the dims must be 4"),
        ([-2, -2], "dims[0] must be an integer, 0 to"),
        ([2, "x"], "dims[1] must be an integer"),
        (None, "dims must be a number of dimensions or the length of each, not None"),
        (0, "dims [] do not fit 4 ranks"),
        (True, "the number of dimensions must be an integer"),
    ],
)
def test_wrong_dims_are_refused(dims: Any, text: str) -> None:
    with pytest.raises(un.UsageError) as caught:
        grid_dims(4, dims)
    assert text in str(caught.value)


@bounded
@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3), st.data())
def test_coordinates_are_in_row_major_order(sides: list[tuple[int, bool]], data: st.DataObject) -> None:
    dims, periodic = tuple(length for length, _ in sides), tuple(wraps for _, wraps in sides)
    shape = GridShape(dims, periodic)
    rank = data.draw(st.integers(0, prod(dims) - 1))
    coordinates = shape.coordinates(rank)
    assert coordinates == tuple(np.unravel_index(rank, dims))
    offset = [data.draw(st.integers(-9, 9)) for _ in dims]
    at = np.array(coordinates) + offset
    is_outside = any(
        not wraps and not 0 <= each < length for each, length, wraps in zip(at, dims, periodic, strict=True)
    )
    expected = None if is_outside else int(np.ravel_multi_index(tuple(at % dims), dims))
    assert shape.neighbour(rank, offset) == expected


def edges_between_hosts(shape: GridShape, ranks: Sequence[int], hosts: Sequence[Sequence[int]]) -> int:
    host_of = {rank: number for number, host in enumerate(hosts) for rank in host}
    places = range(prod(shape.dims))
    pairs = [(ranks[place], ranks[near]) for place in places if (near := shape.neighbour(place, (1, 0))) is not None]
    pairs += [(ranks[place], ranks[near]) for place in places if (near := shape.neighbour(place, (0, 1))) is not None]
    return sum(host_of[one] != host_of[other] for one, other in pairs)


@bounded
@given(st.tuples(st.integers(1, 6), st.integers(1, 6)), st.tuples(st.booleans(), st.booleans()), st.data())
def test_placement_has_each_rank_once_and_cuts_no_more_edges_than_rows(
    dims: tuple[int, int], periodic: tuple[bool, bool], data: st.DataObject
) -> None:
    shape, size = GridShape(dims, periodic), prod(dims)
    each = data.draw(st.sampled_from([number for number in range(1, size + 1) if size % number == 0]))
    order = data.draw(st.permutations(range(size)))
    hosts = sorted(tuple(sorted(order[first : first + each])) for first in range(0, size, each))
    ranks = rank_at_each_place(shape, hosts)
    assert sorted(ranks) == list(range(size))
    rows = [rank for host in hosts for rank in host]
    assert edges_between_hosts(shape, ranks, hosts) <= edges_between_hosts(shape, rows, hosts)


def test_ranks_of_a_host_get_a_box_of_the_grid() -> None:
    hosts = [range(first, first + 4) for first in range(0, 16, 4)]
    ranks = np.reshape(rank_at_each_place(GridShape((4, 4), (False, False)), hosts), (4, 4))
    assert ranks.tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert list(rank_at_each_place(GridShape((2, 2), (False, False)), [(0, 3), (1,), (2,)])) == [0, 3, 1, 2]


# --- grids of ranks ------------------------------------------------------------------------------------------------


def facts_of_grid(world: un.Communicator, dims: Any, periodic: Any, keep: list[int]) -> Any:
    with world.grid(dims, periodic=periodic) as grid:
        below, above = grid.shift(0)
        assert grid.rank_at(grid.coordinates()) == grid.rank
        assert (below, above) == grid.sources[:2] == grid.destinations[:2]
        again = grid.dup()
        assert (again.dims, again.periodic, again.neighbor_allgather(np.array([grid.rank])).size) == (
            grid.dims,
            grid.periodic,
            len(grid.sources),
        )
        part = grid.subgrid(keep)
        return grid.world_ranks, grid.coordinates(), part.dims, part.periodic, part.world_ranks, part.coordinates()


def test_subgrid_has_the_ranks_that_differ_in_the_kept_dimensions(four: Any) -> None:
    rows = four.run_calls(facts_of_grid, [2, 2], [True, False], [1])
    assert rows == [
        ((0, 1, 2, 3), divmod(rank, 2), (2,), (False,), ((0, 1), (2, 3))[rank // 2], (rank % 2,)) for rank in range(4)
    ]
    columns = four.run_calls(facts_of_grid, [2, 2], [True, False], [0])
    assert [each[2:] for each in columns] == [
        ((2,), (True,), ((0, 2), (1, 3))[rank % 2], (rank // 2,)) for rank in range(4)
    ]
    alone = four.run_calls(facts_of_grid, [4, 1], False, [])
    assert [each[2:] for each in alone] == [((), (), (rank,), ()) for rank in range(4)]


def place_on_two_hosts(executor: Any, reorder: bool) -> Any:
    with communicator_of(executor, (0, 1, 2, 3), (4, 5, 6, 7)) as world:
        grid = world.grid([2, 4], reorder=reorder)
        return grid.world_ranks, int(grid.allgather(np.array(world.rank))[grid.rank]) == world.rank


def test_grid_of_several_hosts_places_neighbours_on_one_host_unless_ranks_keep_their_numbers() -> None:
    assert LocalRanks(8).run(place_on_two_hosts, True) == [((0, 1, 4, 5, 2, 3, 6, 7), True)] * 8
    assert LocalRanks(8).run(place_on_two_hosts, False) == [((0, 1, 2, 3, 4, 5, 6, 7), True)] * 8


TWO = np.ones(2)
WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "too few ranks": (lambda world: world.grid([2]), "do not fit 4 ranks"),
    "periodic of another length": (lambda world: world.grid([2, 2], periodic=[True]), "one of them for each of 2"),
    "periodic of numbers": (lambda world: world.grid([2, 2], periodic=[1, 0]), "periodic must be True, False, or"),
    "no such dimension": (lambda world: world.grid([4]).shift(1), "dimension must be an integer, 0 to 0"),
    "other coordinates": (lambda world: world.grid([4]).rank_at([0, 0]), "coordinates must be 1 integers"),
    "dimensions as flags": (lambda world: world.grid([2, 2]).subgrid([True, False]), "keep[0] must be an integer"),
    "dimension twice": (lambda world: world.grid([2, 2]).subgrid([1, 1]), "in ascending order"),
    "unequal blocks": (lambda world: world.grid([2, 2]).neighbor_alltoall(np.ones(5)), "not equal blocks for 4"),
    "a list": (lambda world: world.grid([4]).neighbor_allgather([np.ones(2)]), "takes one array, not a list"),
    "no array": (lambda world: world.grid([4]).neighbor_allgather(None), "x is None in neighbor_allgather"),
    "counts of ranks": (
        lambda world: world.grid([4]).neighbor_allgatherv(np.ones(1), [1] * 4),
        "counts must be 2 integers, one for each neighbour; got 4",
    ),
    "other counts": (
        lambda world: world.grid([4]).neighbor_alltoallv(np.ones(3), [1, 1], [1, 1]),
        "x has 3 rows, and the sum of send_counts is 2",
    ),
    "other counts to itself": (
        lambda world: world.grid([4, 1], periodic=True).neighbor_alltoallv(np.ones(4), [1] * 4, [1, 1, 2, 1]),
        "send_counts[3] is 1 rows and recv_counts[2] is 2, but both count the rows that this rank sends to itself",
    ),
    "wrong out": (
        lambda world: world.grid([4]).neighbor_allgather(np.ones(2), out=np.ones(3)),
        "pass an out of shape (4,) or (2, 2)",
    ),
    "overlap": (lambda world: world.grid([4]).neighbor_alltoall(TWO, out=TWO), "x and out share memory"),
    "plan with an op": (lambda world: world.grid([4]).plan("neighbor_alltoall", np.ones(2), op="sum"), "takes no op"),
    "plan without counts": (
        lambda world: world.grid([4]).plan("neighbor_alltoallv", np.ones(2)),
        "takes send_counts and recv_counts; got none",
    ),
    "plan without a grid": (lambda world: world.plan("neighbor_alltoall", np.ones(2)), "there is no collective"),
}


def errors_of(world: un.Communicator) -> list[tuple[str, str]]:
    return [error_of(lambda call=call: call(world)) for call, _ in WRONG.values()]  # type: ignore[misc]


def test_wrong_calls_are_refused_and_the_communicator_stays_usable(four: Any) -> None:
    for errors in four.run_calls(errors_of):
        assert [(kind, part in text) for (kind, text), (_, part) in zip(errors, WRONG.values(), strict=True)] == [
            ("UsageError", True)
        ] * len(WRONG), errors


# --- collectives among neighbours ----------------------------------------------------------------------------------

Case = tuple[tuple[int, ...], tuple[bool, ...], str, tuple[int, ...], list[int], str, str]
WAYS = ("call", "out", "no wait", "plan", "group")
CALLS = ("neighbor_allgather", "neighbor_alltoall", "neighbor_allgatherv", "neighbor_alltoallv")


def edges_of(case: Case) -> dict[tuple[int, int], tuple[int, int] | None]:
    """Return, for each (rank, source), the (rank, destination) of the block that arrives there, as MPI-4.1 says."""
    dims, periodic, *_ = case
    shape = GridShape(dims, periodic)
    edges: dict[tuple[int, int], tuple[int, int] | None] = {}
    for rank in range(4):
        for dimension in range(len(dims)):
            for side, by in enumerate((-1, 1)):
                offset = [by if each == dimension else 0 for each in range(len(dims))]
                source = shape.neighbour(rank, offset)
                edges[rank, 2 * dimension + side] = None if source is None else (source, 2 * dimension + 1 - side)
    return edges


def rows_of(case: Case, rank: int, block: int) -> int:
    """Return the number of rows of a block that a rank sends."""
    _, _, name, _, rows, *_ = case
    if name == "neighbor_allgatherv":
        return rows[rank]
    return rows[(3 * rank + block) % len(rows)] if name.endswith("v") else rows[0]


def block_of(case: Case, rank: int, block: int) -> Any:
    _, _, name, rest, _, dtype, _ = case
    shape = (rows_of(case, rank, block), *rest)
    first = 1000 * rank + (0 if "allgather" in name else 100 * block)
    return (first + np.arange(prod(shape)).reshape(shape)).astype(dtype)


def arguments_of(case: Case, rank: int) -> tuple[Any, dict[str, list[int]]]:
    dims, _, name, *_ = case
    degree, edges = 2 * len(dims), edges_of(case)
    x = (
        block_of(case, rank, 0)
        if "allgather" in name
        else np.concatenate([block_of(case, rank, i) for i in range(degree)])
    )
    received = [0 if (edge := edges[rank, i]) is None else rows_of(case, *edge) for i in range(degree)]
    if name == "neighbor_allgatherv":
        return x, {"counts": received}
    if name == "neighbor_alltoallv":
        return x, {"send_counts": [rows_of(case, rank, i) for i in range(degree)], "recv_counts": received}
    return x, {}


def expected_of(case: Case, rank: int) -> Any:
    dims, _, name, rest, rows, dtype, way = case
    missing = rows[0] if not name.endswith("v") else 0
    untouched = 7 if way in ("out", "plan") else 0
    blocks = [
        np.full((missing, *rest), untouched, dtype)
        if (edge := edges_of(case)[rank, i]) is None
        else block_of(case, *edge)
        for i in range(2 * len(dims))
    ]
    return np.concatenate(blocks)


def exchanged(world: un.Communicator, cases: list[Case]) -> list[Any]:
    results = []
    for case in cases:
        dims, periodic, name, _, _, _, way = case
        with world.grid(dims, periodic=periodic) as grid:
            x, counts = arguments_of(case, grid.rank)
            out = np.full_like(expected_of(case, grid.rank), 7)
            call = getattr(grid, name)
            if way == "plan":
                again = grid.plan(name, x, out=out, **counts)
                assert again() is out
                assert again(wait=False).wait() is out
            elif way == "out":
                assert all(call(x, **counts, out=out) is out for _ in range(3))
            elif way == "no wait":
                works = [call(x, **counts, wait=False) for _ in range(3)]
                out = [work.wait() for work in works][1]
            elif way == "group":
                with grid.group():
                    work, total = call(x, **counts), grid.allreduce(np.array(1))
                out = work.result()
                assert total.result() == 4
            else:
                out = call(x, **counts)
        results.append(out)
    return results


shapes_of_four = st.sampled_from([(4,), (2, 2), (4, 1), (1, 4), (2, 1, 2)]).flatmap(
    lambda dims: st.tuples(st.just(dims), st.tuples(*[st.booleans()] * len(dims)))
)
case_of_four = st.tuples(
    shapes_of_four,
    st.sampled_from(CALLS),
    st.sampled_from([(), (3,), (2, 5), (0,)]),
    st.lists(st.sampled_from([0, 1, 2, 40, 3000]), min_size=4, max_size=7),
    st.sampled_from(["float64", "int8", "float32", "complex64"]),
    st.sampled_from(WAYS),
).map(lambda each: (*each[0], *each[1:]))


@settings(max_examples=4, deadline=None, derandomize=True)
@given(st.lists(case_of_four, min_size=25, max_size=25))
def test_blocks_of_neighbours_arrive_in_the_order_of_mpi(four: Any, cases: list[Case]) -> None:
    for rank, results in enumerate(four.run_calls(exchanged, cases)):
        for case, result in zip(cases, results, strict=True):
            np.testing.assert_array_equal(result, expected_of(case, rank), err_msg=str(case), strict=True)


@pytest.mark.parametrize(("size", "periodic"), [(1, True), (2, True), (1, False)])
def test_small_periodic_grid_receives_from_below_what_was_sent_upwards(size: int, periodic: bool) -> None:
    def both(world: un.Communicator) -> Any:
        ring = world.grid([size], periodic=periodic)
        return ring.neighbor_alltoall(np.array([10 * ring.rank + 1, 10 * ring.rank + 2])).tolist()

    expected = {(1, True): [[2, 1]], (2, True): [[12, 11], [2, 1]], (1, False): [[0, 0]]}
    assert un.launch(both, size) == expected[size, periodic]


def torch_exchanged(world: un.Communicator) -> Any:
    torch = pytest.importorskip("torch")
    ring = world.grid([4], periodic=True)
    x = torch.arange(8, dtype=torch.bfloat16).reshape(4, 2)[:, ::1] + 10 * ring.rank
    out = torch.zeros(4, 2, dtype=torch.bfloat16)
    received = ring.neighbor_alltoall(x[:, :1].expand(4, 2), out=out)
    fresh = ring.neighbor_allgather(x[0])
    assert (received is out, type(fresh)) == (True, torch.Tensor)
    return out.float().tolist(), fresh.float().tolist()


def test_neighbours_exchange_tensors_of_torch_with_strides(four: Any) -> None:
    pytest.importorskip("torch")
    results = four.run_calls(torch_exchanged)
    assert results[0] == ([[34, 34], [36, 36], [10, 10], [12, 12]], [30, 31, 10, 11])


def disagreeing(world: un.Communicator, sizes: tuple[int, int]) -> tuple[str, str]:
    line, (sent, expected) = world.grid([2]), sizes
    if line.rank == 0:
        return error_of(lambda: _then_barrier(line, line.neighbor_alltoallv, np.ones(sent), (0, sent), (0, 0)))
    return error_of(lambda: _then_barrier(line, line.neighbor_alltoallv, np.ones(0), (0, 0), (expected, 0)))


def _then_barrier(line: Any, call: Callable[..., Any], *arguments: Any) -> None:
    call(*arguments)
    line.barrier()  # the sender of an edge may have ended its call before the receiver finds the difference


@pytest.mark.parametrize("sizes", [(3, 4), (0, 1), (1, 0)])
def test_neighbours_that_disagree_on_an_edge_get_an_error_with_both_sizes(fresh: Ranks, sizes: tuple[int, int]) -> None:
    kinds, texts = zip(*fresh.run_calls(disagreeing, sizes), strict=True)
    assert set(kinds) == {"MismatchError"}
    assert f"rank 1: rank 0 sent {8 * sizes[0]} bytes, where {8 * sizes[1]} are to be received" in texts[1]
    assert f"rank 0 sent {8 * sizes[0]} bytes, where {8 * sizes[1]} are to be received" in texts[0]


def other_blocks(world: un.Communicator) -> tuple[str, str]:
    line = world.grid([2])
    return error_of(lambda: _then_barrier(line, line.neighbor_alltoall, np.ones((2, 3 + line.rank))))


def test_neighbours_with_blocks_of_other_shapes_get_an_error(fresh: Ranks) -> None:
    kinds, texts = zip(*fresh.run_calls(other_blocks), strict=True)
    assert set(kinds) == {"MismatchError"}
    assert "neighbor_alltoall(float64[3])" in texts[1]
