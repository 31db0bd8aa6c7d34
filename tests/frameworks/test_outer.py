"""Training that hardly communicates: outer optimizers by a model in numpy, and what they do on real ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.outcomes import error_of

import unisono as un
from unisono.data_parallel import BlockMomentum, DiLoCo, LocalSGD, fingerprint
from unisono.frameworks.data_parallel.layers import Layer
from unisono.frameworks.outer.fragments import FragmentSchedule, fragments_of
from unisono.frameworks.outer.rules import OuterRule
from unisono.launchers.launch import Pool

bounded = settings(max_examples=25, deadline=None, derandomize=True)
SIZE = 3


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(SIZE) as pool:
        yield pool


def run(pool: Pool, program: Any, *args: Any) -> list[Any]:
    return pool.run(program, *args, timeout_s=DEADLINE_S)


# --- rules and schedules -------------------------------------------------------------------------------------------


@bounded
@given(inner_steps=st.integers(1, 40), fragments=st.integers(1, 8), data=st.data())
def test_each_fragment_leaves_once_in_inner_steps_and_never_with_another(
    inner_steps: int, fragments: int, data: Any
) -> None:
    schedule = FragmentSchedule(inner_steps, min(fragments, inner_steps), 0)
    first = data.draw(st.integers(1, 100))
    left = [schedule.leaving(step) for step in range(first, first + inner_steps)]
    assert sorted(index for index in left if index is not None) == list(range(schedule.fragments))
    assert schedule.leaving(inner_steps) == schedule.fragments - 1


@bounded
@given(counts=st.lists(st.integers(1, 500), min_size=1, max_size=12), data=st.data())
def test_fragments_hold_each_layer_once_and_are_of_about_equal_size(counts: list[int], data: Any) -> None:
    layers = [Layer(f"l{index}", ((f"l{index}.w", "float32", count),), "float32") for index, count in enumerate(counts)]
    fragments = fragments_of(layers, data.draw(st.integers(1, len(layers))))
    assert sorted(part for fragment in fragments for part in fragment.parts) == sorted(
        part for layer in layers for part in layer.parts
    )
    sizes = [fragment.elements for fragment in fragments]
    assert max(sizes) - min(sizes) <= max(counts)


@bounded
@given(lr=st.floats(0.01, 2), momentum=st.floats(0, 0.99), nesterov=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_outer_rule_is_sgd_of_torch_on_minus_the_change(lr: float, momentum: float, nesterov: bool, seed: int) -> None:
    torch = pytest.importorskip("torch", reason="make torch installs it")
    random = np.random.default_rng(seed)
    values, changes = random.normal(size=5), random.normal(size=(4, 5))
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    optimizer = torch.optim.SGD([parameter], lr=lr, momentum=momentum, nesterov=nesterov and momentum > 0)
    velocity = np.zeros(5) if momentum else None
    for change in changes:
        parameter.grad = torch.from_numpy(-change)
        optimizer.step()
        OuterRule(lr, momentum, nesterov).apply(values, velocity, change.copy())
    np.testing.assert_allclose(values, parameter.detach().numpy(), rtol=1e-12)


@bounded
@given(seed=st.integers(0, 2**32 - 1), momentum=st.floats(0.1, 0.9), lr=st.floats(0.1, 1.5))
def test_nesterov_rule_is_the_nesterov_block_momentum_of_the_paper(seed: int, momentum: float, lr: float) -> None:
    # Chen and Huo: D = η D + ζ G; W = W + D; the next block starts at W + η D, from which G is measured.
    averages = np.random.default_rng(seed).normal(size=(5, 3))
    model, start, step = np.zeros(3), np.zeros(3), np.zeros(3)
    values, velocity = np.zeros(3), np.zeros(3)
    for average in averages:  # of the parameters of all ranks at the end of a block, from the start of the block
        step = momentum * step + lr * average
        model = model + step
        start = model + momentum * step
        OuterRule(lr, momentum, nesterov=True).apply(values, velocity, average.copy())
        np.testing.assert_allclose(values, start, rtol=1e-9, atol=1e-12)


# --- against a model -----------------------------------------------------------------------------------------------

START = {"a.w": np.float32, "a.b": np.float64, "b.w": np.float32, "c.w": np.float32, "c.n": "bfloat16"}


def start() -> dict[str, Any]:
    return {name: np.arange(4).astype(dtype).reshape(2, 2) for name, dtype in START.items()}


def own_step(x: Any, rank: int, step: int) -> Any:
    """Return the parameters after a step of an inner optimizer, which depends on the parameters, rank and step."""
    return x - 0.125 * (x - rank - step % 3)


def model_of(steps: int, arguments: dict[str, Any], layers: list[list[str]]) -> list[dict[str, Any]]:
    """Return the parameters of all ranks after some steps, in float64: the definition of DiLoCo and its streaming."""
    ranks = [{name: x.astype(np.float64) for name, x in start().items()} for _ in range(SIZE)]
    outer = {name: x.astype(np.float64) for name, x in start().items()}
    velocity = {name: np.zeros((2, 2)) for name in outer}
    h, tau, mixing = arguments["inner_steps"], arguments.get("overlap", 0), arguments.get("mixing", 1.0)
    lr, momentum = arguments["lr"], arguments["momentum"]
    flying: list[tuple[int, list[str], dict[str, Any]]] = []
    for step in range(1, steps + 1):
        ranks = [{name: own_step(x, rank, step) for name, x in own.items()} for rank, own in enumerate(ranks)]
        for index, names in enumerate(layers):
            if step % h == (h * (index + 1) // len(layers)) % h:
                gradient = {name: outer[name] - np.mean([own[name] for own in ranks], axis=0) for name in names}
                flying.append((step + tau, names, gradient))
        for due, names, gradient in flying:
            for name in names if due == step else ():
                velocity[name] = momentum * velocity[name] + gradient[name]
                outer[name] = outer[name] - lr * (gradient[name] + momentum * velocity[name])
                for own in ranks:
                    own[name] = (1 - mixing) * own[name] + mixing * outer[name]
    return ranks


def trained(
    world: Any, arguments: dict[str, Any], steps: int, restart_after: int | None = None, kind: Any = DiLoCo
) -> tuple[dict[str, Any], str, str, list[list[str]]]:
    """Return the parameters after some steps, hashes of these and of the outer parameters, and the fragments."""
    own = start()
    outer = kind(world, own, **arguments)
    for step in range(1, steps + 1):
        for name, x in own.items():
            own[name] = own_step(x.astype(np.float64), world.rank, step).astype(x.dtype)
        own = outer.step(own)
        if step == restart_after:
            state = outer.state_dict()
            outer.close()
            outer = kind(world, start(), **arguments)
            outer.load_state_dict(state)
    fragments = [[name for name, _, _ in fragment.parts] for fragment in outer._fragments]
    values = fingerprint({str(index): value for index, value in enumerate(outer.state_dict()["values"])})
    after = {name: x.copy() for name, x in own.items()}
    outer.synchronize(own)
    outer.close()
    return after, values, fingerprint(own), fragments


@st.composite
def ways(draw: st.DrawFn) -> dict[str, Any]:
    inner_steps = draw(st.integers(1, 7))
    return {
        "inner_steps": inner_steps,
        "fragments": draw(st.integers(1, min(3, inner_steps))),
        "overlap": draw(st.integers(0, inner_steps - 1)),
        "mixing": draw(st.sampled_from((1.0, 0.5, 0.25))),
        "lr": draw(st.sampled_from((1.0, 0.7))),
        "momentum": draw(st.sampled_from((0.0, 0.5, 0.9))),
    }


@bounded
@given(arguments=ways(), steps=st.integers(1, 20))
def test_diloco_computes_what_its_definition_says_with_equal_outer_bits_on_all_ranks(
    three: Pool, arguments: dict[str, Any], steps: int
) -> None:
    every = run(three, trained, arguments, steps)
    assert len({(values, synchronized) for _, values, synchronized, _ in every}) == 1
    expected = model_of(steps, arguments, every[0][3])
    for (after, *_), model in zip(every, expected, strict=True):
        for name, x in after.items():
            tolerance = 0.2 if x.dtype == "bfloat16" else 1e-4
            np.testing.assert_allclose(x.astype(np.float64), model[name], rtol=tolerance, atol=tolerance)


@bounded
@given(arguments=ways(), compression=st.sampled_from((None, "float16", "int8")), data=st.data())
def test_training_resumes_from_its_state_with_equal_bits(
    three: Pool, arguments: dict[str, Any], compression: str | None, data: Any
) -> None:
    arguments["compression"] = compression
    steps = data.draw(st.integers(2, 16))
    once = run(three, trained, arguments, steps)
    again = run(three, trained, arguments, steps, data.draw(st.integers(1, steps - 1)))
    assert [result[1:] for result in once] == [result[1:] for result in again]
    assert [fingerprint(result[0]) for result in once] == [fingerprint(result[0]) for result in again]


def test_local_sgd_averages_parameters_and_streaming_of_one_fragment_is_diloco(three: Pool) -> None:
    rule = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
    local = run(three, trained, {"inner_steps": 1}, 4, None, LocalSGD)
    diloco = run(three, trained, {"inner_steps": 1, **rule}, 4)
    streaming = run(three, trained, {"inner_steps": 1, "fragments": 1, "overlap": 0, "mixing": 1.0, **rule}, 4)
    assert [result[1:] for result in local] == [result[1:] for result in diloco] == [result[1:] for result in streaming]
    averaged = start()
    for step in range(1, 5):
        for name, x in averaged.items():
            own = [own_step(x.astype(np.float64), rank, step).astype(x.dtype) for rank in range(SIZE)]
            averaged[name] = np.mean([array.astype(np.float64) for array in own], axis=0).astype(x.dtype)
    for name, x in local[0][0].items():
        tolerance = 2e-2 if x.dtype == "bfloat16" else 1e-6
        np.testing.assert_allclose(x.astype(np.float64), averaged[name].astype(np.float64), rtol=tolerance)


def returns_its_argument(world: Any) -> list[bool]:
    own = {"w": np.zeros(3)}
    with LocalSGD(world, own, inner_steps=3) as outer:
        return [outer.step(own) is own for _ in range(6)]


def test_steps_without_an_average_return_the_dict_as_it_is(three: Pool) -> None:
    assert run(three, returns_its_argument) == [[True, True, False] * 2] * SIZE


def test_block_momentum_has_the_momentum_of_the_paper(three: Pool) -> None:
    given_momentum = {"inner_steps": 2, "momentum": 1 - 1 / SIZE, "lr": 1.0}
    assert [result[1:] for result in run(three, trained, {"inner_steps": 2}, 8, None, BlockMomentum)] == [
        result[1:] for result in run(three, trained, given_momentum, 8)
    ]


def changes_with_feedback(world: Any, compression: str, rounds: int) -> tuple[Any, Any, str, int, int]:
    """Return the sum of the applied averages, and that of the true ones; outer bits; bytes with and without."""
    random = np.random.default_rng(world.rank)
    own = {"w": np.zeros(5000, np.float32)}
    true = np.zeros(5000)
    with DiLoCo(world, own, inner_steps=1, lr=1.0, momentum=0.0, compression=compression) as outer:
        for _ in range(rounds):
            moved = random.normal(size=5000).astype(np.float32)
            true += world.allreduce(moved.astype(np.float64), "avg")
            own["w"] += moved
            outer.step(own)
        residual = world.allreduce(outer.state_dict()["compression"][0]["residuals"].astype(np.float64), "avg")
        sent = outer.nbytes_sent()
    return own["w"].astype(np.float64) + residual, true, fingerprint(own), sent, own["w"].nbytes * rounds


@pytest.mark.parametrize("compression", ["bfloat16", "int8"])
def test_error_feedback_loses_no_change_of_a_fragment(three: Pool, compression: str) -> None:
    every = run(three, changes_with_feedback, compression, 6)
    assert len({bits for _, _, bits, _, _ in every}) == 1
    applied, true, *_ = every[0]
    # In bfloat16 the result is rounded once more, which no rank keeps.
    np.testing.assert_allclose(applied, true, atol=1e-4 if compression == "int8" else 5e-2)


def in_groups(world: Any, groups: Any, overlap: int) -> tuple[float, str, int]:
    own = {"a.w": np.zeros(3, np.float32), "b.w": np.zeros(2)}
    arguments = {"inner_steps": 2, "lr": 1.0, "momentum": 0.0, "groups": groups, "fragments": 2, "overlap": overlap}
    with DiLoCo(world, own, **arguments) as outer:
        for _ in range(6):
            moved = outer.group.allreduce(np.array(12.0 * (world.rank + 1)), "avg")
            for x in own.values():
                np.add(x, moved, out=x)
            outer.step(own)
        own = outer.synchronize(own)
        sent = outer.nbytes_sent()
    return float(own["a.w"][0]), fingerprint(own), sent


@pytest.mark.parametrize("groups", [[[0], [2, 1]], 2, 1, "hosts"], ids=str)
def test_groups_count_by_their_ranks_and_only_their_first_rank_sends(three: Pool, groups: Any) -> None:
    for overlap in (0, 1):
        every = run(three, in_groups, groups, overlap)
        assert len({bits for _, bits, _ in every}) == 1
        # With an overlap, the outer parameters replace a step that the ranks have taken in the meantime.
        assert every[0][0] == pytest.approx((3 if overlap else 6) * 24.0)
        leaders = {"hosts": [0], 1: [0], 2: [0, 1]}.get(groups if isinstance(groups, (int, str)) else "", [0, 2])
        assert [rank for rank, (_, _, sent) in enumerate(every) if sent] in (leaders, [])


# --- libraries -----------------------------------------------------------------------------------------------------


def with_torch(world: Any) -> tuple[float, float, str, bool, int]:
    torch = __import__("torch")
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model[0].bias.requires_grad_(False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    optimizer = un.torch.DiLoCo(
        model, inner, world, inner_steps=5, fragments=2, overlap=2, mixing=0.5, compression="int8"
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    x = torch.randn(64, 4)
    losses = []
    for _ in range(50):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    optimizer.synchronize()
    optimizer.close()
    is_same_memory = before == [parameter.data_ptr() for parameter in model.parameters()]
    return losses[0], losses[-1], fingerprint(model.state_dict()), is_same_memory, len(inner.state)


def test_torch_model_trains_alone_and_all_ranks_end_with_it(three: Pool) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    every = run(three, with_torch)
    assert len({bits for _, _, bits, _, _ in every}) == 1
    for first, last, _, is_same_memory, states in every:
        assert (last < first / 2, is_same_memory, states) == (True, True, 3)


def with_jax(world: Any) -> tuple[list[float], str, tuple[str, str]]:
    jax = __import__("jax")
    parameters = {"a": [jax.numpy.zeros(3), jax.numpy.ones(2)], "b": {"w": jax.numpy.zeros(())}}
    step = jax.jit(lambda tree, rank: jax.tree.map(lambda x: x + rank, tree))
    with un.jax.LocalSGD(world, parameters, inner_steps=2, fragments=2) as outer:
        for _ in range(4):
            parameters = outer.step(step(parameters, world.rank))
        wrong = error_of(lambda: outer.step({"a": parameters["a"]}))
        parameters = outer.synchronize(parameters)
    named = {"0": parameters["a"][0], "1": parameters["a"][1], "2": parameters["b"]["w"]}
    return [float(x.reshape(-1)[0]) for x in named.values()], fingerprint(named), wrong


def test_pytrees_of_jax_are_averaged_and_keep_their_structure() -> None:
    pytest.importorskip("jax", reason="make jax installs it")
    with Pool(SIZE) as started:
        for values, _, wrong in run(started, with_jax):
            assert values == [4.0, 5.0, 4.0]
            assert (wrong[0], "pass the same pytree" in wrong[1]) == ("UsageError", True)


# --- misuse --------------------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "inner_steps must be an integer, 1 or more, not 0": {"inner_steps": 0},
    "inner_steps must be an integer, 1 or more, not 2.5": {"inner_steps": 2.5},
    "3 fragments need as many layers, and the parameters have 2": {"fragments": 3},
    "2 fragments need inner_steps=2 or more, not 1": {"fragments": 2, "inner_steps": 1},
    "overlap=4 must be below inner_steps=4": {"overlap": 4},
    "overlap must be an integer, 0 or more, not -1": {"overlap": -1},
    "mixing must be above 0 and at most 1, not 0": {"mixing": 0},
    "the outer lr must be a positive number, not nan": {"lr": float("nan")},
    "the outer momentum must be from 0 to below 1, not 1": {"momentum": 1},
    "not 'int9'; did you mean int8?": {"compression": "int9"},
    'groups must be "hosts", a number, or the ranks of each group': {"groups": "host"},
    "groups must be from 1 to the number of ranks, 3, not 4": {"groups": 4},
}


def misuse(world: Any) -> list[tuple[str, str]]:
    good = {"a.w": np.zeros(2), "b.w": np.zeros(2)}

    def made(named: Any = good, **arguments: Any) -> Any:
        return DiLoCo(world, named, **{"inner_steps": 4, **arguments})

    errors = [error_of(partial(made, **arguments)) for arguments in WRONG.values()]
    errors.append(error_of(lambda: made({"n": np.zeros(2, int)})))
    errors.append(error_of(lambda: made(inner_steps=4 + (world.rank == 1))))
    errors.append(error_of(lambda: made({"a.w": np.full(2, float(world.rank == 2))})))
    with made(inner_steps=1) as outer:
        errors.append(error_of(lambda: outer.step({"a.w": np.zeros(2)})))
        errors.append(error_of(lambda: outer.step({**good, "b.w": np.zeros(3)})))
        other = {**outer.state_dict(), "facts": ""}
        errors.append(error_of(lambda: outer.load_state_dict(other)))
        errors.append(error_of(lambda: outer.load_state_dict({"facts": "", "values": []})))
        outer.synchronize(good)
    with made(inner_steps=100) as outer:
        for _ in range(1 + (world.rank == 1)):
            outer.step(good)
        errors.append(error_of(lambda: outer.synchronize(good)))
    with made(inner_steps=1) as outer:
        outer._values[0] += world.rank == 1
        errors.append(error_of(lambda: outer.step(good)))
        errors.append(error_of(lambda: outer.synchronize(good)))
    return errors


def test_outer_training_refuses_misuse_and_names_what_differs(three: Pool) -> None:
    for errors in run(three, misuse):
        wrong, (integer, differing, bits, lacking, shape, state, cut, counts, drifted, again) = (
            errors[:-10],
            errors[-10:],
        )
        for (kind, text), expected in zip(wrong, WRONG, strict=True):
            assert (kind, expected in text) == ("UsageError", True), text
        assert "only real floats are averaged" in integer[1]
        assert (differing[0], "inner_steps=5" in differing[1]) == ("MismatchError", True)
        assert (bits[0], "'a.w' has other bits on rank 2" in bits[1]) == ("MismatchError", True)
        assert "the parameters lack 'b.w'" in lacking[1]
        assert "'b.w' is float64[3], and was float64[2] at the start" in shape[1]
        assert "the state belongs to other arguments or parameters" in state[1]
        assert (cut[0], "the state has no rank, steps, velocities" in cut[1]) == ("UsageError", True)
        assert (counts[0], "rank 1: another number of steps" in counts[1]) == ("MismatchError", True)
        assert (drifted[0], "the outer parameters on rank 1 have other bits" in drifted[1]) == ("MismatchError", True)
        assert again[0] == "MismatchError"


def fail(world: un.Communicator) -> None:
    own = {"w": np.zeros(3)}
    with DiLoCo(world, own, inner_steps=2, overlap=1) as outer:
        for step in range(10):
            if world.rank == 1 and step == 5:
                raise KeyError("an error of the program")
            outer.step(own)


def test_rank_that_raises_between_steps_is_an_error_on_all_ranks() -> None:
    with pytest.raises(KeyError):
        un.launch(fail, SIZE, timeout_s=DEADLINE_S)
