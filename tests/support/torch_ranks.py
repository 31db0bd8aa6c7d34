"""Runs ranks of torch.distributed in tests, as processes that meet in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from support.import_path import import_path
from support.programs import Completed, completed

PROGRAMS = Path(__file__).parent / "torch_programs"
# Warnings of torch are errors, except two of versions before 2.13, which concern torch itself.
WARNINGS = (
    *("-W", "error::UserWarning"),
    *("-W", "ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    *("-W", "ignore:Warning:UserWarning"),  # "Warning: Profiler clears events"
)


def ended(program: str, ranks: int, folder: Path, *words: str) -> list[Completed]:
    """Run the ranks of a program of `torch_programs`; return their exit codes and outputs.

    `folder` is the current folder of the ranks. They meet in a file there (`torch_programs.meeting`).
    """
    command = [sys.executable, *WARNINGS, str(PROGRAMS / f"{program}.py"), *words]
    shared = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path()}
    return completed([command] * ranks, [{**shared, "RANK": str(rank)} for rank in range(ranks)], folder)


def run(program: str, ranks: int, folder: Path, *words: str) -> list[str]:
    """Run a program as `ended` does; return the standard output of each rank. All must end with exit code 0."""
    of_ranks = ended(program, ranks, folder, *words)
    errors = "\n".join(f"rank {rank}: {process.stderr}" for rank, process in enumerate(of_ranks))
    assert [process.returncode for process in of_ranks] == [0] * ranks, errors
    return [process.stdout for process in of_ranks]


def lines_of(outputs: Sequence[str]) -> list[list[str]]:
    """Return the lines of each rank's output."""
    return [output.splitlines() for output in outputs]
