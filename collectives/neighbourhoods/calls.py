"""Prepares neighbourhood collectives: their arguments become the memory that a plan reads and writes, and the plan.

Used by: `api/neighbours.py`. Nothing is sent here.

There is one algorithm, so these calls ask no tuner (docs/decisions/0032-neighbourhoods.md). Their plans depend on the
neighbourhood, which a communicator keeps for its life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, TypeAlias

from unisono.algorithms.builders.neighbours import NAME, neighbor_allgather_direct, neighbor_alltoall_direct
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.algorithms.ir.plan import Counts, Plan
from unisono.collectives.arrays import operands
from unisono.collectives.arrays.operands import HOST, Memory
from unisono.collectives.calls.planning import CallSpec
from unisono.collectives.calls.prepared import BoundArray, PreparedCall
from unisono.collectives.calls.shapes import Extents, Layout, checked_rows
from unisono.collectives.neighbourhoods.names import NEIGHBOUR_CALLS
from unisono.errors import UsageError
from unisono.transports.contracts.call import Call, Extent, Signature

Rows: TypeAlias = "tuple[Extents, ...] | None"
_Layout: TypeAlias = "Callable[[Neighbourhood, int, Extents, Extents | None, Rows], Layout]"

_BUILDERS: dict[str, Callable[..., Plan]] = {
    "neighbor_allgather": neighbor_allgather_direct,
    "neighbor_alltoall": neighbor_alltoall_direct,
}
_MOST_CALLS = 1024


class NeighbourCalls:
    """Prepares the neighbourhood collectives of one rank of a communicator.

    Args:
        rank, size: this rank, and the number of ranks.
        neighbourhood: its neighbours.
    """

    def __init__(self, rank: int, size: int, neighbourhood: Neighbourhood) -> None:
        self._rank, self._size = rank, size
        self._neighbourhood = neighbourhood
        self._calls: dict[CallSpec, Call] = {}

    def prepared(self, name: str, x: Any, out: Any, counts: Sequence[Any], memory: Memory = HOST) -> PreparedCall:
        """Return the call `name` on these arrays, with its plan.

        Args:
            name: a key of `NEIGHBOUR_CALLS`.
            x: the array that is read.
            out: the array for the result; None for a new one.
            counts: the counts that `NEIGHBOUR_CALLS` names.
            memory: where the arrays are.

        Raises:
            UsageError: an argument is wrong.
        """
        array = self.bound(name, x, out, counts, memory)
        call = self._calls.get(array.spec)
        if call is None:
            if len(self._calls) >= _MOST_CALLS:
                self._calls.clear()
            call = self._calls[array.spec] = self._planned(array.spec)
        return PreparedCall([array], None, call)

    def bound(self, name: str, x: Any, out: Any, counts: Sequence[Any], memory: Memory) -> BoundArray:
        """Return the array of a call, as `prepared` takes it."""
        collective, names = NEIGHBOUR_CALLS[name]
        if isinstance(x, (list, tuple)) or isinstance(out, (list, tuple)):
            raise UsageError(f"{name} takes one array, not a list: make a call for each")
        degrees = self._degrees()[-len(names) :] if names else ()
        rows = tuple(checked_rows(*each, "neighbour") for each in zip(names, counts, degrees, strict=True)) or None
        source = memory.source(x, any_order=False)
        written = memory.target(out) if out is not None else None
        if written is not None and written.order == "F":
            raise UsageError(
                "out is in F order, where the blocks of neighbours are not contiguous: pass one in C order"
            )
        layout = _LAYOUTS[collective, rows is not None](
            self._neighbourhood, self._rank, source.shape, None if written is None else written.shape, rows
        )
        result, target, convert = out, written, None
        if written is not None:
            operands.check_fit(written, source, layout.results)
            operands.share_memory(source, written, None)
        else:
            result, target = memory.new(layout.results[0], source, zeros=None in self._neighbourhood.sources)
            result, convert = memory.wrapped(result, x)
        spec = CallSpec(collective, layout, source.dtype)
        assert target is not None, "every rank has a result"
        return BoundArray(spec, source.moved, target.moved, result, source.is_packed, convert=convert)

    def _degrees(self) -> tuple[int, int]:
        return len(self._neighbourhood.destinations), len(self._neighbourhood.sources)

    def _planned(self, spec: CallSpec) -> Call:
        layout, dtype = spec.layout, spec.dtype
        assert layout is not None, "a neighbourhood collective has an array"
        assert dtype is not None, "an array has a dtype"
        varying = layout.rows is not None
        plan = _BUILDERS[spec.collective](self._size, self._rank, self._neighbourhood, varying=varying)
        name = f"{spec.collective}v" if varying else spec.collective
        extent = Extent.of(layout.elements, dtype, None)
        signature = Signature(name, dtype.name, layout.agreed, "C", None, None, NAME, 1)
        return Call(
            signature,
            plan,
            Shape(extent.elements, _counts(layout, dtype.units)),
            (extent,),
        )


def _counts(layout: Layout, units: int) -> dict[Counts, Sequence[int]]:
    """Return the elements of each block for a plan with counts."""
    if layout.rows is None:
        return {}
    names = (Counts.RECEIVE,) if len(layout.rows) == 1 else (Counts.SEND, Counts.RECEIVE)
    return {name: [row * layout.row * units for row in rows] for name, rows in zip(names, layout.rows, strict=True)}


def _gathered(neighbours: Neighbourhood, _: int, shape: Extents, out: Extents | None, rows: Rows) -> Layout:
    sources = len(neighbours.sources)
    rest = (sources * shape[0], *shape[1:]) if shape else (sources,)
    return Layout(shape, (prod(shape), sources * prod(shape)), 0, (rest, (sources, *shape)))


def _exchanged(neighbours: Neighbourhood, _: int, shape: Extents, out: Extents | None, rows: Rows) -> Layout:
    destinations, sources = len(neighbours.destinations), len(neighbours.sources)
    if destinations:
        length = _divided("x", shape, destinations)
    elif out is not None and sources:
        length = _divided("out", out, sources)
    elif sources:
        raise UsageError("this rank sends to no neighbour, so x does not say what it receives: pass an out")
    else:
        length = 0
    block = (length, *shape[1:])
    elements = destinations * prod(block), sources * prod(block)
    if prod(shape) != elements[0]:
        raise UsageError(f"x has {shape[0]} rows, and this rank sends to no neighbour: pass an x without rows")
    # A rank without neighbours does not know the rows of a block, so all ranks agree on the shape of a row only.
    return Layout(shape[1:], elements, 0, ((sources * length, *shape[1:]),))


def _gathered_rows(neighbours: Neighbourhood, rank: int, shape: Extents, out: Extents | None, rows: Rows) -> Layout:
    assert rows is not None, "a call with counts has rows"
    if not shape:
        raise UsageError("x is 0-dimensional, and counts are of rows: pass an x with rows")
    for index in neighbours.received().get(rank, ()):
        _check_own(f"counts[{index}]", rows[0][index], "x", shape[0])
    row = prod(shape[1:])
    result = (sum(rows[0]), *shape[1:])
    return Layout(shape[1:], (prod(shape), prod(result)), 0, (result,), 0, rows, row)


def _exchanged_rows(neighbours: Neighbourhood, rank: int, shape: Extents, out: Extents | None, rows: Rows) -> Layout:
    assert rows is not None, "a call with counts has rows"
    sent, received = rows
    if not shape or shape[0] != sum(sent):
        actual = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(f"x {actual}, and the sum of send_counts is {sum(sent)}: they must be equal")
    own = neighbours.sent().get(rank, ()), neighbours.received().get(rank, ())
    for source, target in zip(*own, strict=True):
        _check_own(f"send_counts[{source}]", sent[source], f"recv_counts[{target}]", received[target])
    result = (sum(received), *shape[1:])
    return Layout(shape[1:], (prod(shape), prod(result)), 0, (result,), 0, rows, prod(shape[1:]))


def _check_own(name: str, rows: int, other: str, other_rows: int) -> None:
    """Check that the rank sends itself as many rows as it receives from itself."""
    if rows != other_rows:
        raise UsageError(
            f"{name} is {rows} rows and {other} is {other_rows}, but both count the rows that this rank sends to "
            f"itself: pass the same number"
        )


def _divided(name: str, shape: Extents, neighbours: int) -> int:
    if not shape or shape[0] % neighbours:
        rows = f"has {shape[0]} rows" if shape else "is 0-dimensional"
        raise UsageError(
            f"{name} {rows}, which are not equal blocks for {neighbours} neighbours: its first axis must be divisible "
            f"by {neighbours}"
        )
    return shape[0] // neighbours


_LAYOUTS: dict[tuple[str, bool], _Layout] = {
    ("neighbor_allgather", False): _gathered,
    ("neighbor_allgather", True): _gathered_rows,
    ("neighbor_alltoall", False): _exchanged,
    ("neighbor_alltoall", True): _exchanged_rows,
}
