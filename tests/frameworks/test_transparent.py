"""Programs for one process that train data-parallel without a change."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S

torch = pytest.importorskip("torch", reason="make torch installs it")

import unisono as un  # noqa: E402
from unisono.frameworks.transparent import program  # noqa: E402

PROGRAMS = Path(__file__).parents[2] / "examples" / "single_process"
BATCHES = {"classifier": 64, "convolutions": 32, "adversarial": 64, "characters": 16, "closure": 128}


def alone(world: un.Communicator, path: str, folder: str, *words: str) -> float:
    """Run a program as Python does; return its variable `loss`."""
    torch.set_num_threads(1)
    sys.argv = [path, *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return float(runpy.run_path(path, run_name="__main__")["loss"])


def together(world: un.Communicator, path: str, folder: str, *words: str) -> tuple[Any, list[str]]:
    """Run a program data-parallel; return its variable `loss` or the text of its error, and the report."""
    torch.set_num_threads(1)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            return float(program.run(world, [path, *words], lines.append)["loss"]), lines
        except un.UsageError as error:
            return str(error), lines


def of_text(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def on_two(path: str, folder: Path, *words: str) -> list[tuple[Any, list[str]]]:
    return un.launch(together, 2, path, str(folder), *words, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("name", BATCHES)
def test_unchanged_program_reaches_the_loss_of_one_process(name: str, tmp_path: Path) -> None:
    path = str(PROGRAMS / f"{name}.py")
    (expected,) = un.launch(alone, 1, path, str(tmp_path), timeout_s=DEADLINE_S)
    (first, lines), (second, _) = on_two(path, tmp_path, "--batch-size", str(BATCHES[name] // 2))
    assert first == second
    # Statistics of batches are those of a rank's own batches.
    assert first == pytest.approx(expected, rel=0.05 if name == "convolutions" else 1e-4)
    assert any(f"{name}.py:" in line and "gradients over 2 ranks" in line for line in lines)
    assert any("its share of" in line for line in lines)


PARTS = """
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
x = torch.arange(6.0)[:, None]
model = torch.nn.Linear(1, 1)
"""
TRAINED = """
for (batch,) in loader:
    model(batch).sum().backward()
    {before_step}
    optimizer.step()
    optimizer.zero_grad()
loss = 0.0
"""
LOADER = PARTS + "loader = DataLoader(TensorDataset(x), batch_size=1, shuffle=True)\n"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
REFUSED = {
    "a gradient that is scaled by hand": (
        LOADER + OPTIMIZER + TRAINED.format(before_step="model.weight.grad.mul_(0.5)"),
        "the program has set or changed the gradient of parameter 0 of SGD, of shape [1, 1] after backward",
    ),
    "a gradient that is set by hand": (
        LOADER + OPTIMIZER + TRAINED.format(before_step="model.bias.grad = torch.ones(1)"),
        "the program has set or changed the gradient of parameter 1 of SGD, of shape [1] after backward",
    ),
    "a backward after clipping": (
        LOADER
        + OPTIMIZER
        + TRAINED.format(
            before_step="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); model(batch).sum().backward()"
        ),
        "after it was clipped and averaged",
    ),
    "a second optimizer of the same parameters": (
        LOADER
        + OPTIMIZER
        + "other = torch.optim.Adam(model.parameters())\n"
        + TRAINED.format(before_step="other.step()"),
        "SGD and Adam change the same parameters",
    ),
    "an iterable dataset without a length": (
        PARTS + "class Endless(IterableDataset):\n    def __iter__(self): return iter(x)\nDataLoader(Endless())\n",
        "train.py:8: --data-parallel cannot train this program: its iterable dataset has no length",
    ),
    "a gradient scaler": (
        PARTS + "torch.amp.GradScaler('cpu')\n",
        "a GradScaler skips a step on the ranks alone whose gradients overflow",
    ),
    "a program of torch.distributed": (
        PARTS + "import torch.distributed as dist\ndist.init_process_group('gloo')\n",
        "train.py:7: --data-parallel cannot train this program: it trains by torch.distributed already",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_program_that_cannot_be_changed_safely_is_refused_on_all_ranks(what: str, tmp_path: Path) -> None:
    text, words = REFUSED[what]
    for outcome, _ in on_two(of_text(tmp_path, text), tmp_path):
        assert words in outcome


SHARED = (
    PARTS
    + """
import random, numpy
from torch.utils.data import BatchSampler, SequentialSampler, SubsetRandomSampler
{dataset}
seen = [item for _ in range(2) for batch in {loader} for item in batch[0].flatten().tolist()]
loss = float(sum(int(item) * 10**place for place, item in enumerate(seen)))
random_numbers = random.random(), numpy.random.rand(), torch.rand(1).item()
"""
)
LENGTH = """
class Sized(IterableDataset):
    def __len__(self): return 6
    def __iter__(self): return iter([(value,) for value in x])
"""
LOADERS = {
    "a sampler": ("", "DataLoader(TensorDataset(x), sampler=SubsetRandomSampler(range(6)))"),
    "batches": ("", "DataLoader(TensorDataset(x), batch_sampler=BatchSampler(SequentialSampler(x), 1, False))"),
    "an iterable dataset": (LENGTH, "DataLoader(Sized())"),
    "a shuffled loader with workers": ("", "DataLoader(TensorDataset(x), shuffle=True, num_workers=1)"),
}


def digits(number: float, places: int) -> list[int]:
    return [int(number) // 10**place % 10 for place in range(places)]


@pytest.mark.parametrize("what", LOADERS)
def test_ranks_read_each_sample_of_an_epoch_once(what: str, tmp_path: Path) -> None:
    dataset, loader = LOADERS[what]
    ranks = on_two(of_text(tmp_path, SHARED.format(dataset=dataset, loader=loader)), tmp_path)
    first, second = (digits(loss, 6) for loss, _ in ranks)
    for epoch in (slice(3), slice(3, 6)):
        assert sorted(first[epoch] + second[epoch]) == list(range(6))


ACCEPTED = {
    "another optimizer for a second phase": (
        LOADER
        + OPTIMIZER
        + TRAINED.format(before_step="")
        + "schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n"
        + "optimizer = torch.optim.Adam(model.parameters())\n"
        + TRAINED.format(before_step="torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")
    ),
    "zeros for a gradient that backward does not touch": (
        LOADER
        + "unused = torch.nn.Linear(1, 1)\n"
        + "optimizer = torch.optim.SGD([*model.parameters(), *unused.parameters()], lr=0.1)\n"
        + "unused.weight.grad = unused.bias.grad = None\nunused(x).sum().backward()\n"
        + "optimizer.zero_grad(set_to_none=False)\n"
        + TRAINED.format(before_step="").replace("zero_grad()", "zero_grad(set_to_none=False)")
    ),
    "a state that is saved to memory": (
        PARTS
        + "import io\nfile = io.BytesIO()\ntorch.save(model.state_dict(), file)\nfile.seek(0)\n"
        + "model.load_state_dict(torch.load(file))\nloss = 0.0\n"
    ),
    "an evaluation of a loader that shuffles": (
        LOADER
        + OPTIMIZER
        + "with torch.no_grad():\n    seen = sorted(float(batch) for (batch,) in loader)\n"
        + "assert seen == [0, 1, 2, 3, 4, 5], seen\nassert len(loader) == 3\nloss = 0.0\n"
    ),
    "a rate that falls on a plateau": (
        LOADER
        + OPTIMIZER
        + "schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
        + "import unisono.frameworks.transparent.changes as changes\n"
        + "rank = next(iter(loader))[0].item()\n"
        + "for value in (1.0, 1.0 + rank, 1.0 + rank):\n    schedule.step(value)\n"
        + "loss = optimizer.param_groups[0]['lr']\n"
    ),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_program_of_usual_parts_is_not_refused(what: str, tmp_path: Path) -> None:
    (first, _), (second, _) = on_two(of_text(tmp_path, ACCEPTED[what]), tmp_path)
    assert not isinstance(first, str), first
    assert first == second


PROBED = """
import importlib.util
assert importlib.util.find_spec("torch") is not None
import torch
model = torch.nn.Linear(1, 1)
torch.optim.SGD(model.parameters(), lr=0.1)
"""


def test_looking_for_torch_before_its_import_changes_nothing(tmp_path: Path) -> None:
    path = of_text(tmp_path, PROBED)
    result = unisono("run", "-n", "2", "--data-parallel", path, folder=tmp_path)
    assert "train.py:6: SGD: 2 parameters are copied from rank 0" in result.stderr


def test_program_that_trains_nothing_is_reported(tmp_path: Path) -> None:
    for _, lines in on_two(of_text(tmp_path, "loss = 0.0\n"), tmp_path):
        assert lines == [
            "warning: the program has made no optimizer of torch and has called no fit of Keras, so each rank has done "
            "the same work alone"
        ]


def random_numbers(world: un.Communicator, path: str) -> Any:
    world.barrier()
    np.random.seed(world.rank)
    return program.run(world, [path])["random_numbers"]


def test_ranks_draw_the_same_random_numbers(tmp_path: Path) -> None:
    path = of_text(tmp_path, SHARED.format(dataset="", loader="[]"))
    first, second = un.launch(random_numbers, 2, path, timeout_s=DEADLINE_S)
    assert first == second


def test_command_line_prints_the_report_and_what_rank_0_prints(tmp_path: Path) -> None:
    path = of_text(tmp_path, PARTS + "import sys\nprint('trained', sys.argv[1:], __name__)\n" + OPTIMIZER)
    result = unisono("run", "-n", "2", "--data-parallel", path, "--lr", "1", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "[0] trained ['--lr', '1'] __main__\n"
    assert "[0] unisono: train.py:8: SGD: 2 parameters are copied from rank 0" in result.stderr
    refused = unisono("run", "-n", "2", "--data-parallel", "--", "ls", folder=tmp_path)
    assert refused.returncode == 2
    assert "--data-parallel runs a Python file" in refused.stderr
