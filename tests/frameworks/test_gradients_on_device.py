"""The gradient engine on arrays of a GPU double: packed, reduced, compressed and unpacked there."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.outcomes import error_of
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.collectives.device.workspace import Workspace
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.quantisation import Quantised, dequantised, with_feedback
from unisono.transports.cuda.device import Stream
from unisono.transports.cuda.kernels.quantised_form import QUANTISED_BLOCK

pytestmark = pytest.mark.timeout(120)

SHAPES = {"weight": (37, 11), "bias": (5,), "empty": (0,), "scale": ()}


two = ranks_fixture((2, "cuda_ipc,shm"), (2, "shm"))
by_ipc = ranks_fixture((2, "cuda_ipc,shm"))


def gradients_of(rank: int, step: int, dtype: str = "float32") -> dict[str, Any]:
    random = np.random.default_rng(100 * step + rank)
    return {name: np.asarray(random.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}


class Program:
    """A program with gradients on a double, which it computes on a stream of its own."""

    def __init__(self, world: un.Communicator, gpu: Any, stream: Stream, **options: Any) -> None:
        self.world, self.gpu, self.stream = world, gpu, stream
        self.reducer = un.GradientReducer(world, **options)

    def step(self, gradients: dict[str, Any], backwards: bool = False) -> dict[str, Any]:
        """Pass gradients, and return the results on the host, in the order in which the program reads them."""
        arrays = {name: DoubleArray(self.gpu, values, self.stream) for name, values in gradients.items()}
        for name in sorted(arrays, reverse=backwards):
            self.reducer.ready(name, arrays[name])
        reduced = self.reducer.finish()
        for name, array in reduced.items():
            if name in arrays:
                assert array is arrays[name]
        return {name: read(self.gpu, array) for name, array in reduced.items()}


def on_double(world: un.Communicator, body: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    with device_double(world.rank) as gpu:
        stream = gpu.device().new_stream()
        program = Program(world, gpu, stream, **options)
        try:
            result = body(program, *arguments)
        finally:
            program.reducer.close()
            del program
            gc.collect()
            gpu.device().end_stream(stream)
    return result


def averages(program: Program, dtype: str) -> float:
    """Return the greatest difference of the results of six steps from the averages."""
    worst = 0.0
    for step in range(6):
        got = program.step(gradients_of(program.world.rank, step, dtype), backwards=step > 1)
        of_ranks = [gradients_of(rank, step, dtype) for rank in range(program.world.size)]
        for name, shape in SHAPES.items():
            expected = sum(gradients[name].astype(np.float64) for gradients in of_ranks) / len(of_ranks)
            assert got[name].shape == shape
            worst = max(worst, np.abs(got[name].astype(np.float64) - expected).max(initial=0))
    return worst


@pytest.mark.parametrize("bucket_nbytes", [None, 256])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 0.02)])
def test_gradients_on_a_gpu_are_averaged_there(two: Ranks, dtype: str, error: float, bucket_nbytes: int | None) -> None:
    results = two.run_calls(lambda world: on_double(world, averages, dtype, bucket_nbytes=bucket_nbytes))
    assert max(results) < error


N = 1008  # a multiple of the alignment of gradients


def simulated(form: str, steps: int, size: int) -> list[Any]:
    """Return the average of each step by the definition of quantisation, in numpy."""
    residuals, results = np.zeros((size, N), np.float32), []
    part = -(-N // (size * QUANTISED_BLOCK)) * QUANTISED_BLOCK if form == "int8" else N
    owned = [slice(min(N, owner * part), min(N, owner * part + part)) for owner in range(size if form == "int8" else 1)]
    for step in range(steps):
        result = np.zeros(N, np.float32)
        for owner, own in enumerate(owned):
            total = np.zeros(own.stop - own.start, np.float32)
            for rank in range(size):
                made = with_feedback(large_of(rank, step)[own], residuals[rank, own], form)
                total += dequantised(made)
            total /= np.float32(size)
            if form == "int8":
                made = with_feedback(total, residuals[owner, own], form, feeds=False, weight=float(size))
                result[own] = dequantised(made)
            else:
                result[own] = dequantised(Quantised(total.astype(form), np.empty(0, np.float32)))
        results.append(result)
    return results


def large_of(rank: int, step: int) -> Any:
    return (np.random.default_rng(100 * step + rank).normal(size=N) * (rank + 1)).astype(np.float32)


def compressed(program: Program, form: str, steps: int) -> bool:
    """Return whether the results have the bits of the definition, and rounding has left residuals."""
    expected = simulated(form, steps, program.world.size)
    for step in range(steps):
        got = program.step({"large": large_of(program.world.rank, step)})
        if got["large"].tobytes() != expected[step].tobytes():
            return False
    state = program.reducer.state_dict()
    program.reducer.load_state_dict(state)
    again = program.step({"large": large_of(program.world.rank, steps)})
    if again["large"].tobytes() != simulated(form, steps + 1, program.world.size)[-1].tobytes():
        return False
    return bool(np.abs(state["residuals"]["large"]).max() > 0)


@pytest.mark.parametrize("form", ["int8", "bfloat16", "float16"])
def test_compression_on_a_gpu_has_the_bits_of_its_definition_and_feeds_errors_back(two: Ranks, form: str) -> None:
    assert two.run_calls(lambda world: on_double(world, compressed, form, 4, compression=form)) == [True] * 2


def traffic_of(program: Program) -> int:
    before = sent_by(program)
    for step in range(2):
        program.step({"large": large_of(program.world.rank, step)})
    return (sent_by(program) - before) // 2


def sent_by(program: Program) -> int:
    comms = program.reducer._comms._comms
    stats = [communicator.stats().on_device for comm in comms for communicator in comm.communicators]
    assert all(stats_of_rank.to_host_nbytes == 0 for stats_of_rank in stats), "gradients were staged"
    return sum(traffic.sent_nbytes for stats_of_rank in stats for traffic in stats_of_rank.by_ipc.values())


def test_compressed_gradients_move_fewer_bytes_between_gpus(by_ipc: Ranks) -> None:
    plain, narrow, codes = (
        by_ipc.run_calls(lambda world, form=form: on_double(world, traffic_of, compression=form))[0]
        for form in (None, "bfloat16", "int8")
    )
    assert narrow == plain / 2
    assert codes < narrow


def with_lag(program: Program) -> list[Any]:
    results = []
    for step in range(4):
        rows = np.full(N, float(10**step * (program.world.rank + 1)), np.float32)
        got = program.step({"large": rows})
        results.append(got["large"][0].item() if got else None)
    flushed = [read(program.gpu, gradients["large"])[0].item() for gradients in program.reducer.flush()]
    return [*results, *flushed]


def test_gradients_on_a_gpu_come_later_with_a_lag(two: Ranks) -> None:
    sums = [3.0, 30.0, 300.0, 3000.0]
    assert two.run_calls(lambda world: on_double(world, with_lag, lag=1, op="sum")) == [[None, *sums]] * 2


def missing_and_new(program: Program) -> list[Any]:
    rank, results = program.world.rank, []
    for step in range(3):
        gradients = {"all": np.full(4, 2.0 * rank)}
        if rank == 0:
            gradients["some"] = np.full(3, 6.0)
        if step:
            gradients["late"] = np.full(2, 4.0 * rank)
        got = program.step(gradients)
        results.append({name: values[0].item() for name, values in sorted(got.items())})
    return results


def test_missing_gradients_on_a_gpu_count_as_zeros_and_new_ones_are_averaged(two: Ranks) -> None:
    later = {"all": 1.0, "late": 2.0, "some": 3.0}
    results = two.run_calls(lambda world: on_double(world, missing_and_new, missing="zero"))
    assert results == [[{"all": 1.0, "some": 3.0}, later, later]] * 2


def refusals(program: Program) -> list[str]:
    on_host = lambda: (program.reducer.ready("host", np.ones(3)), program.reducer.finish())  # noqa: E731
    program.step({"a": np.ones(3)})
    program.reducer.ready("a", DoubleArray(program.gpu, np.ones(3), program.stream))
    texts = [error_of(on_host)[1]]
    with un.GradientReducer(program.world, compression="int8") as other:
        other.ready("wide", DoubleArray(program.gpu, np.ones(3), program.stream))
        texts.append(error_of(other.finish)[1])
    with un.GradientReducer(program.world, check_finite=True) as other:
        other.ready("looked at", DoubleArray(program.gpu, np.ones(3), program.stream))
        texts.append(error_of(other.finish)[1])
    with un.GradientReducer(program.world) as other:
        other.ready("a", np.ones(3) if program.world.rank else DoubleArray(program.gpu, np.ones(3), program.stream))
        texts.append(error_of(other.finish)[1])
    return texts


def test_gradients_that_a_gpu_cannot_take_are_named_on_all_ranks(by_ipc: Ranks) -> None:
    for texts in by_ipc.run_calls(lambda world: on_double(world, refusals)):
        mixed, wide, looked_at, apart = texts
        assert "'host' is on the host, and others are on a GPU" in mixed
        assert "'wide' is of float64, which a GPU does not compress to int8" in wide
        assert "check_finite" in looked_at
        assert "memory='host'" in apart
        assert "memory='device'" in apart


def outcome_without(world: un.Communicator, place: str) -> str:
    """Return "right" or the class of the error, when the orders of streams in a function are left out."""
    whole = Workspace.order

    def order(self: Workspace, later: Stream, earlier: Stream) -> None:
        if sys._getframe(1).f_code.co_name != place:
            whole(self, later, earlier)

    with mock.patch.object(Workspace, "order", order):
        try:
            return "right" if on_double(world, averages, "float32", timeout_s=10) < 1e-6 else "wrong"
        except (AssertionError, un.UnisonoError) as error:
            return type(error).__name__


# The functions that order streams.
ORDERS = ("_on_device", "start", "wait", "deliver")


@pytest.mark.parametrize("place", ORDERS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_gradients_on_a_gpu_need_each_order_of_streams(place: str) -> None:
    with start_ranks(2, "cuda_ipc,shm") as ranks:
        assert "right" not in ranks.run_calls(outcome_without, place)


def test_gradients_on_a_gpu_are_right_with_all_orders_of_streams(by_ipc: Ranks) -> None:
    assert by_ipc.run_calls(outcome_without, "nowhere") == ["right"] * 2
