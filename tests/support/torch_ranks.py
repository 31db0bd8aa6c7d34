"""Starts ranks of torch.distributed in tests, as processes that meet in a file."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from support.deadlines import DEADLINE_S

PROGRAMS = Path(__file__).parent / "torch_programs"
# Warnings of torch are errors, except two of versions before 2.13, which concern torch itself.
WARNINGS = (
    *("-W", "error::UserWarning"),
    *("-W", "ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
    *("-W", "ignore:Warning:UserWarning"),  # "Warning: Profiler clears events"
)


@contextlib.contextmanager
def started(program: str, ranks: int, folder: Path, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a program of `torch_programs`; kill ranks that still run at the end of the with-block.

    `folder` is the current folder of the ranks. They meet in a file there (`torch_programs.meeting`).
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            processes.append(
                subprocess.Popen(
                    [sys.executable, *WARNINGS, str(PROGRAMS / f"{program}.py"), *words],
                    env={**os.environ, **place},
                    cwd=folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def run(program: str, ranks: int, folder: Path, *words: str) -> list[str]:
    """Run a program on `ranks` ranks; return the standard output of each rank. All must end with exit code 0.

    A rank that still runs at the deadline is killed. Then the assertion shows the standard error of all ranks.
    """
    deadline = time.monotonic() + DEADLINE_S
    with started(program, ranks, folder, *words) as processes:
        outputs = [_output_until(deadline, process) for process in processes]
        codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, "\n".join(f"rank {rank}: {errors}" for rank, (_, errors) in enumerate(outputs))
    return [output for output, _ in outputs]


def _output_until(deadline: float, process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()


def lines_of(outputs: Sequence[str]) -> list[list[str]]:
    """Return the lines of each rank's output."""
    return [output.splitlines() for output in outputs]
