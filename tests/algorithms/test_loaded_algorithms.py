"""Algorithms in a user's file, loaded by ``--load`` and by the option `load`, for commands and for ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from support.commands import unisono
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.main import main

MINE = """
import dataclasses
import unisono as un
from unisono.algorithms import Cost
from unisono.algorithms.builders.doubling import allreduce_recursive_doubling

def cost(size):
    rounds = (size - 1).bit_length()
    return Cost(rounds=rounds, sent=rounds, reduced=rounds)

@un.algorithm("allreduce", "mine", cost=cost, sizes=[2, 4])
def allreduce_mine(size, rank, root=0):
    return dataclasses.replace(allreduce_recursive_doubling(size, rank), algorithm="mine")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a file adds its folder
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return str(path)


@pytest.mark.parametrize(
    "command", ["show allreduce mine -n 4", "simulate allreduce mine -n 4", "explain allreduce 64 --algorithm mine"]
)
def test_command_knows_algorithm_of_loaded_file(command: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) != 0
    assert "has no algorithm 'mine'" in capsys.readouterr().err
    assert main([*command.split(), "--load", file]) == 0
    assert "mine" in capsys.readouterr().out


def test_command_refuses_file_that_it_cannot_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.py").write_text("")
    for name, message in (("none.py", "does not exist"), ("empty.py", "registers no algorithm")):
        assert main(["show", "allreduce", "mine", "--load", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err


def test_ranks_know_algorithm_of_loaded_file(file: str) -> None:
    def called(world: un.Communicator) -> list[tuple[float, str]]:
        total = world.allreduce(np.ones(3), algorithm="mine").sum()
        return [(float(total), call.algorithm) for call in world.stats().calls]

    assert un.launch(called, 2, options=un.Options(load=file), timeout_s=DEADLINE_S) == [[(6.0, "mine")]] * 2


def test_tune_and_bench_measure_algorithm_of_loaded_file(file: str, tmp_path: Path) -> None:
    arguments = ["--collectives", "allreduce", "--sizes", "64", "--budget", "12s", "--force", "--out", "t.json"]
    tuned = unisono("tune", "-n", "2", *arguments, "--load", file, folder=tmp_path)
    assert tuned.returncode == 0, tuned.stderr
    assert '"variant": "mine"' in (tmp_path / "t.jsonl").read_text()
    arguments = ["-n", "2", "--sizes", "64", "--rounds", "1", "--seconds", "0.1", "--load", file]
    measured = unisono("bench", "allreduce", *arguments, folder=tmp_path, UNISONO_ALGORITHM="allreduce:0-=mine")
    assert measured.returncode == 0, measured.stderr


def test_option_load_names_a_missing_file() -> None:
    with pytest.raises(un.UsageError, match=r"there is no file '.*/none.py' to load algorithms from"):
        un.init(un.Options(load="none.py"))
