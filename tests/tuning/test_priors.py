"""The priors, which describe a machine without measurements, by its kind of processor."""

from __future__ import annotations

from pathlib import Path

import pytest

import unisono as un
from unisono.collectives.bootstrap import shared_settings
from unisono.tuning.decide.choice import Question, TunerState, explain
from unisono.tuning.machine import fingerprint
from unisono.tuning.machine.parameters import PRIORS, priors
from unisono.tuning.measure import calibration_files

AMD = "AuthenticAMD"


def segments(nbytes: int, maker: str) -> int:
    """Return the number of segments into which a ring of two ranks cuts each block of a vector."""
    rows = explain(Question("allreduce", nbytes, 2, "shm"), TunerState(parameters=priors(maker))).candidates
    return next(row.segments for row in rows if row.algorithm == "ring")


@pytest.mark.parametrize("maker", ["", "GenuineIntel", "somebody else"])
def test_prior_sends_blocks_up_to_8_mib_whole(maker: str) -> None:
    assert priors(maker) == PRIORS
    assert [segments(mib << 20, maker) for mib in (1, 2, 4, 16, 32)] == [1, 1, 1, 1, 64]


def test_prior_cuts_large_blocks_earlier_on_amd_processors() -> None:
    assert [segments(mib << 20, AMD) for mib in (1, 2, 4, 16)] == [1, 1, 1, 64]
    assert {**priors(AMD).links, "shm": None} == {**PRIORS.links, "shm": None}


@pytest.mark.parametrize("has_cache", [False, True])
def test_all_ranks_use_the_priors_of_the_machine_of_rank_0(
    has_cache: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if has_cache:
        (tmp_path / "unisono").mkdir()
    monkeypatch.setattr(fingerprint, "maker", lambda: AMD)
    of_rank_0 = shared_settings.collect(un.Options(), 0)
    monkeypatch.setattr(fingerprint, "maker", lambda: "GenuineIntel")
    assert shared_settings.apply(of_rank_0).parameters == priors(AMD)
    assert shared_settings.apply(shared_settings.collect(un.Options(), 1)).parameters == PRIORS
    assert calibration_files.parameters_of("a machine on which nothing was measured") == PRIORS


def test_processor_maker_is_read_from_cpuinfo() -> None:
    said = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("vendor_id")]
    assert fingerprint.maker() == (said[0].split(": ")[1] if said else "")
