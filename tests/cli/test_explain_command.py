"""``unisono explain``: it shows the choices of a job on this machine, and refuses wrong input in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import unisono as un
from unisono.cli.main import main

DEADLINE_S = 60


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the JSON that the command prints."""
    assert main(["explain", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def explained(world: un.Communicator, nbytes: int) -> tuple[str, dict[str, float | None]]:
    """Return the choice of a job, and the predicted times of all candidates."""
    explanation = world.explain("allreduce", nbytes)
    return explanation.choice.variant, {
        candidate.algorithm: candidate.predicted_s for candidate in explanation.candidates
    }


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_explain_command_agrees_with_a_job_whose_ranks_share_cores(
    capsys: pytest.CaptureFixture[str], nbytes: int
) -> None:
    ranks = 2 * len(os.sched_getaffinity(0))
    explanation = explain(capsys, "allreduce", str(nbytes), "-n", str(ranks))
    assert explanation["question"]["crowd"] == 2
    variant, predicted_s = un.launch(explained, ranks, nbytes, timeout_s=DEADLINE_S)[0]
    assert explanation["choice"]["variant"] == variant
    assert {candidate["algorithm"]: candidate["predicted_s"] for candidate in explanation["candidates"]} == predicted_s


def test_explain_table_marks_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "allreduce", "1K", "-n", "4", "--algorithm", "ring"]) == 0
    out = capsys.readouterr().out
    assert "ring (forced)" in out
    assert [line for line in out.splitlines() if "*" in line and "ring" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["alltogether", "8"], "alltogether"),
        (["allreduce", "8", "--size", "8"], "both set the number of bytes"),
        (["allreduce", "8", "--algorithm", "rnig"], "did you mean 'ring'"),
        (["allreduce", "many"], "'many' is not"),
        (
            ["allreduce", "8", "--algorithm", "ring(segmnt=4)"],
            "it has segment_nbytes, order; did you mean 'segment_nbytes'?",
        ),
        (["allreduce", "8", "--per-host", "1", "--link", "shm"], "cannot use shm"),
        (["allreduce", "8", "--per-host", "2", "--topology", "t.toml"], "omit --per-host and --link"),
    ],
)
def test_explain_refuses_wrong_input_without_a_traceback(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["explain", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_explain_command_agrees_with_a_job_on_vector_collectives(capsys: pytest.CaptureFixture[str]) -> None:
    nbytes, ranks = 1 << 16, 2
    answer = explain(capsys, "allgatherv", str(nbytes), "-n", str(ranks))
    assert answer["question"]["varying"]
    variants = un.launch(lambda world: world.explain("allgatherv", nbytes).choice.variant, ranks, timeout_s=DEADLINE_S)
    assert [answer["choice"]["variant"]] * ranks == variants
    assert main(["explain", "alltoallv", "64", "-n", "4"]) == 0
    assert "alltoallv, 64 B, 4 ranks by shm on one host" in capsys.readouterr().out


def test_explain_distinguishes_several_hosts_from_shared_cores(capsys: pytest.CaptureFixture[str]) -> None:
    on_hosts = explain(capsys, "allreduce", "-n", "1000", "--per-host", "8")["question"]
    assert (len(on_hosts["hosts"]), on_hosts["link"], on_hosts["inside"]) == (125, "tcp", "shm")
    assert on_hosts["crowd"] == max(1, 8 / len(os.sched_getaffinity(0)))
    assert main(["explain", "allreduce", "-n", "1000"]) == 0
    assert "1000 ranks share" in capsys.readouterr().out
    assert main(["explain", "allreduce", "-n", "1000", "--per-host", "8"]) == 0
    out = capsys.readouterr().out
    assert "1000 ranks on 125 hosts, by shm inside them and by tcp between them" in out
    assert "ranks share" not in out


# The ways between neighbours in the order of ranks are slow.
SLOW = {
    "format": 1,
    "delay_s": [[0.01 * (i != j) for j in range(4)] for i in range(4)],
    "per_byte_s": [
        [0.0 if i == j else 4e-6 if {i, j} in ({0, 1}, {2, 3}) else 4e-8 for j in range(4)] for i in range(4)
    ],
}


def test_explain_shows_hosts_links_and_the_chosen_ways_of_a_map(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "map.json").write_text(json.dumps(SLOW))
    arguments = ["explain", "allreduce", "64M", "--map", str(tmp_path / "map.json"), "--algorithm", "ring"]
    assert main([*arguments, "--json", "--svg", str(tmp_path / "map.svg")]) == 0
    shown = json.loads(capsys.readouterr().out)
    order, used = shown["network"]["order"], {tuple(way) for way in shown["network"]["used"]}
    assert used == {(order[at - 1], order[at]) for at in range(4)}
    assert not any({i, j} in ({0, 1}, {2, 3}) for i, j in used)
    assert shown["network"]["regions"] == [[0, 1, 2, 3]]
    assert shown["choice"]["variant"] == f"ring(order={tuple(order)})"
    assert "<svg" in (tmp_path / "map.svg").read_text()
    assert main([*arguments, "--per-host", "2"]) == 0
    text = capsys.readouterr().out
    assert f"order of hosts: {' '.join(map(str, order))}" in text
    assert "8 ranks on 4 hosts" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--svg", "map.svg"], "--svg draws the map of a network: add --map"),
        (["--map", "absent.json"], "the map absent.json cannot be read"),
        (["--map", "map.json", "-n", "3"], "the map has 4 hosts, and so 4 ranks, not 3: omit -n"),
        (["--map", "map.json", "--link", "tcp"], "--map already has hosts and links"),
        (["--map", "map.json", "--root", "4"], "there is no rank 4 among 4 ranks"),
        (["--map", "map.json", "--svg", "absent/map.svg"], "there is no folder"),
    ],
)
def test_explain_refuses_a_map_that_cannot_be_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "map.json").write_text(json.dumps(SLOW))
    assert main(["explain", "allreduce", "8", *more]) != 0
    assert message in capsys.readouterr().err
