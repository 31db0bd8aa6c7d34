"""`Op`: the reduction operations, on Python objects, on arrays, and by functions of the program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.base.handles import Handle, State, constant
from unisono.compat.mpi4py.memory.access import buffer
from unisono.compat.mpi4py.memory.buffers import Block, simple

_MOST_OPS = 32
_open: set[int] = set()


def _located(better: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """Return the operation on pairs (value, index): the better value, and the lower index of equal ones."""

    def choose(x: Any, y: Any) -> Any:
        if better(x[0], y[0]):
            return (x[0], x[1])
        if better(y[0], x[0]):
            return (y[0], y[1])
        return (x[0], x[1] if not y[1] < x[1] else y[1]) if x[1] == y[1] or x[1] < y[1] else (y[0], y[1])

    return choose


def _located_arrays(better: Any) -> Callable[[Any, Any], Any]:
    def choose(x: Any, y: Any) -> Any:
        first = better(x["f0"], y["f0"]) | ((x["f0"] == y["f0"]) & (x["f1"] <= y["f1"]))
        return np.where(first, x, y)

    return choose


# By name: the operation on objects, on arrays of numpy, and its name in Unisono ("" if it has none).
_TABLE: dict[str, tuple[Any, Any, str]] = {
    "MAX": (lambda x, y: y if y > x else x, np.maximum, "max"),
    "MIN": (lambda x, y: y if y < x else x, np.minimum, "min"),
    "SUM": (operator.add, np.add, "sum"),
    "PROD": (operator.mul, np.multiply, "prod"),
    "LAND": (lambda x, y: bool(x) & bool(y), np.logical_and, "land"),
    "BAND": (operator.and_, np.bitwise_and, "band"),
    "LOR": (lambda x, y: bool(x) | bool(y), np.logical_or, "lor"),
    "BOR": (operator.or_, np.bitwise_or, "bor"),
    "LXOR": (lambda x, y: bool(x) ^ bool(y), np.logical_xor, "lxor"),
    "BXOR": (operator.xor, np.bitwise_xor, "bxor"),
    "MAXLOC": (_located(operator.gt), _located_arrays(np.greater), ""),
    "MINLOC": (_located(operator.lt), _located_arrays(np.less), ""),
    "REPLACE": (lambda x, y: y, lambda x, y: y, ""),
    "NO_OP": (lambda x, y: x, lambda x, y: x, ""),
}


class OpState(State):
    """An operation.

    Attributes:
        on_objects, on_arrays: the functions of two operands; `on_arrays` is None for a function of the program.
        native: the name in Unisono, or "".
        function: the function of the program, which gets two buffers and the datatype.
        is_commutative: whether operands may change places.
    """

    def __init__(self, constant: str = "", function: Any = None, is_commutative: bool = True) -> None:
        super().__init__(constant)
        self.function, self.is_commutative = function, is_commutative
        self.on_objects, self.on_arrays, self.native = _TABLE.get(constant, (None, None, ""))

    def combine(self, left: Any, right: Any, datatype: Any) -> Any:
        """Return the combination of two arrays of elements, of which `left` is from lower ranks."""
        if self.function is None:
            return self.on_arrays(left, right).astype(right.dtype, copy=False)
        result = right.copy()
        raw = (np.ascontiguousarray(each).view(np.uint8) for each in (left, result))
        self.function(*(buffer.frombuffer(each) for each in raw), datatype)
        return result


class Op(Handle):
    """A reduction operation."""

    __slots__ = ()
    _null, _error = "OP_NULL", "ERR_OP"

    def __call__(self, x: Any, y: Any, /) -> Any:
        if self._state is None:
            raise ValueError("cannot call the null operation")
        if self._state.function is not None:
            return self._state.function(x, y, None)
        return self._state.on_objects(x, y)

    @classmethod
    def Create(cls, function: Callable[[Any, Any, Any], None], commute: bool = False) -> Any:
        """Return the operation by a function, which gets two buffers and the datatype, and writes to the second one."""
        if len(_open) >= _MOST_OPS:
            raise RuntimeError(f"cannot create more than {_MOST_OPS} operations")
        state = OpState(function=function, is_commutative=bool(commute))
        _open.add(state.number)
        return cls._of(state)

    def Free(self) -> None:
        """Make the handle null."""
        self._free()

    def _release(self) -> None:
        _open.discard(self._state.number)

    def __reduce__(self) -> Any:
        if self._state is None or self._state.function is None:
            return super().__reduce__()
        if self._state.number not in _open:
            raise ValueError("cannot pickle an operation that has been freed")
        return _created, (type(self), self._state.function, self._state.is_commutative)

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return a handle of the operation of this number."""
        new = super().fromhandle(handle)
        return new if new._state is None or new._state.function is None else _Unpicklable._of(new._state)

    def Is_commutative(self) -> bool:
        """Return whether operands may change places."""
        return bool(self._live.is_commutative)

    is_commutative = property(Is_commutative, doc="Whether operands may change places.")
    is_predefined = property(
        lambda self: self._state is None or bool(self._state.constant), doc="Whether it is predefined."
    )

    def Reduce_local(self, inbuf: Any, inoutbuf: Any) -> None:
        """Set each element of the second buffer to the combination of the elements of both."""
        left, right = simple(inbuf), simple(inoutbuf, writable=True)
        if (left.count, left.layout.dtype) != (right.count, right.layout.dtype):
            raise ValueError("the two buffers have different counts or datatypes")
        check_operation(self._live, right)
        right.store_elements(combine(self._live, left.elements(), right.elements(), right))


class _Unpicklable(Op):
    __slots__ = ()

    def __reduce__(self) -> Any:
        raise ValueError("cannot pickle an operation made from a handle")


def _created(of_class: Any, function: Any, commute: bool) -> Any:
    return of_class.Create(function, commute)


def combine(op: OpState, left: Any, right: Any, block: Block) -> Any:
    """Return the combination of two arrays of elements of a block's layout."""
    from unisono.compat.mpi4py.memory.datatype import NAMED, Datatype

    layout = block.layout
    datatype = NAMED[layout.constant] if layout.constant in NAMED else Datatype._of(layout)
    if not right.size:
        return right
    if op.function is None or layout.is_dense or right.dtype.names:
        return op.combine(left, right, datatype)
    return _combine_apart(op, left, right, layout, datatype)


def _combine_apart(op: OpState, left: Any, right: Any, layout: Any, datatype: Any) -> Any:
    """Return what a function of the program makes of packed elements, in memory where they lie apart."""
    count = right.nbytes // layout.size
    low, high = layout.span(count)
    places = layout.positions(count, max(-low, 0))
    memory = np.zeros((2, max(count * layout.extent, high - min(low, 0))), np.uint8)
    for row, packed in zip(memory, (left, right), strict=True):
        row[places] = packed.view(np.uint8)
    return op.combine(memory[0], memory[1], datatype)[places].view(right.dtype)


def check_operation(op: OpState, block: Block) -> None:
    """Raise `Exception` if a predefined operation does not combine the elements of a block."""
    if op.function is not None or op.constant in {"REPLACE", "NO_OP"}:
        return
    dtype = block.layout.dtype
    if dtype is None or dtype.kind == "U":
        raise fail(
            "ERR_OP", f"{op.name} does not combine elements of the datatype {block.layout.name or 'of the program'}"
        )
    none = np.empty(0, np.int8 if dtype.kind == "S" else dtype)
    try:
        op.on_arrays(none, none)
    except (TypeError, IndexError):
        raise fail("ERR_OP", f"{op.name} does not combine elements of {dtype}") from None


def op_of(op: Any) -> OpState:
    """Return the state of an operation; raises the error of a null one."""
    if not isinstance(op, Op):
        raise TypeError(f"expecting an operation, got {type(op).__name__}")
    state: OpState = op._live
    return state


def function_of(op: Any) -> Callable[[Any, Any], Any]:
    """Return the function of two objects that an operation, or a function of the program, stands for."""
    if isinstance(op, Op) and op._state is None:
        raise fail("ERR_OP", "OP_NULL combines nothing")
    return op


OP_NULL = constant("OP_NULL", Op, None)
OPS = {name: constant(name, Op, OpState(name)) for name in _TABLE}
SUM = OPS["SUM"]
