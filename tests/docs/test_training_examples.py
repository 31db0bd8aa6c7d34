"""The examples that train with torch: their losses on one rank and on several, and after a rank was replaced."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from support.commands import unisono

import unisono as un

pytestmark = pytest.mark.night

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE = EXAMPLES / "transformer.py"
STEPS = 25


def train_in_all_ways(world: un.Communicator, example: str) -> list[list[float]]:
    """Return the losses of one rank, of two, of four, and of two with a lag."""
    spec = importlib.util.spec_from_file_location("transformer", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    alone, pair = world.subgroup([world.rank]), world.subgroup([world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    return [*(module.train(ranks, STEPS) for ranks in (alone, pair, world)), module.train(pair, STEPS, lag=1)]


def test_transformer_example_has_equal_losses_on_one_two_and_four_ranks() -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    pytest.importorskip("sklearn")
    for alone, pair, four, late in un.launch(train_in_all_ways, 4, str(EXAMPLE), timeout_s=200):
        assert alone[-1] < 0.7 * alone[0]
        assert pair == pytest.approx(alone, rel=1e-4)
        assert four == pytest.approx(alone, rel=1e-4)
        assert late[0] == pytest.approx(alone[0], rel=1e-4)
        assert late[-1] < 0.75 * late[0]


def test_horovod_example_goes_on_after_a_loss_and_with_a_replacement(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    program = str(EXAMPLES / "horovod_elastic.py")
    completed = unisono("run", "-n", "2", "--max-restarts", "1", program, folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.endswith("with 2, then 1, then 2 ranks, as by a single process\n")


def test_ddp_goes_on_after_a_loss_and_with_a_replacement(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="make torch installs it")
    program = str(EXAMPLES / "elastic_torch.py")
    completed = unisono("run", "-n", "3", "--max-restarts", "1", program, "--lose", "0", folder=tmp_path)
    assert completed.returncode == 0, completed.stderr
    loss, growth, losses = completed.stdout.splitlines()
    assert re.fullmatch(r"\[1\] step (19|20): a rank was lost; 2 ranks go on", loss)
    assert growth == "[1] step 40: a replacement has joined; 3 ranks go on"
    assert losses.endswith("in 60 steps, as by a single process")
