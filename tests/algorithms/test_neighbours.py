"""The plans of neighbourhood collectives, proved for random neighbourhoods of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import pytest
from hypothesis import given, settings, strategies as st

from unisono.algorithms.builders.neighbours import neighbor_allgather_direct, neighbor_alltoall_direct
from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.algorithms.ir.plan import Plan
from unisono.algorithms.verifier.neighbours import verify_neighbours
from unisono.collectives.neighbourhoods.grid_shape import GridShape
from unisono.errors import PlanError

bounded = settings(max_examples=60, deadline=None, derandomize=True)
BUILDERS = [neighbor_allgather_direct, neighbor_alltoall_direct]


def neighbourhoods_of(shape: GridShape) -> list[Neighbourhood]:
    return [shape.neighbourhood(rank) for rank in range(prod(shape.dims))]


def neighbourhoods_by_edges(size: int, edges: Sequence[tuple[int, int]]) -> list[Neighbourhood]:
    """Return the neighbourhoods of a graph with these edges, of which two ranks may have several."""
    return [
        Neighbourhood(
            tuple(source for source, target in edges if target == rank),
            tuple(target for source, target in edges if source == rank),
        )
        for rank in range(size)
    ]


def plans(build: Callable[..., Plan], neighbourhoods: Sequence[Neighbourhood], *, varying: bool = False) -> list[Plan]:
    size = len(neighbourhoods)
    return [build(size, rank, neighbourhood, varying=varying) for rank, neighbourhood in enumerate(neighbourhoods)]


grids = st.lists(st.tuples(st.integers(1, 3), st.booleans()), max_size=3).map(
    lambda sides: GridShape(tuple(length for length, _ in sides), tuple(wraps for _, wraps in sides))
)
graphs = st.integers(1, 4).flatmap(
    lambda size: st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=12).map(
        lambda edges: neighbourhoods_by_edges(size, edges)
    )
)


@bounded
@given(grids.map(neighbourhoods_of) | graphs, st.sampled_from(BUILDERS), st.booleans(), st.integers(1, 2))
def test_plans_exchange_the_blocks_of_all_edges(
    neighbourhoods: list[Neighbourhood], build: Callable[..., Plan], varying: bool, segments: int
) -> None:
    verify_neighbours(plans(build, neighbourhoods, varying=varying), neighbourhoods, segments)


@pytest.mark.parametrize("varying", [False, True])
def test_edges_that_one_rank_matches_in_another_order_are_refused(varying: bool) -> None:
    ring = neighbourhoods_of(GridShape((2,), (True,)))
    others = [ring[0], Neighbourhood(ring[1].sources, ring[1].destinations)]
    with pytest.raises(PlanError, match=r"block 0 of|length"):
        verify_neighbours(plans(neighbor_alltoall_direct, others, varying=varying), ring)


def test_edge_of_which_only_one_end_knows_is_refused() -> None:
    one_sided = [Neighbourhood((), (1,)), Neighbourhood((), ())]
    with pytest.raises(PlanError, match="rank 0 sends 1 blocks to rank 1, which receives 0 of it"):
        verify_neighbours(plans(neighbor_alltoall_direct, one_sided), one_sided)


def test_block_that_no_rank_sends_must_stay_untouched() -> None:
    line = neighbourhoods_of(GridShape((2,), (False,)))
    ring = neighbourhoods_of(GridShape((2,), (True,)))
    with pytest.raises(PlanError):
        verify_neighbours(plans(neighbor_alltoall_direct, ring), line)
