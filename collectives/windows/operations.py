"""The operations of accumulates, and the dtypes of windows, with their numbers in the native core."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from unisono.dtypes import DType
from unisono.errors import UsageError
from unisono.foundation.near_names import did_you_mean
from unisono.operations import OPERATIONS, Combine, Lower, Op
from unisono.transports.contracts.call import AnyArray

REPLACE, NO_OP = 32, 33
"""The numbers of the two operations that combine nothing: `WindowOp` of the native core."""

_OTHERS = {"replace": REPLACE, "no_op": NO_OP}
# The average has no meaning here: no operation knows how many others there will be.
_REDUCTIONS = {name: op for name, op in OPERATIONS.items() if op.lower is not Lower.DIVIDE_BY_SIZE}
# Numpy does not export these dtypes by the buffer protocol.
_AS_INTEGERS: dict[str, type[np.unsignedinteger[Any]]] = {
    "bfloat16": np.uint16,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}
# Python's numbers that an element takes without a loss of kind.
_NUMBERS: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "integer": (int,),
    "float": (int, float),
    "float8": (int, float),
    "complex": (int, float, complex),
}


class Selection(NamedTuple):
    """Elements of a part: `elements` of them from `start` on, each `step` after the one before; or at `indices`."""

    start: int
    elements: int
    step: int = 1
    indices: AnyArray | None = None


class Element:
    """The elements of a window, as one of its views sees them.

    Attributes:
        dtype: Unisono's dtype.
        numpy: numpy's dtype.
        code: the number of the dtype in the native core.
        numbers: the types of single values that need no check.
        is_plain: whether `raw` and `moved` return their arguments. A caller that asks saves a frame of Python.
        moved_nbytes: the size of the elements that `moved` selects.
    """

    __slots__ = ("_codes", "_raw", "code", "dtype", "is_plain", "itemsize", "moved_nbytes", "numbers", "numpy")

    def __init__(self, dtype: DType, numpy_dtype: np.dtype[Any]) -> None:
        numpy = numpy_dtype
        self.dtype, self.numpy, self.code, self.itemsize = dtype, numpy, dtype.moved.code, dtype.itemsize
        self.moved_nbytes = dtype.moved.itemsize
        # A date of another unit is no single value of this dtype.
        self.numbers = frozenset() if dtype.is_moved_as_bytes else frozenset({*_NUMBERS[dtype.kind], numpy.type})
        self._raw = np.uint8 if dtype.is_moved_as_bytes else _AS_INTEGERS.get(dtype.name)
        self.is_plain = self._raw is None
        self._codes: dict[str, int] = {}  # of operations that have been used

    def raw(self, array: AnyArray) -> AnyArray:
        """Return a contiguous array in a dtype whose memory the native core can read."""
        return array if self._raw is None else array.view(self._raw)

    def moved(self, where: Selection) -> Selection:
        """Return the selection of the same memory as elements of `code`."""
        nbytes = self.itemsize // self.moved_nbytes
        if nbytes == 1:
            return where
        if where.indices is None and where.step == 1:
            return Selection(where.start * nbytes, where.elements * nbytes)
        places: Any = where.start + np.arange(where.elements) * where.step if where.indices is None else where.indices
        positions = (places[:, None] * nbytes + np.arange(nbytes)).reshape(-1)
        return Selection(0, len(positions), 1, positions)

    def op(self, op: str | Op) -> int:
        """Return the number of an operation of accumulates on these elements; raises as `code_of`."""
        code = self._codes.get(op) if type(op) is str else None
        if code is None:
            code = code_of(op, self.dtype)
            if type(op) is str:
                self._codes[op] = code
        return code


def code_of(op: str | Op, dtype: DType) -> int:
    """Return the number of an operation of accumulates.

    Raises:
        UsageError: there is no such operation for this dtype.
    """
    check_atomic(dtype)
    if isinstance(op, str) and op in _OTHERS:
        return _OTHERS[op]
    reduction = _REDUCTIONS.get(op) if isinstance(op, str) else op
    if not isinstance(reduction, Op):
        names = (*_REDUCTIONS, *_OTHERS)
        raise UsageError(f"op must be one of {', '.join(names)}; got {op!r}{did_you_mean(str(op), names)}")
    is_plain = reduction.factor is None and reduction.lower is not Lower.DIVIDE_BY_SIZE
    if reduction.combine is Combine.FUNCTION or not is_plain:
        raise UsageError(f"op {reduction.name!r} cannot be used in a window: pass one of {', '.join(_REDUCTIONS)}")
    reduction.check(dtype)
    return int(reduction.combine)


def check_atomic(dtype: DType) -> None:
    """Check that operations on elements of a dtype can be atomic.

    Raises:
        UsageError: the elements are moved as bytes.
    """
    if dtype.is_moved_as_bytes:
        raise UsageError(
            f"no operation on {dtype.name} is atomic: use put and get, or window.view('int64') for dates and durations"
        )
