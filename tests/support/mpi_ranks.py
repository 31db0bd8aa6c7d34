"""Ranks under the launchers of MPI libraries, in the environments that ``make mpi`` makes."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.programs import completed, import_path

ROOT = Path(__file__).parents[2] / ".mpi"
LIBRARIES = ("openmpi", "mpich")
OPTIONS: dict[str, tuple[str, ...]] = {"openmpi": ("--map-by", "slot:oversubscribe", "--bind-to", "none"), "mpich": ()}
# Open MPI refuses to run as root unless both variables are set. Tests in containers often run as root.
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def environment_of(library: str) -> Path:
    """Return the folder of the environment of an MPI library. The test is skipped if the folder is missing."""
    folder = ROOT / library
    if not (folder / "complete").exists():
        pytest.skip(f"{folder} is missing: `make mpi` makes it")
    return folder


def launcher(library: str, *options: str) -> list[str]:
    """Return the command line of the library's ``mpiexec`` with the usual options and `options`."""
    return [str(environment_of(library) / "bin" / "mpiexec"), *OPTIONS[library], *options]


def run(
    library: str,
    ranks: int,
    program: str,
    *,
    python: Path | str | None = None,
    options: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program on ranks under the library's ``mpiexec``. No process outlives this call.

    Args:
        library: the MPI library.
        ranks: the number of ranks.
        program: the text of the program.
        python: the Python that runs it; by default the one of the library's environment.
        options: options of mpiexec, in addition to the usual ones.
        variables: environment variables of the ranks, in addition to those of this process.
        deadline_s: seconds after which all processes are killed.
    """
    command = [*launcher(library, *options), "-n", str(ranks)]
    command += [str(python or environment_of(library) / "bin" / "python"), "-c", program]
    # With buffering, a rank writes each of its lines at once, so that the lines of several ranks do not mix.
    environ = {**AS_ROOT, "PYTHONUNBUFFERED": "", "PYTHONPATH": import_path(), **(variables or {})}
    return completed([command], [environ], deadline_s=deadline_s)[0]
