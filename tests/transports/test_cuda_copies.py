"""The GPU kernels that copy many extents and that quantise blocks, compiled for the host and compared with numpy."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.bit_patterns import guarded_copy, has_intact_guards
from support.cuda_on_host import Run, address, compiled

from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.testing.quantisation import dequantised, quantised, with_feedback
from unisono.transports.cuda.kernels.catalogue import (
    BLOCK_THREADS,
    COPY_EXTENTS,
    dequantise,
    quantise,
)
from unisono.transports.cuda.kernels.quantised_form import QUANTISED_BLOCK, quantised_nbytes, scales_offset

SOURCES = ["float16", "bfloat16", "float32"]
CODES = ["int8", "float8_e4m3fn", "float8_e5m2"]
FORMS = [*((source, codes) for source in SOURCES for codes in CODES), ("float32", "float16"), ("float32", "bfloat16")]
TILE_NBYTES = 4 * 16 * BLOCK_THREADS


class Extent(ctypes.Structure):
    _fields_ = (("dst", ctypes.c_void_p), ("src", ctypes.c_void_p), ("nbytes", ctypes.c_uint64))


def copy(pairs: list[tuple[Any, Any]], blocks: int) -> None:
    extents = (Extent * len(pairs))(*(Extent(dst.ctypes.data, src.ctypes.data, src.nbytes) for dst, src in pairs))
    table = ctypes.c_void_p(ctypes.addressof(extents))
    compiled((COPY_EXTENTS,))[COPY_EXTENTS.name](blocks, table, ctypes.c_uint64(len(pairs)))


LENGTHS = st.sampled_from([0, 1, 3, 4, 15, 16, 17, 100, TILE_NBYTES - 1, TILE_NBYTES + 33])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    arrays=st.lists(st.tuples(LENGTHS, st.integers(0, 15), st.integers(0, 15) | st.none()), max_size=7),
    blocks=st.integers(1, 3),
)
def test_gpu_copy_kernel_packs_and_unpacks_a_bucket(arrays: list[tuple[int, int, int | None]], blocks: int) -> None:
    generator = np.random.default_rng(len(arrays))
    sources = [guarded_copy(generator.integers(0, 256, nbytes, dtype=np.uint8), start) for nbytes, start, _ in arrays]
    # An array begins in the bucket at its own offset from a multiple of 16 bytes, or at the offset `own`.
    begin, places = 0, []
    for nbytes, start, own in arrays:
        begin = -(-begin // 16) * 16 + (start if own is None else own)
        places.append(begin)
        begin += nbytes
    bucket = guarded_copy(np.zeros(begin, np.uint8), 0)
    parts = [bucket[place : place + source.size] for place, source in zip(places, sources, strict=True)]
    copy(list(zip(parts, sources, strict=True)), blocks)
    assert [part.tobytes() for part in parts] == [source.tobytes() for source in sources]
    assert has_intact_guards(bucket)
    between = np.ones(bucket.size, bool)
    for place, source in zip(places, sources, strict=True):
        between[place : place + source.size] = False
    assert not bucket[between].any(), "bytes between the arrays were written"
    unpacked = [
        guarded_copy(np.zeros_like(source), start) for source, (_, start, _) in zip(sources, arrays, strict=True)
    ]
    copy(list(zip(unpacked, parts, strict=True)), blocks)
    assert [got.tobytes() for got in unpacked] == [source.tobytes() for source in sources]
    assert all(has_intact_guards(got) for got in unpacked)


def kernels(dtype: str, codes: str) -> tuple[Run, Run]:
    """Return the kernels that quantise and dequantise."""
    pairs = [(DTYPES[source], DTYPES[of]) for source, of in FORMS]
    by_name = compiled(tuple(make(*pair) for pair in pairs for make in (quantise, dequantise)), "-DUNISONO_WARPS")
    pair = DTYPES[dtype], DTYPES[codes]
    return by_name[quantise(*pair).name], by_name[dequantise(*pair).name]


def blocks_of(count: int) -> int:
    return -(-count // QUANTISED_BLOCK)


def forward(
    run: Run, blocks: int, codes: Any, scales: Any, residual: Any, values: Any, feeds: bool = True, weight: float = 1.0
) -> None:
    kept = ctypes.c_void_p(None) if residual is None else address(residual)
    counts = ctypes.c_uint64(values.size), ctypes.c_uint64(feeds)
    run(blocks, address(codes), address(scales), kept, address(values), *counts, ctypes.c_float(weight))


def backward(run: Run, blocks: int, values: Any, codes: Any, scales: Any, rows: int = 1, divisor: int = 1) -> None:
    """Run the kernel on rows in one array of bytes; the first codes and scales begin at the arguments."""
    stride = codes.strides[0] if codes.ndim == 2 else 0
    numbers = (ctypes.c_uint64(number) for number in (rows, stride, divisor, values.size))
    run(blocks, address(values), address(codes), address(scales), *numbers)


def values_of(dtype: str, count: int, seed: int) -> Any:
    """Return blocks of zeros, and of subnormal, usual and large numbers. Some have an infinity or a NaN."""
    generator = np.random.default_rng(seed)
    tiny, most = float(ml_dtypes.finfo(dtype).smallest_subnormal), float(ml_dtypes.finfo(dtype).max)
    magnitudes = generator.choice([0.0, tiny, 100 * tiny, 1e-5, 1.0, most / 4], blocks_of(count))
    values = np.repeat(magnitudes, QUANTISED_BLOCK)[:count] * generator.uniform(-3, 3, count)
    if count and seed % 3 == 0:
        values[generator.integers(count)] = generator.choice([np.nan, np.inf, -np.inf])
    return values.astype(dtype)


COUNTS = [0, 1, 3, 4, 127, 128, 129, 1000, 4096, 4 * BLOCK_THREADS + 5, 20000]


@pytest.mark.parametrize(("dtype", "codes"), FORMS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    count=st.sampled_from(COUNTS),
    start=st.sampled_from([0, 4, 8]),
    codes_start=st.sampled_from([0, 2, 8]),
    seed=st.integers(0, 1000),
    feeds=st.booleans() | st.none(),
)
def test_gpu_quantisation_gives_the_bits_of_numpy(
    dtype: str, codes: str, count: int, start: int, codes_start: int, seed: int, feeds: bool | None
) -> None:
    forth, back = kernels(dtype, codes)
    values = guarded_copy(values_of(dtype, count, seed), start)
    made = guarded_copy(np.zeros(count, codes), codes_start)
    scales = guarded_copy(np.zeros(blocks_of(count) if codes in CODES else 0, np.float32), 4)
    before = np.zeros(count, np.float32)
    if feeds is not None:
        before[:] = np.abs(values_of("float32", count, seed * 3 + 1)) / 100
    kept = guarded_copy(before, 4)
    forward(forth, 2, made, scales, None if feeds is None else kept, values, bool(feeds), 3.0)
    reference = with_feedback(values, before, codes, feeds=bool(feeds), weight=3.0)
    np.testing.assert_array_equal(scales, reference.scales)
    assert made.tobytes() == reference.codes.tobytes()
    if feeds is not None:
        assert kept.tobytes() == before.tobytes()
    assert all(has_intact_guards(array) for array in (made, scales, kept))
    got = guarded_copy(np.zeros(count, dtype), start)
    backward(back, 2, got, made, scales)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = dequantised(reference).astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    assert has_intact_guards(got)


@pytest.mark.parametrize(("dtype", "codes"), [("float32", "int8"), ("bfloat16", "float8_e5m2"), ("float32", "float16")])
@pytest.mark.parametrize("count", [130, 4096])
@pytest.mark.parametrize("start", [0, 4])
def test_gpu_kernel_adds_up_quantised_rows_in_order(dtype: str, codes: str, count: int, start: int) -> None:
    rows, form = 3, DTYPES[codes]
    forth, back = kernels(dtype, codes)
    wire = np.zeros((rows, quantised_nbytes(form, count)), np.uint8)
    offset, total = scales_offset(form, count), np.zeros(count, np.float32)
    for i in range(rows):
        values = values_of(dtype, count, 3 * i + 1)
        forward(forth, 1, wire[i], wire[i, offset:], None, values)
        with np.errstate(over="ignore", invalid="ignore"):
            total += dequantised(quantised(values, codes))
    got = guarded_copy(np.zeros(count, dtype), start)
    backward(back, 2, got, wire, wire[:, offset:], rows, divisor=3)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (total / np.float32(3)).astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    assert has_intact_guards(got)


@pytest.mark.parametrize("codes", CODES)
def test_dequantised_element_is_within_half_a_step(codes: str) -> None:
    forth, back = kernels("float32", codes)
    values = np.random.default_rng(0).normal(size=100 * QUANTISED_BLOCK).astype(np.float32)
    made, scales, got = np.zeros(values.size, codes), np.zeros(100, np.float32), np.zeros_like(values)
    forward(forth, 1, made, scales, None, values)
    backward(back, 1, got, made, scales)
    greatest = np.abs(values).reshape(100, -1).max(axis=1).repeat(QUANTISED_BLOCK)
    # int8 has a fixed step. The step of 8-bit floats is relative, 2^-3 or 2^-2, except for subnormal numbers.
    step = {
        "int8": greatest / 127,
        "float8_e4m3fn": np.abs(values) / 8 + greatest / 2**17,
        "float8_e5m2": np.abs(values) / 4,
    }
    assert (np.abs(got - values) <= step[codes] / 2 * 1.001).all()


def test_only_quantised_blocks_with_infinity_or_nan_become_nan() -> None:
    forth, back = kernels("float32", "int8")
    values = np.ones(3 * QUANTISED_BLOCK, np.float32)
    for bad in (np.inf, -np.inf, np.nan):
        values[QUANTISED_BLOCK + 5] = bad
        made, scales, got = np.zeros(values.size, np.int8), np.zeros(3, np.float32), np.zeros_like(values)
        forward(forth, 1, made, scales, None, values)
        backward(back, 1, got, made, scales)
        assert np.flatnonzero(np.isnan(got)).tolist() == list(range(QUANTISED_BLOCK, 2 * QUANTISED_BLOCK))


def test_quantisation_refuses_unsupported_dtypes() -> None:
    with pytest.raises(UsageError, match="float64 cannot be quantised to int8: float16, bfloat16, float32"):
        quantise(DTYPES["float64"], DTYPES["int8"])
    with pytest.raises(UsageError, match="float16 cannot be quantised to bfloat16"):
        quantise(DTYPES["float16"], DTYPES["bfloat16"])
    with pytest.raises(UsageError, match="float32 cannot be quantised to uint8"):
        dequantise(DTYPES["float32"], DTYPES["uint8"])
