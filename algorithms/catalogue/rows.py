"""Table rows of flat algorithms, written with each name once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder, Cost

# The properties of algorithms over mapped memory. They run by name only: their costs depend on where the arrays of each
# rank lie, and that may differ between ranks.
MAPPED: Mapping[str, Any] = {"segmentable": False, "mapped": True, "by_name_only": True}

# The properties of algorithms that only shorten the ways of messages. They run by name only: some other algorithm has
# the same cost or a lower one at each number of ranks, and the tuner's model knows no distances within a network.
SHORT_WAYS: Mapping[str, Any] = {"by_name_only": True, "short_ways": True}


class Row(NamedTuple):
    """A row of a table: an `Algorithm` without its collective, and the file in `algorithms/builders` of its builder."""

    name: str
    file: str
    cost: Callable[..., Cost]
    reference: str
    properties: Mapping[str, Any]


def row(name: str, file: str, cost: Callable[..., Cost], reference: str, **properties: Any) -> Row:
    """Return a row; `properties` are further fields of `Algorithm`."""
    return Row(name, file, cost, reference, properties)


def table(collective: str, *rows: Row, **common: Any) -> dict[str, Algorithm]:
    """Return the algorithms of a collective by name, in the order of the rows.

    The builder of each is the function ``<collective>_<name>``. `common` are fields of `Algorithm` for all rows that do
    not set these fields themselves.

    >>> from unisono.algorithms.catalogue import costs
    >>> table("allreduce", row("ring", "ring", costs.allreduce_ring, "a paper"))["ring"].build
    builders.ring.allreduce_ring
    """
    return {
        name: Algorithm(
            collective=collective,
            name=name,
            build=Builder(f"builders.{file}", f"{collective}_{name}"),
            cost=cost,
            reference=reference,
            **{**common, **properties},
        )
        for name, file, cost, reference, properties in rows
    }
