"""The list of planted faults is up to date: each text occurs once in its file, and the tests of each fault exist."""

from __future__ import annotations

import pytest
from support.planted_faults import FAULTS, ROOT, Fault

by_name = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@by_name
def test_a_fault_replaces_a_text_that_is_in_its_file_once(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.text) == 1
    assert fault.replacement != fault.text


@by_name
def test_what_must_catch_a_fault_exists(fault: Fault) -> None:
    for test in fault.arguments:
        path, _, function = test.partition("[")[0].partition("::")
        file = ROOT / (f"tests/native/{test}.cpp" if fault.runner == "native" else path)
        assert f"def {function}(" in file.read_text() or not function, test


def test_there_are_sixty_faults_with_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
