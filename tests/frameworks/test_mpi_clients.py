"""Unchanged programs of mpi4py print the same over Unisono and over Open MPI, which `make mpi` installs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.import_path import import_path

ROOT = Path(__file__).parents[2]
OPENMPI = ROOT / ".mpi" / "openmpi"
PROGRAM = ROOT / "tests" / "support" / "mpi4py_programs" / "conjugate_gradients.py"
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def lines_of(*command: object, **environ: str) -> list[str]:
    """Return the lines that a command prints, in order."""
    ended = subprocess.run(
        [*map(str, command)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("ranks", [1, 4])
def test_conjugate_gradients_of_mpi4py_print_the_same_as_over_open_mpi(ranks: int) -> None:
    if not (OPENMPI / "complete").exists():
        pytest.skip("Open MPI is not installed: make mpi")
    ours = [sys.executable, "-m", "unisono", "run", "-n", ranks, "--no-label", "--mpi4py", PROGRAM]
    mpiexec = [OPENMPI / "bin" / "mpiexec", "-n", ranks, "--map-by", "slot:oversubscribe", "--bind-to", "none"]

    printed = lines_of(*ours, PYTHONPATH=import_path())

    assert printed[-1] == "residual is small: True"
    assert printed == lines_of(*mpiexec, OPENMPI / "bin" / "python", PROGRAM, **AS_ROOT)
