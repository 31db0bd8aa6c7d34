"""The gradient engine: its rules as functions, and what it does on real ranks."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.float_modes import MODES, mode
from support.programs import survivors_of_rank_1

import unisono as un
from unisono.frameworks.data_parallel.sync_check import SyncCheck
from unisono.frameworks.gradients.blocks import BLOCK
from unisono.frameworks.gradients.bucket_comms import BucketComms
from unisono.frameworks.gradients.bucket_sizing import best_size, exposed_s
from unisono.frameworks.gradients.lag import Lag, lag_of
from unisono.frameworks.gradients.layout import ALIGNMENT, Filling, Gradient, layout_of
from unisono.frameworks.gradients.priorities import start_order_of
from unisono.frameworks.gradients.ready_order import ReadyOrder
from unisono.launchers.launch import Pool
from unisono.transports.reductions.wire_formats import from_wire, to_wire, wire_nbytes

# --- rules -------------------------------------------------------------------------------------------------------


@st.composite
def tables(draw: st.DrawFn) -> list[Gradient]:
    shapes = st.lists(st.integers(0, 12), max_size=3).map(tuple)
    kinds = st.tuples(shapes, st.sampled_from(("float32", "float64", "bfloat16", "int32")))
    return [Gradient(f"p{index}", *kind) for index, kind in enumerate(draw(st.lists(kinds, min_size=1, max_size=12)))]


@settings(deadline=None)
@given(tables(), st.integers(1, 1 << 16))
def test_layout_puts_each_element_into_one_bucket_that_names_its_gradient(table: list[Gradient], nbytes: int) -> None:
    layout = layout_of(table, nbytes)
    assert list(layout.gradients.values()) == table
    covered = {dtype: np.zeros(length, int) for dtype, length in layout.lengths.items()}
    for bucket in layout.buckets:
        covered[bucket.dtype][bucket.start : bucket.stop] += 1
    assert all((counts == 1).all() for counts in covered.values())
    taken = {dtype: np.zeros(length, int) for dtype, length in layout.lengths.items()}
    for gradient in table:
        begin = layout.offsets[gradient.name]
        assert begin * np.dtype(gradient.dtype).itemsize % ALIGNMENT == 0
        taken[gradient.dtype][begin : begin + gradient.elements] += 1
        for bucket in layout.buckets:
            lies_in = (
                bucket.dtype == gradient.dtype and bucket.start < begin + gradient.elements and begin < bucket.stop
            )
            assert not (lies_in and gradient.elements) or gradient.name in bucket.names
        assert any(gradient.name in bucket.names for bucket in layout.buckets)
    assert all((counts <= 1).all() for counts in taken.values())


@settings(deadline=None)
@given(tables(), st.integers(ALIGNMENT, 1 << 16))
def test_layout_keeps_buckets_below_the_limit_and_joins_small_ones(table: list[Gradient], nbytes: int) -> None:
    layout = layout_of(table, nbytes)
    assert all(bucket.nbytes <= nbytes + ALIGNMENT for bucket in layout.buckets)
    for dtype in layout.lengths:
        sizes = [bucket.nbytes for bucket in layout.buckets if bucket.dtype == dtype]
        if all(len(indices) == 1 for indices in layout.buckets_of().values()):  # no gradient is split
            assert all(one + other > nbytes for one, other in pairwise(sizes))


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 40), st.floats(0, 1), st.floats(0, 1))
def test_lag_changes_by_at_most_one_and_is_zero_in_warmup_and_cooldown(
    steps: int, total: int, warmup: float, cooldown: float
) -> None:
    lag = lag_of(steps, total, warmup, cooldown)
    at = [0, *(lag.at(step) for step in range(total + 1))]
    assert all(abs(after - before) <= 1 for before, after in pairwise(at))
    assert all(lag.at(step) == 0 for step in range(lag.warmup))
    if lag.cooldown_from is not None:
        assert all(lag.at(step) == 0 for step in range(lag.cooldown_from + steps, total))
    assert max(at) <= steps


def test_lag_without_warmup_and_cooldown_stays_constant() -> None:
    assert [Lag(2).at(step) for step in (0, 1, 2, 100)] == [1, 2, 2, 2]


FORMS = ("float16", "bfloat16", "int8")


def quantised(x: Any) -> Any:
    """Return what blocks of int8 say, by numpy: the definition."""
    padded = np.zeros(-(-x.size // BLOCK) * BLOCK, np.float32)
    padded[: x.size] = x
    rows = padded.reshape(-1, BLOCK)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        scale[~np.isfinite(scale)] = np.nan
        inverse = np.float32(1) / scale
        inverse[~np.isfinite(inverse)] = 0
        values = np.rint(np.nan_to_num(rows, nan=0, posinf=0, neginf=0) * inverse)
        return (values.astype(np.int8) * scale).reshape(-1)[: x.size]


def said_and_lost(form: str, x: Any, residual: Any) -> Any:
    """Return what the native codec says of an array, and what it leaves."""
    left, back = residual.copy(), np.full_like(x, 7)
    wire = np.full(wire_nbytes(form, x.size) + 1, 99, np.uint8)
    to_wire(form, wire, x, left)
    assert wire[-1] == 99
    from_wire(form, back, wire)
    twice = back.copy()
    from_wire(form, twice, wire, adds=True)
    np.testing.assert_array_equal(twice, back + back)
    return back, left


@settings(deadline=None)
@given(st.sampled_from(FORMS), st.integers(0, 1200), st.integers(-44, 37), st.integers(0, 2**32 - 1))
def test_codec_rounds_like_numpy_and_keeps_the_rest_as_residual(
    form: str, count: int, exponent: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    x, residual = (random.normal(size=(2, count)) * 10.0**exponent).astype(np.float32)
    x[: count // 4] = 0
    with np.errstate(over="ignore"):
        exact = x + residual
        said = quantised(exact) if form == "int8" else exact.astype(form).astype(np.float32)
        lost = exact - said
    back, left = said_and_lost(form, x, residual)
    np.testing.assert_array_equal(back, said)
    np.testing.assert_array_equal(left, np.where(np.isfinite(lost), lost, 0))
    if form == "int8" and count:
        assert np.abs(left).max() <= np.abs(exact).max() / 127 * 0.5001 + 1e-36


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_codec_keeps_nonfinite_values_and_leaves_no_residual(form: str, value: float) -> None:
    x = np.ones(3 * BLOCK, np.float32)
    x[BLOCK + 7] = value
    back, left = said_and_lost(form, x, np.zeros_like(x))
    spoilt = slice(BLOCK, 2 * BLOCK) if form == "int8" else slice(BLOCK + 7, BLOCK + 8)
    np.testing.assert_array_equal(back[spoilt], np.nan if form == "int8" else value)
    assert (np.delete(back, spoilt) == 1).all()
    assert (left == 0).all()


def test_order_is_relearned_after_the_same_new_order_in_three_steps() -> None:
    order = ReadyOrder()
    steps = [([1, 0], "ba"), ([1, 0], "ba"), ([0, 1], "ab"), ([1, 0], "ba"), ([1, 0], "ba"), ([1, 0], "ba")]
    assert [order.see(full, tuple(names)) for full, names in steps] == [False] * 5 + [True]
    assert order.proposed == ("b", "a")


def test_best_bucket_size_grows_with_latency() -> None:
    nbytes, backward_s = 64 << 20, 0.1
    gradients = [Gradient(f"p{index}", (nbytes >> 11,), "float64") for index in range(256)]

    def cut(size: int) -> list[Filling]:
        return layout_of(gradients, size).fillings()

    quick = best_size(cut, backward_s, lambda n: 1e-6 + n / 5e9)
    slow = best_size(cut, backward_s, lambda n: 0.05 + n / 5e9)
    assert quick < slow
    assert exposed_s(cut(nbytes), backward_s, lambda n: n / 1e9) > 0.064


def test_best_bucket_size_does_not_split_a_gradient_without_gain() -> None:
    gradients = [Gradient("large", (1 << 18,), "float32"), Gradient("small", (1 << 10,), "float32")]
    assert layout_of(gradients, 1 << 18).fillings()[:-1] == [Filling(1 << 18, 256 / 257)] * 4
    size = best_size(lambda nbytes: layout_of(gradients, nbytes).fillings(), 0.1, lambda n: n / 1e8)
    assert len(layout_of(gradients, size).buckets) == 2


def predicted_sizes(world: un.Communicator) -> list[tuple[int, str]]:
    """Return the sizes of buckets for which a reducer predicts a time when it chooses the size of its buckets."""
    asked: list[tuple[int, str]] = []

    def predicted_s(_comms: BucketComms, nbytes: int, dtype: str) -> float:
        asked.append((nbytes, dtype))
        return 1e-6

    with pytest.MonkeyPatch.context() as patch, un.GradientReducer(world) as reducer:
        patch.setattr(BucketComms, "predicted_s", predicted_s)
        for _ in range(7):
            for name in range(16):
                reducer.ready(f"p{name}", np.ones(1 << 16, np.float32))
            reducer.finish()
    return asked


def test_reducer_predicts_the_time_of_each_size_of_bucket_once() -> None:
    (asked,) = un.launch(predicted_sizes, 1, timeout_s=DEADLINE_S)
    assert asked
    assert len(set(asked)) == len(asked)


def test_buckets_needed_first_overtake_buckets_that_wait_for_the_link() -> None:
    buckets = [Filling(100, k / 6) for k in range(1, 7)]  # ready at 1, 2, … 6 s
    assert start_order_of(buckets, 6.0, lambda _: 0.5) == (0, 1, 2, 3, 4, 5)
    assert start_order_of(buckets, 6.0, lambda _: 2.5) == (0, 2, 5, 4, 3, 1)
    assert start_order_of(buckets, 6.0, lambda _: 9.0) == (0, 5, 4, 3, 2, 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 10), st.floats(0, 10))
def test_every_bucket_has_one_turn(shares: list[float], backward_s: float, cost_s: float) -> None:
    buckets = [Filling(1, share) for share in sorted(shares)]
    assert sorted(start_order_of(buckets, backward_s, lambda _: cost_s)) == list(range(len(buckets)))


# --- ranks -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2) as pool:
        yield pool


def run(pool: Pool, fn: Callable[..., Any], *args: Any) -> list[Any]:
    return pool.run(fn, *args, timeout_s=DEADLINE_S)


DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "complex64")


def average_everything(world: Any, dtypes: tuple[str, ...], bucket_nbytes: int, seed: int) -> None:
    import ml_dtypes  # noqa: F401

    shared = np.random.default_rng(seed)
    shapes = [tuple(shared.integers(0, 9, size=shared.integers(0, 4))) for _ in range(3 * len(dtypes))]
    with un.GradientReducer(world, bucket_nbytes=bucket_nbytes, op="sum") as reducer:
        for step in range(3):
            order = np.random.default_rng((seed, step, world.rank)).permutation(len(shapes))
            arrays = {}
            for index in order:  # another order on each rank and in each step
                values = np.asarray(np.arange(np.prod(shapes[index], dtype=int)).reshape(shapes[index]) % 7)
                arrays[index] = np.asarray(values + step + world.rank, dtypes[index % len(dtypes)])
                reducer.ready(str(index), arrays[index])
            results = reducer.finish()
            for index, shape in enumerate(shapes):
                values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7
                expected = (world.size * (values + step) + world.size * (world.size - 1) // 2).astype(
                    arrays[index].dtype
                )
                np.testing.assert_array_equal(arrays[index], expected)
                assert results[str(index)] is arrays[index]


@settings(max_examples=8, deadline=None)
@given(st.sampled_from((64, 200, 1 << 20)), st.integers(0, 2**31))
def test_reduced_gradients_are_exact_in_every_dtype_and_ready_order(nbytes: int, seed: int) -> None:
    run(POOLS[0], average_everything, DTYPES, nbytes, seed)


POOLS: list[Pool] = []


@pytest.fixture(autouse=True)
def pool_for_hypothesis(two: Pool) -> None:
    POOLS[:] = [two]


def steps_of(world: Any, count: int, **arguments: Any) -> list[Any]:
    """Reduce gradients whose elements are the number of the step, on every rank; return what each step gave."""
    found = []
    with un.GradientReducer(world, **arguments) as reducer:
        for step in range(count):
            x = np.full(10, float(step))
            reducer.ready("x", x)
            results = reducer.finish()
            found.append(float(x[0]) if results else None)
        found.append([float(flushed["x"][3]) for flushed in reducer.flush()])
    return found


def test_lagged_step_returns_the_gradients_of_the_step_before_the_lag(two: Pool) -> None:
    for found in run(two, lambda world: steps_of(world, 6, lag=2)):
        assert found == [None, None, 0.0, 1.0, 2.0, 3.0, [4.0, 5.0]]


def test_lag_applies_every_gradient_once_with_warmup_and_cooldown(two: Pool) -> None:
    for found in run(
        two,
        lambda world: steps_of(world, 10, lag=2, total_steps=10, warmup_fraction=0.2, cooldown_fraction=0.4),
    ):
        assert found == [0.0, 1.0, None, None, 2.0, 3.0, 4.0 + 5.0, 6.0 + 7.0, 8.0, 9.0, []]


def steps_in_mode(world: Any, name: str, compression: str | None, dtype: str) -> list[bytes]:
    """Return the gradients of steps, of which some are added up, with rank 0 in a floating-point mode."""
    values = np.tile([1 / 3, 6e-8, 3e-6, 1e-40], 2 * BLOCK) * (1 + world.rank / 3)
    values[:BLOCK] = 1e-40
    found = []
    with (
        mode(name if world.rank == 0 else "default"),
        un.GradientReducer(world, compression=compression, lag=2, total_steps=8, cooldown_fraction=0.4) as reducer,
    ):
        for _ in range(8):
            reducer.ready("x", values.astype(dtype))
            found += [array.tobytes() for array in reducer.finish().values()]
    return found


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8"])
def test_reduced_gradients_agree_bitwise_in_every_floating_point_mode(two: Pool, compression: str | None) -> None:
    for dtype in ("float32", "float64"):
        for name in MODES:
            one, other = run(two, steps_in_mode, name, compression, dtype)
            assert one == other, (dtype, name)


def mistaken_steps(world: Any, mistake: str, **arguments: Any) -> list[Any]:
    """Make a step that is right, one in which rank 1 errs, and one that is right; return what they gave."""
    found: list[Any] = []
    with un.GradientReducer(world, **arguments) as reducer:
        for step in range(3):
            arrays = {name: np.full(4, step + 1.0) for name in ("one", "two")}
            if step == 1 and world.rank == 1:
                MISTAKES[mistake](arrays)
            for name, array in arrays.items():
                reducer.ready(name, array)
            try:
                results = reducer.finish()
                found.append(float(results["two"][0]) if results else None)
            except un.UnisonoError as error:
                found.append((type(error).__name__, str(error)))
    return found


MISTAKES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "lacks": lambda arrays: arrays.pop("two"),
    "shape": lambda arrays: arrays.update(two=np.zeros(5)),
    "dtype": lambda arrays: arrays.update(two=np.zeros(4, np.float32)),
    "another": lambda arrays: arrays.update(three=np.zeros(4)),
    "no array": lambda arrays: arrays.update(two="zero"),
    "not finite": lambda arrays: arrays["one"].__setitem__(2, np.nan),
}


@pytest.mark.parametrize(
    ("mistake", "kind", "words"),
    [
        ("lacks", "MismatchError", "rank 1: got no gradient of 'two'"),
        ("shape", "UsageError", "rank 1: the gradient of 'two' is float64[5], and was float64[4]"),
        ("dtype", "UsageError", "rank 1: the gradient of 'two' is float32[4], and was float64[4]"),
        ("no array", "UsageError", "rank 1: the gradient 'two' is of type str, which is not an array"),
        ("not finite", "NotFiniteError", "rank 1: the gradient of 'one' is not finite"),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"lag": 1}, {"priorities": True}], ids=str)
def test_mistake_of_one_rank_fails_the_step_on_all_and_next_step_works(
    two: Pool, mistake: str, kind: str, words: str, arguments: dict[str, Any]
) -> None:
    program = lambda world: mistaken_steps(world, mistake, check_finite=True, **arguments)  # noqa: E731
    for found in run(two, program):
        errors = [outcome for outcome in found if isinstance(outcome, tuple)]
        assert len(errors) == 1
        assert errors[0][0] == kind
        assert words in errors[0][1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "MismatchError: rank 0: got no gradient of 'three', which other ranks passed for the first time"),
        ({"priorities": True}, "MismatchError: rank 0: got no gradient of 'three'"),
        ({"lag": 1}, "UsageError: rank 1: 'three' is not among the gradients of the first step: with a lag"),
    ],
    ids=str,
)
def test_gradient_added_by_one_rank_alone_is_an_error_on_all_ranks(
    two: Pool, arguments: dict[str, Any], words: str
) -> None:
    for found in run(two, lambda world: mistaken_steps(world, "another", **arguments)):
        (error,) = [": ".join(outcome) for outcome in found if isinstance(outcome, tuple)]
        assert words in error


def later_gradients(world: Any, **arguments: Any) -> list[dict[str, list[float]]]:
    """Return what each step gave, of which the third and all later ones have two gradients more."""
    found = []
    with un.GradientReducer(world, **arguments) as reducer:
        for step in range(10):
            names = ("one", "two") if step < 2 else ("three", "one", "four", "two")
            for name in names:
                if not (name == "four" and step == 2 and world.rank == 0 and arguments.get("missing") == "zero"):
                    reducer.ready(name, np.full(3, step + 2.0 * world.rank + len(name), np.float32))
            found.append({name: np.asarray(x).tolist() for name, x in reducer.finish().items()})
    return found


@pytest.mark.parametrize(
    "arguments", [{}, {"priorities": True}, {"compression": "float16"}, {"missing": "zero"}], ids=str
)
def test_gradients_added_later_are_averaged_from_their_first_step_on(two: Pool, arguments: dict[str, Any]) -> None:
    for found in run(two, lambda world: later_gradients(world, **arguments)):
        for step, gradients in enumerate(found):
            expected = {name: [step + 1.0 + len(name)] * 3 for name in ("one", "two")}
            if step >= 2:
                expected |= {name: [step + 1.0 + len(name)] * 3 for name in ("three", "four")}
            if step == 2 and "missing" in arguments:
                expected["four"] = [(step + 2.0 + 4) / 2] * 3
            assert gradients == expected


def test_gradient_changed_before_finish_is_an_error_on_all_ranks(two: Pool) -> None:
    def program(world: Any) -> Any:
        with un.GradientReducer(world) as reducer:
            x = np.ones(3)
            reducer.ready("x", x)
            if world.rank == 1:
                x[1] = 2
            with pytest.raises(un.UsageError) as caught:
                reducer.finish()
            reducer.ready("x", x)
            return caught.value.message, reducer.finish()["x"].tolist()

    message, x = run(two, program)[0]
    assert message.startswith("rank 1: the gradient of 'x' was changed while it was being averaged: clip")
    assert x == [1.0, 1.5, 1.0]


def drift(world: Any, name: str, when: int, **arguments: Any) -> tuple[int, str]:
    """Let rank 1 change a parameter by itself in one step; return in which step both are told, and the text."""
    parameters = {f"p{index}": np.zeros(1000 * (index + 1)) for index in range(4)}
    with un.GradientReducer(world, parameters=parameters, verify_every=8, **arguments) as reducer:
        for step in range(60):
            for parameter, x in parameters.items():
                reducer.ready(parameter, np.full(x.size, 1.0 + world.rank))
            try:
                for each, gradient in reducer.finish().items():
                    parameters[each] -= gradient
            except un.MismatchError as error:
                return step, error.message
            if step == when and world.rank == 1:
                parameters[name][-1] += 1
    raise AssertionError("nobody was told")


@pytest.mark.parametrize("arguments", [{}, {"priorities": True}, {"lag": 2}], ids=str)
@pytest.mark.parametrize(("name", "when", "latest"), [("p3", 0, 1), ("p0", 20, 30)])
def test_parameters_that_drift_apart_are_an_error_of_all_ranks(
    two: Pool, name: str, when: int, latest: int, arguments: dict[str, Any]
) -> None:
    (step, text), other = run(two, lambda world: drift(world, name, when, **arguments))
    assert (step, text) == other
    assert when < step <= latest + arguments.get("lag", 0)
    assert f"no longer the same on all ranks: '{name}' has other bits on rank 1 than on the others (float64[" in text


def test_sync_check_checks_each_parameter_once_per_period() -> None:
    class Watched(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            seen.append(name)
            return super().__getitem__(name)

    sizes = {"large": 1 << 20, "small": 10, "medium": 1 << 17, "empty": 0}
    check, seen = SyncCheck(Watched({name: np.ones(size) for name, size in sizes.items()}), 10), []
    for _ in range(3):
        assert check.checksum()
    assert seen == 3 * list(sizes)
    seen.clear()
    steps = []
    for _ in range(101):
        before = len(seen)
        check.checksum()
        steps.append(len(seen) - before)
    assert all(10 <= seen.count(name) <= 11 for name in sizes)
    assert steps.count(0) > 50  # after the large one, which takes most of the time


def test_nonfinite_gradients_pass_without_check_finite(two: Pool) -> None:
    for found in run(two, lambda world: mistaken_steps(world, "not finite")):
        assert found == [1.0, 2.0, 3.0]


def differ_at_first(world: Any, of_rank: list[dict[str, Any]], **arguments: Any) -> Any:
    with un.GradientReducer(world, **arguments) as reducer:
        for name, array in of_rank[world.rank].items():
            reducer.ready(name, array)
        try:
            return {name: array.tolist() for name, array in reducer.finish().items()}
        except un.UnisonoError as error:
            return type(error).__name__, str(error)


ONE = np.ones(2)


@pytest.mark.parametrize(
    ("of_rank", "words"),
    [
        ([{"a": ONE}, {"a": np.ones(3)}], "rank 1: the gradient of 'a' is float64[3], and other ranks have float64[2]"),
        ([{"a": ONE, "b": ONE}, {"a": ONE}], "rank 1: got no gradient of 'b'"),
        ([{"a": ONE}, {"a": ONE, "b": ONE}], "rank 1: passed a gradient of 'b', and rank 0 has passed none"),
        ([{}, {}], "no rank has passed a gradient"),
        ([{"a": ONE}, {"a": np.array(["x"])}], "rank 1: the gradient 'a' has dtype <U1, which cannot be sent"),
    ],
)
def test_first_step_names_the_gradients_in_which_ranks_differ(two: Pool, of_rank: Any, words: str) -> None:
    for _, text in run(two, differ_at_first, of_rank):
        assert words in text


def test_missing_gradients_count_as_zeros_with_missing_zero(two: Pool) -> None:
    of_rank = [{"a": ONE}, {"b": 4 * ONE}]
    program = lambda world: differ_at_first(world, of_rank, missing="zero")  # noqa: E731
    assert run(two, program) == [{"a": [0.5, 0.5], "b": [2.0, 2.0]}] * 2


def sometimes(world: Any, of_steps: list[list[str]], **arguments: Any) -> list[dict[str, list[float]]]:
    """Pass gradients of these names in each step, and return all results; those of steps in flight come last."""
    results = []
    with un.GradientReducer(world, **arguments) as reducer:
        for step, names in enumerate(of_steps):
            for name in names:
                reducer.ready(name, np.full(2, world.rank + 2.0 * step))
            found = reducer.finish()
            results.append({name: found[name].tolist() for name in sorted(found)})
        results += [{name: array.tolist() for name, array in found.items()} for found in reducer.flush()]
    return results


@pytest.mark.parametrize("arguments", [{}, {"missing": "zero"}, {"priorities": True}, {"lag": 1}], ids=str)
def test_gradient_that_no_rank_passes_is_left_out_of_its_step(two: Pool, arguments: dict[str, Any]) -> None:
    of_steps = [["a", "b"], ["a"], [], ["b"], ["a", "b"], ["b"]]
    expected = [{name: [2 * step + 0.5] * 2 for name in names} for step, names in enumerate(of_steps)]
    if arguments.get("lag"):
        expected.insert(0, {})
    program = lambda world: sometimes(world, of_steps, **arguments)  # noqa: E731
    assert run(two, program) == [expected] * 2


def test_reducers_with_different_options_are_a_mismatch(two: Pool) -> None:
    program = lambda world: differ_at_first(world, [{"a": ONE}] * 2, lag=world.rank)  # noqa: E731
    for kind, text in run(two, program):
        assert kind == "MismatchError"
        assert "rank 1: its reducer has" in text


def test_compressing_an_integer_gradient_is_refused_with_its_name(two: Pool) -> None:
    program = lambda world: differ_at_first(world, [{"a": np.ones(3, int)}] * 2, compression="int8")  # noqa: E731
    for kind, text in run(two, program):
        assert (kind, "'a' is of int64, which cannot be compressed to int8" in text) == ("UsageError", True)


@pytest.mark.parametrize(
    "arguments",
    [
        {"op": "max"},
        {"compression": "zip"},
        {"lag": -1},
        {"missing": "maybe"},
        {"bucket_nbytes": 0},
        {"warmup_fraction": 0.5},
        {"warmup_fraction": 2, "total_steps": 3},
        {"teams": 0},
        {"total_steps": 0},
        {"priorities": True, "lag": 1},
        {"parameters": {}, "verify_every": -1},
        {"parameters": np.ones(3)},
    ],
    ids=str,
)
def test_gradient_reducer_refuses_invalid_arguments(arguments: dict[str, Any]) -> None:
    def program(world: Any) -> str:
        with pytest.raises(un.UsageError) as caught:
            un.GradientReducer(world, **arguments)
        return str(caught.value)

    with un.init() as world:
        assert program(world)


def relearn(world: Any) -> tuple[Any, Any]:
    names = [f"p{index}" for index in range(6)]
    with un.GradientReducer(world, bucket_nbytes=512) as reducer:
        orders = []
        for step in range(8):
            order = names if step < 2 else names[::-1]
            if world.rank == 1:  # whose order does not count
                order = names[3:] + names[:3]
            for name in order:
                reducer.ready(name, np.full(100, float(int(name[1:]) + step)))
            found = reducer.finish()
            assert all((found[name] == int(name[1:]) + step).all() for name in names)
            orders.append(list(reducer.state_dict()["gradients"]))
    return [row[0] for row in orders[3]], [row[0] for row in orders[-1]]


def test_all_ranks_relearn_the_order_of_rank_0(two: Pool) -> None:
    names = [f"p{index}" for index in range(6)]
    assert run(two, relearn) == [(names, names[::-1])] * 2


def compress(world: Any, compression: str | None, count: int, steps: int) -> tuple[Any, float, float]:
    """Return the first result, the mean of all, and the bytes sent in a step after the first."""
    gradient = np.random.default_rng(world.rank).normal(size=count).astype(np.float32)
    with un.GradientReducer(world, compression=compression, bucket_nbytes=1 << 18) as reducer:
        results = []
        for _ in range(steps):
            reducer.ready("x", gradient.copy())
            results.append(reducer.finish()["x"].copy())
        return results[0], np.mean(results, axis=0, dtype=np.float64), reducer.report().sent_nbytes


COUNT = 100_003
EXACT = np.mean([np.random.default_rng(rank).normal(size=COUNT).astype(np.float32) for rank in (0, 1)], axis=0)


@pytest.mark.parametrize(
    ("compression", "tolerance", "share", "remains"),
    [("float16", 2e-3, 0.5, 0.9), ("bfloat16", 2e-2, 0.5, 0.9), ("int8", 4e-2, 0.2540, 0.25)],
)
def test_errors_of_compressed_gradients_are_small_and_do_not_add_up(
    two: Pool, compression: str, tolerance: float, share: float, remains: float
) -> None:
    plain_sent = run(two, compress, None, COUNT, 2)[0][2]
    found = run(two, compress, compression, COUNT, 12)
    np.testing.assert_array_equal(found[0][0], found[1][0])
    first, mean, sent = found[0]
    assert 0 < np.abs(first - EXACT).max() <= tolerance
    assert np.abs(mean - EXACT).max() <= remains * np.abs(first - EXACT).max()
    assert sent <= plain_sent * share * 1.02


def interrupted(world: Any, arguments: dict[str, Any], restart_after: int | None) -> list[Any]:
    """Return the results of 8 steps, on a reducer that is saved and made anew in between, or not."""
    random = np.random.default_rng(world.rank)
    reducer = un.GradientReducer(world, bucket_nbytes=1 << 12, **arguments)
    found = []
    for step in range(8):
        for name, count in (("a", 3000), ("b", 17)):
            reducer.ready(name, random.normal(size=count).astype(np.float32))
        found.append({name: array.copy() for name, array in reducer.finish().items()})
        if step == restart_after:
            state = reducer.state_dict()
            del state["device"]  # as in states of earlier versions
            reducer.close()
            reducer = un.GradientReducer(world, bucket_nbytes=1 << 12, **arguments)
            reducer.load_state_dict(state)
    found += reducer.flush()
    reducer.close()
    return found


@pytest.mark.parametrize(
    "arguments", [{"lag": 2}, {"compression": "int8"}, {"compression": "float16", "lag": 1}], ids=str
)
def test_reducer_resumes_exactly_from_its_saved_state(two: Pool, arguments: Any) -> None:
    once = run(two, interrupted, arguments, None)[0]
    again = run(two, interrupted, arguments, 4)[0]
    assert len(once) == len(again)
    for one, other in zip(once, again, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def continued_from_rank_0(world: Any) -> list[tuple[float, list[bytes]]]:
    """Load the state of rank 0 on all ranks; return for two forms the residual, and the gradients of later steps."""
    found = []
    for arguments in ({"compression": "float16"}, {"compression": "int8", "lag": 1}):
        with un.GradientReducer(world, **arguments) as reducer:

            def step(number: int, reducer: Any = reducer) -> bytes:
                reducer.ready("x", np.linspace(0, 1 + world.rank + number, 1000, dtype=np.float32))
                return b"".join(array.tobytes() for array in reducer.finish().values())

            for number in range(3):
                step(number)
            state = reducer.state_dict()
            reducer.load_state_dict(world.broadcast_object(state))
            residual = float(np.abs(reducer.state_dict()["residuals"]["x"]).max())
            found.append((residual, [step(number) for number in range(3)]))
    return found


def test_state_of_another_rank_is_loaded_without_its_residuals(two: Pool) -> None:
    for (residual, gradients), (other_residual, other_gradients) in zip(*run(two, continued_from_rank_0), strict=True):
        assert residual > 0
        assert other_residual == 0
        assert gradients == other_gradients


def refuse_reset(world: Any) -> Any:
    with un.GradientReducer(world, lag=1) as reducer:
        reducer.ready("x", np.ones(3))
        reducer.finish()
        with pytest.raises(un.UsageError, match="call flush"):
            reducer.reset()
        reducer.flush()
        reducer.reset()
        reducer.ready("another", np.full(3, world.rank))
        reducer.finish()
        return [found["another"].tolist() for found in reducer.flush()]


def test_reducer_refuses_reset_while_a_step_is_in_flight(two: Pool) -> None:
    assert run(two, refuse_reset) == [[[0, 0, 0]]] * 2  # integers divide towards zero


TURNS = (1, 3, 2, 0)


def in_turns(world: Any, compression: str | None, folder: str) -> tuple[list[str], list[list[str]], list[int]]:
    """Reduce four buckets in other turns than they become ready in, and look their gradients up in two ways.

    Returns:
        The order of need; the gradients by when their buckets were started; in each step, how many had
        ended when one gradient had been looked up, and when all had; of the last one, only the first of these.
    """
    names = [f"p{index}" for index in range(4)]
    ended = []
    with un.GradientReducer(world, priorities=True, bucket_nbytes=512, compression=compression) as reducer:
        for step in range(3):
            given = {name: np.full(128, float(int(name[1:]) + step + world.rank), np.float32) for name in names}
            for name in names[:: 1 if world.rank else -1] if step else names:
                reducer.ready(name, given[name])
            reduced = reducer.finish()
            assert reduced["p2"] is given["p2"]
            ended.append(reducer.report().steps)
            if step == 2:
                continue
            for name, gradient in reduced.items():
                assert (gradient == int(name[1:]) + step + 0.5).all()
            ended.append(reducer.report().steps)
            if step == 0:
                reducer.load_state_dict({**reducer.state_dict(), "turns": TURNS})
        reducer.flush()
        with pytest.raises(un.UsageError, match="'p0' was first read after the next step"):
            reduced["p0"]
        assert (reduced["p2"] == 4.5).all()
        reducer.trace(Path(folder, f"{world.rank}.json"))
        events = json.loads(Path(folder, f"{world.rank}.json").read_text())["traceEvents"]
        reduced_last = [event for event in events if event["name"] == "reduce" and event["args"]["step"] == 2]
        started = sorted(reduced_last, key=lambda event: event["ts"])
        assert reducer.state_dict()["turns"] == TURNS
        return list(reduced), [event["args"]["gradients"] for event in started], ended


@pytest.mark.parametrize("compression", [None, "int8"])
def test_gradients_with_priorities_arrive_in_the_order_of_need(
    two: Pool, compression: str | None, tmp_path: Path
) -> None:
    for needed, started, ended in run(two, in_turns, compression, str(tmp_path)):
        assert needed == ["p3", "p2", "p1", "p0"]
        assert started == [[f"p{index}"] for index in TURNS]
        assert ended == [0, 1, 1, 2, 2]


def test_rank_0_sets_the_order_in_which_buckets_start_on_all_ranks(two: Pool) -> None:
    def program(world: Any) -> Any:
        with un.GradientReducer(world, priorities=True, bucket_nbytes=512) as reducer:
            for step in range(8):
                for index in range(6):
                    reducer.ready(f"p{index}", np.full(128, float(step + index), np.float32))
                assert all((found == step + int(name[1:])).all() for name, found in reducer.finish().items())
            return reducer.state_dict()["turns"]

    turns, others = run(two, program)
    assert turns == others
    assert sorted(turns) == list(range(6))


DEATH = """
import os, signal, sys
import numpy as np
import unisono as un

rank, options = int(sys.argv[1]), eval(sys.argv[3])
world = un.init(store=sys.argv[2], rank=rank, size=3)
reducer = un.GradientReducer(world, bucket_nbytes=1 << 14, **options)
try:
    for step in range(10):
        for index in range(20):
            if (rank, step, index) == (1, 3, 10):
                os.kill(os.getpid(), signal.SIGKILL)
            reducer.ready(f"p{index}", np.ones(4096, np.float32))
        list(reducer.finish().items())
except un.UnisonoError as error:
    print(type(error).__name__, error)
reducer.close()
"""


@pytest.mark.parametrize("options", [{}, {"compression": "int8"}, {"lag": 2}, {"priorities": True}], ids=str)
def test_survivors_name_a_rank_that_dies_between_its_gradients(options: dict[str, Any], tmp_path: Path) -> None:
    for text in survivors_of_rank_1(DEATH, f"file://{tmp_path}/store", repr(options)):
        assert text.startswith("PeerLostError")
        assert "rank 1 died" in text


def test_torch_tensors_are_reduced_in_place(two: Pool) -> None:
    pytest.importorskip("torch", reason="make torch installs it")

    def program(world: Any) -> None:
        import torch

        with un.GradientReducer(world) as reducer:
            for step in range(2):
                tensors = {
                    "float": torch.full((3, 4), float(world.rank)),
                    "bfloat16": torch.full((5,), float(world.rank + step), dtype=torch.bfloat16),
                    "strided": torch.full((4, 6), float(world.rank)).t()[::2],
                }
                for name, tensor in tensors.items():
                    reducer.ready(name, tensor)
                results = reducer.finish()
                for name, tensor in tensors.items():
                    assert results[name] is tensor
                    assert (tensor == 0.5 + step * (name == "bfloat16")).all(), (name, tensor)

    run(two, program)


class Exported:
    """An array of a class that no table knows."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self._array = array  # keeps the memory


def test_gradient_may_have_another_class_in_each_step(two: Pool) -> None:
    torch = pytest.importorskip("torch", reason="make torch installs it")

    def program(world: Any) -> None:
        with un.GradientReducer(world) as reducer:
            for make in (np.asarray, Exported, torch.from_numpy, np.asarray, lambda x: np.ma.masked_array(x).data):
                memory = np.full(3, float(world.rank))
                gradient = make(memory)
                reducer.ready("weight", gradient)
                assert reducer.finish()["weight"] is gradient
                assert (memory == 0.5).all()

    run(two, program)


# CPython 3.11 runs 48, and other versions may differ by a few.
MOST_FRAMES_OF_A_STEP = 55


def test_steady_step_of_one_gradient_runs_few_python_frames(two: Pool) -> None:
    def program(world: Any) -> int:
        gradient, entered = np.ones(1000, np.float32), list[str]()
        with un.GradientReducer(world, bucket_nbytes=1 << 20) as reducer:
            for step in range(10):
                if step == 9:
                    sys.setprofile(lambda frame, event, _: entered.append(event) if event == "call" else None)
                try:
                    reducer.ready("weight", gradient)
                    reducer.finish()
                finally:
                    sys.setprofile(None)
        return len(entered)

    assert 0 < max(run(two, program)) <= MOST_FRAMES_OF_A_STEP


def recorded(world: Any, folder: str) -> Any:
    with un.GradientReducer(world, bucket_nbytes=512, timeline=True) as reducer:
        for _ in range(4):
            for name in ("one", "two", "three"):
                reducer.ready(name, np.ones(100, np.float32))
            reducer.finish()
        path = Path(folder, f"{world.rank}.json")
        reducer.trace(path)
        if world.rank == 0:
            reducer.draw(Path(folder, "steps.png"))
        events = json.loads(path.read_text())["traceEvents"]
        with_calls = json.loads(world.trace(path).read_text())["traceEvents"]
        return events, reducer.report(), with_calls


def test_timeline_records_when_each_bucket_was_reduced(two: Pool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rank, (events, report, with_calls) in enumerate(run(two, recorded, str(tmp_path))):
        reduced = [event for event in events if event["name"] == "reduce"]
        assert len(reduced) == 4 * 3
        assert {event["args"]["bytes"] for event in reduced} == {448}
        assert {event["pid"] for event in events} == {rank}
        assert all(event["dur"] > 0 for event in reduced)
        assert len([event for event in events if event["name"] == "exposed"]) == 4
        assert report.steps == 4
        assert report.nbytes == sum(row.nbytes for row in report.buckets) == 3 * 448
        assert all(row.start_s <= row.end_s for row in report.buckets)
        assert "3 buckets" in str(report)
        bars = [event for event in with_calls if event["ph"] == "X"]
        calls = [bar for bar in bars if bar["cat"] == "collective" and bar["name"].startswith("allreduce")]
        # reducers of earlier tests may not have been collected yet, and then they are in the trace too
        last = max((bar for bar in bars if bar["name"] == "reduce"), key=lambda bar: bar["ts"])
        assert last["args"]["step"] == 3
        assert any(last["ts"] <= call["ts"] <= last["ts"] + last["dur"] for call in calls)
        assert last["pid"] == rank
        assert last["tid"] not in {call["tid"] for call in calls}
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def cores_of_threads(world: un.Communicator, core: int) -> list[set[int]]:
    from unisono.frameworks.gradients.bucket_comms import Teams

    with un.GradientReducer(world, teams=Teams(2, (core,))) as reducer:
        reducer.ready("x", np.ones(3))
        reducer.finish()
        return [os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()]


def test_bucket_communicators_are_bound_to_the_named_cores(two: Pool) -> None:
    core = max(os.sched_getaffinity(0))
    for found in run(two, cores_of_threads, core):
        assert found.count({core}) >= 2
