from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS
from unisono.transports.reductions import numpy_dtype, reduce_into

INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
NARROW = ["float16", "bfloat16"]


def reduced(rows: Any, op: str, lower: bool = True, size: int | None = None) -> Any:
    result = np.zeros_like(rows[0])
    reduce_into(result, list(rows), OPERATIONS[op], size or len(rows), lower)
    return result


def test_every_dtype_of_the_table_is_one_of_numpy_with_that_size() -> None:
    assert {name: numpy_dtype(dtype).itemsize for name, dtype in DTYPES.items()} == {
        name: dtype.itemsize for name, dtype in DTYPES.items()
    }


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap(dtype: str) -> None:
    limits = np.iinfo(dtype)
    modulus = 1 << limits.bits
    columns = [(limits.max, 1, 5), (limits.max, limits.max, 2), (limits.min, limits.max, 3), (7, 11, 13)]
    rows = np.array(columns, dtype).T
    for op, combine in (("sum", operator.add), ("prod", operator.mul)):
        wanted = [(reduce(combine, column) - limits.min) % modulus + limits.min for column in columns]
        assert reduced(rows, op).tolist() == wanted


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_average_of_integers_truncates_towards_zero(dtype: str) -> None:
    sums = np.array([-7, -6, -1, 0, 1, 6, 7, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    wanted = [-2, -2, 0, 0, 0, 2, 2, -(-int(sums[-2]) // 3), int(sums[-1]) // 3]
    assert reduced([sums], "avg", size=3).tolist() == wanted


def test_average_of_integers_takes_more_ranks_than_the_dtype_can_count() -> None:
    assert reduced([np.array([-128, 127], np.int8)], "avg", size=1000).tolist() == [0, 0]
    assert reduced([np.array([255], np.uint8)], "avg", size=300).tolist() == [0]


def test_average_of_large_unsigned_integers_does_not_lose_bits() -> None:
    largest = np.iinfo(np.uint64).max
    assert reduced([np.array([largest], np.uint64)], "avg", size=3).tolist() == [int(largest) // 3]


@pytest.mark.parametrize("op", ["sum", "prod", "avg"])
@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_floats_are_rounded_once_for_all_operands(dtype: str, op: str) -> None:
    rows = np.random.default_rng(1).uniform(0.5, 1.5, (9, 500)).astype(dtype)
    wide = rows.astype(np.float32)
    state = wide[0]
    for row in wide[1:]:
        state = state * row if op == "prod" else state + row
    wanted = (state / np.float32(9) if op == "avg" else state).astype(dtype)
    assert reduced(rows, op).tobytes() == wanted.tobytes()
    pairwise = rows[0]
    for row in rows[1:]:
        pairwise = reduced([pairwise, row], op, lower=False)
    assert (pairwise != reduced(rows, op, lower=False)).any(), "the data does not tell one rounding from many"


@pytest.mark.parametrize("dtype", NARROW)
def test_a_sum_that_overflows_the_dtype_on_the_way_is_exact_in_the_end(dtype: str) -> None:
    largest = ml_dtypes.finfo(dtype).max
    rows = np.array([[largest], [largest], [-largest]], dtype)
    # The sum of two is beyond float16, but bfloat16 has the range of its accumulator.
    wanted = float(largest) if dtype == "float16" else np.inf
    assert reduced(rows, "sum").astype(np.float64).tolist() == [wanted]


@pytest.mark.parametrize("dtype", FLOATS)
def test_overflow_is_infinity_without_a_warning(dtype: str) -> None:
    largest = np.full((2, 1), ml_dtypes.finfo(dtype).max, dtype)
    assert np.isinf(reduced(largest, "sum").astype(np.float64)).all()


@pytest.mark.parametrize("op", list(OPERATIONS))
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_is_propagated_wherever_it_stands(dtype: str, op: str) -> None:
    rows = np.array([[np.nan, 1.0, 1.0], [1.0, np.nan, 2.0]], dtype)
    assert np.isnan(reduced(rows, op).astype(np.float64)).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_min_and_max_choose_among_the_operands(dtype: str) -> None:
    rows = np.array([[3, 1, 2], [1, 2, 3], [2, 3, 1]], dtype)
    assert reduced(rows, "min").tolist() == [1, 1, 1]
    assert reduced(rows, "max").tolist() == [3, 3, 3]


def test_a_state_that_is_not_lowered_is_not_divided() -> None:
    rows = np.full((4, 2), 3.0)
    assert reduced(rows, "avg", lower=False).tolist() == [12.0, 12.0]
    assert reduced(rows, "avg", lower=True).tolist() == [3.0, 3.0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(INTEGERS + FLOATS),
    op=st.sampled_from(list(OPERATIONS)),
    operands=st.integers(1, 5),
    target=st.integers(0, 4),
    length=st.integers(0, 40),
)
def test_the_target_may_be_any_of_the_sources(dtype: str, op: str, operands: int, target: int, length: int) -> None:
    rows = np.random.default_rng(length).integers(0, 9, (operands, length)).astype(dtype)
    wanted = reduced(rows, op, size=operands)
    target %= operands
    untouched = np.delete(rows, target, axis=0)
    reduce_into(rows[target], list(rows), OPERATIONS[op], operands, lower=True)
    assert rows[target].tobytes() == wanted.tobytes()
    assert np.delete(rows, target, axis=0).tobytes() == untouched.tobytes()
