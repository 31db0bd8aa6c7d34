"""`DistributedOptimizer` with priorities: updates that wait for the forward lead to the same bits, or are errors."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from support.deadlines import DEADLINE_S
from support.programs import survivors_of_rank_1

import unisono as un
from unisono.frameworks.gradients.priorities import Arriving
from unisono.launchers.launch import Pool

torch = pytest.importorskip("torch", reason="make torch installs what these tests need")

from unisono.frameworks.torch.training.deferred_updates import DeferredUpdates  # noqa: E402  (it needs torch)


@pytest.fixture(scope="module")
def two() -> Iterator[Pool]:
    with Pool(2, on_output=lambda *_: None) as pool:
        yield pool


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(3, on_output=lambda *_: None) as pool:
        yield pool


def run(pool: Pool, program: Any, *arguments: Any) -> Any:
    return pool.run(program, *arguments, timeout_s=DEADLINE_S)


class LooksUpOnly:
    """While it is entered, no gradient has arrived before it is looked up: all updates are as late as they can be."""

    def __enter__(self) -> None:
        self._before = Arriving.arrived
        Arriving.arrived = lambda arriving, names: [name for name in names if name in arriving._taken]  # type: ignore

    def __exit__(self, *_: object) -> None:
        Arriving.arrived = self._before  # type: ignore[method-assign]


class Odd(torch.nn.Module):  # type: ignore[misc]
    """Reads weights in many ways: twice, frozen, tied, those of an LSTM, and of a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        self.twice = torch.nn.Linear(8, 8)
        self.frozen = torch.nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.never_called = torch.nn.Linear(8, 8, bias=False)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.scale = torch.nn.Parameter(torch.ones(8))
        self.head = torch.nn.Linear(8, 11)
        self.head.weight = self.embedding.weight

    def forward(self, x: Any) -> Any:
        x = self.twice(torch.tanh(self.twice(self.embedding(x)))) * self.scale
        x = torch.nn.functional.linear(self.frozen(x), self.never_called.weight)
        return self.head(self.recurrent(x)[0])


class Transformer(torch.nn.Module):  # type: ignore[misc]
    """A small transformer; in evaluation, torch reads the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 8)
        layer = torch.nn.TransformerEncoderLayer(8, 2, dim_feedforward=16, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, x: Any) -> Any:
        return self.head(self.encoder(self.embedding(x)))


MODELS = {"odd": Odd, "transformer": Transformer}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def made(world: Any, kind: str = "odd", way: str = "sgd", priorities: bool = True, **options: Any) -> Any:
    torch.set_num_threads(1)
    torch.manual_seed(world.rank)  # another one on each rank, until they get that of rank 0
    model = MODELS[kind]()
    # Of several groups, of which one has another rate.
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("embedding")]
    groups = [{"params": list(model.embedding.parameters())}, {"params": rest, "lr": 0.02}]
    options = {"bucket_nbytes": 1024, **options}
    optimizer = un.torch.DistributedOptimizer(
        OPTIMIZERS[way](groups), world, model=model, priorities=priorities, **options
    )
    return model, optimizer


def loss_of(model: Any, x: Any) -> Any:
    result = model(x[:, :-1])
    return torch.nn.functional.cross_entropy(result.flatten(0, 1), x[:, 1:].flatten())


def batches(world: Any, steps: int) -> Any:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(11, (6, 5), generator=random).chunk(world.size)[world.rank] for _ in range(steps)]


def bits(values: Any) -> Any:
    """Return tensors in whatever nests them as what can be compared bit by bit."""
    if isinstance(values, torch.Tensor):
        return values.detach().numpy().tobytes()
    if isinstance(values, Mapping):
        return {key: bits(value) for key, value in values.items()}
    if isinstance(values, (list, tuple)):
        return [bits(value) for value in values]
    return values


def in_place(model: Any) -> Any:
    """Return parameters without asking the model for them."""
    return {
        f"{where}.{name}": parameter
        for where, module in model.named_modules()
        for name, parameter in dict.items(module._parameters)
        if parameter is not None
    }


def train(world: Any, kind: str, way: str, priorities: bool) -> Any:
    """Train with all that may come between steps, and return all that is seen of it."""
    model, optimizer = made(world, kind, way, priorities)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.1, 0.02], total_steps=12)
    seen: list[Any] = []
    late = 0
    for step, x in enumerate(batches(world, 10)):
        optimizer.zero_grad(set_to_none=step % 4 != 3)
        if step % 3 == 2:
            with optimizer.no_sync():
                loss_of(model, x[:1]).backward()
        with torch.autocast("cpu", enabled=step == 5):
            loss = loss_of(model, x)
        loss.backward()
        if step == 4:
            optimizer.synchronize()
            seen.append(bits(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        before = bits(in_place(model))
        optimizer.step()
        late += before == bits(in_place(model))
        schedule.step()
        seen.append(bits(loss))
        if step in {0, 6}:
            model.eval()
            with torch.no_grad() if step else torch.inference_mode():  # where the first step makes states
                seen.append(bits(model(x)))
            model.train()
        if step == 7:
            seen += [bits(optimizer.state_dict()["state"]), bits(model.state_dict())]
        if step == 8:
            seen.append(bits(copy.deepcopy(model).state_dict()))
    optimizer.close()
    return seen, bits(model.state_dict()), bits(optimizer.optimizer.state_dict()), late


def train_late(world: Any, kind: str, way: str) -> Any:
    with LooksUpOnly():
        return train(world, kind, way, True)


@pytest.mark.parametrize("ranks", ["two", "three"])
@pytest.mark.parametrize("way", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
def test_deferred_updates_lead_to_the_same_bits(
    request: pytest.FixtureRequest, ranks: str, way: str, kind: str
) -> None:
    pool = request.getfixturevalue(ranks)
    plain = run(pool, train, kind, way, False)
    assert all(row[3] == 0 for row in plain)
    for results in (run(pool, train, kind, way, True), run(pool, train_late, kind, way)):
        for mine, its in zip(results, plain, strict=True):
            assert mine[:3] == its[:3]
    assert all(result[3] == 9 for result in results)  # the tenth was synchronized


def test_deferred_update_happens_when_the_model_is_asked_for_the_parameter(two: Pool) -> None:
    def program(world: Any) -> Any:
        with LooksUpOnly():
            model, optimizer = made(world)
            loss_of(model, batches(world, 1)[0]).backward()
            own = in_place(model)
            before = bits(own)
            optimizer.step()
            assert all(parameter.grad is None for parameter in own.values())
            told = []
            for look in (
                lambda: model.twice.weight,
                lambda: model.recurrent._parameters.get("bias_hh_l0"),
                model.twice.state_dict,
                lambda: next(model.recurrent.parameters()),
                optimizer.flush,
            ):
                look()
                told.append(sorted(name for name, value in bits(own).items() if value != before[name]))
            optimizer.close()
            return told

    recurrent = [f"recurrent.{name}_l0" for name in ("bias_hh", "bias_ih", "weight_hh", "weight_ih")]
    expected = [
        ["twice.weight"],
        ["recurrent.bias_hh_l0", "twice.weight"],
        ["recurrent.bias_hh_l0", "twice.bias", "twice.weight"],
        [*recurrent, "twice.bias", "twice.weight"],
    ]
    for told in run(two, program):
        assert told[:4] == expected
        assert set(told[4]) == {
            *(*told[3], "embedding.weight", "never_called.weight", "head.weight", "head.bias", ".scale"),
        }


def test_parameter_used_without_asking_the_model_is_an_error_on_all_ranks(two: Pool) -> None:
    def program(world: Any) -> Any:
        model, optimizer = made(world, missing="zero")
        held = model.head.bias
        loss_of(model, batches(world, 1)[0]).backward()
        optimizer.step()
        (held if world.rank else model.head.bias).sum().backward()
        with pytest.raises(un.UsageError) as caught:
            optimizer.step()
        held.sum().backward()
        optimizer.step()  # the update has been made, as all others
        optimizer.flush()
        held.sum().backward()
        optimizer.step()  # and now it was asked for
        optimizer.close()
        return caught.value.message

    told, other = run(two, program)
    assert told == other
    assert told.startswith("rank 1: 'head.bias' has got a gradient, but was not looked up in model")


def test_step_post_hooks_see_all_deferred_updates(two: Pool) -> None:
    def program(world: Any) -> Any:
        with LooksUpOnly():
            model, optimizer = made(world)
            calls = []
            optimizer.register_step_post_hook(lambda *_: calls.append(bits(in_place(model))))
            for x in batches(world, 2):
                optimizer.zero_grad()
                loss_of(model, x).backward()
                optimizer.step()
            result = bits(in_place(model))
            optimizer.close()
            return len(calls), calls[-1] == result

    assert run(two, program) == [(2, True)] * 2


def test_parameters_outside_the_model_are_updated_without_delay(two: Pool) -> None:
    def program(world: Any) -> Any:
        with LooksUpOnly():
            model = torch.nn.Linear(2, 2)
            lonely = torch.nn.Parameter(torch.zeros(2))
            optimizer = un.torch.DistributedOptimizer(
                torch.optim.SGD([model.weight, lonely], lr=1.0),
                world,
                named_parameters=[*model.named_parameters(), ("lonely", lonely)],
                model=model,
                priorities=True,
            )
            (model(torch.ones(1, 2)) * (lonely + world.rank)).sum().backward()
            optimizer.step()
            result = lonely.grad is not None, model.bias.grad.tolist(), model._parameters.get("weight").grad is None
            optimizer.close()
            return *result, type(model._parameters)

    assert run(two, program) == [(True, [0.5, 0.5], True, dict)] * 2


def test_two_optimizers_share_a_model_and_copies_of_it_are_plain(two: Pool) -> None:
    def program(world: Any) -> Any:
        with LooksUpOnly():
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 3))
            named = dict(model.named_parameters())
            optimizers = []
            for words in ("weight", "bias"):
                some = {name: parameter for name, parameter in named.items() if words in name}
                sgd = torch.optim.SGD(some.values(), lr=0.1)
                optimizers.append(
                    un.torch.DistributedOptimizer(
                        sgd, world, named_parameters=some.items(), model=model, priorities=True
                    )
                )
            for _ in range(3):
                model(torch.ones(2, 3))[0].sum().backward()
                for optimizer in optimizers:
                    optimizer.step()
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
            assert all(type(module._parameters) is dict for loaded in copies for module in loaded.modules())
            assert [bits(loaded.state_dict()) for loaded in copies] == [bits(model.state_dict())] * 2
            optimizers[0].close()
            assert type(model[0]._parameters) is not dict
            optimizers[1].close()
            optimizers[1].close()
            assert type(model[0]._parameters) is dict

    run(two, program)


def test_priorities_refuse_optimizers_and_models_that_cannot_defer(two: Pool) -> None:
    def program(world: Any) -> dict[str, str]:
        model = torch.nn.Linear(2, 2)
        told = {}

        class Own(torch.optim.SGD):  # type: ignore[misc]
            pass

        def attempt(name: str, make: Any = torch.optim.SGD, given: Any = model, **options: Any) -> None:
            inner = make(model.parameters(), lr=0.1)
            with pytest.raises(un.UsageError) as caught:
                un.torch.DistributedOptimizer(inner, world, model=given, **{"priorities": True, **options})
            told[name] = caught.value.message
            assert type(model._parameters) is dict

        attempt("lbfgs", torch.optim.LBFGS)
        attempt("own", Own)
        attempt("none", given=None)
        attempt("no module", given=model.parameters(), priorities=False)
        attempt("other module", given=torch.nn.Linear(2, 2), named_parameters=model.named_parameters())
        attempt("lag", lag=1)
        attempt("groups", groups=2)
        attempt("two names", named_parameters=[*model.named_parameters(), ("again", model.weight)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted = torch.jit.script(model)
        attempt("scripted", given=scripted, named_parameters=model.named_parameters())
        optimizer = un.torch.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), world, model=model, priorities=True
        )
        with pytest.raises(un.UsageError) as caught:
            optimizer.step(lambda: 0.0)
        told["closure"] = caught.value.message
        optimizer.close()
        return told

    words = {
        "lbfgs": "not torch.optim.lbfgs.LBFGS",
        "own": "Own",
        "none": "pass model=",
        "no module": "model must be a torch.nn.Module, not generator",
        "other module": "model has none of the optimizer's parameters",
        "lag": "priorities=True needs lag=0",
        "groups": "priorities=True needs groups=None",
        "two names": "a parameter has two names",
        "scripted": "takes no scripted modules",
        "closure": "use one without priorities",
    }
    for told in run(two, program):
        assert told.keys() == words.keys()
        for name, text in words.items():
            assert text in told[name]


class Lost(Mapping[str, Any]):
    """Gradients that will never arrive."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._error = un.PeerLostError("rank 1 died")

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __getitem__(self, name: str) -> Any:
        raise self._error

    def arrived(self, names: Any) -> list[str]:
        return []


def test_model_refuses_parameters_whose_update_has_failed_until_close() -> None:
    model = torch.nn.Linear(2, 2)
    late = DeferredUpdates(torch.optim.SGD(model.parameters(), lr=0.1), model, dict(model.named_parameters()))
    before = bits(in_place(model))
    late.defer(Lost("weight", "bias"))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(un.PeerLostError, match=r"rank 1 died: the last step\(\) has not updated 'weight'"):
            model(torch.ones(1, 2))
    late.close()
    assert type(model._parameters) is dict
    assert bits(in_place(model)) == before


DEATH = """
import os, signal, sys
import torch
import unisono as un

rank = int(sys.argv[1])
torch.set_num_threads(1)
world = un.init(store=sys.argv[2], rank=rank, size=3)
model = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(10)))
optimizer = un.torch.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01), world, model=model, priorities=True, bucket_nbytes=1 << 14
)
try:
    for step in range(10):
        loss = model(torch.ones(1, 200)).sum()
        if (rank, step) == (1, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
except un.UnisonoError as error:
    print(type(error).__name__, error)
optimizer.close()
print(type(model[0]._parameters).__name__)
"""


def test_survivors_with_priorities_name_the_dead_rank_and_can_close(tmp_path: Any) -> None:
    for text in survivors_of_rank_1(DEATH, f"file://{tmp_path}/store"):
        assert text.startswith("PeerLostError")
        assert "rank 1 died" in text
        assert text.splitlines()[-1] == "dict"
