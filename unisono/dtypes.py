"""The element types that Unisono reduces and moves, as one table, and those that it only moves.

The native core has the same table as an enum with the same codes; a test compares the two. Neither numpy nor ml_dtypes
is imported here: both use the names in the table, so a lookup by name is enough.

A `DType` of a date, a text or a structure is not in the table. Its elements are moved as bytes, and no call combines
them. Its `name` identifies it on all ranks.
"""

from __future__ import annotations

import re
from typing import Literal

from unisono.errors import UsageError
from unisono.foundation.records import record

Kind = Literal["bool", "integer", "float", "float8", "complex", "date", "duration", "text", "structure"]

# Names of dtypes that are moved as bytes begin with the bits of an element, such as datetime64[s].
_BITS = re.compile(r"[a-z]+(\d{1,18})")

# The kinds of elements that are moved as bytes.
_AS_BYTES = frozenset({"date", "duration", "text", "structure"})


@record
class DType:
    """One element type.

    Attributes:
        name: its name in numpy or ml_dtypes.
        code: its number in compiled plans, message headers and the native core.
        itemsize: the number of bytes of an element.
        kind: the kind of its arithmetic.
        accumulate: the name of the dtype in which one combination is computed, before the result is rounded back.
    """

    name: str
    code: int
    itemsize: int
    kind: Kind
    accumulate: str

    @property
    def is_moved_as_bytes(self) -> bool:
        """Whether plans and messages treat an element as `itemsize` elements of uint8."""
        return self.kind in _AS_BYTES

    @property
    def moved(self) -> DType:
        """The dtype of the elements that a plan moves: uint8 for elements that are moved as bytes."""
        return DTYPES["uint8"] if self.is_moved_as_bytes else self

    @property
    def units(self) -> int:
        """The number of elements of `moved` in an element of this dtype."""
        return self.itemsize if self.is_moved_as_bytes else 1


_ROWS: tuple[tuple[str, int, Kind, str], ...] = (
    ("bool", 1, "bool", "bool"),
    ("int8", 1, "integer", "int8"),
    ("uint8", 1, "integer", "uint8"),
    ("int16", 2, "integer", "int16"),
    ("uint16", 2, "integer", "uint16"),
    ("int32", 4, "integer", "int32"),
    ("uint32", 4, "integer", "uint32"),
    ("int64", 8, "integer", "int64"),
    ("uint64", 8, "integer", "uint64"),
    ("float16", 2, "float", "float32"),
    ("bfloat16", 2, "float", "float32"),
    ("float32", 4, "float", "float32"),
    ("float64", 8, "float", "float64"),
    ("float8_e4m3fn", 1, "float8", "float32"),
    ("float8_e5m2", 1, "float8", "float32"),
    ("complex64", 8, "complex", "complex64"),
    ("complex128", 16, "complex", "complex128"),
)

DTYPES: dict[str, DType] = {
    name: DType(name, code, itemsize, kind, accumulate) for code, (name, itemsize, kind, accumulate) in enumerate(_ROWS)
}


def itemsize_of(name: str) -> int:
    """Return the bytes of an element of the dtype of this name, which another rank may have sent.

    Raises:
        UsageError: no dtype has such a name.
    """
    if (dtype := DTYPES.get(name)) is not None:
        return dtype.itemsize
    bits = _BITS.match(name)
    if bits is None:
        raise UsageError(f"no elements are of the dtype {name!r}")
    return int(bits[1]) // 8
