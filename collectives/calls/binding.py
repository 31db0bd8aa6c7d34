"""Binding: the arguments of a call become the memory that its plan reads and writes, and a call spec.

Used by: `checking`, for calls on host memory and on a device.

Theory of operation
-------------------
Rank 1 of 4 calls ``allgather(x)`` with an `x` of 2 rows of 3 float32 in Fortran order. Then `Binder.bind` works so:

1. The memory of the call (`operands.HOST`, or the arrays of a device) returns the operand of `x`: flat and contiguous.
   An allgather puts the rows of ranks one after the other, so this `x` is packed in C order first.
2. `shapes` derives the layout of the call from the shape of `x`: the result has 8 rows of 3.
3. The caller passed no `out`, so the memory makes a new array for the result, and its operand.
4. The bound array has the call spec, the flat memory of both operands, and the way to make the caller's array from the
   result.

Nothing is sent and nothing is planned here. Every error of an argument is raised on the rank that passed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from unisono.algorithms.ir.contracts import CONTRACTS, Contract, Cut
from unisono.collectives.arrays import operands
from unisono.collectives.arrays.operands import HOST, Memory, Operand
from unisono.collectives.calls.arguments import CallArguments, checked_integer
from unisono.collectives.calls.planning import AlgorithmLike, CallSpec
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.calls.shapes import (
    Layout,
    RootCounts,
    checked_rows,
    layout_of,
    layout_of_share,
    own_count,
)
from unisono.errors import UsageError
from unisono.operations import Op

_Rows: TypeAlias = "tuple[tuple[int, ...], ...] | None"

# For collectives that also move Python objects: the values for which a caller without an array wants that method.
_FOR_OBJECTS = {
    "broadcast": "a value that only the root knows: broadcast_object(value, root=root)",
    "scatter": "values of any kind: scatter_object(values, root=root)",
    "gather": "values of any kind: gather_object(value, root=root)",
    "allgather": "values of any kind: allgather_object(value)",
}


class Binder:
    """Binds the arrays of calls on one rank of a communicator.

    Args:
        rank, size: this rank, and the number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def bind_all(self, singles: Sequence[CallArguments], memory: Memory = HOST) -> list[BoundArray]:
        """Return the arrays of calls on one array each, which run together; they must not overlap.

        Raises:
            UsageError: an argument is wrong, or a call writes memory that another one uses.
        """
        arrays = [self.bind(single, memory) for single in singles]
        if len(arrays) > 1:
            operands.check_apart([(array.source, array.target) for array in arrays])
        return arrays

    def bind(self, arguments: CallArguments, memory: Memory = HOST) -> BoundArray:
        """Return the array of a call on one array, with its call spec and the memory that the plan reads and writes.

        Raises:
            UsageError: an argument is wrong.
        """
        collective, x, out, op, root, counts, algorithm, _ = arguments
        contract = CONTRACTS[collective]
        root = None if root is None else checked_integer(root, "root", 0, self._size - 1)
        if contract.input is Cut.TOKEN:
            return BoundArray(CallSpec(collective, algorithm=algorithm))
        rows, knows_all = None, True
        if counts is not None:
            if isinstance(counts[0], RootCounts) and memory is not HOST:
                raise UsageError("counts_at_root is for arrays in host memory: pass counts on every rank")
            knows_all = not isinstance(counts[0], RootCounts) or self._rank == root
            rows = _rows(counts, self._size) if knows_all else None
        source = self._source(memory, arguments, contract, root or 0)
        gets_result = contract.has_output(self._rank, root or 0)
        written = _written(memory, contract, out) if out is not None and gets_result else None
        if not knows_all:
            share = source or written
            rows = None if share is None else own_count(collective, share.shape, self._size, self._rank)
        layout = self._layout(collective, source, written, rows)
        if counts is not None and isinstance(counts[0], RootCounts):
            layout, algorithm = replace(layout, whole=0, counts_at_root=True), _linear(algorithm)
        result, target, convert = out, written, None
        if source is not None and written is not None:
            operands.check_fit(written, source, layout.results)
        elif source is not None and gets_result:
            result, target = memory.new(layout.results[0], source, zeros=collective == "exscan")
            result, convert = memory.wrapped(result, x)
        elif source is not None:
            result = None
        like = source or target
        assert like is not None, "a rank without x has an out"
        reads = source is not None and contract.has_input(self._rank, root or 0)
        return BoundArray(
            CallSpec(collective, layout, like.dtype, like.order, op, root, algorithm),
            source.moved if source and reads else None,
            target.moved if target else None,
            result,
            bool(source and reads and source.is_packed),
            bool(source and target and operands.share_memory(source, target, layout.offset)),
            convert,
            op if isinstance(op, Op) and op.factor is not None else None,
        )

    def _source(self, memory: Memory, arguments: CallArguments, contract: Contract, root: int) -> Operand | None:
        """Return the operand of `x`; None in a scatter off the root, where the rank learns shape and dtype from `out`.

        A rank that is not the root of a broadcast has an `x` whose elements nobody reads.
        """
        if contract.input is Cut.SHARES and not contract.has_input(self._rank, root):
            return None
        if arguments.x is None:
            raise UsageError(_missing_x(arguments.collective))
        return memory.source(arguments.x, any_order=contract.input is Cut.VECTOR)

    def _layout(self, collective: str, source: Operand | None, written: Operand | None, rows: _Rows) -> Layout:
        if source is not None:
            return layout_of(collective, source.shape, size=self._size, rank=self._rank, rows=rows)
        if written is not None:
            return layout_of_share(written.shape, size=self._size, rank=self._rank, rows=rows)
        raise UsageError(
            f"{collective} needs an out on every rank but the root, because its shape and dtype say what the rank "
            "receives: pass an out"
        )


def _written(memory: Memory, contract: Contract, out: Any) -> Operand:
    """Return the operand of the caller's `out`."""
    operand = memory.target(out)
    if operand.order == "F" and contract.input is not Cut.VECTOR:
        raise UsageError("out is in F order, where the parts of the ranks are not contiguous: pass one in C order")
    return operand


def _rows(counts: tuple[Sequence[int], ...], size: int) -> _Rows:
    names = ("counts",) if len(counts) == 1 else ("send_counts", "recv_counts")
    return tuple(checked_rows(name, rows, size) for name, rows in zip(names, counts, strict=True))


def _linear(algorithm: AlgorithmLike) -> AlgorithmLike:
    """Return the algorithm of a call whose counts only the root knows, in which it exchanges a message with each rank.

    Raises:
        UsageError: the call forces another one, in which ranks pass on the shares of others.
    """
    if algorithm not in (None, "auto", "linear"):
        raise UsageError(
            f"algorithm {algorithm!r} needs the counts on all ranks: pass them, or leave algorithm out, or 'linear'"
        )
    return "linear"


def _missing_x(collective: str) -> str:
    """Return the error of a call without an x, such as that of a broadcast on a rank that does not know the values."""
    of_root = (
        " of the root's shape and dtype, whose values are ignored off the root" if collective == "broadcast" else ""
    )
    text = f"x is None in {collective}: every rank passes an array{of_root}"
    return f"{text}; for {_FOR_OBJECTS[collective]}" if collective in _FOR_OBJECTS else text
