"""Converts float32 to and from the compressed wire formats by native code (native/core/kernels/wire_formats.h)."""

from __future__ import annotations

from unisono.dtypes import DTYPES
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.executors.call_memory import as_bytes


def wire_nbytes(form: str, elements: int) -> int:
    """Return the bytes of `elements` floats in a format: "float16", "bfloat16" or "int8", which works in blocks."""
    return _core.wire_nbytes(DTYPES[form].code, elements)


def to_wire(form: str, wire: AnyArray, x: AnyArray, residual: AnyArray) -> None:
    """Write ``x + residual`` to `wire`, rounded to nearest even, and the rounding errors to `residual`.

    The residual of a sum that is not finite is 0.

    Args:
        form: "float16", "bfloat16" or "int8".
        wire: flat contiguous array of at least `wire_nbytes` bytes. Bytes after these are not changed.
        x: flat contiguous float32.
        residual: flat contiguous float32 of the same length.
    """
    _core.to_wire(DTYPES[form].code, as_bytes(wire), as_bytes(x), as_bytes(residual))


def from_wire(form: str, x: AnyArray, wire: AnyArray, *, adds: bool = False) -> None:
    """Decode `wire` into `x`, or add it to `x` if `adds`. The arguments are those of `to_wire`."""
    _core.from_wire(DTYPES[form].code, as_bytes(x), as_bytes(wire), adds)
