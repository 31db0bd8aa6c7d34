"""The campaign of seeded faults: some of its trials, and that it notices broken promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unisono as un
from unisono.bench import campaign
from unisono.bench.campaign import FAULTS, GOOD, STEPS_BY_NAME, Trial, run, trial_of

TRIAL = Trial(0, "shm", 3, "allreduce", 1000, "none", "before", 1, 2)


@pytest.mark.parametrize("seed", range(12))
def test_trials_end_as_promised(seed: int) -> None:
    outcome = run(trial_of(seed))
    assert outcome.verdict in GOOD, outcome


def test_every_fault_and_call_occurs_among_few_seeds() -> None:
    trials = [trial_of(seed) for seed in range(200)]
    assert {trial.fault for trial in trials} == set(FAULTS)
    assert {trial.call for trial in trials} == set(STEPS_BY_NAME)
    assert trial_of(7) == trial_of(7) != trial_of(8)


def damaged_broadcast(world: un.Communicator, count: int, salt: int) -> tuple[Any, Any]:
    result, wanted = np.arange(count), np.arange(count)
    if (world.rank, salt) == (2, 3):
        result[count // 2] ^= 1
    return world.broadcast(result, 2), wanted


def hang(_: un.Communicator) -> None:
    while True:
        pass


@pytest.mark.parametrize(
    ("trial", "verdict"),
    [
        (TRIAL._replace(call="damaged"), "wrong result"),
        (TRIAL._replace(fault="SIGKILL without a word"), "wrong error"),
        (TRIAL._replace(fault="hang"), "hang"),
    ],
)
def test_broken_promises_are_noticed(trial: Trial, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STEPS_BY_NAME, "damaged", damaged_broadcast)
    monkeypatch.setitem(FAULTS, "SIGKILL without a word", FAULTS["SIGKILL"]._replace(error="AbortedError"))
    monkeypatch.setitem(FAULTS, "hang", FAULTS["SIGKILL"]._replace(plant=hang))
    monkeypatch.setattr(campaign, "LIMIT_S", 1.0)
    assert run(trial).verdict == verdict
