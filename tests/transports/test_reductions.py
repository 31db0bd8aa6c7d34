from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import OPERATIONS, Op, operation
from unisono.transports.reductions.definition import lift, numpy_dtype, reduce_into

INTEGERS = [name for name, dtype in DTYPES.items() if dtype.kind == "integer"]
FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
NARROW = ["float16", "bfloat16"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
COMPLEX = ["complex64", "complex128"]
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]


def reduced(rows: Any, op: str, lower: bool = True, size: int | None = None) -> Any:
    result = np.zeros_like(rows[0])
    reduce_into(result, list(rows), OPERATIONS[op], size or len(rows), lower)
    return result


def test_every_dtype_in_the_table_has_the_size_of_its_numpy_dtype() -> None:
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
        expected = [(reduce(combine, column) - limits.min) % modulus + limits.min for column in columns]
        assert reduced(rows, op).tolist() == expected


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64"])
def test_average_of_integers_truncates_towards_zero(dtype: str) -> None:
    sums = np.array([-7, -6, -1, 0, 1, 6, 7, np.iinfo(dtype).min, np.iinfo(dtype).max], dtype)
    expected = [-2, -2, 0, 0, 0, 2, 2, -(-int(sums[-2]) // 3), int(sums[-1]) // 3]
    assert reduced([sums], "avg", size=3).tolist() == expected


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
    expected = (state / np.float32(9) if op == "avg" else state).astype(dtype)
    assert reduced(rows, op).tobytes() == expected.tobytes()
    pairwise = rows[0]
    for row in rows[1:]:
        pairwise = reduced([pairwise, row], op, lower=False)
    assert (pairwise != reduced(rows, op, lower=False)).any(), "the data does not tell one rounding from many"


@pytest.mark.parametrize("dtype", NARROW)
def test_sum_of_narrow_floats_may_overflow_the_dtype_in_between(dtype: str) -> None:
    largest = ml_dtypes.finfo(dtype).max
    rows = np.array([[largest], [largest], [-largest]], dtype)
    # The sum of two such numbers exceeds float16. bfloat16 has the range of its accumulator.
    expected = float(largest) if dtype == "float16" else np.inf
    assert reduced(rows, "sum").astype(np.float64).tolist() == [expected]


@pytest.mark.parametrize("dtype", FLOATS)
def test_overflow_is_infinity_without_a_warning(dtype: str) -> None:
    largest = np.full((2, 1), ml_dtypes.finfo(dtype).max, dtype)
    assert np.isinf(reduced(largest, "sum").astype(np.float64)).all()


@pytest.mark.parametrize("op", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("dtype", [*FLOATS, *FLOAT8])
def test_reference_reduction_propagates_nan_from_any_position(dtype: str, op: str) -> None:
    rows = np.array([[np.nan, 1.0, 1.0], [1.0, np.nan, 2.0]], dtype)
    assert np.isnan(reduced(rows, op).astype(np.float64)).tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", INTEGERS + FLOATS)
def test_min_and_max_choose_among_the_operands(dtype: str) -> None:
    rows = np.array([[3, 1, 2], [1, 2, 3], [2, 3, 1]], dtype)
    assert reduced(rows, "min").tolist() == [1, 1, 1]
    assert reduced(rows, "max").tolist() == [3, 3, 3]


def test_average_is_divided_only_when_lowered() -> None:
    rows = np.full((4, 2), 3.0)
    assert reduced(rows, "avg", lower=False).tolist() == [12.0, 12.0]
    assert reduced(rows, "avg", lower=True).tolist() == [3.0, 3.0]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    reduction=st.sampled_from(REDUCTIONS),
    operands=st.integers(1, 5),
    target=st.integers(0, 4),
    length=st.integers(0, 40),
)
def test_reference_reduction_may_write_into_any_of_its_sources(
    reduction: tuple[str, str], operands: int, target: int, length: int
) -> None:
    dtype, op = reduction
    rows = np.random.default_rng(length).integers(0, 9, (operands, length)).astype(dtype)
    expected = reduced(rows, op, size=operands)
    target %= operands
    untouched = np.delete(rows, target, axis=0)
    reduce_into(rows[target], list(rows), OPERATIONS[op], operands, lower=True)
    assert rows[target].tobytes() == expected.tobytes()
    assert np.delete(rows, target, axis=0).tobytes() == untouched.tobytes()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(dtype=st.sampled_from(COMPLEX), operands=st.integers(1, 8), length=st.sampled_from([0, 1, 7, 64]))
def test_complex_reduction_equals_numpy_up_to_rounding(dtype: str, operands: int, length: int) -> None:
    parts = np.random.default_rng(length).standard_normal((operands, length, 2))
    rows = parts.astype(np.dtype(dtype).type(0).real.dtype).view(dtype)[..., 0]
    tolerance = 16 * float(np.finfo(dtype).eps)
    assert np.allclose(reduced(rows, "sum"), rows.sum(axis=0), atol=tolerance)
    assert np.allclose(reduced(rows, "prod"), rows.prod(axis=0), rtol=tolerance, atol=tolerance)
    assert np.allclose(reduced(rows, "avg"), rows.sum(axis=0) / operands, atol=tolerance)


@pytest.mark.parametrize("dtype", COMPLEX)
def test_an_average_of_complex_numbers_divides_each_part(dtype: str) -> None:
    rows = np.array([[complex(np.inf, 1), complex(49, np.nan), 49 + 7j]] * 49, dtype)
    assert str(reduced(rows, "avg").tolist()) == "[(inf+1j), (49+nanj), (49+7j)]"


@pytest.mark.parametrize(("dtype", "op"), [(dtype, op) for dtype, op in REDUCTIONS if op in ("land", "lor", "lxor")])
def test_logical_operations_give_0_or_1_even_of_one_contribution(dtype: str, op: str) -> None:
    rows = np.array([[0, 3, 0, 5], [0, 0, 7, 9]]).astype(dtype)
    combine = {"land": np.logical_and, "lor": np.logical_or, "lxor": np.logical_xor}[op]
    assert reduced(rows, op).tobytes() == combine(*rows).astype(dtype).tobytes()
    assert reduced(rows[:1], op).tobytes() == (rows[0] != 0).astype(dtype).tobytes()
    assert reduced(rows[:1], op, lower=False).tobytes() == rows[0].tobytes()


def test_overflow_of_8_bit_floats_follows_ml_dtypes() -> None:
    for dtype, is_lost in (("float8_e4m3fn", np.isnan), ("float8_e5m2", np.isinf)):
        largest = np.full((2, 1), ml_dtypes.finfo(dtype).max, dtype)
        assert is_lost(reduced(largest, "sum").astype(np.float32)).all()


@pytest.mark.parametrize(
    ("dtype", "factor"),
    [
        ("int8", 3),
        ("uint16", 1000),
        ("int32", np.int64(7)),
        ("float16", 0.1),
        ("bfloat16", 0.1),
        ("float8_e5m2", 0.3),
        ("float32", np.float64(0.5)),
        ("float64", 2),
        ("complex64", 1j),
        ("complex128", 0.5),
    ],
)
def test_contributions_are_multiplied_in_the_accumulation_dtype(dtype: str, factor: Any) -> None:
    x = np.array([1, 2, 3, 5, 100]).astype(dtype)
    untouched = x.copy()
    accumulate = DTYPES[dtype].accumulate
    expected = (x.astype(accumulate) * np.array(factor).astype(accumulate)).astype(dtype)
    assert lift(Op.premul_sum(factor), x).tobytes() == expected.tobytes()
    stage = np.zeros_like(x)
    assert lift(Op.premul_sum(factor), x, stage) is stage
    assert stage.tobytes() == expected.tobytes()
    assert x.tobytes() == untouched.tobytes()
    assert lift(OPERATIONS["sum"], x) is x


@pytest.mark.parametrize(
    ("dtype", "factor"), [("int8", 128), ("uint8", -1), ("int64", 0.5), ("float32", 1j), ("bfloat16", 2j)]
)
def test_premul_sum_refuses_a_factor_outside_the_dtype(dtype: str, factor: Any) -> None:
    with pytest.raises(UsageError, match=f"the factor of premul_sum is .* not in the range of {dtype}"):
        lift(Op.premul_sum(factor), np.ones(3, dtype))


def test_premul_sum_ops_are_equal_whatever_their_factor() -> None:
    assert Op.premul_sum(2) == Op.premul_sum(3.5)
    assert hash(Op.premul_sum(2)) == hash(Op.premul_sum(3.5))
    assert Op.premul_sum(2) != OPERATIONS["sum"]
    with pytest.raises(UsageError, match="must be a number"):
        Op.premul_sum("2")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "op", "advice"),
    [
        ("bool", "sum", "astype('int64')"),
        ("bool", "avg", "lor"),
        ("complex64", "min", "no order"),
        ("float32", "band", "a view of unsigned integers"),
        ("int32", "minloc", "1j"),
    ],
)
def test_undefined_op_is_refused_with_advice(dtype: str, op: str, advice: str) -> None:
    with pytest.raises(UsageError) as refusal:
        operation(op).check(DTYPES[dtype])
    assert f"op {op!r} is not defined for {dtype}" in str(refusal.value)
    assert advice in str(refusal.value)
