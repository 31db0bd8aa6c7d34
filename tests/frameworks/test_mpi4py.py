"""Unchanged programs of mpi4py over Unisono: all calls, the named errors of wrong programs, and refusals."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support import mpi_ranks
from support.commands import unisono
from support.import_path import import_path
from support.programs import Completed, completed

PROGRAMS = Path(__file__).parents[1] / "support" / "mpi4py_programs"


def run(*words: str, ranks: int = 2, **environ: str) -> Completed:
    """Run ``unisono run --mpi4py`` with these words."""
    command = [sys.executable, "-m", "unisono", "run", "-n", str(ranks), "--mpi4py", *words]
    return completed([command], [{"PYTHONPATH": import_path(), **environ}])[0]


def test_unchanged_program_makes_all_calls_of_mpi4py() -> None:
    ended = run(str(PROGRAMS / "all_calls.py"), ranks=3)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 3


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_all_forms_of_buffers_meet_in_messages_and_collectives(transports: str) -> None:
    ended = run(str(PROGRAMS / "plain_buffers.py"), UNISONO_TRANSPORTS=transports)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 2


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_partitioned_messages_go_when_all_partitions_are_ready_and_match_no_others(transports: str) -> None:
    ended = run(str(PROGRAMS / "partitions.py"), UNISONO_TRANSPORTS=transports)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 2


def test_values_are_those_of_mpi() -> None:
    ended = run(str(PROGRAMS / "like_mpi.py"), ranks=3)

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 3


@pytest.mark.parametrize("library", mpi_ranks.LIBRARIES)
def test_values_of_mpi_are_those_of_its_libraries(library: str) -> None:
    ended = mpi_ranks.run(library, 3, (PROGRAMS / "like_mpi.py").read_text())

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 3


@pytest.mark.parametrize("transports", ["shm", "tcp"])
def test_wrong_call_is_an_error_of_its_rank_and_sends_nothing(transports: str) -> None:
    ended = run(str(PROGRAMS / "mistakes.py"), UNISONO_TRANSPORTS=transports, UNISONO_TIMEOUT_S="60")

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("has checked everything") == 2


def test_program_is_a_world_of_one_rank_without_a_launcher() -> None:
    program = "from unisono.compat.mpi4py import MPI; print(MPI.COMM_WORLD.size, MPI.COMM_WORLD.allreduce(5))"

    (ended,) = completed([[sys.executable, "-c", program]])

    assert ended.stdout == "1 5\n", ended.stderr


WRONG = {
    "counts": ("float64[3]", "float64[4]"),
    "types": ("int32[2]", "float32[2]"),
    "order": ("broadcast(", "barrier()"),
    "roots": ("root=0", "root=1"),
    "operations": ("op=sum", "op=max"),
    "shares": ("rank 0", "rank 1"),
    "neighbours": ("rank 0", "rank 1"),
    "objects": ("broadcast(", "allgather("),
    "missing": ("barrier()", "rank 1"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_ranks_that_disagree_get_a_named_error_on_all_ranks(fault: str) -> None:
    ended = run(str(PROGRAMS / "wrong.py"), fault, UNISONO_TIMEOUT_S="3")

    errors = [line for line in ended.stdout.splitlines() if "class" in line]
    assert len(errors) == 2, ended.stdout + ended.stderr
    named = ("CollectiveTimeoutError", "AbortedError") if fault == "missing" else ("MismatchError", "AbortedError")
    assert all(any(f"{name}: " in error for name in named) for error in errors), errors
    assert any(all(part in error for part in WRONG[fault]) for error in errors), errors


def test_rank_that_is_lost_is_a_named_error() -> None:
    ended = run(str(PROGRAMS / "wrong.py"), "lost")

    assert "PeerLostError" in ended.stdout, ended.stdout + ended.stderr
    assert "rank 1" in ended.stdout


def test_count_beyond_all_memory_is_a_named_error_on_all_ranks() -> None:
    ended = run(str(PROGRAMS / "wrong.py"), "huge", UNISONO_TIMEOUT_S="3")

    errors = sorted(line for line in ended.stdout.splitlines() if "class" in line)
    assert len(errors) == 2, ended.stdout + ended.stderr
    assert "invalid count" in errors[0]
    assert "rank 0" in errors[1]


def test_hint_asks_for_reproducible_sums() -> None:
    ended = run(str(PROGRAMS / "sums.py"), ranks=4)

    assert ended.stdout.count("has the bits of the tree") == 4, ended.stderr


def test_postmortem_and_traces_show_the_calls_of_a_program(tmp_path: Path) -> None:
    dumps, traces = tmp_path / "dumps", tmp_path / "traces"

    run(str(PROGRAMS / "wrong.py"), "counts", UNISONO_DUMP=str(dumps), UNISONO_TRACE=str(traces))

    report = unisono("postmortem", str(dumps), folder=tmp_path).stdout
    assert all(part in report for part in ("float64[3]", "float64[4]", "wrong.py")), report
    merged = unisono("trace", "merge", str(traces), "--output", "trace.json", folder=tmp_path)
    assert merged.returncode == 0, merged.stderr
    assert "allreduce(" in (tmp_path / "trace.json").read_text()


def test_explain_and_top_see_the_communicator_of_a_program(tmp_path: Path) -> None:
    program = tmp_path / "shown.py"
    program.write_text(
        "import json, os, subprocess, sys\n"
        "from mpi4py import MPI, communicator_of\n"
        "comm = MPI.COMM_WORLD\n"
        "assert 'allreduce' in str(communicator_of(comm).explain('allreduce', 1 << 20))\n"
        "pids = comm.allgather(os.getpid())\n"
        "if comm.rank == 0:\n"
        "    command = [sys.executable, '-m', 'unisono', 'top', '--json']\n"
        "    shown = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)\n"
        "    print('ranks', sorted(each['rank'] for each in shown if each['pid'] in pids))\n"
        "comm.Barrier()\n"
    )

    ended = run(str(program))

    assert "ranks [0, 1]" in ended.stdout, ended.stdout + ended.stderr


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


def test_tasks_run_on_the_other_ranks_under_the_module_futures() -> None:
    ended = run("-m", "mpi4py.futures", str(PROGRAMS / "pool_of_ranks.py"), ranks=3)

    assert (ended.returncode, ended.stdout) == (0, "[0] workers: 2\n"), ended.stderr


def test_tasks_run_on_spawned_ranks_otherwise() -> None:
    ended = run(str(PROGRAMS / "pool_of_ranks.py"), ranks=1, MPI4PY_FUTURES_MAX_WORKERS="2")

    assert (ended.returncode, ended.stdout) == (0, "[0] workers: 2\n"), ended.stderr


def test_workers_end_with_the_exit_code_of_the_program() -> None:
    ended = run("-m", "mpi4py.futures", str(PROGRAMS / "pool_of_ranks.py"), "3", ranks=2)

    assert ended.returncode == 3, ended.stderr


def test_objects_datatypes_and_executors_of_a_communicator() -> None:
    for ranks in (1, 3):
        ended = run(str(PROGRAMS / "utilities.py"), ranks=ranks)

        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.count("has checked everything") == ranks


def test_ranks_free_a_communicator_that_only_some_have_used(tmp_path: Path) -> None:
    program = tmp_path / "free.py"
    program.write_text(
        "from mpi4py import MPI\n"
        "comm = MPI.COMM_WORLD.Dup()\n"
        "if comm.rank < 2:\n"
        "    assert comm.sendrecv(comm.rank, 1 - comm.rank) == 1 - comm.rank\n"
        "comm.Free()\n"
    )

    ended = run(str(program), ranks=3)

    assert ended.returncode == 0, ended.stderr


def test_program_imports_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 7\n")
    program = tmp_path / "program.py"
    program.write_text("import beside\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(beside.value))\n")

    ended = run(str(program))

    assert sorted(ended.stdout.splitlines()) == ["[0] 14", "[1] 14"], ended.stderr


@pytest.mark.parametrize("place", ["task", "pause"])
@pytest.mark.parametrize("words", [(), ("-m", "mpi4py.futures")], ids=["spawned", "beside"])
def test_killed_worker_breaks_its_executor(place: str, words: tuple[str, ...]) -> None:
    ended = run(*words, str(PROGRAMS / "killed_worker.py"), place, ranks=3 if words else 1)

    assert ended.stdout.count("BrokenExecutor") == 4, ended.stdout + ended.stderr
    assert "has shut down" in ended.stdout


@pytest.mark.parametrize("module", ["pool", "sync"])
def test_utilities_for_workers_and_turns(module: str) -> None:
    ended = run(str(PROGRAMS / f"{module}_utilities.py"), ranks=3)

    assert ended.stdout.count("has checked everything") == 3, ended.stdout + ended.stderr
