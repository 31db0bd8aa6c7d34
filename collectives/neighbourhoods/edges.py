"""The edges of a graph of ranks: each rank names its own, and all ranks check that both ends name the same ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.collectives.calls.arguments import checked_integer
from unisono.errors import UsageError

Weights: TypeAlias = "tuple[tuple[float, ...], tuple[float, ...]] | None"


def named_neighbourhood(
    neighbours: Sequence[int] | None,
    sources: Sequence[int] | None,
    destinations: Sequence[int] | None,
    size: int,
) -> Neighbourhood:
    """Return the neighbours that a rank has named for a graph of `size` ranks; see `Communicator.graph`.

    Raises:
        UsageError: an item is no rank, or both forms are mixed.
    """
    if (neighbours is None) == (sources is None) or (sources is None) != (destinations is None):
        raise UsageError("pass either neighbours, a list for both directions, or sources and destinations")
    if neighbours is not None:
        both = _checked_ranks("neighbours", neighbours, size)
        return Neighbourhood(both, both)
    return Neighbourhood(_checked_ranks("sources", sources, size), _checked_ranks("destinations", destinations, size))


def checked_weights(weights: Any, neighbourhood: Neighbourhood, *, are_of_both: bool) -> Weights:
    """Return the weights of sources and of destinations; None without weights.

    Args:
        weights: a number for each neighbour, or a pair of such sequences for sources and destinations.
        neighbourhood: the neighbours.
        are_of_both: whether `weights` is one sequence for both directions.

    Raises:
        UsageError: `weights` has another form.
    """
    if weights is None:
        return None
    try:
        pair = (weights, weights) if are_of_both else weights
        of_sources, of_destinations = (tuple(float(weight) for weight in each) for each in pair)
    except (TypeError, ValueError):
        raise UsageError(f"weights must be numbers, {_FORMS[are_of_both]}, not {weights!r}") from None
    if (len(of_sources), len(of_destinations)) != (len(neighbourhood.sources), len(neighbourhood.destinations)):
        raise UsageError(f"weights must be numbers, {_FORMS[are_of_both]}; got {weights!r}")
    return of_sources, of_destinations


_FORMS = {True: "one for each neighbour", False: "one for each source and, in a second list, for each destination"}


def check_edges(named: Sequence[Neighbourhood]) -> None:
    """Check that the two ends of each edge name it equally often. `named` has the neighbours of each rank.

    Raises:
        UsageError: they do not, with the first such edge; the same on all ranks.
    """
    sent = Counter((rank, other) for rank, each in enumerate(named) for other in _numbers(each.destinations))
    received = Counter((other, rank) for rank, each in enumerate(named) for other in _numbers(each.sources))
    for edge in sorted(sent.keys() | received.keys()):
        if sent[edge] != received[edge]:
            source, target = edge
            raise UsageError(
                f"rank {source} names rank {target} {_times(sent[edge])} among its destinations, and rank {target} "
                f"names rank {source} {_times(received[edge])} among its sources: both ends must name the edge equally "
                "often"
            )


def _times(number: int) -> str:
    return {0: "not", 1: "once"}.get(number, f"{number} times")


def _checked_ranks(name: str, ranks: Any, size: int) -> tuple[int, ...]:
    try:
        return tuple(checked_integer(rank, f"{name}[{index}]", 0, size - 1) for index, rank in enumerate(ranks))
    except TypeError:
        raise UsageError(f"{name} must be a sequence of ranks, not {ranks!r}") from None


def gathered(
    own: Neighbourhood,
    allgather: Callable[[Sequence[int]], Sequence[int]],
    allgatherv: Callable[[Sequence[int], Sequence[int]], Sequence[int]],
) -> list[Neighbourhood]:
    """Return the neighbours that each rank has named, by two collectives of all ranks.

    Args:
        own: the neighbours that this rank has named.
        allgather: gathers as many integers of each rank.
        allgatherv: ``allgatherv(integers, counts)`` gathers counts[r] integers of rank r.
    """
    lengths = allgather([len(own.sources), len(own.destinations)])
    pairs = list(zip(lengths[::2], lengths[1::2], strict=True))
    ranks = iter(allgatherv([*_numbers(own.sources), *_numbers(own.destinations)], [sum(pair) for pair in pairs]))
    return [
        Neighbourhood(tuple(next(ranks) for _ in range(ins)), tuple(next(ranks) for _ in range(outs)))
        for ins, outs in pairs
    ]


def _numbers(ranks: Sequence[int | None]) -> list[int]:
    return [rank for rank in ranks if rank is not None]
