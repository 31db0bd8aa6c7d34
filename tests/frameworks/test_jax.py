"""Calls inside programs of JAX, made by real ranks. Each test starts them once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.launched import by_variables

pytest.importorskip("jax", reason="make jax installs what these tests need")

PROGRAMS = Path(__file__).parents[1] / "support" / "jax_programs"
START = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
QUIET = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore:os.fork:RuntimeWarning"}


def lines_of(program: str, *arguments: str, folder: Path, ranks: int, **environ: str) -> list[list[str]]:
    """Run a program of `jax_programs`; return the lines of each rank. All must end with exit code 0."""
    path = str(PROGRAMS / f"{program}.py")
    ended = by_variables(START, path, *arguments, folder=folder, ranks=ranks, **QUIET, **environ)
    assert [each.returncode for each in ended] == [0] * ranks, "\n".join(each.stderr for each in ended)
    return [each.stdout.splitlines() for each in ended]


def test_calls_in_programs_equal_direct_calls_and_have_derivatives(tmp_path: Path) -> None:
    for lines in lines_of("calls", folder=tmp_path, ranks=2):
        assert lines == ["all calls were made"]


def test_failed_calls_in_programs_raise_and_ranks_go_on(tmp_path: Path) -> None:
    kinds = {
        "shapes": "MismatchError: ranks disagree on call #0",
        "branches": "MismatchError: ranks disagree on call #0",
        "messages": "MismatchError",
        "aborted": "AbortedError: rank 0 aborted: enough",
        "closed": "UsageError: the communicator",
        "forked": "UsageError: this process was forked from a rank",
    }
    for lines in lines_of("failures", *kinds, folder=tmp_path, ranks=2):
        raised = [line for line in lines if line != "no error"]
        assert [words in line for words, line in zip(kinds.values(), raised, strict=True)] == [True] * len(kinds), lines


def test_interrupt_ends_a_program_and_other_ranks_raise_aborted_error(tmp_path: Path) -> None:
    first, second = lines_of("failures", "interrupted", folder=tmp_path, ranks=2)
    assert first[0].startswith("KeyboardInterrupt")
    assert "AbortedError: rank 0 was interrupted" in second[0]


def test_death_of_a_rank_ends_programs_of_the_others_which_can_exit(tmp_path: Path) -> None:
    first, _, third = lines_of("failures", "died", folder=tmp_path, ranks=3)
    assert "PeerLostError: rank 1 died" in first[0]
    assert "PeerLostError: rank 1 died" in third[0]


def test_examples_reach_the_loss_of_one_process(tmp_path: Path) -> None:
    examples = sorted(path.name for path in (Path(__file__).parents[2] / "examples").glob("jax_*.py"))
    assert lines_of("examples", folder=tmp_path, ranks=2) == [examples] * 2


def test_program_for_several_devices_of_a_process_is_refused(tmp_path: Path) -> None:
    two = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    ((text,),) = lines_of("devices", folder=tmp_path, ranks=1, **two)
    assert "program for 2 devices" in text
