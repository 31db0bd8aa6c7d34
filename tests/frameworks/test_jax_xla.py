"""XLA's own collectives between processes, carried out by Unisono: results, failures, and wrong order of imports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.jax_ranks import lines_of, run

from unisono.frameworks.jax import mpi_library

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="make jax installs what these tests need")


@pytest.mark.parametrize("ranks", [1, 4])
def test_collectives_of_xla_have_right_results(ranks: int) -> None:
    assert lines_of("xla_collectives", ranks=ranks, UNISONO_BIND_ADDRESS="127.0.0.0/8") == [["right"]] * ranks


def test_programs_on_some_devices_and_groups_of_them_have_right_results() -> None:
    assert lines_of("xla_groups", ranks=4) == [["right"]] * 4


def test_program_that_jax_loads_is_refused_on_every_process_because_its_groups_are_unknown(tmp_path: Path) -> None:
    assert lines_of("xla_loaded", "save", str(tmp_path), ranks=2) == [[], []]
    for (error,) in lines_of("xla_loaded", "load", str(tmp_path), ranks=2):
        assert "compile the program here instead of loading it" in error


def test_several_devices_in_a_process_are_refused_on_every_process(tmp_path: Path) -> None:
    flags = "--xla_force_host_platform_device_count=2"
    for process in run("xla_failures", "none", str(tmp_path), ranks=2, XLA_FLAGS=flags):
        assert "UsageError: a program with collectives runs on 4 devices of 2 processes" in process.stderr


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        ("die", ["PeerLostError: rank 1 died"]),
        ("raise", ["PeerLostError: rank 1 has left: ArithmeticError: planted"]),
        ("disagree", ["MismatchError", "rank 1 called allgather"]),
        ("sleep", ["CollectiveTimeoutError", "in call #11 allreduce"]),
    ],
)
def test_failure_is_an_error_of_jax_on_every_other_process(fault: str, texts: list[str], tmp_path: Path) -> None:
    processes = run("xla_failures", fault, str(tmp_path), ranks=3, UNISONO_TIMEOUT_S="1" if fault == "sleep" else "30")
    others = [processes[0], processes[2]]
    assert all(text in other.stdout for other in others for text in texts), [rank.stderr for rank in processes]
    # JAX itself may end a process, when the process that serves the others has ended before.
    assert all(other.returncode for other in others)


def error_of(program: str, **environ: str) -> str:
    """Run a program as one process that ends with an error, and return its standard error."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=env)
    assert done.returncode == 1
    return done.stderr


def test_jax_must_not_be_imported_before() -> None:
    error = error_of("import jax\nimport unisono.jax as uj\nuj.use_for_xla()")
    assert "UsageError: JAX was imported before unisono.jax" in error


def test_jax_must_not_be_used_before() -> None:
    error = error_of("import unisono.jax as uj\nimport jax\njax.devices()\nuj.use_for_xla()")
    assert "UsageError: JAX has already been used in this process" in error


def test_another_mpi_library_is_respected(tmp_path: Path) -> None:
    other = shutil.copy(mpi_library.path(), tmp_path / "libmpiwrapper.so")
    error = error_of("import unisono.jax as uj\nuj.use_for_xla()", MPITRAMPOLINE_LIB=str(other))
    assert f"UsageError: MPITRAMPOLINE_LIB names another MPI library, {other}: unset it" in error
