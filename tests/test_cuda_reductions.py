"""The reductions of GPUs, compiled for the host, against the definition in numpy, bit for bit."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
from cuda_on_host import Run, address, addresses, compiled, reduce
from hypothesis import given, settings, strategies as st

from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import OPERATIONS, Op
from unisono.transports.cuda.catalogue import BLOCK_THREADS, MOST_SOURCES, reduction
from unisono.transports.reductions import reduce_into

REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
NARROW = ["float16", "bfloat16", *FLOAT8]
INSTRUCTIONS = ("-include", "cuda_float8_instructions.h")
PACK_NBYTES = 16
MOST_UNROLLED = 8
GUARD_NBYTES = 64
MANY = MOST_SOURCES + 1


def kernel(dtype: str, op: str, sources: int, *options: str) -> Run:
    """Return a kernel; those of an operation are compiled together, because most of the time goes into the headers."""
    kernels = tuple(
        reduction(DTYPES[name], OPERATIONS[op], k)
        for name, of in REDUCTIONS
        if of == op and (name in FLOAT8 or not options)
        for k in range(1, MANY + 1)
    )
    wanted = reduction(DTYPES[dtype], OPERATIONS[op], sources).name
    return compiled(kernels, *options)[wanted]


def random_bits(generator: np.random.Generator, rows: int, count: int, dtype: str) -> Any:
    """Return an array of any bit patterns: NaNs, infinities, subnormals and the extremes of integers among them."""
    raw = generator.integers(0, 2 if dtype == "bool" else 256, (rows, count * DTYPES[dtype].itemsize), dtype=np.uint8)
    return raw.view(dtype) if count else np.zeros((rows, 0), dtype)


def placed(row: Any, offset: int) -> Any:
    """Return a copy of `row` that begins `offset` bytes behind a multiple of 16, with guards around it."""
    memory = np.full(row.nbytes + 2 * GUARD_NBYTES + PACK_NBYTES, 0xA5, np.uint8)
    start = GUARD_NBYTES + (-memory.ctypes.data) % PACK_NBYTES + offset
    placed: Any = memory[start : start + row.nbytes].view(row.dtype)
    placed[:] = row
    return placed


def is_guarded(array: Any) -> bool:
    """Whether nothing around a `placed` array has been written."""
    memory = array
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    start = array.ctypes.data - memory.ctypes.data
    return bool((np.delete(memory, np.arange(start, start + array.nbytes)) == 0xA5).all())


def wanted_of(rows: list[Any], op: str, size: int) -> Any:
    wanted = np.zeros_like(rows[0])
    reduce_into(wanted, rows, OPERATIONS[op], size, lower=True)
    return wanted


def assert_same_values(got: Any, wanted: Any) -> None:
    """Every bit must agree, except those of a NaN, which IEEE 754 leaves to the processor."""
    if wanted.dtype.kind == "c":
        got, wanted = got.view(wanted.real.dtype), wanted.view(wanted.real.dtype)
    if DTYPES[wanted.dtype.name].kind in ("float", "float8"):
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(got), nan)
        got, wanted = got[~nan], wanted[~nan]
    assert got.tobytes() == wanted.tobytes()


def part_nbytes(dtype: str) -> int:
    """Return what arrays must be aligned to."""
    return DTYPES[dtype].itemsize // (2 if DTYPES[dtype].kind == "complex" else 1)


def counts(dtype: str, sources: int, tiles: int) -> Any:
    """Return counts that need the ways for single elements, for single packs, and for whole tiles of a block."""
    lanes = PACK_NBYTES // DTYPES[dtype].itemsize
    packs = MOST_UNROLLED * BLOCK_THREADS * tiles
    small = st.sampled_from(sorted({0, 1, 2, 3, lanes - 1, lanes, lanes + 1, 3 * lanes + 1, 1001}))
    return small | st.integers(packs * lanes - 2 * lanes, packs * lanes + 2 * lanes)


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_bits_are_reduced_as_by_numpy(dtype: str, op: str, data: st.DataObject) -> None:
    sources = data.draw(st.integers(1, MANY + 9), "sources")
    count = data.draw(counts(dtype, sources, tiles=1), "count")
    blocks = data.draw(st.integers(1, 3), "blocks")
    part = part_nbytes(dtype)
    offset = st.integers(0, PACK_NBYTES // part - 1).map(lambda parts: parts * part)
    offsets = data.draw(offset.map(lambda one: [one] * (sources + 1)) | st.lists(offset, min_size=sources + 1, max_size=sources + 1))
    rows = random_bits(np.random.default_rng(data.draw(st.integers(0, 1000))), sources, count, dtype)
    size = data.draw(st.sampled_from([1, 2, 3, 7, 8, sources]), "size")
    arrays = [placed(row, start) for row, start in zip(rows, offsets, strict=False)]
    dst = placed(np.zeros(count, dtype), offsets[-1])
    reduce(kernel(dtype, op, sources), blocks, dst, arrays, size)
    assert_same_values(dst, wanted_of(list(rows), op, size))
    assert is_guarded(dst), "bytes outside the destination were written"
    assert all(array.tobytes() == row.tobytes() for array, row in zip(arrays, rows, strict=True))
