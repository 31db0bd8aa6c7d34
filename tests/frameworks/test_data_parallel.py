"""Data-parallel bookkeeping by real ranks: parameters, their bits, metrics, samples, norms."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.float_modes import MODES, mode
from support.outcomes import error_of
from support.ranks import Ranks, ranks_fixture

import unisono as un
from unisono.data_parallel import (
    HybridGroups,
    ShardedSampler,
    average_metrics,
    broadcast_parameters,
    clip_global_norm,
    fingerprint,
    first_difference,
    global_norm,
    scale_by_larc,
    verify_sync,
)
from unisono.dtypes import DTYPES

SIZE = 3
bounded = settings(max_examples=40, deadline=None, derandomize=True)


ranks = ranks_fixture((SIZE, "shm"))


# --- parameters ----------------------------------------------------------------------------------------------------


def made(rank: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of every dtype and layout, other ones on each rank."""
    arrays = {name: np.full((2, 3), rank + 1).astype(name) for name in DTYPES}
    arrays["0-d"] = np.array(rank + 0.5)
    arrays["empty"] = np.empty((0, 4), np.float32)
    arrays["columns"] = np.full((4, 6), float(rank))[:, ::2]
    arrays["fortran"] = np.asfortranarray(np.full((2, 3), rank, np.int16))
    arrays["long"] = np.full(70_001, rank, np.float32)
    return arrays


def broadcast_all(world: un.Communicator) -> list[str]:
    mine, of_root = made(world.rank), made(1)
    before = {name: x.ctypes.data for name, x in mine.items()}
    given = broadcast_parameters(world, mine, root=1)
    verify_sync(world, mine)
    assert all(given[name] is x and x.ctypes.data == before[name] for name, x in mine.items())
    return [name for name, x in mine.items() if x.tobytes() != of_root[name].tobytes()]


def test_broadcast_parameters_copies_those_of_the_root_in_every_dtype(ranks: Ranks) -> None:
    assert ranks.run_calls(broadcast_all) == [[]] * SIZE


# The value of rank 2 instead, and the text that all ranks get.
DIVERGENT: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, ""),
    "a bit": ({"b": np.array([1.0, np.nan, 0.0])}, "'b' has other bits on rank 2 than on the others (float64[3])"),
    "another NaN": (
        {"b": np.array([1.0, -np.nan, -0.0])},
        "'b' has other bits on rank 2 than on the others (float64[3])",
    ),
    "a dtype": ({"b": np.zeros(3, np.float32)}, "'b' is float32[3] on rank 2, and float64[3] on the others"),
    "a shape": ({"b": np.zeros((1, 3))}, "'b' is float64[1,3] on rank 2, and float64[3] on the others"),
    "a name": ({"z": np.zeros(3)}, "rank 2: 'z' where the others have no further array: pass the same names"),
}


def diverge(world: un.Communicator, what: str) -> tuple[tuple[str, str], tuple[str, str]]:
    named = {"a": np.arange(5), "b": np.array([1.0, np.nan, -0.0]), "c": np.zeros(0)}
    if world.rank == 2:
        named |= DIVERGENT[what][0]
    error = error_of(lambda: verify_sync(world, named))
    # The communicator is as good as before.
    return error, error_of(lambda: verify_sync(world, {"a": world.allreduce(np.ones(2))}))


@pytest.mark.parametrize("what", DIVERGENT)
def test_every_rank_names_the_first_array_that_differs_and_its_ranks(ranks: Ranks, what: str) -> None:
    text = DIVERGENT[what][1]
    for error, afterwards in ranks.run_calls(diverge, what):
        assert error[0] == ("MismatchError" if text else "")
        assert error[1].startswith(text)
        assert afterwards == ("", "")


def test_first_difference_trusts_the_lowest_rank_in_a_tie() -> None:
    def all_differ(world: un.Communicator) -> list[str | None]:
        own = {"w": np.array([world.rank])}
        fewer = {"w": np.zeros(1)} if world.rank == 0 else {"w": np.zeros(1), "v": np.zeros(1)}
        return [first_difference(world, own), first_difference(world, fewer), first_difference(world, {})]

    for own, fewer, nothing in un.launch(all_differ, 2, timeout_s=DEADLINE_S):
        assert own is not None
        assert own.startswith("'w' has other bits on rank 1 ")
        assert fewer is not None
        assert fewer.startswith("rank 1: 'v' where the others have no further array")
        assert nothing is None


class Wrapped:
    """An array that others see by `__array__`: its memory, or a copy of it."""

    def __init__(self, values: Any, copies: bool = False) -> None:
        self.values, self._copies = values, copies

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values.copy() if self._copies else self.values


class Interfaced:
    """An array that others see by `__array_interface__`."""

    def __init__(self, values: Any) -> None:
        self.values = values

    @property
    def __array_interface__(self) -> Any:
        return self.values.__array_interface__


def broadcast_foreign(world: un.Communicator) -> list[Any]:
    shared = [Wrapped(np.full(3, world.rank)), Interfaced(np.full(3, world.rank))]
    given = broadcast_parameters(world, {str(index): x for index, x in enumerate(shared)}, root=1)
    assert list(given.values()) == shared
    copied = Wrapped(np.full(3, float(world.rank)), copies=True)
    errors = [
        error_of(lambda: broadcast_parameters(world, {"w": copied})),
        error_of(lambda: clip_global_norm([copied], 0.1)),
    ]
    errors.append(error_of(lambda: HybridGroups(world, {"w": copied}, groups=1, staleness=0)))
    return [[x.values.tolist() for x in shared], errors]


def test_arrays_of_unknown_libraries_are_written_in_place_or_refused(ranks: Ranks) -> None:
    for shared, errors in ranks.run_calls(broadcast_foreign):
        assert shared == [[1, 1, 1]] * 2
        assert {kind for kind, _ in errors} == {"UsageError"}
        assert all("is read-only, or gives access only to copies" in text for _, text in errors)


def refuse(world: un.Communicator) -> list[tuple[str, str]]:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    wrong: list[Any] = [[np.zeros(2)], np.zeros(2), {"a": "text"}, {"a": np.array([None])}, {"a": np.zeros(2, ">f4")}]
    errors = [error_of(lambda x=x: verify_sync(world, x)) for x in [*wrong, [("a", frozen), ("a", frozen)], 3]]
    errors.append(error_of(lambda: broadcast_parameters(world, {"frozen": frozen})))
    errors.append(error_of(lambda: broadcast_parameters(world, {"frozen": np.float64(1.0)})))
    shapes = {"w": np.zeros(2 + (world.rank == 1))}
    errors.append(error_of(lambda: broadcast_parameters(world, shapes)))
    world.barrier()
    return errors


def test_arguments_that_are_no_named_arrays_are_refused_before_sending(ranks: Ranks) -> None:
    for *wrong, frozen, number, shapes in ranks.run_calls(refuse):
        assert [kind for kind, _ in wrong] == ["UsageError"] * 7
        assert "pass arrays with their names" in wrong[0][1]
        assert "a is of type str" in wrong[2][1]
        assert frozen[1].startswith("frozen is read-only")
        assert number[1].startswith("frozen is read-only")
        assert shapes == ("MismatchError", "'w' is float64[3] on rank 1, and float64[2] on the others [rank 0]") or (
            shapes[1].startswith("'w' is float64[3] on rank 1, and float64[2] on the others")
        )


def of_torch(world: un.Communicator) -> list[str]:
    torch = __import__("torch")
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(4, 4))
    model[0].to(memory_format=torch.channels_last)
    model[2].to(torch.bfloat16)
    model.tied = model[2].weight
    model.buffer = torch.nn.Buffer(torch.full((2,), world.rank).to(torch.float8_e4m3fn))
    before = [p.data_ptr() for p in model.parameters()]
    broadcast_parameters(world, model.state_dict(), root=2)
    assert before == [p.data_ptr() for p in model.parameters()]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    verify_sync(world, model.named_parameters())
    with torch.no_grad():
        model[2].bias[1] += world.rank == 1
    return [fingerprint(model.state_dict()), first_difference(world, model.state_dict()) or ""]


def test_torch_models_are_broadcast_in_place_and_compared(ranks: Ranks) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    told = ranks.run_calls(of_torch)
    assert {text for _, text in told} == {"'2.bias' has other bits on rank 1 than on the others (bfloat16[4])"}
    prints = [digits for digits, _ in told]
    assert prints[0] == prints[2] != prints[1]


def of_jax(world: un.Communicator) -> list[float]:
    jax = __import__("jax")
    named = {"w": jax.numpy.full((2, 2), world.rank, jax.numpy.bfloat16)}
    given = broadcast_parameters(world, named, root=1)
    assert isinstance(given["w"], jax.Array)
    verify_sync(world, given)
    return [float(x) for x in given["w"].reshape(-1)]


def test_jax_arrays_are_broadcast_to_new_arrays(ranks: Ranks) -> None:
    pytest.importorskip("jax", reason="make jax installs it")
    assert ranks.run_calls(of_jax) == [[1.0] * 4] * SIZE


def test_clipping_refuses_immutable_jax_arrays() -> None:
    jax = pytest.importorskip("jax", reason="make jax installs it")
    x = jax.numpy.ones(3)
    with pytest.raises(un.UsageError, match="array 0 is immutable"):
        clip_global_norm([x], 0.1)
    with pytest.raises(un.UsageError, match="w is immutable"):
        scale_by_larc({"w": x}, {"w": x}, 0.1)
    assert global_norm([x]) == pytest.approx(3**0.5)


def of_keras(world: un.Communicator) -> list[Any]:
    keras, tf = __import__("keras"), __import__("tensorflow")
    keras.utils.set_random_seed(world.rank)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    named = {variable.path: variable for variable in model.variables}
    before = first_difference(world, named)
    given = broadcast_parameters(world, named, root=1)
    assert all(given[path] is variable for path, variable in named.items())
    verify_sync(world, named)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def traced(x: Any) -> Any:
        broadcast_parameters(world, named)
        return x

    return [before is not None, model.variables[0].numpy().tolist(), error_of(lambda: traced(tf.constant(1.0)))[1]]


def test_keras_variables_are_assigned_in_place(ranks: Ranks) -> None:
    if importlib.util.find_spec("keras") is None or importlib.util.find_spec("tensorflow") is None:
        pytest.skip("pip install tensorflow-cpu")
    results = ranks.run_calls(of_keras)
    assert all(differed for differed, *_ in results)
    assert results[0][1] == results[1][1] == results[2][1]
    assert all("has no elements while TensorFlow traces it" in text for *_, text in results)


# --- metrics -------------------------------------------------------------------------------------------------------


def average(world: un.Communicator) -> tuple[dict[str, float], list[tuple[str, str]]]:
    mine = {"loss": float(world.rank), "accuracy": np.array(0.5)}
    names = list(mine) if world.rank else list(reversed(mine))
    # Rank 1 has no samples, and a loss that is no number.
    samples = (3, 0, 1)[world.rank]
    result = average_metrics(world, {name: np.nan if world.rank == 1 else mine[name] for name in names}, samples)
    other = {"loss": 1.0} if world.rank else {"cost": 1.0}
    wrong = [
        error_of(lambda: average_metrics(world, other)),
        error_of(lambda: average_metrics(world, {"loss": 1.0}, samples=0)),
        error_of(lambda: average_metrics(world, {"loss": "much"})),
        error_of(lambda: average_metrics(world, {"loss": 1.0}, samples=-1)),
        error_of(lambda: average_metrics(world, {"loss": 1.0}, samples=math.nan)),
    ]
    assert average_metrics(world, {}) == {}
    return result, wrong


def test_metrics_are_averaged_by_samples_and_their_names_must_agree(ranks: Ranks) -> None:
    for result, wrong in ranks.run_calls(average):
        assert result == {"accuracy": 0.5, "loss": 0.5}
        assert [kind for kind, _ in wrong] == ["MismatchError", *["UsageError"] * 4]
        assert "rank 0: 'cost' where the others have 'loss'" in wrong[0][1]


# --- samples -------------------------------------------------------------------------------------------------------


@bounded
@given(length=st.integers(1, 40), size=st.integers(1, 7), drop_last=st.booleans(), epoch=st.integers(0, 3))
def test_sharded_sampler_gives_the_shares_of_torch_distributed_sampler(
    length: int, size: int, drop_last: bool, epoch: int
) -> None:
    sampling = pytest.importorskip("torch.utils.data", reason="make torch installs it")
    if drop_last and length < size:
        with pytest.raises(un.UsageError, match="leave none for each"):
            ShardedSampler(length, 0, size, drop_last=True)
        return
    shares = []
    for rank in range(size):
        plain = ShardedSampler(length, rank, size, shuffle=False, drop_last=drop_last)
        theirs = sampling.DistributedSampler(range(length), size, rank, shuffle=False, drop_last=drop_last)
        # Dropping, torch leaves out as many, but not always the same ones.
        assert len(plain) == len(theirs)
        assert list(plain) == list(theirs)
        shuffled = ShardedSampler(length, rank, size, seed=3, drop_last=drop_last)
        shuffled.set_epoch(epoch)
        shares.append(list(shuffled))
        assert shuffled.epoch == epoch + 1
    assert {len(share) for share in shares} == {len(plain)}
    taken = [index for row in zip(*shares, strict=True) for index in row]
    assert len(set(taken[:length])) == min(length, len(taken))
    assert set(taken) <= set(range(length))


@bounded
@given(
    length=st.integers(1, 50),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    steps=st.integers(0, 8),
)
def test_sharded_sampler_resumes_with_another_number_of_ranks(length: int, before: int, after: int, steps: int) -> None:
    samplers = [ShardedSampler(length, rank, before, seed=1) for rank in range(before)]
    steps = min(steps, len(samplers[0]) - 1)
    taken = [index for sampler in samplers for index in islice(sampler, steps)]
    state = samplers[-1].state_dict()
    resumed = []
    for rank in range(after):
        sampler = ShardedSampler(length, rank, after, seed=1)
        sampler.load_state_dict(state)
        resumed.append(list(sampler))
        assert (sampler.epoch, sampler.state_dict()["taken"]) == (1, 0)
    assert len({len(share) for share in resumed}) == 1
    left = [index for share in resumed for index in share]
    assert set(taken) | set(left) == set(range(length))
    assert len(left) == -(-(length - len(taken)) // after) * after


def test_sharded_sampler_repeats_an_epoch_and_refuses_a_foreign_state() -> None:
    sampler = ShardedSampler(100, 1, 4)
    first, second = list(sampler), list(sampler)
    assert first != second
    sampler.set_epoch(0)
    assert list(sampler) == first
    for wrong in ({}, {**sampler.state_dict(), "length": 7}, {**sampler.state_dict(), "seed": 9}):
        with pytest.raises(un.UsageError, match="state"):
            sampler.load_state_dict(wrong)
    for arguments in ((0, 0, 1), (5, 2, 2), (5, -1, 2)):
        with pytest.raises(un.UsageError, match="must be 1 or more, and rank"):
            ShardedSampler(*arguments)


# --- norms ---------------------------------------------------------------------------------------------------------


def clip_shards(world: un.Communicator) -> tuple[float, float, float]:
    whole = [np.full(3, 2.0), np.array([[6.0, 0.0]], np.float32), np.array(3 + 4j)]
    shard = [x if index == world.rank else np.zeros_like(x) for index, x in enumerate(whole)]
    sharded, replicated = global_norm(shard, world), global_norm(whole)
    assert clip_global_norm(shard, 100.0, world) == sharded
    assert shard[world.rank].tobytes() == whole[world.rank].tobytes()
    clip_global_norm(shard, 1.0, world)
    return sharded, replicated, global_norm(shard, world)


def test_norm_of_sharded_arrays_equals_norm_of_the_whole(ranks: Ranks) -> None:
    for sharded, replicated, clipped in ranks.run_calls(clip_shards):
        assert sharded == replicated == math.sqrt(12 + 36 + 25)
        assert clipped == pytest.approx(1.0, abs=1e-6)


def numbers_in_mode(world: un.Communicator, name: str) -> list[Any]:
    """Return what must have the same bits on all ranks, with rank 0 in a floating-point mode."""
    weights, gradients = {"a": np.array([1e-40, 1 / 3], np.float32)}, {"a": np.array([3e-40, 0.7], np.float32)}
    with mode(name if world.rank == 0 else "default"):
        metrics = average_metrics(world, {"loss": 1 / (3 + world.rank)}, samples=1 + world.rank)
        norm = clip_global_norm([gradients["a"]], 0.5)
        factors = scale_by_larc(weights, gradients, 0.1)
    return [metrics, norm, gradients["a"].tobytes(), factors]


def test_norms_and_metrics_agree_bitwise_in_every_floating_point_mode(ranks: Ranks) -> None:
    for name in MODES:
        first, *others = ranks.run_calls(numbers_in_mode, name)
        assert others == [first] * (SIZE - 1), name


def test_clipping_scales_like_torch_and_refuses_nonfinite_gradients() -> None:
    torch = pytest.importorskip("torch", reason="make torch installs it")
    gradients = [torch.arange(6.0).reshape(2, 3).t(), torch.ones(3), torch.zeros(0), torch.tensor(2.0)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, each in zip(parameters, gradients, strict=True):
        parameter.grad = each.clone()
    expected = float(torch.nn.utils.clip_grad_norm_(parameters, 2.5))
    assert clip_global_norm(gradients, 2.5) == pytest.approx(expected, rel=1e-6)
    for parameter, each in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(parameter.grad, each)
    narrow = torch.full((300,), 3.0, dtype=torch.bfloat16)
    assert global_norm([narrow]) == math.sqrt(2700)
    bad = [np.array([1.0, np.inf]), np.ones(2)]
    with pytest.raises(FloatingPointError, match="is inf: no gradient was changed"):
        clip_global_norm(bad, 1.0)
    assert bad[1].tolist() == [1.0, 1.0]
    for wrong in ([np.ones(2, int)], ["x"]):
        with pytest.raises(un.UsageError):
            global_norm(wrong)
    with pytest.raises(un.UsageError, match="positive"):
        clip_global_norm([np.ones(2)], 0.0)


def test_larc_scales_each_layer_by_its_own_rate() -> None:
    weights = {"a": np.array([3.0, 4.0]), "b": np.full(4, 1e4), "zero": np.zeros(2)}
    gradients = {"b": np.full(4, 1e-4), "a": np.array([0.0, 10.0]), "zero": np.ones(2)}
    factors = scale_by_larc(weights, gradients, 0.1, trust=0.02)
    assert factors == {"b": 1.0, "a": pytest.approx(0.02 * 5 / 10 / 0.1), "zero": 1.0}
    assert gradients["a"] == pytest.approx([0.0, 1.0])
    assert gradients["b"].tolist() == [1e-4] * 4
    gradients = {"a": np.array([0.0, 10.0]), "b": np.ones(4), "zero": np.ones(2)}
    factors = scale_by_larc(weights, gradients, 0.1, trust=0.02, clip=False, weight_decay=0.5)
    rate = 0.02 * 5 / (10 + 0.5 * 5)
    assert factors["a"] == pytest.approx(rate / 0.1)
    assert gradients["a"] == pytest.approx([1.5 * rate / 0.1, 12 * rate / 0.1])
    assert gradients["zero"].tolist() == [1.0, 1.0]
    with pytest.raises(FloatingPointError, match="'a'"):
        scale_by_larc({"a": np.array([np.nan])}, {"a": np.ones(1)}, 0.1)
    with pytest.raises(un.UsageError, match="same names"):
        scale_by_larc({"a": np.ones(2)}, {"a": np.ones(3)}, 0.1)


def test_data_parallel_module_imports_no_array_library_but_numpy() -> None:
    code = "import sys, unisono.data_parallel; print(*sorted({'torch', 'jax', 'tensorflow'} & set(sys.modules)))"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert completed.stdout.split() == []
