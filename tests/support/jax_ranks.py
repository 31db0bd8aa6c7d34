"""Runs programs of JAX on ranks that are forked from a process with JAX, whose import takes longer than most tests."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from support.deadlines import DEADLINE_S
from support.forked_ranks import Started, server
from support.import_path import import_path
from support.ports import free_port
from support.ranks import end_with_stacks, late_of

from unisono.frameworks.jax import mpi_library
from unisono.launchers.process import Command

PROGRAMS = Path(__file__).parent / "jax_programs"
# JAX has read its variables when it was imported, in the process that forks ranks.
START = (
    "import faulthandler, jax, runpy, sys; faulthandler.enable(); jax.config.update('jax_platforms', 'cpu'); "
    "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
VARIABLES = {
    "MPITRAMPOLINE_LIB": mpi_library.path(),
    "MPITRAMPOLINE_DLOPEN_MODE": "dlopen",
    "OMP_NUM_THREADS": "1",
    # The compiler takes two thirds of the time that it takes by default.
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}


def run(program: str, *arguments: str, ranks: int, **environ: str) -> list[subprocess.CompletedProcess[str]]:
    """Run a program of `jax_programs` on ranks; return their exit codes and outputs, which are short.

    If a rank still runs at the deadline, all are aborted, and the test fails with the stacks of their threads.
    """
    command = Command(("python", "-c", START, str(PROGRAMS / f"{program}.py"), *arguments))
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared = {**os.environ, "PYTHONPATH": import_path(), **VARIABLES, **meeting, **environ}
    fork = server("unisono.jax").start
    started = [fork(command, (), {**shared, "RANK": str(rank)}) for rank in range(ranks)]
    try:
        late = late_of(started, DEADLINE_S)
    finally:
        end_with_stacks(started)
    completed = [subprocess.CompletedProcess(program, process.wait(), *_outputs(process)) for process in started]
    assert not late, completed
    return completed


def lines_of(program: str, *arguments: str, ranks: int, **environ: str) -> list[list[str]]:
    """Run a program; return the lines of each rank. All must end with exit code 0."""
    processes = run(program, *arguments, ranks=ranks, **environ)
    assert [rank.returncode for rank in processes] == [0] * ranks, [
        (rank.returncode, rank.stderr) for rank in processes
    ]
    return [rank.stdout.splitlines() for rank in processes]


def _outputs(process: Started) -> tuple[str, str]:
    """Return what a process that has ended has written to its standard output and to its standard error."""
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr:
        return process.stdout.read().decode(), process.stderr.read().decode()
