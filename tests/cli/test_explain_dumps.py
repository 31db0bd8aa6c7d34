"""`unisono explain --dumps`: the calls of a job that ran beside their predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.cli.main import main
from unisono.postmortem.loading import load
from unisono.postmortem.timings import times_of


def make_calls(world: un.Communicator, folder: str) -> None:
    pair = world.split(world.rank // 2)
    assert pair is not None
    for _ in range(3):
        world.allreduce(np.ones(1 << 14, np.float32), algorithm="chain")
        world.allreduce(np.ones(8), reproducible=True)
        world.allgatherv(np.ones(world.rank + 1), [1, 2, 3])
        pair.broadcast(np.ones(8))
    world.send(np.ones(2), 0, tag=1) if world.rank == 1 else None
    world.recv(np.ones(2), 1, tag=1) if world.rank == 0 else None
    world.dump(folder)


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dumps")
    un.launch(make_calls, 3, str(folder), timeout_s=DEADLINE_S)
    return folder


def rows(dumps: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, object]]:
    assert main(["explain", "--dumps", str(dumps), "--json", *options]) == 0
    return {f"{row['collective']} {row['nbytes']}": row for row in json.loads(capsys.readouterr().out)}


def test_calls_of_a_job_have_measured_and_predicted_times(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_call = rows(dumps, capsys)
    assert by_call.keys() >= {"allreduce 65536", "allreduce 64", "allgatherv 48", "broadcast 64", "allgather 72"}
    chain = by_call["allreduce 65536"]
    assert (chain["algorithm"], chain["calls"], chain["hosts"], chain["link"]) == ("chain", 3, [[0, 1, 2]], "shm")
    assert by_call["broadcast 64"]["hosts"] == [[0, 1]]
    assert chain["measured_s"] > 0  # type: ignore[operator]
    assert chain["faster"] not in ("", "chain")
    assert chain["gain_s"] == pytest.approx(3 * (chain["measured_s"] - chain["expected_s"]))  # type: ignore[operator]
    assert by_call["allreduce 64"]["faster"] == ""  # it demands an order of combining


def test_table_names_the_gain(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--dumps", str(dumps)]) == 0
    shown = capsys.readouterr().out
    assert "predicted with default costs" in shown
    assert "these calls would take" in shown


def test_calls_are_compared_with_a_simulation(dumps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.toml").write_text(
        '[[levels]]\nname = "host"\nsize = 3\nlatency_s = 1e-3\noverhead_s = 1e-6\nper_byte_s = 1e-10\n'
    )
    slow = rows(dumps, capsys, "--topology", str(tmp_path / "t.toml"))
    assert slow["allreduce 65536"]["predicted_s"] > 1e-3  # type: ignore[operator]


def test_call_that_a_rank_has_not_ended_has_no_time(dumps: Path, tmp_path: Path) -> None:
    for path in list(dumps.glob("*.json"))[1:]:
        (tmp_path / path.name).write_text(path.read_text())
    assert not [each for each in times_of(load([tmp_path])) if len(each.kind.hosts[0]) == 3]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--dumps", "none"], "there is no file or directory"),
        (["allreduce", "--dumps", "."], "omit the collective"),
        ([], "name a collective, such as allreduce, or a job by --dumps"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_damaged_dumps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "unisono-1-0-rank-0.json").write_text('{"format": "unisono-dump", "ver')
    assert main(["explain", "--dumps", str(tmp_path)]) == 2
    assert "there are no dumps" in capsys.readouterr().err
