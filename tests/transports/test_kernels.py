"""The native kernels, compared bit by bit with the definition in numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.bit_patterns import assert_same_values, random_bits
from support.float_modes import MODES, mode

from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS, Lower, Op
from unisono.transports import _core
from unisono.transports.reductions.definition import lift, reduce_into
from unisono.transports.reductions.native import divisor, reduce_into as reduce_natively

REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]
EIGHT_BITS = [dtype for dtype in DTYPES if DTYPES[dtype].itemsize == 1]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
NARROW = ["float16", "bfloat16"]
ARITHMETIC = ["sum", "prod", "min", "max", "avg"]
VECTOR_WIDTHS = (16, 32, 64)
COUNTS = sorted({0, 1, 2, 3, 1000, *(width + step for width in VECTOR_WIDTHS for step in (-1, 0, 1))})
GUARD_NBYTES = 64


def as_bytes(array: Any) -> Any:
    return array.view(np.uint8)


def native(dst: Any, sources: list[Any], op: str, size: int) -> None:
    reduce_natively(dst, sources, OPERATIONS[op], size)


def assert_like_numpy(rows: Any, op: str, size: int | None = None) -> None:
    size = size or len(rows)
    expected, got = np.zeros_like(rows[0]), np.zeros_like(rows[0])
    reduce_into(expected, list(rows), OPERATIONS[op], size, lower=True)
    native(got, list(rows), op, size)
    assert_same_values(got, expected)


def all_halves(dtype: str) -> Any:
    return np.arange(1 << 16, dtype=np.uint16).view(dtype)


def test_native_core_has_the_same_table_of_dtypes() -> None:
    assert [(dtype.name, dtype.itemsize) for dtype in DTYPES.values()] == _core.DTYPES


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(sources=st.integers(1, 9), count=st.sampled_from(COUNTS), seed=st.integers(0, 1000))
def test_native_reduction_of_any_bits_equals_numpy(dtype: str, op: str, sources: int, count: int, seed: int) -> None:
    assert_like_numpy(random_bits(np.random.default_rng(seed), sources, count, dtype), op)


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, op in REDUCTIONS if dtype in EIGHT_BITS])
def test_native_reduction_of_every_pair_of_8_bit_elements_equals_numpy(dtype: str, op: str) -> None:
    elements = np.arange(2 if dtype == "bool" else 256, dtype=np.uint8).view(dtype)
    rows = [np.repeat(elements, len(elements)), np.tile(elements, len(elements))]
    assert_like_numpy(rows, op)
    assert_like_numpy(rows[:1], op)


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("dtype", FLOAT8)
def test_native_reduction_of_every_pair_of_8_bit_floats_equals_ml_dtypes(dtype: str, op: str) -> None:
    elements = np.arange(256, dtype=np.uint8).view(dtype)
    rows = [np.repeat(elements, 256), np.tile(elements, 256)]
    combine = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    got = np.zeros_like(rows[0])
    native(got, rows, op, 2)
    with np.errstate(all="ignore"):
        expected = combine(*rows)
    # min and max of two zeros may return either zero.
    is_zero = (rows[0] == 0) & (rows[1] == 0) & (op in ("min", "max"))
    assert (got[is_zero] == 0).all()
    assert_same_values(got[~is_zero], expected[~is_zero])


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_minloc_and_maxloc_prefer_nan_and_then_the_lowest_index(dtype: str) -> None:
    rows = np.array([[2 + 5j, 1 + 4j, 1 + 4j, complex(np.nan, 7)], [1 + 9j, 1 + 3j, 3 + 2j, complex(np.nan, 6)]], dtype)
    rows = np.concatenate([rows, np.array([[7 + 0j, 8 + 1j, 9 + 1j, 1 + 1j]], dtype)])
    for op, expected in (("minloc", [9, 3, 4, 6]), ("maxloc", [0, 1, 1, 6])):
        for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            got = np.zeros(4, dtype)
            native(got, list(rows[order]), op, 3)
            assert got.imag.tolist() == expected


PARTNERS = [0.0, -0.0, 1.0, -1.0, 1.5, 1e-7, 6e-8, -65504.0, 3e38, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("op", [op for dtype, op in REDUCTIONS if dtype == "float16"])
@pytest.mark.parametrize("partner", PARTNERS)
@pytest.mark.parametrize("dtype", NARROW)
def test_native_reduction_of_every_16_bit_float_equals_numpy(dtype: str, partner: float, op: str) -> None:
    with np.errstate(over="ignore"):
        other = np.full(1 << 16, partner, np.float32).astype(dtype)
    assert_like_numpy([all_halves(dtype), other], op)
    assert_like_numpy([other, all_halves(dtype)], op)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", NARROW)
def test_native_average_of_every_16_bit_float_equals_numpy(dtype: str, size: int) -> None:
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
def test_native_min_and_max_propagate_nan_from_any_position(dtype: str, op: str) -> None:
    for count in COUNTS[1:]:
        for place in range(3):
            rows = np.ones((3, count), dtype)
            rows[place, count // 2] = np.nan
            got = np.zeros(count, dtype)
            native(got, list(rows), op, 3)
            assert np.flatnonzero(np.isnan(got)).tolist() == [count // 2]


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, op in REDUCTIONS if dtype in INTEGERS])
def test_native_reduction_of_extreme_integers_equals_numpy(dtype: str, op: str) -> None:
    limits = np.iinfo(dtype)
    extremes = np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], dtype)
    rows = np.array(np.meshgrid(extremes, extremes, extremes)).reshape(3, -1)
    assert_like_numpy(rows, op)
    for size in (1, 2, 3, 7, 255, 256, limits.max // 2 + 1, 1 << 40):
        assert_like_numpy(rows[:1], "avg", int(size))


@pytest.mark.parametrize("dtype", ["int16", "uint16"])
def test_native_average_of_every_16_bit_integer_equals_numpy(dtype: str) -> None:
    for size in (2, 3, 5, 7, 10, 127, 255, 641, 32767, 32768, 65535):
        assert_like_numpy([np.arange(1 << 16, dtype=np.uint16).view(dtype)], "avg", size)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    reduction=st.sampled_from(REDUCTIONS),
    sources=st.integers(1, 9),
    count=st.sampled_from(COUNTS),
    offsets=st.lists(st.integers(0, 9), min_size=10, max_size=10),
)
def test_native_reduction_needs_no_alignment(
    reduction: tuple[str, str], sources: int, count: int, offsets: list[int]
) -> None:
    dtype, op = reduction
    rows = random_bits(np.random.default_rng(count), sources, count, dtype)
    views = [misaligned(as_bytes(row), offset) for row, offset in zip(rows, offsets, strict=False)]
    nbytes = rows[0].nbytes
    memory = np.full(nbytes + 2 * GUARD_NBYTES, 0xA5, np.uint8)
    dst = memory[GUARD_NBYTES + offsets[-1] :][:nbytes]
    operation = OPERATIONS[op]
    _core.reduce(dst, views, DTYPES[dtype].code, int(operation.combine), divisor(operation, sources))
    expected = np.zeros_like(rows[0])
    reduce_into(expected, list(rows), OPERATIONS[op], sources, lower=True)
    assert_same_values(np.frombuffer(dst.tobytes(), dtype), expected)
    around = np.delete(memory, np.arange(nbytes) + GUARD_NBYTES + offsets[-1])
    assert (around == 0xA5).all(), "bytes outside the destination were written"


def misaligned(row: Any, offset: int) -> Any:
    memory = np.zeros(row.size + offset, np.uint8)
    memory[offset:] = row
    return memory[offset:]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    reduction=st.sampled_from(REDUCTIONS),
    sources=st.integers(1, 9),
    target=st.integers(0, 8),
    count=st.sampled_from(COUNTS),
)
def test_native_reduction_may_write_into_any_of_its_sources(
    reduction: tuple[str, str], sources: int, target: int, count: int
) -> None:
    dtype, op = reduction
    rows = random_bits(np.random.default_rng(sources), sources, count, dtype)
    target %= sources
    expected = np.zeros_like(rows[0])
    reduce_into(expected, list(rows), OPERATIONS[op], sources, lower=True)
    others = np.delete(rows, target, axis=0).tobytes()
    native(rows[target], list(rows), op, sources)
    assert_same_values(rows[target], expected)
    assert np.delete(rows, target, axis=0).tobytes() == others


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_native_kernels_exist_exactly_for_defined_operations(dtype: str) -> None:
    row = np.zeros(16, np.uint8)
    for op in OPERATIONS.values():
        if DTYPES[dtype].kind in op.kinds:
            _core.reduce(row, [row], DTYPES[dtype].code, int(op.combine), 1)
        elif op.lower is not Lower.DIVIDE_BY_SIZE:
            with pytest.raises(ValueError, match="no kernel reduces"):
                _core.reduce(row, [row], DTYPES[dtype].code, int(op.combine), 1)


def test_native_reduction_refuses_sources_of_another_length() -> None:
    with pytest.raises(ValueError, match="as long as"):
        _core.reduce(np.zeros(8, np.uint8), [np.zeros(4, np.uint8)], DTYPES["uint8"].code, 0, 1)


# --- the same bits in every floating-point mode --------------------------------------------------------------------


def reduced(mode_name: str, dtype: str, op: str) -> tuple[Any, Any]:
    """Return the results of numpy and of the kernels for random bits, half of which are subnormal numbers."""
    rows = random_bits(np.random.default_rng(1), 3, 400, dtype)
    itemsize = rows.dtype.itemsize
    rows.view(np.uint8).reshape(3, 400, itemsize)[:, ::2, -2:] &= np.array([0x0F, 0x80], np.uint8)[-itemsize:]
    by_numpy, by_kernels = np.zeros_like(rows[0]), np.zeros_like(rows[0])
    with mode(mode_name):
        reduce_into(by_numpy, list(rows), OPERATIONS[op], 3, lower=True)
        native(by_kernels, list(rows), op, 3)
    return by_numpy, by_kernels


@pytest.mark.parametrize("name", MODES)
def test_native_reduction_gives_equal_bits_in_every_floating_point_mode(name: str) -> None:
    for dtype, op in REDUCTIONS:
        for got, expected in zip(reduced(name, dtype, op), reduced("default", dtype, op), strict=True):
            assert_same_values(got, expected)


@pytest.mark.parametrize("name", MODES)
def test_premul_sum_gives_equal_bits_in_every_floating_point_mode(name: str) -> None:
    x = np.array([3e-40, 1 + 2.0**-23, 3e38], np.float32)

    def lifted(mode_name: str) -> Any:
        with mode(mode_name):
            return lift(Op.premul_sum(1.1), x)

    assert lifted(name).tobytes() == lifted("default").tobytes()
