from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from unisono.collectives.arrays import operands
from unisono.dtypes import DTYPES
from unisono.errors import UsageError


@pytest.mark.parametrize("name", DTYPES)
def test_operand_has_the_dtype_of_its_array(name: str) -> None:
    operand = operands.source(np.zeros(3, name))
    assert operand.dtype is DTYPES[name]
    assert operand.flat.dtype.itemsize == DTYPES[name].itemsize


@pytest.mark.parametrize(
    ("shape", "order", "expected"),
    [((2, 3), "C", "C"), ((2, 3), "F", "F"), ((), "C", "C"), ((4, 1), "F", "C"), ((0, 3), "C", "C"), ((5,), "F", "C")],
)
def test_contiguous_arrays_become_operands_without_a_copy(shape: tuple[int, ...], order: Any, expected: str) -> None:
    array = np.zeros(shape, order=order)
    for operand in (operands.source(array), operands.target(array)):
        assert (operand.shape, operand.order, operand.flat.ndim) == (shape, expected, 1)
        assert operand.flat.size == array.size
        assert operand.flat.ctypes.data == array.ctypes.data


def test_operand_of_fortran_order_array_is_flat_in_memory_order() -> None:
    array = np.asfortranarray(np.arange(6).reshape(2, 3))
    assert operands.source(array).flat.tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("view", [np.s_[::2], np.s_[::-1], np.s_[1:, ::3], np.s_[:, 1]])
def test_strided_arrays_are_packed_in_c_order(view: Any) -> None:
    array = np.arange(24).reshape(4, 6)[view]
    operand = operands.source(array)
    assert operand.order == "C"
    assert operand.flat.tolist() == array.reshape(-1).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(0, 4), max_size=4), order=st.sampled_from("CF"), turned=st.booleans())
def test_new_result_has_the_shape_dtype_and_order_of_its_operand(shape: list[int], order: Any, turned: bool) -> None:
    array = np.zeros(shape, "float16", order=order)
    operand = operands.source(array.T if turned else array)
    result, target = operands.new(operand.shape, operand)
    assert (result.shape, result.dtype) == ((array.T if turned else array).shape, array.dtype)
    assert (target.dtype, target.shape, target.order) == (operand.dtype, operand.shape, operand.order)
    assert operands.target(result).order == operand.order
    target.flat[...] = np.arange(target.flat.size)
    copied = operands.source(result)
    assert copied.flat.tolist() == target.flat.tolist()


WRONG = {
    "a list": ([1.0, 2.0], "must be an array, not list"),
    "a number": (3.0, "not float"),
    "a scalar of numpy": (np.float32(3), "not numpy.float32"),
    "nothing": (None, "not NoneType"),
    "objects": (np.array([1, "a"], object), "Python objects"),
    "a structure of objects": (np.zeros(2, [("a", "i4"), ("b", "O")]), "Python objects"),
    "another byte order": (np.zeros(2, ">f4"), "byte order"),
    "a mask": (np.ma.masked_array([1.0, 2.0], [True, False]), "masks"),
    "extended floats": (np.zeros(1, "longdouble"), "convert it with astype"),
    "a type of ml_dtypes that is not moved": (np.zeros(2, ml_dtypes.int4), "convert it with astype"),
}


@pytest.mark.parametrize("what", WRONG)
def test_operand_of_no_plain_array_is_refused(what: str) -> None:
    wrong, why = WRONG[what]
    for take in (operands.source, operands.target):
        with pytest.raises(UsageError, match=why):
            take(wrong)


def read_only() -> Any:
    array = np.zeros((2, 3), "float32")
    array.flags.writeable = False
    return array


MISFITS = {
    "read-only": (read_only(), "read-only"),
    "not contiguous": (np.zeros((2, 6), "float32")[:, ::2], "not contiguous"),
    "dtype": (np.zeros((2, 3), "float64"), "dtype float64"),
    "shape": (np.zeros((3, 2), "float32"), "shape"),
    "fewer dimensions": (np.zeros(6, "float32"), "shape"),
    "order": (np.zeros((2, 3), "float32", order="F"), "F order and x in C order"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_an_out_that_does_not_fit_is_refused(what: str) -> None:
    out, why = MISFITS[what]
    with pytest.raises(UsageError, match=why):
        operands.check_fit(operands.target(out), operands.source(np.zeros((2, 3), "float32")), ((2, 3),))


def test_arrays_that_overlap_in_part_are_refused() -> None:
    memory = np.zeros(10)
    with pytest.raises(UsageError, match="overlap"):
        operands.share_memory(operands.source(memory[:8]), operands.target(memory[1:9]), 0)


def test_in_place_and_disjoint_arrays_are_accepted() -> None:
    memory = np.zeros(10)
    for first, offset in ((0, 0), (2, 2)):
        out = operands.target(memory[first : first + 5])
        assert operands.share_memory(operands.source(memory[:5]), out, offset)
    assert not operands.share_memory(operands.source(memory[:5]), operands.target(memory[5:]), 0)
    with pytest.raises(UsageError, match="share memory"):
        operands.share_memory(operands.source(memory[:5]), operands.target(memory[:5]), None)


def test_strided_input_may_overlap_out_because_it_is_packed_first() -> None:
    memory = np.zeros(10)
    assert not operands.share_memory(operands.source(memory[::2]), operands.target(memory[:5]), 0)
