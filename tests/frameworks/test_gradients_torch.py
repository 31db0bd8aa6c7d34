"""torch over the gradient engine: the optimizer, the hook of DDP and the examples, on real ranks."""

from __future__ import annotations

import importlib.util
import io
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.data_parallel import first_difference
from unisono.launchers.launch import Pool

pytest.importorskip("torch", reason="make torch installs what these tests need")
pytest.importorskip("sklearn", reason="pip install --group demo")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "torch_gradients.py"


def example() -> Any:
    import torch

    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("torch_gradients", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_gradients"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, on_output=lambda *_: None) as pool:
        yield pool


def train(world: Any, options: dict[str, Any], epochs: int = 2) -> Any:
    history = example().train(world, epochs=epochs, **options)
    return history.losses, history.accuracy


@pytest.fixture(scope="module")
def alone() -> Any:
    with un.init() as world:
        return train(world, {})


@pytest.mark.clients
def test_two_ranks_reach_the_loss_of_one_process(two: Pool, alone: Any) -> None:
    for losses, accuracy in two.run(train, {}, timeout_s=DEADLINE_S):
        assert losses == pytest.approx(alone[0], rel=1e-3)
        assert accuracy == pytest.approx(alone[1], abs=0.01)


def test_four_ranks_reach_the_loss_of_one_process(alone: Any) -> None:
    for losses, _ in un.launch(train, 4, {}, 1, timeout_s=DEADLINE_S, on_output=lambda *_: None):
        assert losses == pytest.approx(alone[0][:1], rel=1e-3)


EPOCHS, STEPS = 12, 12 * 29
LATE = {"lag": 1, "total_steps": STEPS, "warmup_fraction": 0.1, "cooldown_fraction": 0.1}


@pytest.fixture(scope="module")
def accuracy_alone() -> float:
    with un.init() as world:
        result: float = train(world, {}, EPOCHS)[1]
        return result


@pytest.mark.night
@pytest.mark.parametrize(
    "options", [LATE, *({"compression": form} for form in ("float16", "bfloat16", "int8"))], ids=str
)
def test_lag_and_compression_cost_at_most_one_percent_of_accuracy(
    two: Pool, accuracy_alone: float, options: dict[str, Any]
) -> None:
    for _, accuracy in two.run(train, options, EPOCHS, timeout_s=DEADLINE_S):
        assert accuracy >= accuracy_alone - 0.0101


def model_and_optimizer(world: Any, make: Any = None, **options: Any) -> Any:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(world.rank)  # another one on each rank, until they get that of rank 0
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    optimizer = un.torch.DistributedOptimizer(
        make(model.parameters()), world, named_parameters=model.named_parameters(), **options
    )
    random = torch.Generator().manual_seed(5)
    batches = [(torch.randn(8, 8, generator=random), torch.randn(8, 1, generator=random)) for _ in range(6)]
    return model, optimizer, batches


def parameters_of(model: Any) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def share(world: Any, batch: Any) -> Any:
    return tuple(part.chunk(world.size)[world.rank] for part in batch)


def loss_of(model: Any, batch: Any) -> Any:
    import torch

    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def in_all_ways(world: Any) -> Any:
    """Train in ways that should all be the same, and return the parameters that each has led to."""
    result = {}
    for way in ("plain", "zeros stay", "accumulated", "scheduled"):
        model, optimizer, batches = model_and_optimizer(world, bucket_nbytes=256)
        schedule = None
        if way == "scheduled":
            import torch

            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=1.0)
        for batch in batches:
            x, y = share(world, batch)
            optimizer.zero_grad(set_to_none=way != "zeros stay")
            if way == "accumulated":
                with optimizer.no_sync():
                    (loss_of(model, (x[::2], y[::2])) / 2).backward()
                (loss_of(model, (x[1::2], y[1::2])) / 2).backward()
            else:
                loss_of(model, (x, y)).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
        result[way] = parameters_of(model)
        optimizer.close()
    return result


def test_all_ways_of_training_lead_to_the_parameters_of_one_process(two: Pool) -> None:
    result, other = two.run(in_all_ways, timeout_s=DEADLINE_S)
    assert result == other
    with un.init() as world:
        expected = in_all_ways(world)["plain"]
    for way, parameters in result.items():
        for one, its in zip(parameters, expected, strict=True):
            assert one == pytest.approx(its, abs=1e-5), way


def clipped(world: Any) -> Any:
    import torch

    model, optimizer, batches = model_and_optimizer(world)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, share(world, batch)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    optimizer.close()
    return parameters_of(model)


def minimised(world: Any) -> Any:
    """Train by an optimizer that calls a closure as often as it likes."""
    import torch

    model, optimizer, batches = model_and_optimizer(
        world, lambda parameters: torch.optim.LBFGS(parameters, max_iter=6, line_search_fn="strong_wolfe")
    )

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, share(world, batches[0]))
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    optimizer.close()
    return parameters_of(model)


@pytest.mark.parametrize("program", [clipped, minimised])
def test_clipping_and_closures_lead_to_the_parameters_of_one_process(two: Pool, program: Any) -> None:
    results, other = two.run(program, timeout_s=DEADLINE_S)
    assert results == other
    with un.init() as world:
        expected = program(world)
    for one, its in zip(results, expected, strict=True):
        assert one == pytest.approx(its, abs=1e-3)


def scaled(world: Any, scale: float) -> Any:
    """Train a fused optimizer with a loss that is scaled; the scaler skips the third step, of infinite gradients."""
    import torch

    model, optimizer, batches = model_and_optimizer(
        world, lambda parameters: torch.optim.SGD(parameters, lr=0.05, fused=True)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model, share(world, batch)) * (float("inf") if number == 2 and world.rank == 0 else 1.0)
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.step(optimizer)
        scaler.update()
    optimizer.close()
    return parameters_of(model)


def test_grad_scaler_works_with_a_fused_optimizer(two: Pool) -> None:
    unscaled, large = (two.run(scaled, scale, timeout_s=DEADLINE_S) for scale in (1.0, 1024.0))
    assert unscaled[0] == unscaled[1]
    assert large[0] == large[1]
    for one, its in zip(large[0], unscaled[0], strict=True):
        assert one == pytest.approx(its, abs=1e-5)


def saved(world: Any, restart: bool) -> Any:
    import torch

    model, optimizer, batches = model_and_optimizer(world, lag=2, compression="float16")
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, share(world, batch)).backward()
        optimizer.step()
        if restart and step == 3:
            file = io.BytesIO()
            torch.save((optimizer.state_dict(), model.state_dict()), file)
            file.seek(0)
            state, weights = torch.load(file, weights_only=True)
            optimizer.close()
            model, optimizer, _ = model_and_optimizer(world, lag=2, compression="float16")
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
    optimizer.flush()
    optimizer.close()
    return parameters_of(model)


def test_training_resumes_exactly_from_saved_state(two: Pool) -> None:
    once, again = (two.run(saved, restart, timeout_s=DEADLINE_S) for restart in (False, True))
    assert once == again
    assert once[0] == once[1]


def mistakes(world: Any) -> dict[str, str]:
    import torch

    told = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except un.UnisonoError as error:
            told[name] = f"{type(error).__name__}: {error}"

    model, optimizer, batches = model_and_optimizer(world)
    for wrong in (False, True):
        optimizer.zero_grad()
        (
            model[2](model[0](batches[0][0])) if not wrong or world.rank == 0 else model[0](batches[0][0])
        ).sum().backward()
        attempt("unused", optimizer.step)
    optimizer.close()
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    attempt("names", lambda: un.torch.DistributedOptimizer(sgd, world, named_parameters=[("one", model[0].weight)]))
    late = un.torch.DistributedOptimizer(sgd, world, lag=1)
    attempt("closure", lambda: late.step(lambda: 0.0))
    late.close()
    return told


def test_torch_optimizer_errors_name_the_parameters(two: Pool) -> None:
    words = {
        "unused": "rank 1: got no gradient of '2.",
        "names": "named_parameters lacks parameters of the optimizer, with the shapes [(16,),",
        "closure": "use one without lag",
    }
    for told in two.run(mistakes, timeout_s=DEADLINE_S):
        for name, text in words.items():
            assert text in told[name]


def in_groups(world: Any, groups: Any) -> Any:
    import torch

    sgd = partial(torch.optim.SGD, lr=0.05)
    model, optimizer, batches = model_and_optimizer(world, sgd, groups=groups, staleness=0)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model, share(world, batch)).backward()
        optimizer.step()
    contributions = optimizer.hybrid.contributions if optimizer.hybrid else 0
    optimizer.finish()
    optimizer.close()
    return parameters_of(model), contributions


def test_groups_in_step_learn_the_parameters_of_all_ranks_together(two: Pool) -> None:
    together = two.run(in_groups, None, timeout_s=DEADLINE_S)
    apart = two.run(in_groups, 2, timeout_s=DEADLINE_S)
    assert apart[0][0] == apart[1][0]
    assert apart[0][1] > 0
    for result, expected in zip(apart[0][0], together[0][0], strict=True):
        assert result == pytest.approx(expected, abs=0.02)


def replace_by_double(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad * 2


def clip(model: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.grad.data.clamp_(-0.01, 0.01)


def unscale(model: Any) -> None:
    import torch

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


def lose(model: Any) -> None:
    model[0].weight.grad = None


def change_early(world: Any, change: Any, step: int, of_all: bool, options: dict[str, Any]) -> Any:
    """Change gradients between backward and `step`; return the error, and whether the parameters are as before.

    They are also returned themselves, as ranks must have the same.
    """
    sgd = None
    if options.get("priorities"):
        import torch

        sgd = partial(torch.optim.SGD, lr=0.05)
    model, optimizer, batches = model_and_optimizer(world, sgd, **options)
    for number, batch in enumerate(batches):
        optimizer.zero_grad()
        loss_of(model, share(world, batch)).backward()
        if number == step and (of_all or world.rank == 1):
            change(model)
        before = parameters_of(model)
        try:
            optimizer.step()
        except un.UsageError as error:
            return error.message, number - step, before == parameters_of(model), before
        finally:
            if number == len(batches) - 1:
                optimizer.close()
    raise AssertionError("nobody was told")


@pytest.mark.parametrize(
    ("change", "step", "options", "words"),
    [
        (clip, 0, {"op": "sum"}, "'2.bias' was changed while it was being averaged: clip"),
        (clip, 3, {"op": "sum"}, "'2.bias' was changed"),
        (clip, 3, {"lag": 1}, "'2.bias' was changed"),
        (clip, 3, {"op": "sum", "compression": "int8"}, "'2.bias' was changed"),
        (replace_by_double, 3, {"op": "sum"}, "'2.bias' was replaced"),
        (replace_by_double, 2, {"lag": 2, "verify_every": 0}, "'2.bias' was replaced"),
        (lose, 3, {"op": "sum"}, "'0.weight' was replaced"),
        # torch counts no writes of these two; the first step finds them by checksums.
        (clip_data, 0, {"op": "sum"}, "'2.bias' was changed"),
        (unscale, 0, {"op": "sum"}, "'2.bias' was changed"),
    ],
)
def test_gradients_changed_while_step_averages_them_are_an_error_of_all_ranks(
    two: Pool, change: Any, step: int, options: dict[str, Any], words: str
) -> None:
    for of_all in (True, False):
        told = two.run(change_early, change, step, of_all, options, timeout_s=DEADLINE_S)
        assert told[0] == told[1]
        text, late, untouched, _ = told[0]
        assert f"rank {0 if of_all else 1}: the gradient of {words}" in text
        assert "optimizer.synchronize()" in text
        assert (late, untouched) == (options.get("lag", 0), True)


def grown(world: Any, way: str, priorities: bool) -> Any:
    """Train a layer that is unfrozen, added or replaced in the third step; return how far it went, and the names."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    first = model[0].requires_grad_(way != "unfrozen")
    trained = model[2] if way == "added" else model
    optimizer = un.torch.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9),
        world,
        named_parameters=trained.named_parameters(),
        model=model if priorities else None,
        priorities=priorities,
    )
    random = torch.Generator().manual_seed(5)
    for step in range(6):
        if step == 2 and way == "unfrozen":
            first.requires_grad_()
        if step == 2 and way == "added":
            torch.manual_seed(world.rank)
            if world.rank:
                torch.nn.init.ones_(first.weight)  # until it gets that of rank 0
            optimizer.add_param_group({"params": first.parameters(), "lr": 0.05})
        if step == 2 and way == "replaced":
            first.weight = torch.nn.Parameter(torch.ones(8, 8))
            optimizer.param_groups[0]["params"][0] = first.weight
        if step == 2 and way == "appended":
            model.extra = torch.nn.Parameter(torch.ones(1))
            optimizer.param_groups.append({**optimizer.param_groups[0], "params": [model.extra]})
        batch = torch.randn(8, 8, generator=random), torch.randn(8, 1, generator=random)
        model.zero_grad()
        loss = loss_of(lambda x: model(x) * getattr(model, "extra", 1), share(world, batch))
        loss.backward()
        optimizer.step()
    optimizer.flush()
    optimizer.close()
    return parameters_of(model), list(optimizer.reducer.report().buckets) != [], list(optimizer._parameters)


@pytest.mark.parametrize("priorities", [False, True], ids=["", "priorities"])
@pytest.mark.parametrize("way", ["unfrozen", "added", "replaced", "appended"])
def test_parameters_trained_later_learn_as_in_one_process(two: Pool, way: str, priorities: bool) -> None:
    result, other = two.run(grown, way, priorities, timeout_s=DEADLINE_S)
    assert result == other
    with un.init() as world:
        expected = grown(world, way, False)
    for one, its in zip(result[0], expected[0], strict=True):
        assert one == pytest.approx(its, abs=1e-5)
    added = {"added": ["param_groups[1][0]", "param_groups[1][1]"], "appended": ["param_groups[1][0]"]}
    assert result[2][len(result[2]) - len(added.get(way, [])) :] == added.get(way, [])


def drifted(world: Any, way: str) -> str:
    """Let rank 1 alone do something; return what both ranks are told by the next steps."""
    import torch

    options = {"groups": {"groups": 1}, "lag": {"lag": 2, "verify_every": 0}}.get(way, {})
    model, optimizer, batches = model_and_optimizer(world, None, **options)
    model[0].requires_grad_(way != "lag")
    if way == "lag":
        optimizer.close()
        optimizer = un.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), world, named_parameters=model.named_parameters(), **options
        )
    try:
        for number, batch in enumerate(batches):
            optimizer.zero_grad()
            loss_of(model, share(world, batch)).backward()
            optimizer.step()
            if number == 1 and way == "groups":
                model.extra = torch.nn.Parameter(torch.ones(1))
                with pytest.raises(un.UsageError, match="hybrid groups exchange"):
                    optimizer.add_param_group({"params": [model.extra]})
                optimizer.param_groups[0]["params"].append(model.extra)
            if number == 2 and way == "lag":
                model[0].requires_grad_()
            if number == 1 and way == "data":
                model[2].bias.data += world.rank
            if number == 1 and way == "another":
                torch.manual_seed(world.rank)
                model[0].weight = torch.nn.Parameter(torch.randn(16, 8))
                optimizer.param_groups[0]["params"][0] = model[0].weight
    except un.UnisonoError as error:
        same = first_difference(world, dict(model.named_parameters())) is None
        return f"{number} {'same' if same else 'other'} {error.message}"
    finally:
        optimizer.close()
    return "nothing"


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("lag", "5 same rank 0: '0.weight' is not among the gradients of the first step: with a lag, call flush()"),
        ("data", "2 other the parameters are no longer the same on all ranks: '2.bias' has other bits on rank 1"),
        ("another", "2 other the parameters are no longer the same on all ranks: '0.weight' has other bits on rank 1"),
        ("groups", "'param_groups[0][4]' is new, and hybrid groups exchange the parameters with which they started"),
    ],
)
def test_all_ranks_report_new_parameters_that_cannot_stay_in_sync(two: Pool, way: str, words: str) -> None:
    for text in two.run(drifted, way, timeout_s=DEADLINE_S):
        assert words in text
