"""Planted faults: two of the study that no other test plants. tests/cli/test_postmortem.py has most of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from unisono.bench.namespaces import missing
from unisono.bench.studies.faults import FAULTS, PlannedFault, ask

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name in ("slow link", "full disk during the dump")]
)
def test_every_source_names_the_culprit(fault: PlannedFault, tmp_path: Path) -> None:
    answers = ask(fault, tmp_path)
    silent = [source for source, named in answers.named.items() if named is False]
    assert not silent, answers.texts
    assert any(answers.named.values())
