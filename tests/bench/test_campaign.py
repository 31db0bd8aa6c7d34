"""The campaign of seeded faults: some of its trials, and that it notices broken promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.bench.studies import campaign
from unisono.bench.studies.campaign import GOOD, run, trial_of
from unisono.bench.studies.trial_ranks import CALLS, FAULTS, STEPS, Trial

TRIAL = Trial(0, "unisono", "shm", 3, "allreduce", 1000, "none", "before", 1, 2)


# The ranks of a trial are forked, so it needs a process without threads.
ALONE = """
import numpy as np
from unisono.bench.studies import campaign
from unisono.bench.studies.trial_ranks import CALLS, FAULTS, Trial

def damaged_broadcast(world, count, salt):
    result, wanted = np.arange(count), np.arange(count)
    if (world.rank, salt) == (2, 3):
        result[count // 2] ^= 1
    return world.broadcast(result, 2), wanted

def hang(_):
    while True:
        pass

CALLS["damaged"] = damaged_broadcast
FAULTS["SIGKILL without a word"] = FAULTS["SIGKILL"]._replace(errors=("AbortedError",))
FAULTS["impatience"] = FAULTS["SIGSTOP"]._replace(timeout_s=1e-6)
FAULTS["hang"] = FAULTS["SIGKILL"]._replace(plant=hang)
campaign.LIMIT_S = {limit_s}
outcome = campaign.run(Trial(*{trial}))
print(outcome.verdict, len(outcome.latencies_ms), outcome.why)
"""


def outcome_of(trial: Trial, limit_s: float = 0.8 * DEADLINE_S) -> str:
    program = ALONE.replace("{limit_s}", str(limit_s)).replace("{trial}", repr(tuple(trial)))
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True).stdout


@pytest.mark.parametrize("library", ["unisono", "gloo"])
def test_trial_ends_as_promised(library: str) -> None:
    if library == "gloo":
        pytest.importorskip("torch")
    assert outcome_of(TRIAL._replace(library=library, fault="SIGKILL")).startswith("promised 2")


def test_trial_between_hosts_is_skipped_without_hosts() -> None:
    assert run(TRIAL._replace(transport="hosts")).verdict in GOOD


def test_trial_is_skipped_if_a_call_reaches_its_time_limit_before_the_fault() -> None:
    after_all_calls = STEPS
    trial = TRIAL._replace(fault="impatience", at=after_all_calls)
    assert outcome_of(trial).startswith("skipped 0 a rank was so slow")


def test_every_fault_and_call_occurs_among_few_seeds() -> None:
    trials = [trial_of(seed) for seed in range(200)]
    assert {trial.fault for trial in trials} == set(FAULTS)
    assert {trial.call for trial in trials} == set(CALLS)
    assert trial_of(7) == trial_of(7) != trial_of(8)


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (TRIAL._replace(call="damaged"), "wrong result"),
        (TRIAL._replace(fault="SIGKILL without a word"), "wrong error"),
        (TRIAL._replace(fault="hang"), "hang"),
    ],
)
def test_broken_promises_are_noticed(trial: Trial, verdict: str) -> None:
    limit = {"limit_s": 2.0} if verdict == "hang" else {}
    assert outcome_of(trial, **limit).startswith(verdict)


def test_outcomes_are_shown_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outcomes.jsonl"
    file.write_text(
        json.dumps({**TRIAL._asdict(), "verdict": "promised", "latencies_ms": [3.0, 40.0], "why": "", "named": True})
    )
    assert campaign.main(["--show", str(file)]) == 0
    assert "promised: 1" in capsys.readouterr().out
    file.write_text("{}")
    with pytest.raises(un.UsageError, match="line 1, is no outcome of a campaign"):
        campaign.main(["--show", str(file)])
