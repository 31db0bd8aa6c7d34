"""Graphs of ranks: their edges, and the collectives among neighbours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.outcomes import error_of
from support.ranks import ranks_fixture, start_ranks

import unisono as un

pytestmark = pytest.mark.timeout(120)


four = ranks_fixture((4, "shm"), (4, "tcp"))


Case = tuple[list[tuple[int, int]], list[int]]  # edges in the order in which both ends name them, and rows of each


def exchanged(world: un.Communicator, cases: list[Case]) -> list[Any]:
    results = []
    for edges, rows in cases:
        incoming = [index for index, (_, target) in enumerate(edges) if target == world.rank]
        outgoing = [index for index, (source, _) in enumerate(edges) if source == world.rank]
        sources, destinations = [edges[index][0] for index in incoming], [edges[index][1] for index in outgoing]
        with world.graph(sources=sources, destinations=destinations) as graph:
            assert (graph.sources, graph.destinations) == (tuple(sources), tuple(destinations))
            x = np.concatenate([np.full((rows[index], 2), index) for index in outgoing] or [np.zeros((0, 2), int)])
            counts = [rows[index] for index in outgoing], [rows[index] for index in incoming]
            counted = graph.neighbor_alltoallv(x, *counts)
            of_sources = graph.neighbor_allgatherv(np.full(graph.rank, graph.rank), sources)
            equal = np.array(outgoing, np.int16).reshape(-1, 1)
            out = np.zeros((len(incoming), 1), np.int16)
            results.append([counted, of_sources, graph.neighbor_alltoall(equal, out=out), graph.dup().rank])
    return results


edges_of_four = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=14)
cases_of_four = edges_of_four.flatmap(
    lambda edges: st.tuples(
        st.just(edges), st.lists(st.sampled_from([0, 1, 3, 9000]), min_size=len(edges), max_size=len(edges))
    )
)


@settings(max_examples=3, deadline=None, derandomize=True)
@given(st.lists(cases_of_four, min_size=15, max_size=15))
def test_blocks_of_all_edges_arrive_also_where_two_ranks_have_several(four: Any, cases: list[Case]) -> None:
    for rank, results in enumerate(four.run_calls(exchanged, cases)):
        for (edges, rows), (counted, of_sources, equal, own) in zip(cases, results, strict=True):
            incoming = [index for index, (_, target) in enumerate(edges) if target == rank]
            blocks = [np.full((rows[index], 2), index) for index in incoming]
            np.testing.assert_array_equal(counted, np.concatenate([np.zeros((0, 2), int), *blocks]), strict=True)
            np.testing.assert_array_equal(of_sources, np.repeat(*[[edges[index][0] for index in incoming]] * 2))
            assert (equal[:, 0].tolist(), own) == (incoming, rank)


def errors_of(world: un.Communicator) -> list[tuple[str, str]]:
    near = [(world.rank + 1) % 4]
    both = {"sources": [1] if world.rank == 2 else [], "destinations": [2] if world.rank in (1, 3) else []}
    twice = {"sources": [0] if world.rank == 1 else [], "destinations": [1, 1] if world.rank == 0 else []}
    calls = [
        lambda: world.graph([4]),
        lambda: world.graph(near, sources=near),
        lambda: world.graph(sources=near),
        world.graph,
        lambda: world.graph(3),  # type: ignore[arg-type]
        lambda: world.graph(near, weights=[1, 2]),
        lambda: world.graph(sources=near, destinations=near, weights=[1]),
        lambda: world.graph(near),
        lambda: world.graph(**both),
        lambda: world.graph(**twice),
        lambda: world.graph(sources=[], destinations=[]).neighbor_alltoall(np.ones(2)),
    ]
    return [error_of(call) for call in calls]


def test_wrong_graphs_are_refused_on_all_ranks(four: Any) -> None:
    results = four.run_calls(errors_of)
    texts = [
        "neighbours[0] must be an integer, 0 to 3, not 4",
        "pass either neighbours, a list for both directions, or sources and destinations",
        "pass either neighbours",
        "pass either neighbours",
        "neighbours must be a sequence of ranks, not 3",
        "weights must be numbers, one for each neighbour; got [1, 2]",
        "weights must be numbers, one for each source and, in a second list, for each destination",
        "rank 0 names rank 1 once among its destinations, and rank 1 names rank 0 not among its sources",
        "rank 3 names rank 2 once among its destinations, and rank 2 names rank 3 not among its sources",
        "rank 0 names rank 1 2 times among its destinations, and rank 1 names rank 0 once among its sources",
        "this rank sends to no neighbour",
    ]
    for errors in results:
        assert [(kind, part in text) for (kind, text), part in zip(errors, texts, strict=True)] == [
            ("UsageError", True)
        ] * len(texts), errors


def weighted(world: un.Communicator) -> Any:
    graph = world.graph([1 - world.rank], weights=[0.5])
    other = world.graph(sources=[], destinations=[], weights=([], []))
    with pytest.raises(un.UsageError, match="pass an out"):
        world.graph(sources=[1 - world.rank] * 2, destinations=[1 - world.rank] * 2).neighbor_alltoall(
            np.ones((0, 3)), out=np.ones((1, 3))
        )
    return graph.weights, other.weights, world.graph([]).weights, repr(graph)


def test_graph_keeps_weights() -> None:
    with start_ranks(2, "shm") as ranks:
        expected = ((0.5,), (0.5,)), ((), ()), None
        assert ranks.run_calls(weighted) == [(*expected, f"<unisono.Graph rank {rank} of 2>") for rank in range(2)]
