"""The element types that Unisono reduces and moves, as one table.

The codes are shared with the native core, where the same table stands as an enum; a test compares the two. Nothing is
imported here: numpy and ml_dtypes both spell these types by the names in the table, so a lookup by name is enough.
"""

from __future__ import annotations

from typing import Literal

from unisono.records import record

Kind = Literal["bool", "integer", "float", "float8", "complex"]


@record
class DType:
    """One element type.

    Attributes:
        name: numpy's (or ml_dtypes') name of it.
        code: its number in compiled plans, message headers and the native core.
        itemsize: bytes per element.
        kind: what arithmetic it has.
        accumulate: name of the dtype in which a single combination is computed before it is rounded back.
    """

    name: str
    code: int
    itemsize: int
    kind: Kind
    accumulate: str


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
