"""Python functions by which random calls reduce: one shows the order, one takes any dtype, one is from numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES
from unisono.operations import Op

_Array = NDArray[Any]

# A map x -> m·x + c modulo the prime is stored as the number m·BASE + c, which the dtypes of `composition` hold
# exactly.
PRIME, BASE = 251, 256


def composition(a: _Array, b: _Array) -> _Array:
    """Return the maps that first apply those of `a`, then those of `b`."""
    (m, c), (n, d) = (np.divmod(each.astype(np.int64), BASE) for each in (a, b))
    maps: _Array = (n * m % PRIME * BASE + (n * c + d) % PRIME).astype(a.dtype)
    return maps


def first_nonzero(a: _Array, b: _Array) -> _Array:
    """Return the elements of `a` that are not 0, and elsewhere those of `b`."""
    return np.where(a != 0, a, b)


@dataclass(frozen=True)
class Function:
    """A function as an op, and the dtypes that it supports."""

    op: Op
    dtypes: tuple[str, ...]


# By their names in cases.
FUNCTIONS = {
    "composition": Function(
        Op.from_function(composition, commutative=False),
        ("uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"),
    ),
    "first_nonzero": Function(Op.from_function(first_nonzero, commutative=False), tuple(DTYPES)),
    "maximum": Function(
        Op.from_function(np.maximum), tuple(name for name, dtype in DTYPES.items() if dtype.kind != "complex")
    ),
}
