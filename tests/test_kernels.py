"""The native kernels against the definition in numpy, bit for bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS, Lower
from unisono.transports import _core
from unisono.transports.reductions import reduce_into

INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
NARROW = ["float16", "bfloat16"]
OPS = list(OPERATIONS)
VECTOR_WIDTHS = (16, 32, 64)
COUNTS = sorted({0, 1, 2, 3, 1000, *(width + step for width in VECTOR_WIDTHS for step in (-1, 0, 1))})
GUARD_NBYTES = 64


def as_bytes(array: Any) -> Any:
    return array.view(np.uint8)


def native(dst: Any, sources: list[Any], op: str, size: int) -> None:
    """Reduce with the native kernel; `dst` and `sources` are arrays of bytes or of elements."""
    divisor = size if OPERATIONS[op].lower is Lower.DIVIDE_BY_SIZE else 1
    code = DTYPES[sources[0].dtype.name].code
    _core.reduce(as_bytes(dst), [as_bytes(source) for source in sources], code, int(OPERATIONS[op].combine), divisor)


def assert_like_numpy(rows: Any, op: str, size: int | None = None) -> None:
    size = size or len(rows)
    wanted, got = np.zeros_like(rows[0]), np.zeros_like(rows[0])
    reduce_into(wanted, list(rows), OPERATIONS[op], size, lower=True)
    native(got, list(rows), op, size)
    assert_same_values(got, wanted)


def assert_same_values(got: Any, wanted: Any) -> None:
    """Every bit must agree, except those of a NaN, which IEEE 754 leaves to the processor."""
    if DTYPES[wanted.dtype.name].kind == "float":
        nan = np.isnan(wanted)
        assert np.array_equal(np.isnan(got), nan)
        got, wanted = got[~nan], wanted[~nan]
    assert got.tobytes() == wanted.tobytes()


def random_bits(generator: np.random.Generator, rows: int, count: int, dtype: str) -> Any:
    """Return an array of any bit patterns: NaNs, infinities, subnormals and the extremes of integers among them."""
    raw = generator.integers(0, 256, (rows, count * DTYPES[dtype].itemsize), dtype=np.uint8)
    return raw.view(dtype) if count else np.zeros((rows, 0), dtype)


def all_halves(dtype: str) -> Any:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def test_the_tables_of_dtypes_are_equal() -> None:
    assert [(dtype.name, dtype.itemsize) for dtype in DTYPES.values()] == _core.DTYPES


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(sources=st.integers(1, 9), count=st.sampled_from(COUNTS), seed=st.integers(0, 1000))
def test_any_bits_are_reduced_as_by_numpy(dtype: str, op: str, sources: int, count: int, seed: int) -> None:
    assert_like_numpy(random_bits(np.random.default_rng(seed), sources, count, dtype), op)


PARTNERS = [0.0, -0.0, 1.0, -1.0, 1.5, 1e-7, 6e-8, -65504.0, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("dtype", NARROW)
def test_every_half_is_combined_as_by_numpy(dtype: str, partner: float, op: str) -> None:
    with np.errstate(over="ignore"):
        other = np.full(1 << 16, partner, np.float32).astype(dtype)
    assert_like_numpy([all_halves(dtype), other], op)
    assert_like_numpy([other, all_halves(dtype)], op)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_every_half_is_divided_as_by_numpy(dtype: str, size: int) -> None:
    assert_like_numpy([all_halves(dtype)], "avg", size)


@pytest.mark.parametrize("dtype", NARROW)
def test_sums_halfway_between_two_narrow_floats_are_rounded_to_even(dtype: str) -> None:
    step = float(ml_dtypes.finfo(dtype).eps)
    odd = 1 + step * np.arange(64)
    half = np.full(64, step / 2)
    rows = np.array([odd, half], dtype)
    assert_like_numpy(rows, "sum")
    got = np.zeros(64, dtype)
    native(got, list(rows), "sum", 2)
    assert got.astype(np.float64).tolist() == [1 + step * (i + i % 2) for i in range(64)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", ["min", "max"])
def test_nan_is_propagated_wherever_it_stands(dtype: str, op: str) -> None:
    for count in COUNTS[1:]:
        for place in range(3):
            rows = np.ones((3, count), dtype)
            rows[place, count // 2] = np.nan
            got = np.zeros(count, dtype)
            native(got, list(rows), op, 3)
            assert np.flatnonzero(np.isnan(got)).tolist() == [count // 2]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_extremes_of_integers_are_reduced_as_by_numpy(dtype: str, op: str) -> None:
    limits = np.iinfo(dtype)
    extremes = np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], dtype)
    rows = np.array(np.meshgrid(extremes, extremes, extremes)).reshape(3, -1)
    assert_like_numpy(rows, op)
    for size in (1, 2, 3, 255, 256, 1 << 40):
        assert_like_numpy(rows[:1], "avg", size)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(INTEGERS + FLOATS),
    op=st.sampled_from(OPS),
    sources=st.integers(1, 9),
    count=st.sampled_from(COUNTS),
    offsets=st.lists(st.integers(0, 9), min_size=10, max_size=10),
)
def test_memory_needs_no_alignment(dtype: str, op: str, sources: int, count: int, offsets: list[int]) -> None:
    rows = random_bits(np.random.default_rng(count), sources, count, dtype)
    views = [misaligned(as_bytes(row), offset) for row, offset in zip(rows, offsets, strict=False)]
    nbytes = rows[0].nbytes
    memory = np.full(nbytes + 2 * GUARD_NBYTES, 0xA5, np.uint8)
    dst = memory[GUARD_NBYTES + offsets[-1] :][:nbytes]
    divisor = sources if op == "avg" else 1
    _core.reduce(dst, views, DTYPES[dtype].code, int(OPERATIONS[op].combine), divisor)
    wanted = np.zeros_like(rows[0])
    reduce_into(wanted, list(rows), OPERATIONS[op], sources, lower=True)
    assert_same_values(np.frombuffer(dst.tobytes(), dtype), wanted)
    around = np.delete(memory, np.arange(nbytes) + GUARD_NBYTES + offsets[-1])
    assert (around == 0xA5).all(), "bytes outside the destination were written"


def misaligned(row: Any, offset: int) -> Any:
    memory = np.zeros(row.size + offset, np.uint8)
    memory[offset:] = row
    return memory[offset:]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(INTEGERS + FLOATS),
    op=st.sampled_from(OPS),
    sources=st.integers(1, 9),
    target=st.integers(0, 8),
    count=st.sampled_from(COUNTS),
)
def test_the_destination_may_be_any_of_the_sources(dtype: str, op: str, sources: int, target: int, count: int) -> None:
    rows = random_bits(np.random.default_rng(sources), sources, count, dtype)
    target %= sources
    wanted = np.zeros_like(rows[0])
    reduce_into(wanted, list(rows), OPERATIONS[op], sources, lower=True)
    others = np.delete(rows, target, axis=0).tobytes()
    native(rows[target], list(rows), op, sources)
    assert_same_values(rows[target], wanted)
    assert np.delete(rows, target, axis=0).tobytes() == others


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.kind not in ("integer", "float")])
def test_types_without_arithmetic_have_no_kernel(name: str) -> None:
    row = np.zeros(16, np.uint8)
    with pytest.raises(ValueError, match="no such reduction"):
        _core.reduce(row, [row], DTYPES[name].code, 0, 1)


def test_sources_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="as long as"):
        _core.reduce(np.zeros(8, np.uint8), [np.zeros(4, np.uint8)], DTYPES["uint8"].code, 0, 1)
