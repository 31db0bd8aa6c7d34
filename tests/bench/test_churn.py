"""Runs the trial of a swarm under churn for some seconds, and checks that it detects what it looks for."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S, eventually
from support.hosts import needs_namespaces

from unisono.bench.programs import churn
from unisono.bench.programs.churn import (
    LEAST,
    _Process as Process,
    _Trial as Trial,
    contribution,
    hosts_with_homes,
    try_swarm,
)


def test_a_swarm_under_churn_keeps_its_promises(tmp_path: Path) -> None:
    outcome = try_swarm(tmp_path, 20.0, seed=7)
    assert outcome.is_right, outcome
    assert outcome.calls > 1
    assert set(outcome.errors) <= {"LeftBehindError", "QuorumLostError"}, outcome.errors


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--seconds -1", "--seconds: it must be a positive number of seconds, not '-1'"),
        ("--seconds nan", "--seconds: it must be a positive number of seconds, not 'nan'"),
        ("--members 99", "--members: invalid choice: 99"),
        ("--transports pigeon", "--transports: 'pigeon' cannot be used: it must be auto, or some of shm"),
    ],
)
def test_trial_refuses_arguments_that_cannot_be_used(
    arguments: str, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["churn", *arguments.split()])
    with pytest.raises(SystemExit, match="2"):
        churn.main()
    assert text in capsys.readouterr().err


def test_trial_without_a_call_fails_and_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["churn", "--seconds", "1", "--transports", "mpi"])
    with pytest.raises(SystemExit, match="1"):
        churn.main()
    assert "the swarm made no call; process 0 wrote: unisono.errors.UsageError: tls=" in capsys.readouterr().err


def test_interrupt_ends_the_trial_without_tracebacks_of_its_processes() -> None:
    command = (sys.executable, "-m", "unisono", "bench", "churn", "--seconds", str(DEADLINE_S))
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as trial:
        children = Path(f"/proc/{trial.pid}/task/{trial.pid}/children")
        assert eventually(lambda: children.read_text() != "")
        os.killpg(trial.pid, signal.SIGINT)  # as a terminal does
        errors = trial.communicate(timeout=DEADLINE_S)[1]
    assert (trial.returncode, errors.strip()) == (130, "unisono: interrupted")


def is_running(process: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes() != b""  # which a process that has ended lacks
    return False


def test_processes_of_a_trial_that_is_killed_end_too() -> None:
    command = (sys.executable, "-m", "unisono", "bench", "churn", "--seconds", str(DEADLINE_S))
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as trial:
        children = Path(f"/proc/{trial.pid}/task/{trial.pid}/children")
        assert eventually(lambda: len(children.read_text().split()) > LEAST)
        processes = children.read_text().split()
        trial.kill()
    assert eventually(lambda: not any(map(is_running, processes)))


@pytest.mark.night
@needs_namespaces
def test_a_swarm_of_which_half_is_at_home_keeps_its_promises_under_churn(tmp_path: Path) -> None:
    with hosts_with_homes() as hosts:
        outcome = try_swarm(tmp_path, 20.0, seed=7, hosts=hosts)
    assert outcome.is_right, outcome
    assert outcome.calls > 1
    assert set(outcome.errors) <= {"LeftBehindError", "QuorumLostError"}, outcome.errors


def line(call: int, contributors: tuple[int, ...], total: int | None = None) -> str:
    right = sum(contribution(process, call) for process in contributors)
    names = [f"process/{process}" for process in contributors]
    facts = {"call": call, "sum": right if total is None else total, "is_even": True, "contributors": names}
    return json.dumps(facts) + "\n"


def test_the_trial_detects_a_wrong_sum_and_a_disagreement(tmp_path: Path) -> None:
    trial = Trial(tmp_path, random.Random(1), "auto")
    lines = ([line(1, (0, 1)), line(2, (0, 1), 5)], [line(1, (0, 1)), line(2, (1,)), '{"call": 3, "su'])
    for number, text in enumerate(lines):
        log = tmp_path / f"calls-{number}.jsonl"
        log.write_text("".join(text))
        trial._all.append(Process(number, None, log))  # type: ignore[arg-type]
    outcome = trial.outcome()
    assert outcome.calls == 2
    assert not outcome.is_right
    assert not outcome._replace(calls=0, wrong_sums=[], disagreements=[], hangs=[]).is_right
    assert [wrong_sum.partition(":")[0] for wrong_sum in outcome.wrong_sums] == ["call 2 on process 0"]
    assert [disagreement.partition(":")[0] for disagreement in outcome.disagreements] == ["call 2"]


@pytest.mark.parametrize("ephemeral", ["32768 60999", "1024 65535"], ids=["some", "all"])
def test_the_ports_of_places_are_not_ephemeral_if_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ephemeral: str
) -> None:
    (tmp_path / "range").write_text(ephemeral.replace(" ", "\t"))
    monkeypatch.setattr(churn, "_EPHEMERAL_PORTS", tmp_path / "range")
    first, last = map(int, ephemeral.split())
    ports = churn._free_ports(2)
    assert len(set(ports)) == 2
    assert first == 1024 or not any(first <= port <= last for port in ports)
