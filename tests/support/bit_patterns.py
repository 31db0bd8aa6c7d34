"""Arrays of random bit patterns, their comparison bit by bit, and arrays between guards that show stray writes."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np

from unisono.dtypes import DTYPES

PACK_NBYTES = 16
GUARD_NBYTES = 64
GUARD = 0xA5


def assert_same_values(result: Any, expected: Any) -> None:
    """Assert that all bits are equal, except the bits of NaNs, which IEEE 754 leaves to the processor."""
    if expected.dtype.kind == "c":
        result, expected = result.view(expected.real.dtype), expected.view(expected.real.dtype)
    if DTYPES[expected.dtype.name].kind in ("float", "float8"):
        nan = np.isnan(expected)
        assert np.array_equal(np.isnan(result), nan)
        result, expected = result[~nan], expected[~nan]
    assert result.tobytes() == expected.tobytes()


def random_bits(generator: np.random.Generator, rows: int, count: int, dtype: str) -> Any:
    """Return an array (rows, count) of random bits. So floats include NaNs, infinities and subnormal numbers."""
    # The byte of a boolean is 0 or 1.
    raw = generator.integers(0, 2 if dtype == "bool" else 256, (rows, count * DTYPES[dtype].itemsize), dtype=np.uint8)
    return raw.view(dtype) if count else np.zeros((rows, 0), dtype)


def guarded_copy(row: Any, offset: int) -> Any:
    """Return a copy of `row` that begins `offset` bytes after a multiple of 16 bytes, with guard bytes around it."""
    memory = np.full(row.nbytes + 2 * GUARD_NBYTES + PACK_NBYTES, GUARD, np.uint8)
    start = GUARD_NBYTES + (-memory.ctypes.data) % PACK_NBYTES + offset
    memory[start : start + row.nbytes] = row.view(np.uint8)
    return memory[start : start + row.nbytes].view(row.dtype)


def has_intact_guards(array: Any) -> bool:
    """Return whether the guard bytes around an array of `guarded_copy` are unchanged."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    start = array.ctypes.data - memory.ctypes.data
    return bool((np.delete(memory, np.arange(start, start + array.nbytes)) == GUARD).all())
