"""Training loops of `un.torch.DistributedOptimizer` that lead to the parameters of one process."""

from __future__ import annotations

import contextlib
import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.launchers.launch import Pool

torch = pytest.importorskip("torch", reason="make torch installs what these tests need")

STEPS = 6


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, on_output=lambda *_: None) as pool:
        yield pool


class Side:
    """One side of a comparison: a rank of two with its half of each batch, or a process with both halves."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self.shares = range(2) if world is None else (world.rank,)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("body", "a", "b")})
        self.opened: list[Any] = []

    def optimizer(self, module: Any = None, make: Any = None, **options: Any) -> Any:
        """Return an optimizer of a module, which averages its gradients if there are ranks."""
        module = module or self.layers
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        made = make(module.parameters())
        if self.world is None:
            made.no_sync, made.synchronize = contextlib.nullcontext, lambda: None
            return made
        self.opened.append(
            un.torch.DistributedOptimizer(made, self.world, named_parameters=module.named_parameters(), **options)
        )
        return self.opened[-1]

    def x(self, step: int, share: int) -> Any:
        return torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + share))

    def loss(self, step: int, branch: str, micro: int = 0) -> Any:
        """Return the mean loss of the shares of this side."""
        outputs = [
            self.layers[branch](torch.tanh(self.layers["body"](self.x(10 * micro + step, share))))
            for share in self.shares
        ]
        return sum(output.square().mean() for output in outputs) / len(outputs)


def micro_batches(side: Side, **options: Any) -> None:
    """Use branch a in the first micro-batch and b in the last, and later the other way round."""
    optimizer = side.optimizer(**options)
    for step in range(STEPS):
        first, last = ("a", "b") if step < 3 else ("b", "a")
        optimizer.zero_grad()
        with optimizer.no_sync():
            side.loss(step, first, 0).backward()
        side.loss(step, last, 1).backward()
        optimizer.step()


def micro_batches_with_priorities(side: Side) -> None:
    micro_batches(side, model=side.layers, priorities=True)


def experts(side: Side) -> None:
    """Use one expert per share in each micro-batch, another one on each rank."""
    optimizer = side.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            for share in side.shares:
                branch = "ab"[(share + micro) % 2]
                output = side.layers[branch](torch.tanh(side.layers["body"](side.x(step + 10 * micro, share))))
                context = optimizer.no_sync() if micro == 0 else contextlib.nullcontext()
                with context:
                    (output.square().mean() / len(side.shares)).backward()
        optimizer.step()


def skipped_layers(side: Side) -> None:
    """Skip a branch in some steps; its momentum must not move it then."""
    optimizer = side.optimizer(missing="zero")
    for step in range(STEPS):
        optimizer.zero_grad()
        side.loss(step, "ab"[step % 2]).backward()
        optimizer.step()


def alternating_losses(side: Side) -> None:
    """Run several backwards in each step, all outside of no_sync()."""
    optimizer = side.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro, branch in enumerate("aba"[: 1 + step % 3]):
            side.loss(step, branch, micro).backward()
        optimizer.step()


def regularised(side: Side) -> None:
    """Set gradients of a branch by hand after backward, and in other steps before it."""
    optimizer = side.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()

        def set_by_hand(step: int = step) -> None:
            values = [side.x(step, share)[:4] for share in side.shares]
            side.layers["b"].weight.grad = torch.stack(values).mean(0)

        if step % 2:
            set_by_hand()
        side.loss(step, "a").backward()
        if not step % 2:
            set_by_hand()
        optimizer.step()


def surgery(side: Side) -> None:
    """Combine the gradients of two losses by hand, without a hook."""
    optimizer = side.optimizer()
    parameters = list(side.layers.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        gradients = [
            torch.autograd.grad(side.loss(step, branch), parameters, allow_unused=True, materialize_grads=True)
            for branch in "ab"
        ]
        for parameter, first, second in zip(parameters, *gradients, strict=True):
            parameter.grad = first + 2 * second
        optimizer.step()


def some_inputs(side: Side) -> None:
    """Compute the gradients of some parameters only, by ``backward(inputs=...)``."""
    optimizer = side.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        side.loss(step, "a").backward(inputs=list(side.layers["ab"[step % 2]].parameters()) or None)
        optimizer.step()


def clipped(side: Side) -> None:
    """Change gradients between backward and step, in the ways that torch counts and in those that it does not."""
    optimizer = side.optimizer()
    for step in range(2 * STEPS):
        optimizer.zero_grad()
        side.loss(step, "a").backward()
        if step % 4 == 0:
            torch.nn.utils.clip_grad_norm_(side.layers.parameters(), 0.1)
        for parameter in side.layers["a"].parameters():
            if step % 4 == 1:
                parameter.grad.data.mul_(0.5)
            if step % 4 == 2:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            if step % 4 == 3:
                parameter.grad.numpy()[...] *= 2
        optimizer.step()


def held_gradients(side: Side) -> None:
    """Add the gradients of the step before, which the program has kept, also those of a layer that has none now."""
    optimizer = side.optimizer()
    before: dict[Any, Any] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        side.loss(step, "ab"[step % 3 == 2]).backward()
        gradients = {parameter: parameter.grad for parameter in side.layers.parameters()}
        for parameter, gradient in before.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        before = gradients
        optimizer.step()


def scaled(side: Side) -> None:
    """Use a GradScaler as in one process; it skips the third step, whose gradients are infinite."""
    optimizer = side.optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(side.loss(step, "a") * (float("inf") if step == 2 and 1 in side.shares else 1.0)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(side.layers.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def left_out(side: Side) -> None:
    """Leave out a step after synchronize()."""
    optimizer = side.optimizer()
    for step in range(STEPS):
        side.layers.zero_grad()
        side.loss(step, "a").backward()
        optimizer.synchronize()
        if step % 3 != 1:
            optimizer.step()


def adversaries(side: Side) -> None:
    """Train a generator against a discriminator, which also gets gradients in the step of the generator."""
    generator, discriminator = side.layers["body"], side.layers["a"]
    of_generator, of_discriminator = side.optimizer(generator), side.optimizer(discriminator)
    for step in range(STEPS):
        discriminator.zero_grad()
        fakes = [generator(side.x(step, share)) for share in side.shares]
        for output in (side.x(step, side.shares[0]) * 0 + 1, torch.cat(fakes).detach()):
            discriminator(output).square().mean().backward()
        of_discriminator.step()
        generator.zero_grad()
        discriminator(torch.cat(fakes)).abs().mean().backward()
        of_generator.step()


def checkpointed(side: Side) -> None:
    """Use a layer twice in reentrant checkpoints, each of which runs a backward of its own."""
    from torch.utils.checkpoint import checkpoint

    optimizer = side.optimizer()
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        for share in side.shares:
            x = side.x(step, share).requires_grad_()
            for layer in ("body", "a", "body"):
                x = checkpoint(side.layers[layer], x, use_reentrant=True)
            outputs.append(x.square().mean())
        (sum(outputs) / len(outputs)).backward()
        optimizer.step()


def embedded(side: Side) -> None:
    """Train a sparse embedding, with an optimizer for sparse gradients, and a layer behind it."""
    table = side.layers["table"] = torch.nn.Embedding(6, 4, sparse=True)
    torch.nn.init.constant_(table.weight, 0.5)
    of_table = side.optimizer(table, make=lambda p: torch.optim.SparseAdam(list(p), lr=0.1))
    of_both = side.optimizer(torch.nn.ModuleList([side.layers["a"]]))
    for step in range(STEPS):
        of_table.zero_grad()
        of_both.zero_grad()
        outputs = [side.layers["a"](table(torch.tensor([0, 1 + share, step % 6]))) for share in side.shares]
        (sum(output.square().mean() for output in outputs) / len(outputs)).backward()
        of_table.step()
        of_both.step()


def mixed_layouts(side: Side) -> None:
    """Train sparse and dense parameters by one optimizer; share 1 does not use the table in some steps."""
    side.layers["table"] = torch.nn.Embedding(6, 4, sparse=True)
    torch.nn.init.constant_(side.layers["table"].weight, 0.5)
    optimizer = side.optimizer(make=lambda p: torch.optim.SGD(p, lr=0.1), missing="zero")
    for step in range(STEPS):
        optimizer.zero_grad()
        for share in side.shares:
            x = side.x(step, share)[:3]
            if share == 0 or step % 2:
                x = x + side.layers["table"](torch.tensor([0, 1 + share, step % 6]))
            (side.layers["a"](x).square().mean() / len(side.shares)).backward()
        optimizer.step()


def attributes(side: Side) -> None:
    """Assign attributes of the optimizer, and replace its step, as schedulers and profilers do."""
    optimizer = side.optimizer(make=lambda p: torch.optim.Adam(p, lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    means: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: means.append(side.layers["a"].bias.grad.clone()))
    original, calls = optimizer.step, []
    optimizer.step = lambda: (calls.append(1), original())
    optimizer.step._wrapped_by_lr_sched = True
    for step in range(STEPS):
        if step == 2:
            optimizer.state = defaultdict(dict)
        if step == 3:
            optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]
        if step == 4:
            optimizer.defaults = {**optimizer.defaults, "lr": 0.25}
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
            optimizer.invented = 1
        optimizer.zero_grad()
        side.loss(step, "a").backward()
        optimizer.step()
        schedule.step()
    del optimizer.step
    del optimizer.invented
    optimizer.step()
    inner = getattr(optimizer, "optimizer", optimizer)
    side.layers["found"] = torch.nn.ParameterList(
        [*means, torch.tensor([len(calls), optimizer.param_groups[1]["lr"], hasattr(inner, "invented")])]
    )


def compiled(side: Side) -> None:
    """Compile a function with backward and step, and in other steps only the step."""
    optimizer = side.optimizer()

    def train(x: Any) -> None:
        optimizer.zero_grad()
        side.layers["a"](x).square().mean().backward()
        optimizer.step()

    compiled_train, compiled_step = train, optimizer.step
    if side.world is not None:
        compiled_train, compiled_step = (
            torch.compile(function, backend="eager") for function in (train, optimizer.step)
        )
    for step in range(STEPS):
        x = torch.cat([side.x(step, share) for share in side.shares])
        if step % 2:
            compiled_train(x)
        else:
            optimizer.zero_grad()
            side.layers["a"](x).square().mean().backward()
            compiled_step()


def sums_that_stay(side: Side) -> None:
    """Keep the sum of a layer that is used in the first step only and then frozen, and all sums in the last step."""
    optimizer = side.optimizer(op="sum")
    for step in range(STEPS):
        if step == 2:
            side.layers["b"].requires_grad_(False)
        if step < STEPS - 1:
            for layer in ("body", "a"):
                side.layers[layer].zero_grad()
            loss = side.loss(step, "a") + (side.loss(step, "b") if step == 0 else 0)
            (loss * len(side.shares) / 2).backward()
        optimizer.step()


LOOPS: tuple[Callable[[Side], None], ...] = (
    micro_batches,
    micro_batches_with_priorities,
    experts,
    skipped_layers,
    alternating_losses,
    regularised,
    surgery,
    held_gradients,
    some_inputs,
    clipped,
    scaled,
    left_out,
    adversaries,
    checkpointed,
    embedded,
    mixed_layouts,
    attributes,
    compiled,
    sums_that_stay,
)


def parameters_after_all(world: Any) -> dict[str, Any]:
    """Return the parameters after each loop, or the text of its error."""
    result: dict[str, Any] = {}
    for loop in LOOPS:
        side = Side(world)
        try:
            loop(side)
            result[loop.__name__] = torch.cat(
                [parameter.detach().flatten() for parameter in side.layers.parameters()]
            ).tolist()
        except un.UnisonoError as error:
            result[loop.__name__] = str(error)
        for optimizer in side.opened:
            optimizer.close()
    return result


def test_every_training_loop_leads_to_the_parameters_of_one_process(two: Pool) -> None:
    result, other = two.run(parameters_after_all, timeout_s=DEADLINE_S)
    expected = parameters_after_all(None)
    assert result == other
    for name, parameters in expected.items():
        assert result[name] == pytest.approx(parameters, abs=1e-5), name


RESETS: dict[str, Callable[[Any, Any], None]] = {
    "kept": lambda optimizer, gradient: None,
    "zero_grad": lambda optimizer, gradient: optimizer.zero_grad(set_to_none=False),
    "uncounted": lambda optimizer, gradient: gradient.data.zero_(),
}


def gradients_of_three_steps(world: Any) -> dict[tuple[str, str], tuple[list[float], list[str]]]:
    """Return the gradients of three steps that begin without or with a reset, and the warnings. Rank r passes r + 1."""
    result = {}
    for op in ("avg", "sum"):
        for name, reset in RESETS.items():
            layer = torch.nn.Linear(1, 1, bias=False)
            optimizer = un.torch.DistributedOptimizer(torch.optim.SGD(layer.parameters(), 0.1), world, op=op)
            values = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(3):
                    if step:
                        reset(optimizer, layer.weight.grad)
                    layer(torch.tensor([[world.rank + 1.0]])).sum().backward()
                    optimizer.step()
                    values.append(layer.weight.grad.item())
            optimizer.close()
            result[op, name] = values, [str(warning.message) for warning in caught]
    return result


def test_sum_that_was_not_reset_counts_for_each_rank_and_warns_once_and_an_average_does_not(two: Pool) -> None:
    for result in two.run(gradients_of_three_steps, timeout_s=DEADLINE_S):
        assert result["avg", "kept"] == ([1.5, 3.0, 4.5], [])
        for reset in ("zero_grad", "uncounted"):
            assert result["avg", reset] == ([1.5] * 3, [])
            assert result["sum", reset] == ([3.0] * 3, [])
        values, (text,) = result["sum", "kept"]
        assert values == [3.0, 2 * 3.0 + 3, 2 * 9.0 + 3]
        assert "call zero_grad() before backward" in text


def uneven_backwards(side: Side, optimizer: Any) -> None:
    for _ in range(2 if side.world.rank else 1):
        side.loss(0, "a").backward()


def gradient_of_one_rank(side: Side, optimizer: Any) -> None:
    side.loss(0, "a").backward()
    if side.world.rank:
        side.layers["a"].bias.grad = torch.ones(4)


def branch_of_one_rank(side: Side, optimizer: Any) -> None:
    side.loss(0, "ab"[side.world.rank]).backward()


def two_backwards(side: Side, optimizer: Any) -> None:
    for branch in "aa":
        side.loss(0, branch).backward()


MISTAKES: tuple[tuple[Callable[[Side, Any], None], dict[str, Any], str], ...] = (
    (uneven_backwards, {}, "rank 1 averages gradients more or less often than rank 0"),
    (gradient_of_one_rank, {}, "rank 1 averages gradients more or less often than rank 0"),
    (branch_of_one_rank, {}, "rank 0: got no gradient of 'b.bias' before finish(), and another rank has"),
    (two_backwards, {"op": "sum"}, "rank 0: the gradient of 'a.bias' was passed twice in a step: call finish()"),
    (two_backwards, {"lag": 1}, "rank 0: the gradient of 'a.bias' was passed twice in a step: call finish()"),
)


def errors_of(world: Any) -> list[str]:
    """Return the error of each mistake in the third step, or in the one after it."""
    texts = []
    for mistake, options, _ in MISTAKES:
        side = Side(world)
        optimizer = side.optimizer(**options)
        try:
            for step in range(4):
                optimizer.zero_grad()
                if step == 2:
                    mistake(side, optimizer)
                else:
                    (side.loss(step, "a") + side.loss(step, "b")).backward()
                optimizer.step()
            optimizer.flush()
            texts.append("none")
        except un.UnisonoError as error:
            texts.append(f"{step}: {error.message}")
        optimizer.close()
    return texts


def test_gradients_that_differ_between_ranks_are_an_error_of_all_ranks(two: Pool) -> None:
    for texts in two.run(errors_of, timeout_s=DEADLINE_S):
        for text, (_, _, words) in zip(texts, MISTAKES, strict=True):
            assert words in text


def copied(world: Any) -> list[Any]:
    """Copy and pickle an optimizer; return the texts of the errors, and how often another one calls a hook later."""
    side = Side(world)
    optimizer = side.optimizer(side.layers["b"])
    texts = []
    for copying in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError) as caught:
            copying(optimizer)
        texts.append(str(caught.value))
    with pytest.raises(TypeError):
        type(optimizer).__new__(type(optimizer)).__setstate__({})
    calls: list[int] = []
    other = side.optimizer(side.layers["a"])
    other.register_step_post_hook(lambda *_: calls.append(1))
    side.loss(0, "a").backward()
    other.step()
    for region in side.opened:
        region.close()
    return [*texts, len(calls)]


def test_copy_of_an_optimizer_is_refused_and_changes_no_other_optimizer(two: Pool) -> None:
    for *texts, calls in two.run(copied, timeout_s=DEADLINE_S):
        assert calls == 1
        for text in texts:
            assert "a DistributedOptimizer cannot be copied or pickled" in text
