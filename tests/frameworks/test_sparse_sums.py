"""Sums of sparse vectors: forms on the wire, both ways of all ranks against numpy, and wrong input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.outcomes import error_of

from unisono.frameworks import sparse_sums
from unisono.frameworks.sparse_sums import SparseForm, SparseRows, SparseSums
from unisono.launchers.launch import Pool

bounded = settings(max_examples=40, deadline=None, derandomize=True)
# By way, the limits of the numbers of ranks and of bytes that choose it.
WAYS = {"gathering": (9, 0), "doubling": (0, 1 << 50), "splitting": (0, -1)}
DTYPES = ("float32", "float64", "bfloat16", "float16", "int32", "uint8", "bool", "complex64")
# The length, the numbers of rows of the ranks in turn, and the shape of a row.
CASES: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = [
    (50, (5, 2, 7), ()),
    (50, (0,), ()),
    (50, (0, 3), (2,)),
    (64, (20, 60), (3,)),  # becomes dense on the way
    (1000, (100, 90), (2, 2)),
    (8, (8,), ()),
    (50, (6,), (0,)),
    (1, (1, 0), ()),
    (0, (0,), ()),
    (1 << 40, (4, 5), ()),
]


@pytest.fixture(scope="module", params=[1, 2, 3, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(request.param) as pool:
        yield pool


def vector(rank: int, length: int, counts: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    random, count = np.random.default_rng((rank, length)), counts[rank % len(counts)]
    indices = np.sort(random.choice(min(length, 2000), count, replace=False)) * max(1, length // 2000)
    return indices, random.integers(0, 4, (count, *shape)).astype(dtype)


def expected(size: int, length: int, counts: tuple[int, ...], shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """Return the sum of the vectors of all ranks: the definition."""
    rows: dict[int, Any] = {}
    for rank in range(size):
        for index, row in zip(*vector(rank, length, counts, shape, dtype), strict=True):
            rows[int(index)] = rows[int(index)] + row if int(index) in rows else row
    indices = sorted(rows)
    return indices, np.array([rows[index] for index in indices], dtype).reshape(len(rows), *shape)


# --- forms on the wire ----------------------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn, form: SparseForm) -> SparseRows:
    indices = draw(st.lists(st.integers(0, form.length - 1), unique=True, max_size=form.length).map(sorted))
    values = np.random.default_rng(len(indices)).integers(1, 9, (len(indices), form.width)).astype(form.dtype)
    some = SparseRows(np.array(indices, form.place), values)
    return form.dense(some) if draw(st.booleans()) else some


forms = st.builds(SparseForm, st.integers(1, 30), st.integers(1, 3), st.sampled_from(["float32", "int8"]).map(np.dtype))


@bounded
@given(st.data(), forms)
def test_rows_survive_the_wire_in_both_forms(data: Any, form: SparseForm) -> None:
    some = data.draw(rows(form))
    again = form.unpacked(form.packed(some))
    assert again.is_dense == some.is_dense
    np.testing.assert_array_equal(again.places, some.places)
    np.testing.assert_array_equal(again.values, some.values)
    if not some.is_dense:
        np.testing.assert_array_equal(form.of_records(form.records(some)).values, some.values)


@bounded
@given(st.data(), forms)
def test_sum_of_two_is_in_the_shorter_form_and_adds_equal_indices(data: Any, form: SparseForm) -> None:
    low, high = data.draw(rows(form)), data.draw(rows(form))
    total = form.added(low, high)
    left, right, whole = form.dense(low), form.dense(high), form.dense(total)
    np.testing.assert_array_equal(whole.places, left.places | right.places)
    np.testing.assert_array_equal(whole.values, left.values + right.values)
    if not (low.is_dense or high.is_dense):
        assert total.is_dense == form.is_shorter_dense(int(whole.places.sum()))


def test_dense_form_begins_where_it_takes_fewer_bytes() -> None:
    form = SparseForm(800, 1, np.dtype(np.float32))
    assert (form.row_nbytes, form.dense_nbytes) == (8, 3300)
    assert [form.is_shorter_dense(count) for count in (412, 413)] == [False, True]
    assert SparseForm(1 << 33, 1, np.dtype(np.float32)).row_nbytes == 12


# --- sums of ranks ---------------------------------------------------------------------------------------------------


def take(way: str) -> None:
    sparse_sums._FEW_RANKS, sparse_sums._FEW_NBYTES = WAYS[way]


def sums_of_all_cases(world: Any, way: str, dtype: str) -> list[tuple[bytes, bytes]]:
    take(way)
    sums, bits = SparseSums(world), []
    for case in CASES:
        indices, values = sums.start(*vector(world.rank, *case, dtype), case[0]).result()
        true_indices, true_values = expected(world.size, *case, dtype)
        assert (indices.tolist(), values.dtype, values.shape) == (true_indices, true_values.dtype, true_values.shape)
        assert (values == true_values).all()
        bits.append((indices.tobytes(), values.tobytes()))
    return bits


@pytest.mark.parametrize("way", WAYS)
def test_sums_are_those_of_numpy_and_the_same_on_all_ranks(pool: Pool, way: str) -> None:
    for dtype in DTYPES:
        every = pool.run(sums_of_all_cases, way, dtype, timeout_s=DEADLINE_S)
        assert all(each == every[0] for each in every)


def float_sum(world: Any, way: str) -> tuple[bytes, float]:
    take(way)
    indices = np.flatnonzero(np.random.default_rng(world.rank).random(2000) < 0.3)
    values = np.random.default_rng(world.rank).normal(size=indices.size).astype(np.float32) * 10.0**world.rank
    dense = np.zeros(2000)
    dense[indices] = values
    i, total = SparseSums(world).start(indices, values.astype(np.float32), 2000).result()
    return total.tobytes(), float(np.abs(total - world.allreduce(dense)[i]).max())


@pytest.mark.parametrize("way", WAYS)
def test_sums_of_floats_have_the_same_bits_on_all_ranks(pool: Pool, way: str) -> None:
    every = pool.run(float_sum, way, timeout_s=DEADLINE_S)
    assert len({bits for bits, _ in every}) == 1
    assert all(error < 0.05 for _, error in every)


def sums_and_calls_in_flight(world: Any) -> tuple[int, list[list[float]]]:
    sums, one = SparseSums(world), np.ones(1, np.float32)
    started = [sums.start(np.array([at]), one * (world.rank + at), 9, wait=False) for at in range(6)]
    between = world.allreduce(np.ones(3))
    called: list[Any] = []
    started[-1].add_done_callback(called.append)
    totals = [[float(value) for value in each.result()[1]] for each in started]
    assert (started[0].done(), called) == (True, [started[-1]])
    assert (between == world.size).all()
    return world.size, totals


def test_sums_in_flight_end_in_order_beside_other_calls(pool: Pool) -> None:
    for size, totals in pool.run(sums_and_calls_in_flight, timeout_s=DEADLINE_S):
        assert totals == [[size * (size - 1) / 2 + size * at] for at in range(6)]


def sent_nbytes(world: Any, shared: bool) -> int:
    """Return the bytes that this rank sends for a sum of vectors with the same indices, or with all different ones."""
    take("splitting")
    sums, count = SparseSums(world), 20_000
    indices = np.arange(count) * world.size + (0 if shared else world.rank)
    comm = sums._comm = world.dup()
    sums.start(indices, np.ones(count, np.float32), count * world.size)
    return sum(traffic.sent_nbytes for traffic in comm.stats().values())


def test_equal_rows_travel_twice_and_a_full_sum_travels_dense() -> None:
    with Pool(4) as pool:
        equal = pool.run(sent_nbytes, True, timeout_s=DEADLINE_S)
        full = pool.run(sent_nbytes, False, timeout_s=DEADLINE_S)
    # A gathering rank would receive three vectors of 160,000 bytes.
    assert sum(equal) < 4 * 2 * 160_000
    assert sum(full) < 4 * (160_000 + 330_000)


# --- wrong input -----------------------------------------------------------------------------------------------------

VALUES = np.ones(2, np.float32)
WRONG: dict[str, tuple[Any, Any, Any]] = {
    "a length that is no count": (np.array([0, 1]), VALUES, -1),
    "indices that are no flat integers": (np.array([0.0, 1.0]), VALUES, 9),
    "values that are no array of a known dtype": (np.array([0, 1]), [1, 2], 9),
    "another number of rows": (np.array([0, 1, 2]), VALUES, 9),
    "indices that do not ascend": (np.array([1, 0]), VALUES, 9),
    "or occur twice": (np.array([1, 1]), VALUES, 9),
    "indices outside of 0": (np.array([-1, 1]), VALUES, 9),
    "outside of 0 to length - 1": (np.array([1, 9]), VALUES, 9),
    "one length on all ranks; got [9, 9, 8]": (np.array([0, 1]), VALUES, 8),
    "one number of elements in a row on all ranks; got [1, 1, 3]": (np.array([0, 1]), np.ones((2, 3), np.float32), 9),
    "one dtype on all ranks; got ['float32', 'float32', 'int64']": (np.array([0, 1]), np.ones(2, np.int64), 9),
}


def wrong_sums(world: Any) -> list[str]:
    sums, right = SparseSums(world), (np.array([0, 1]), VALUES, 9)
    texts = []
    for wrong in WRONG.values():
        arguments = wrong if world.rank == world.size - 1 else right
        kind, text = error_of(partial(sums.start, *arguments))
        assert kind == "UsageError"
        texts.append(text)
        assert sums.start(*right).result()[1].tolist() == [3, 3]
    return texts


def test_wrong_input_of_one_rank_is_the_same_error_on_all() -> None:
    with Pool(3) as pool:
        every = pool.run(wrong_sums, timeout_s=DEADLINE_S)
    assert every[0] == every[1] == every[2]
    for text, part in zip(every[0], WRONG, strict=True):
        assert part in text
