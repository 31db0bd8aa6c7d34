"""MPI's own collectives as `mpi.native`: the same results, refusals with reasons, and failures that end a wait."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.mpi_ranks import LIBRARIES, run

import unisono as un
from unisono.dtypes import DTYPES
from unisono.operations import operation
from unisono.transports.mpi.collectives import refusal

BEGIN = """
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np, unisono as un
from support.deadlines import await_marks, leave_mark
folder = Path(os.environ.get("MARKS", ""))
def tell(*words):
    print(" ".join(map(str, words)) + "\\n", end="", flush=True)
def report_error(call):
    try:
        call()
    except un.UnisonoError as error:
        tell(type(error).__name__, error)
"""


@pytest.mark.parametrize("library", LIBRARIES)
def test_mpi_native_gives_the_same_results_for_every_collective(library: str) -> None:
    done = run(library, 3, "from support import mpi_native_calls; mpi_native_calls.main()")
    assert sorted(done.stdout.split("\n")) == ["", *(f"same on rank {rank}" for rank in range(3))], done.stderr


REFUSED = [
    ("sum", "float16", 1, 8, "does not reduce float16: no MPI rounds it as Unisono does"),
    ("sum", "bfloat16", 1, 8, "does not reduce bfloat16"),
    ("max", "float8_e5m2", 1, 8, "does not reduce float8_e5m2"),
    ("avg", "float32", 1, 8, "has no operation 'avg'"),
    ("minloc", "complex64", 1, 8, "has no operation 'minloc'"),
    ("max", "float64", 1, 8, "has no 'max' of float64 that is the same as Unisono's"),
    ("sum", "float32", 2, 8, "takes one array at a time"),
    ("sum", "float32", 1, 1 << 31, "takes less than 2147483648 bytes"),
]


@pytest.mark.parametrize(("op", "dtype", "arrays", "nbytes", "why"), REFUSED)
def test_mpi_native_refuses_unsupported_calls_with_the_reason(
    op: str, dtype: str, arrays: int, nbytes: int, why: str
) -> None:
    assert str(refusal("allreduce", nbytes, [(DTYPES[dtype], operation(op))], arrays, 4)).startswith(why)


def test_mpi_native_accepts_supported_calls() -> None:
    for dtype in ("int8", "uint64", "float32", "complex128"):
        assert refusal("allreduce", 8, [(DTYPES[dtype], operation("sum"))], 1, 4) is None
    assert refusal("broadcast", 8, [], 1, 4) is None


def test_mpi_native_without_mpi_says_what_it_needs() -> None:
    with un.init() as world:
        assert "mpi.native" not in str(world.explain("allreduce", 1 << 20))
        with pytest.raises(un.NoAlgorithmError, match=r"mpi\.native needs ranks that start by its library"):
            world.allreduce(np.ones(3), algorithm="mpi.native")


def test_mpi_native_failures_are_reported_and_init_works_again(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
by_mpi = {"algorithm": "mpi.native"}
world = un.init()
tell("explained:", str(world.explain("allreduce", 8)).splitlines()[-1].split(maxsplit=1)[0])
report_error(lambda: world.allreduce(np.ones(8, "int32" if world.rank == 1 else "float32"), **by_mpi))
report_error(lambda: world.barrier(**by_mpi))
world.close()
world = un.init()
if world.rank == 1:
    await_marks(folder, 0, 2)
report_error(lambda: world.allreduce(np.ones(8), timeout_s=0.3, **by_mpi))
leave_mark(folder, world.rank)
world.close()
with un.init() as world:
    work = world.allreduce(np.ones(8), wait=False, **by_mpi)
    assert (work.wait() == 3).all()
    if world.rank == 1:
        time.sleep(0.5)
        world.abort("enough")
    report_error(lambda: world.allreduce(np.ones(8), **by_mpi))
"""
    )
    done = run("mpich", 3, program, variables={"MARKS": str(tmp_path)})
    lines = sorted(filter(None, done.stdout.split("\n")))
    kinds = [line.split()[0] for line in lines]
    counts = {kind: kinds.count(kind) for kind in kinds}
    assert counts == {
        "MismatchError": 3,
        "AbortedError": 6,
        "CollectiveTimeoutError": 3,
        "explained:": 3,
    }, done.stdout + done.stderr
    for line in lines:
        if line.startswith("MismatchError"):
            assert "rank 1 called allreduce(int32[8], op=sum, algorithm=mpi.native)" in line
        if line.startswith("CollectiveTimeoutError"):
            assert "rank 1 has not called it" in line


def test_mpi_native_survivors_of_a_killed_rank_can_go_on(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
world = un.init()
me = world.rank
world.allreduce(np.ones(4), algorithm="mpi.native")
if me == 1:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
x = np.ones(1 << 20)
def forever():
    while True:
        world.allreduce(x, algorithm="mpi.native")
report_error(forever)
smaller = world.shrink()
tell("left:", smaller.rank, smaller.size, int(smaller.allreduce(np.array(me))))
world.close()
smaller.barrier()
smaller.close()
os._exit(0)  # MPI_Finalize of Open MPI does not always end when a rank has died
"""
    )
    folder = {"OMPI_MCA_btl_sm_backing_directory": str(tmp_path)}
    done = run("openmpi", 3, program, options=("--with-ft", "ulfm"), variables=folder)
    lines = sorted(filter(None, done.stdout.split("\n")))
    assert [line.split()[0] for line in lines] == ["PeerLostError"] * 2 + ["left:"] * 2, done.stdout + done.stderr
    assert all("rank 1 died" in line for line in lines[:2]), lines
    assert lines[2:] == ["left: 0 2 2", "left: 1 2 2"]


def test_interrupt_ends_an_mpi_native_wait_and_aborts_the_others(tmp_path: Path) -> None:
    program = (
        BEGIN
        + """
with un.init() as world:
    world.barrier()
    if world.rank == 0:
        threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        try:
            world.barrier(algorithm="mpi.native")
        except KeyboardInterrupt:
            tell("interrupted")
        leave_mark(folder, "interrupted")
    else:
        await_marks(folder, "interrupted")
        report_error(lambda: world.barrier(algorithm="mpi.native"))
"""
    )
    done = run("mpich", 2, program, variables={"MARKS": str(tmp_path)})
    lines = sorted(filter(None, done.stdout.split("\n")))
    assert lines[1:] == ["interrupted"], done.stdout + done.stderr
    assert lines[0].startswith("AbortedError")


def test_mpi_native_refuses_threads_that_mpi_does_not_serve() -> None:
    program = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        + BEGIN
        + """
with un.init() as world:
    barrier = lambda: report_error(lambda: world.barrier(algorithm="mpi.native"))
    thread = threading.Thread(target=barrier)
    thread.start()
    thread.join()
    work = world.allreduce(np.ones(3), wait=False, algorithm="mpi.native")
    tell("sum", int(work.wait()[0]))
"""
    )
    done = run("mpich", 2, program)
    lines = sorted(filter(None, done.stdout.split("\n")))
    assert lines[2:] == ["sum 2"] * 2, done.stdout + done.stderr
    assert all(line.startswith("UsageError MPI was initialised for its main thread alone") for line in lines[:2])
