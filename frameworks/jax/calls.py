"""Calls as static parameters of primitives: the shape of the result, the transpose, and the number in the native core.

Theory of operation
-------------------
A call that moves or adds elements is a linear map of the arrays of all ranks to the results of all ranks. Its
derivative is the call itself, and its transpose is another call: that of an allgather is a reduce_scatter, and that of
a broadcast is a reduce. So every array here has a fixed shape on each rank, also where the collective writes nothing.
There the result is zero, as the transpose needs it: a rank that is not the root of a reduce gets zeros.

The gradient on a rank is the derivative of the sum of the results of all ranks with respect to this rank's arrays.

Used by: `primitives`, `collectives`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from unisono import Communicator
from unisono.operations import Op, operation
from unisono.xla_programs import distributes_rows, reduces

Shape: TypeAlias = "tuple[int, ...]"

EXCHANGE = "exchange"
SUM = operation("sum")


class Call(NamedTuple):
    """A call on one rank, except its array. Equal calls are compiled once.

    Attributes:
        name: the collective, or "exchange" for messages.
        comm: the communicator.
        op, root: of a collective; None if it has none.
        dest, source, tag: of an exchange: the ranks, None for no message, and the tag.
        received: the shape of the result of an exchange.
    """

    name: str
    comm: Communicator
    op: Op | None = None
    root: int | None = None
    dest: int | None = None
    source: int | None = None
    tag: int = 0
    received: Shape = ()

    def __repr__(self) -> str:
        """Return the call as programs of JAX show it."""
        shown = [self.op and f"op={self.op.name}", self.root is not None and f"root={self.root}"]
        if self.name == EXCHANGE:
            shown = [f"dest={self.dest}", f"source={self.source}", f"tag={self.tag}"]
        return f"{self.name}({', '.join(each for each in shown if each)})"

    @property
    def is_linear(self) -> bool:
        """Whether the result is a sum of elements, so that the derivative of the call is the call."""
        return self.op is None or self.op == SUM

    @property
    def distributes_rows(self) -> bool:
        """Whether the first axis of the array or of the result is cut into the parts of the ranks."""
        return self.name != EXCHANGE and distributes_rows(self.name)

    def result_shape(self, shape: Shape) -> Shape:
        """Return the shape of the result of an array of this shape, which is valid."""
        if self.name == EXCHANGE:
            return self.received
        return (_ROWS[self.name](self, shape[0]), *shape[1:]) if self.distributes_rows else shape

    def transposed(self, shape: Shape) -> Call:
        """Return the call that maps cotangents of the result to cotangents of the array, which has this shape."""
        if self.name == EXCHANGE:
            return self._replace(dest=self.source, source=self.dest, received=shape)
        if self.name in ("scan", "exscan"):
            return self._replace(comm=self.comm.program_calls().reversed())
        name = _TRANSPOSES[self.name]
        return self._replace(name=name, op=SUM if reduces(name) else None)

    def batched(self, length: int) -> Call:
        """Return the call on `length` arrays at once, which an exchange has as its first axis."""
        return self._replace(received=(length, *self.received)) if self.name == EXCHANGE else self

    def number(self, shape: Shape, dtype: str) -> int:
        """Register the call for an array of this shape and dtype, and return its number in the native core.

        Raises:
            UsageError: the call is wrong, or the communicator is closed.
            NoAlgorithmError: no algorithm carries it out.
        """
        calls, result = self.comm.program_calls(), self.result_shape(shape)
        if self.name == EXCHANGE:
            return calls.exchange(dtype, self.dest, self.source, shape, result, self.tag)
        return calls.collective(self.name, shape, result, dtype, self.op, self.root)


def _gathered_rows(call: Call, rows: int) -> int:
    return call.comm.size * rows if call.root in (None, call.comm.rank) else 0


def _scattered_rows(call: Call, rows: int) -> int:
    return rows // call.comm.size if call.root in (None, call.comm.rank) else rows


# The number of rows of the result, from that of the array.
_ROWS: dict[str, Callable[[Call, int], int]] = {
    "allgather": _gathered_rows,
    "gather": _gathered_rows,
    "reduce_scatter": _scattered_rows,
    "scatter": _scattered_rows,
    "alltoall": lambda _, rows: rows,
}
_TRANSPOSES = {
    "allreduce": "allreduce",
    "reduce": "broadcast",
    "broadcast": "reduce",
    "allgather": "reduce_scatter",
    "reduce_scatter": "allgather",
    "alltoall": "alltoall",
    "gather": "scatter",
    "scatter": "gather",
}
NAMES: tuple[Any, ...] = (*_TRANSPOSES, "scan", "exscan", "barrier", EXCHANGE)
