"""The GPU's reductions, compiled for the host and compared bit by bit with the definition in numpy."""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.bit_patterns import PACK_NBYTES, assert_same_values, guarded_copy, has_intact_guards, random_bits
from support.covering import pairwise
from support.cuda_on_host import BUILT, COMPILER, OPTIONS, Run, address, addresses, built_library, compiled, reduce

from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import OPERATIONS, Op
from unisono.transports.cuda.kernels.catalogue import BLOCK_THREADS, MOST_SOURCES, VARIANTS, reduction
from unisono.transports.reductions.definition import reduce_into

REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
NARROW = ["float16", "bfloat16", *FLOAT8]
INSTRUCTIONS = ("-include", "cuda_float8_instructions.h")
MOST_UNROLLED = 8
MANY = MOST_SOURCES + 1
HALVES, OPS_OF_HALVES = ["float16", "bfloat16"], ["sum", "prod", "max", "avg"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]
OF_FEW_SOURCES, OF_EVERY_SIZE = [1, 2, 3, 8, MANY], ["float32", "bfloat16", "complex128", "float8_e5m2"]
# The compiled kernels, as (dtype, op, number of sources). They cover every pair of two parameters' values.
COVERED = pairwise(
    list(DTYPES), list(OPERATIONS), range(1, MANY + 1), allowed=lambda dtype, op, _: (dtype, op) in REDUCTIONS
)
KERNELS = sorted(
    {
        *COVERED,
        *((dtype, op, 2) for dtype, op in REDUCTIONS if dtype in FLOAT8),
        *((dtype, op, 2) for dtype in HALVES for op in OPS_OF_HALVES),
        *((dtype, "avg", 1) for dtype in INTEGERS),
        *((dtype, "sum", sources) for dtype in OF_EVERY_SIZE for sources in OF_FEW_SOURCES),
    }
)


def kernel(dtype: str, op: str, sources: int, *options: str) -> Run:
    """Return a kernel. All kernels of an op are compiled together, because the headers take most of the time."""
    together = [row for row in KERNELS if row[1] == op and (not options or (row[0] in FLOAT8 and row[2] == 2))]
    kernels = tuple(reduction(DTYPES[name], OPERATIONS[op], k) for name, _, k in together)
    return compiled(kernels, *options)[reduction(DTYPES[dtype], OPERATIONS[op], sources).name]


def wanted_of(rows: list[Any], op: str, size: int) -> Any:
    expected = np.zeros_like(rows[0])
    reduce_into(expected, rows, OPERATIONS[op], size, lower=True)
    return expected


def part_nbytes(dtype: str) -> int:
    """Return the alignment in bytes that the arrays need."""
    return DTYPES[dtype].itemsize // (2 if DTYPES[dtype].kind == "complex" else 1)


def counts(dtype: str) -> Any:
    """Return counts that need the code for single elements, for single packs, and for whole tiles of a block."""
    lanes = PACK_NBYTES // DTYPES[dtype].itemsize
    tile = MOST_UNROLLED * BLOCK_THREADS * lanes
    small = st.sampled_from(sorted({0, 1, 2, 3, lanes - 1, lanes, lanes + 1, 3 * lanes + 1, 1001}))
    return small | st.integers(tile - 2 * lanes, tile + 2 * lanes)


def starts(dtype: str, arrays: int) -> Any:
    """Return offsets of arrays from a multiple of 16 bytes: the same for all arrays, or a different one for each."""
    part = part_nbytes(dtype)
    start = st.integers(0, PACK_NBYTES // part - 1).map(lambda parts: parts * part)
    return start.map(lambda one: [one] * arrays) | st.lists(start, min_size=arrays, max_size=arrays)


@pytest.mark.parametrize(("dtype", "op", "fewest"), COVERED)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_gpu_reduction_of_any_bits_equals_numpy(dtype: str, op: str, fewest: int, data: st.DataObject) -> None:
    sources = data.draw(st.integers(fewest, MANY + 2), "sources") if fewest == MANY else fewest
    count = data.draw(counts(dtype), "count")
    offsets = data.draw(starts(dtype, sources + 1), "offsets")
    size = data.draw(st.sampled_from([1, 2, 3, 7, 8, 1000]), "size")
    rows = random_bits(np.random.default_rng(data.draw(st.integers(0, 1000), "seed")), sources, count, dtype)
    arrays = [guarded_copy(row, offset) for row, offset in zip(rows, offsets, strict=False)]
    dst = guarded_copy(np.zeros(count, dtype), offsets[-1])
    reduce(kernel(dtype, op, sources), data.draw(st.integers(1, 3), "blocks"), dst, arrays, size)
    assert_same_values(dst, wanted_of(list(rows), op, size))
    assert has_intact_guards(dst), "bytes outside the destination were written"
    assert all(array.tobytes() == row.tobytes() for array, row in zip(arrays, rows, strict=True))


# In each variant: every way of loading, and every kind of division.
OF_VARIANTS = [("float32", "sum", 3), ("float8_e5m2", "sum", 2), ("bfloat16", "avg", 2), ("complex128", "avg", 8)]
DIVISORS = [1, 2, 3, 4, 8, 1000, 1 << 20, 1 << 40]


@functools.cache
def variants(variant: str) -> dict[str, Run]:
    return compiled(tuple(reduction(DTYPES[dtype], OPERATIONS[op], k, variant) for dtype, op, k in OF_VARIANTS))


@pytest.mark.parametrize("variant", VARIANTS)
@settings(max_examples=24, deadline=None, derandomize=True)
@given(data=st.data())
def test_variants_of_a_gpu_reduction_give_the_same_bits(variant: str, data: st.DataObject) -> None:
    dtype, op, sources = data.draw(st.sampled_from(OF_VARIANTS), "reduction")
    lanes = PACK_NBYTES // DTYPES[dtype].itemsize
    tiles = st.integers(0, 9).map(lambda tiles: tiles * BLOCK_THREADS * lanes)
    count = data.draw(counts(dtype) | tiles, "count")
    divisor = data.draw(st.sampled_from(DIVISORS), "divisor")
    offsets = data.draw(starts(dtype, sources + 1), "offsets")
    rows = random_bits(np.random.default_rng(data.draw(st.integers(0, 1000), "seed")), sources, count, dtype)
    arrays = [guarded_copy(row, offset) for row, offset in zip(rows, offsets, strict=False)]
    dst = guarded_copy(np.zeros(count, dtype), offsets[-1])
    run = variants(variant)[reduction(DTYPES[dtype], OPERATIONS[op], sources, variant).name]
    reduce(run, data.draw(st.integers(1, 3), "blocks"), dst, arrays, divisor)
    assert_same_values(dst, wanted_of(list(rows), op, divisor))
    assert has_intact_guards(dst), "bytes outside the destination were written"


@pytest.mark.parametrize("variant", ["pipelined", "whole waves"])
def test_variants_of_a_gpu_reduction_may_write_into_a_source(variant: str) -> None:
    run = variants(variant)[reduction(DTYPES["float32"], OPERATIONS["sum"], 3, variant).name]
    rows = random_bits(np.random.default_rng(1), 3, 5 * 2 * BLOCK_THREADS * 4 + 77, "float32")
    arrays = [guarded_copy(row, 0) for row in rows]
    reduce(run, 2, arrays[1], arrays, 3)
    assert_same_values(arrays[1], wanted_of(list(rows), "sum", 3))


PACKS = """
#include "elements.cuh"
#include "split.cuh"
extern "C" unsigned long packs_of(const void* dst, const void* const* sources, unsigned long count) {
  return unisono::cuda::split<unisono::cuda::Plain<float>>(dst, sources, 2, count).packs;
}
"""


def test_gpu_reduction_loads_whole_packs_of_arrays_that_are_not_aligned_alike() -> None:
    library = ctypes.CDLL(str(built_library(PACKS, (COMPILER, *OPTIONS), BUILT)))
    memory = guarded_copy(np.zeros(4000, np.float32), 0)
    for starts_at in itertools.product(range(4), repeat=3):
        dst, *sources = (memory[1000 * i + start : 1000 * i + start + 100] for i, start in enumerate(starts_at))
        packs = library.packs_of(address(dst), addresses(sources), ctypes.c_ulong(100))
        assert packs >= 24, starts_at


@settings(max_examples=60, deadline=None, derandomize=True)
@given(compiled_for=st.sampled_from(COVERED), target=st.integers(0, 8), data=st.data())
def test_gpu_reduction_may_write_into_any_of_its_sources(
    compiled_for: tuple[str, str, int], target: int, data: st.DataObject
) -> None:
    dtype, op, sources = compiled_for
    rows = random_bits(np.random.default_rng(sources), sources, data.draw(counts(dtype), "count"), dtype)
    expected = wanted_of(list(rows), op, sources)
    arrays = [guarded_copy(row, 0) for row in rows]
    target %= sources
    reduce(kernel(dtype, op, sources), 2, arrays[target], arrays, sources)
    assert_same_values(arrays[target], expected)


@pytest.mark.parametrize("options", [(), INSTRUCTIONS], ids=["arithmetic", "instructions"])
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg", "lor"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_gpu_reduction_of_every_pair_of_8_bit_floats_equals_numpy(
    dtype: str, op: str, options: tuple[str, ...]
) -> None:
    elements = np.arange(256, dtype=np.uint8).view(dtype)
    rows = [guarded_copy(np.repeat(elements, 256), 0), guarded_copy(np.tile(elements, 256), 0)]
    got = guarded_copy(np.zeros(1 << 16, dtype), 0)
    reduce(kernel(dtype, op, 2, *options), 1, got, rows, 2)
    assert_same_values(got, wanted_of(rows, op, 2))


PARTNERS = [0.0, -0.0, 1.5, 1e-7, 6e-8, -65504.0, np.inf, np.nan]


@pytest.mark.parametrize("op", OPS_OF_HALVES)
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_reduction_of_every_16_bit_float_equals_numpy(dtype: str, op: str) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for partner in PARTNERS:
        rows = [guarded_copy(halves, 0), guarded_copy(np.full(1 << 16, partner, dtype), 0)]
        got = guarded_copy(np.zeros(1 << 16, dtype), 0)
        reduce(kernel(dtype, op, 2), 1, got, rows, 3)
        assert_same_values(got, wanted_of(rows, op, 3))


@pytest.mark.parametrize("dtype", INTEGERS)
def test_gpu_average_of_extreme_integers_equals_numpy(dtype: str) -> None:
    limits = np.iinfo(dtype)
    extremes = np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], dtype)
    row, got = guarded_copy(extremes, 0), guarded_copy(extremes, 0)
    for size in (1, 2, 3, 255, 256, limits.max // 2 + 1, 1 << 40):
        reduce(kernel(dtype, "avg", 1), 1, got, [row], size)
        assert_same_values(got, wanted_of([row], "avg", size))


def page_before_nothing(nbytes: int) -> Any:
    """Return memory that ends at a page which no code may read or write."""
    page = mmap.PAGESIZE
    whole = -(-nbytes // page) * page
    memory = np.frombuffer(mmap.mmap(-1, whole + page), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + whole), ctypes.c_size_t(page), 0) == 0
    return memory[whole - nbytes : whole]


@pytest.mark.parametrize("sources", OF_FEW_SOURCES)
@pytest.mark.parametrize("dtype", OF_EVERY_SIZE)
def test_gpu_reduction_reads_nothing_behind_the_end_of_an_array(dtype: str, sources: int) -> None:
    itemsize = DTYPES[dtype].itemsize
    for count in (1, PACK_NBYTES // itemsize, 1001, MOST_UNROLLED * BLOCK_THREADS * PACK_NBYTES // itemsize + 1):
        arrays = [page_before_nothing(count * itemsize).view(dtype) for _ in range(sources + 1)]
        # The last destination is not aligned as the sources are, unless its elements have 16 bytes.
        elsewhere = page_before_nothing((count + 1) * itemsize).view(dtype)[:count]
        for dst in (arrays[0], elsewhere):
            for array in arrays:
                array[:] = 1
            reduce(kernel(dtype, "sum", sources), 2, dst, arrays[1:], sources)
            assert (dst == sources).all()


def test_gpu_reduction_refuses_undefined_ops_and_python_functions() -> None:
    with pytest.raises(UsageError, match="'min' is not defined for complex64"):
        reduction(DTYPES["complex64"], OPERATIONS["min"], 2)
    with pytest.raises(UsageError, match="a Python function, which GPUs cannot run"):
        reduction(DTYPES["float32"], Op.from_function(np.hypot), 2)
