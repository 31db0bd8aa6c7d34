"""``unisono explain``: it tells what a job does that is started here, and wrong input is refused in one line."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import unisono as un
from unisono.cli.main import main

DEADLINE_S = 60


def explain(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what the command prints as JSON."""
    assert main(["explain", *arguments, "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def explained(world: un.Communicator, nbytes: int) -> tuple[str, dict[str, float | None]]:
    """Return the choice of a job, and the predicted times of all candidates."""
    found = world.explain("allreduce", nbytes)
    return found.choice.variant, {each.algorithm: each.predicted_s for each in found.candidates}


@pytest.mark.parametrize("nbytes", [64, 1 << 20])
def test_a_job_started_here_does_what_it_tells_also_where_ranks_share_cores(
    capsys: pytest.CaptureFixture[str], nbytes: int
) -> None:
    ranks = 2 * len(os.sched_getaffinity(0))
    found = explain(capsys, "allreduce", str(nbytes), "-n", str(ranks))
    assert found["question"]["crowd"] == 2
    variant, predicted_s = un.launch(explained, ranks, nbytes, timeout_s=DEADLINE_S)[0]
    assert found["choice"]["variant"] == variant
    assert {each["algorithm"]: each["predicted_s"] for each in found["candidates"]} == predicted_s


def test_the_table_marks_the_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "allreduce", "1K", "-n", "4", "--algorithm", "ring"]) == 0
    out = capsys.readouterr().out
    assert "ring (forced)" in out
    assert [line for line in out.splitlines() if "*" in line and "ring" in line]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["alltogether", "8"], "alltogether"),
        (["allreduce", "8", "--size", "8"], "given twice"),
        (["allreduce", "8", "--algorithm", "rnig"], "did you mean 'ring'"),
        (["allreduce", "many"], "'many' is not"),
    ],
)
def test_wrong_input_is_told_in_a_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["explain", *arguments]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
