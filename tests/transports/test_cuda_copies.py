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
from unisono.transports.cuda.kernel_catalogue import (
    BLOCK_THREADS,
    COPY_EXTENTS,
    QUANTISED_BLOCK,
    dequantise,
    quantise,
)

SOURCES = ["float16", "bfloat16", "float32"]
CODES = ["int8", "float8_e4m3fn", "float8_e5m2"]
GREATEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
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
    pairs = [(DTYPES[source], DTYPES[of]) for source in SOURCES for of in CODES]
    by_name = compiled(tuple(make(*pair) for pair in pairs for make in (quantise, dequantise)), "-DUNISONO_WARPS")
    pair = DTYPES[dtype], DTYPES[codes]
    return by_name[quantise(*pair).name], by_name[dequantise(*pair).name]


def blocks_of(count: int) -> int:
    return -(-count // QUANTISED_BLOCK)


def quantised(values: Any, codes: str) -> tuple[Any, Any]:
    """Return codes and scales by the definition in `quantise.cuh`."""
    wide = np.zeros(blocks_of(values.size) * QUANTISED_BLOCK, np.float32)
    wide[: values.size] = values
    wide = wide.reshape(-1, QUANTISED_BLOCK)
    with np.errstate(all="ignore"):
        scales = np.abs(wide).max(axis=1) / np.float32(GREATEST[codes])
        scales[~np.isfinite(wide).all(axis=1)] = np.nan
        quotients = np.clip(wide / scales[:, None], -GREATEST[codes], GREATEST[codes])
        quotients[~(scales > 0)] = 0
    made = np.rint(quotients).astype(np.int8) if codes == "int8" else quotients.astype(codes)
    return made.reshape(-1)[: values.size], scales


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


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", SOURCES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    count=st.sampled_from(COUNTS),
    start=st.sampled_from([0, 4, 8]),
    codes_start=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 1000),
)
def test_gpu_quantisation_gives_the_bits_of_numpy(
    dtype: str, codes: str, count: int, start: int, codes_start: int, seed: int
) -> None:
    forth, back = kernels(dtype, codes)
    values = guarded_copy(values_of(dtype, count, seed), start)
    made = guarded_copy(np.zeros(count, codes), codes_start)
    scales = guarded_copy(np.zeros(blocks_of(count), np.float32), 4)
    forth(2, address(made), address(scales), address(values), ctypes.c_uint64(count))
    wanted, wanted_scales = quantised(values, codes)
    np.testing.assert_array_equal(scales, wanted_scales)
    assert made.tobytes() == wanted.tobytes()
    assert has_intact_guards(made)
    assert has_intact_guards(scales)
    got = guarded_copy(np.zeros(count, dtype), start)
    back(2, address(got), address(made), address(scales), ctypes.c_uint64(count))
    with np.errstate(all="ignore"):
        expected = (made.astype(np.float32) * np.repeat(scales, QUANTISED_BLOCK)[:count]).astype(dtype)
    np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))
    assert has_intact_guards(got)


@pytest.mark.parametrize("codes", CODES)
def test_dequantised_element_is_within_half_a_step(codes: str) -> None:
    forth, back = kernels("float32", codes)
    values = np.random.default_rng(0).normal(size=100 * QUANTISED_BLOCK).astype(np.float32)
    made, scales, got = np.zeros(values.size, codes), np.zeros(100, np.float32), np.zeros_like(values)
    forth(1, address(made), address(scales), address(values), ctypes.c_uint64(values.size))
    back(1, address(got), address(made), address(scales), ctypes.c_uint64(values.size))
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
        forth(1, address(made), address(scales), address(values), ctypes.c_uint64(values.size))
        back(1, address(got), address(made), address(scales), ctypes.c_uint64(values.size))
        assert np.flatnonzero(np.isnan(got)).tolist() == list(range(QUANTISED_BLOCK, 2 * QUANTISED_BLOCK))


def test_quantisation_refuses_unsupported_dtypes() -> None:
    with pytest.raises(UsageError, match="float64 cannot be quantised to int8: float16, bfloat16, float32"):
        quantise(DTYPES["float64"], DTYPES["int8"])
    with pytest.raises(UsageError, match="float32 cannot be quantised to uint8"):
        dequantise(DTYPES["float32"], DTYPES["uint8"])
