"""Floats as they travel in fewer bytes, by the native codecs: see transports/native/core/wire_formats.h."""

from __future__ import annotations

from unisono.dtypes import DTYPES
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.executors.call_memory import as_bytes


def wire_nbytes(form: str, elements: int) -> int:
    """Return how many bytes so many elements take in a form: "float16", "bfloat16" or "int8", which is in blocks."""
    return _core.wire_nbytes(DTYPES[form].code, elements)


def to_wire(form: str, wire: AnyArray, x: AnyArray, residual: AnyArray) -> None:
    """Write ``x + residual`` to `wire`, rounded to nearest even, and to `residual` what that has lost.

    What is not finite is lost without a residual: that is 0 there.

    Args:
        form: "float16", "bfloat16" or "int8".
        wire: flat contiguous array of at least `wire_nbytes` bytes. What is behind these is left as it is.
        x: flat contiguous float32.
        residual: the same, as many.
    """
    _core.to_wire(DTYPES[form].code, as_bytes(wire), as_bytes(x), as_bytes(residual))


def from_wire(form: str, x: AnyArray, wire: AnyArray, *, adds: bool = False) -> None:
    """Write to `x` what a wire says, or add it; the arguments are those of `to_wire`."""
    _core.from_wire(DTYPES[form].code, as_bytes(x), as_bytes(wire), adds)
