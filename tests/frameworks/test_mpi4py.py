"""Unchanged programs of mpi4py over Unisono: all calls, the named errors of wrong programs, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

from support.programs import Completed, completed, import_path

PROGRAMS = Path(__file__).parents[1] / "support" / "mpi4py_programs"


def run(*words: str, ranks: int = 2, **environ: str) -> Completed:
    """Run ``unisono run --mpi4py`` with these words."""
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--mpi4py", *words]
    return completed([command], [{"PYTHONPATH": import_path(), **environ}])[0]


def test_unchanged_program_makes_all_calls_of_mpi4py() -> None:
    ended = run(str(PROGRAMS / "all_calls.py"), ranks=3)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 3


def test_program_is_a_world_of_one_rank_without_a_launcher() -> None:
    program = "from unisono.compat.mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.COMM_WORLD.allreduce(5))"

    (ended,) = completed([[sys.executable, "-c", program]])

    assert ended.stdout == "1 5\n", ended.stderr


def test_ranks_that_disagree_get_a_named_error_of_mpi(tmp_path: Path) -> None:
    program = tmp_path / "wrong.py"
    program.write_text(
        "import numpy as np\n"
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD\n"
        "count = 3 if comm.rank else 4\n"
        "try:\n"
        "    comm.Allreduce(np.ones(count), np.ones(count))\n"
        "except MPI.Exception as error:\n"
        "    named = 'float64[3]' in str(error) and 'float64[4]' in str(error)\n"
        "    print(error.Get_error_class() == MPI.ERR_TRUNCATE, type(error.__cause__).__name__, named)\n"
    )

    ended = run(str(program))

    assert sorted(line[4:] for line in ended.stdout.splitlines()) == ["True MismatchError True"] * 2, ended.stderr


def test_communicators_of_the_same_ranks_keep_messages_apart_when_ranks_use_them_in_another_order() -> None:
    ended = run(str(PROGRAMS / "orders.py"))

    assert ended.stdout.count("has kept the order") == 2, ended.stderr


def test_program_spawns_processes_and_connects_to_ports() -> None:
    ended = run(str(PROGRAMS / "other_jobs.py"), ranks=3)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has met all jobs") == 3


def test_hook_refuses_a_process_that_a_launcher_of_mpi_has_started() -> None:
    program = "from unisono.compat.mpi4py import hook; hook.install()"

    (ended,) = completed([[sys.executable, "-c", program]], [{"OMPI_COMM_WORLD_RANK": "0"}])

    assert ended.returncode == 1
    assert "OMPI_COMM_WORLD_RANK is set" in ended.stderr
    assert "unisono run --mpi4py" in ended.stderr
