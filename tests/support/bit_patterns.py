"""Arrays of any bit patterns, how two of them are compared, and arrays that notice what is written around them."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.dtypes import DTYPES

PACK_NBYTES = 16
GUARD_NBYTES = 64
GUARD = 0xA5


def assert_same_values(got: Any, wanted: Any) -> None:
    """Every bit must agree, except those of a NaN, which IEEE 754 leaves to the processor."""
    if wanted.dtype.kind == "c":
        got, wanted = got.view(wanted.real.dtype), wanted.view(wanted.real.dtype)
    if DTYPES[wanted.dtype.name].kind in ("float", "float8"):
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(got), nan)
        got, wanted = got[~nan], wanted[~nan]
    assert got.tobytes() == wanted.tobytes()


def random_bits(generator: np.random.Generator, rows: int, count: int, dtype: str) -> Any:
    """Return an array of any bit patterns: NaNs, infinities, subnormals and the extremes of integers among them."""
    # Booleans of other bytes than 0 and 1 do not exist.
    raw = generator.integers(0, 2 if dtype == "bool" else 256, (rows, count * DTYPES[dtype].itemsize), dtype=np.uint8)
    return raw.view(dtype) if count else np.zeros((rows, 0), dtype)


def placed(row: Any, offset: int) -> Any:
    """Return a copy of `row` that begins `offset` bytes behind a multiple of 16, with guards around it."""
    memory = np.full(row.nbytes + 2 * GUARD_NBYTES + PACK_NBYTES, GUARD, np.uint8)
    start = GUARD_NBYTES + (-memory.ctypes.data) % PACK_NBYTES + offset
    memory[start : start + row.nbytes] = row.view(np.uint8)
    return memory[start : start + row.nbytes].view(row.dtype)


def is_guarded(array: Any) -> bool:
    """Whether nothing around a `placed` array has been written."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    start = array.ctypes.data - memory.ctypes.data
    return bool((np.delete(memory, np.arange(start, start + array.nbytes)) == GUARD).all())
