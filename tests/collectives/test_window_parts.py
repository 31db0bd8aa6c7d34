"""The operations on one part of a window: the definition in numpy and the native core do the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from unisono.collectives.windows.definition import DefinedPart, bytes_of
from unisono.collectives.windows.memory import private_locks
from unisono.collectives.windows.operations import NO_OP, REPLACE, Element
from unisono.dtypes import DTYPES, DType
from unisono.operations import Combine
from unisono.transports import _core
from unisono.transports.reductions.definition import numpy_dtype

LENGTH = 150  # more than two blocks of the native core
INT64 = DTYPES["int64"].code
OPS = [int(combine) for combine in Combine if combine is not Combine.FUNCTION] + [REPLACE, NO_OP]


def native(memory: Any) -> Any:
    return _core.WindowPart(memory, private_locks(), 0, None, 1.0)


both = pytest.mark.parametrize("make", [DefinedPart, native])


@both
def test_part_is_read_and_written_where_the_selection_says(make: Any) -> None:
    memory = bytes_of(10, DTYPES["int64"])
    part, whole = make(memory), memory.view(np.int64)
    part.put(INT64, 2, 3, 1, None, np.array([5, 6, 7]))
    part.put(INT64, 9, 2, -3, None, np.array([8, 9]))
    part.put(INT64, 0, 2, 1, np.array([0, 1]), np.array([3, 4]))
    assert whole.tolist() == [3, 4, 5, 6, 7, 0, 9, 0, 0, 8]
    target = np.zeros(3, np.int64)
    part.get(INT64, 0, 3, 1, np.array([9, 0, 9]), target)
    assert target.tolist() == [8, 3, 8]
    part.put(INT64, 10, 0, 1, None, np.array([], np.int64))  # nothing, even behind the end
    part.put(INT64, -1, 0, 1, np.array([], np.int64), np.array([], np.int64))


@both
def test_accumulate_returns_values_before_and_changes_an_element_as_often_as_it_is_selected(make: Any) -> None:
    memory = bytes_of(3, DTYPES["int64"])
    part, result = make(memory), np.zeros(4, np.int64)
    part.accumulate(INT64, int(Combine.SUM), 0, 4, 1, np.array([1, 1, 2, 1]), np.array([1, 10, 5, 100]), result)
    assert memory.view(np.int64).tolist() == [0, 111, 5]
    assert result.tolist() == [0, 1, 0, 11]
    part.accumulate(INT64, REPLACE, 0, 1, 1, None, np.array([9]), None)
    part.accumulate(INT64, NO_OP, 0, 2, 1, None, np.array([7, 7]), result)
    assert result[:2].tolist() == [9, 111]
    operand = np.array([2, 2])
    part.accumulate(INT64, int(Combine.PROD), 0, 2, 2, None, operand, operand)  # the result replaces the operand
    assert (operand.tolist(), memory.view(np.int64).tolist()) == ([9, 5], [18, 111, 10])


@both
@pytest.mark.parametrize("name", DTYPES)
def test_compare_and_swap_compares_bits(make: Any, name: str) -> None:
    dtype = DTYPES[name]
    element, memory = Element(dtype, numpy_dtype(dtype)), bytes_of(2, dtype)
    part = make(memory)
    raw = element.raw if make is native else lambda array: array

    def swap(compared: int, value: int) -> Any:
        cell = np.array(value).astype(element.numpy)
        part.compare_and_swap(dtype.code, 1, raw(np.array(compared).astype(element.numpy)), raw(cell))
        return cell[()] == 1

    assert [swap(1, 1), swap(0, 1), swap(1, 0), swap(1, 1)] == [False, False, True, False]
    assert memory.view(element.numpy).astype(complex).tolist() == [0, 0]


@both
@pytest.mark.parametrize(
    ("start", "count", "step", "indices"),
    [
        (8, 3, 1, None),
        (-1, 1, 1, None),
        (10, 1, 1, None),
        (0, 3, 5, None),
        (1, 2, -2, None),
        (0, -1, 1, None),
        (2**62, 4, 2**62, None),
        (0, 1, 1, [10]),
        (0, 2, 1, [0, -1]),
    ],
)
def test_selection_beyond_the_part_changes_nothing(
    make: Any, start: int, count: int, step: int, indices: list[int] | None
) -> None:
    memory = bytes_of(10, DTYPES["int64"])
    part, x = make(memory), np.ones(max(count, 0), np.int64)
    positions = None if indices is None else np.array(indices)
    where = (start, count, step, positions)
    for act in (
        lambda: part.put(INT64, *where, x),
        lambda: part.get(INT64, *where, x.copy()),
        lambda: part.accumulate(INT64, int(Combine.SUM), *where, x, x.copy()),
    ):
        with pytest.raises(IndexError, match="not in the window"):
            act()
    assert not memory.any()


def test_native_part_refuses_memory_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no such lock"):
        _core.WindowPart(bytes_of(1, DTYPES["int64"]), private_locks(), 1, None, 1.0)
    with pytest.raises(ValueError, match="multiple of 64"):
        _core.WindowPart(bytes_of(1, DTYPES["int64"]), np.zeros(256, np.uint8)[8:], 0, None, 1.0)
    part = native(bytes_of(4, DTYPES["int64"]))
    with pytest.raises(ValueError, match="shorter than the selection"):
        part.put(INT64, 0, 4, 1, None, np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="unknown element type"):
        part.put(99, 0, 1, 1, None, np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="combines this element type"):
        part.accumulate(DTYPES["float64"].code, int(Combine.BAND), 0, 1, 1, None, np.zeros(1), None)
    misaligned = native(bytes_of(4, DTYPES["int64"])[1:])
    with pytest.raises(IndexError):
        misaligned.get(INT64, 0, 1, 1, None, np.zeros(1, np.int64))


@st.composite
def selections(draw: Any) -> tuple[int, int, int, Any]:
    if draw(st.booleans()):
        indices = draw(st.lists(st.integers(0, LENGTH - 1), max_size=LENGTH))
        return 0, len(indices), 1, np.array(indices, np.int64)
    start, step = draw(st.integers(0, LENGTH - 1)), draw(st.sampled_from([-7, -1, 1, 2, 50]))
    most = (LENGTH - 1 - start) // step + 1 if step > 0 else start // -step + 1
    return start, draw(st.integers(0, most)), step, None


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.sampled_from(list(DTYPES.values())),
    st.lists(st.tuples(st.sampled_from(OPS), selections()), max_size=4),
    st.integers(0, 999),
)
def test_native_part_does_what_the_definition_says(dtype: DType, steps: list[Any], seed: int) -> None:
    element, random = Element(dtype, numpy_dtype(dtype)), np.random.default_rng(seed)

    def numbers(count: int) -> Any:
        values = random.integers(0, 5, count) + (1j * random.integers(0, 3, count) if dtype.kind == "complex" else 0)
        return values.astype(element.numpy)

    first, second = bytes_of(LENGTH, dtype), bytes_of(LENGTH, dtype)
    first.view(element.numpy)[:] = second.view(element.numpy)[:] = numbers(LENGTH)
    defined, part = DefinedPart(first), native(second)
    for op, (start, count, step, indices) in steps:
        if not _core.WindowPart.can_accumulate(dtype.code, op):
            continue
        operand, results = numbers(count), [np.zeros(count, element.numpy) for _ in range(2)]
        where = (start, count, step, indices)
        defined.accumulate(dtype.code, op, *where, operand, results[0])
        part.accumulate(dtype.code, op, *where, element.raw(operand), element.raw(results[1]))
        assert results[0].tobytes() == results[1].tobytes()
        assert first.tobytes() == second.tobytes()
