"""Run mpi4py's own tests over Unisono and beside it over Open MPI and MPICH, and print a table.

    python scripts/mpi4py_own_tests.py [--folder FOLDER] [--sizes 1 2 3 5] [--over shm tcp openmpi] [--only comm p2p]

FOLDER is the folder `test` of mpi4py's source; by default it is downloaded to `build/`. `make mpi` makes the
environments of both MPIs. Each file runs as a job of its own with a deadline. A test has passed if it has on every
rank. It does not apply if the suite skips it, or if `mpi4py_own_tests.json` has a reason.

The table shows ``passed+failed-none``: the numbers of tests that passed, that failed, and that do not apply. Its end
names the tests that both MPIs pass and Unisono does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

VERSION = "4.1.2"
ROOT = Path(__file__).parents[1]
REASONS = Path(__file__).with_suffix(".json")
# By label: the folder of the environment of an MPI, and the options of its mpiexec.
MPIS = {
    "openmpi": (ROOT / ".mpi" / "openmpi", ("--map-by", "slot:oversubscribe", "--bind-to", "none")),
    "mpich": (ROOT / ".mpi" / "mpich", ()),
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_ORDER = ("failed", "missing", "skipped", "passed")  # the outcome of a test is the first of those of its ranks


class Row(NamedTuple):
    """A test of a job.

    Attributes:
        label: a transport of Unisono, or an MPI.
        outcome: "passed", "failed", or "none" if the test does not apply.
        text: why it failed or does not apply.
    """

    label: str
    file: str
    size: int
    test: str
    outcome: str
    text: str


class _Recorder(unittest.TextTestResult):
    """Writes the outcome of each test to a file, at once."""

    file: Any

    def _note(self, test: Any, outcome: str, text: str = "") -> None:
        self.file.write(json.dumps([test.id(), outcome, text[-2000:]]) + "\n")
        self.file.flush()

    def startTest(self, test: Any) -> None:  # noqa: N802
        super().startTest(test)
        self._note(test, "missing")

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped", reason)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, "failed", self._exc_info_to_string(err, test))

    addFailure = addError  # noqa: N815

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.addError(test, err)


def run_file(folder: Path, name: str, output: Path, is_ours: bool) -> None:
    """Run a file of tests in this process, which is one rank."""
    if is_ours:
        from unisono.compat.mpi4py import hook

        hook.install()
    sys.path.insert(0, str(folder))
    os.chdir(folder)
    for absent in ("cupy", "numba"):
        sys.modules[absent] = None  # type: ignore[assignment]
    from mpi4py import MPI

    if is_ours:
        _add_private_names()
    with (output / f"rank{MPI.COMM_WORLD.rank}").open("w") as file:
        _Recorder.file = file
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        with open(os.devnull, "w") as nowhere:
            unittest.TextTestRunner(nowhere, resultclass=_Recorder).run(suite)


def _add_private_names() -> None:
    """Add the private names of mpi4py that its tests read before they test anything else."""
    from unisono.compat.mpi4py.util import pkl5

    pkl5._BigMPI = type("_BigMPI", (), {"blocksize": 0})  # type: ignore[attr-defined]
    pkl5._bigmpi = pkl5._BigMPI()  # type: ignore[attr-defined]
    from unisono.compat.mpi4py import futures
    from unisono.compat.mpi4py.futures import pool, tasks

    names = {"SharedPool": pool.shared, "MAIN_RUN_NAME": tasks.MAIN_RUN_NAME, "comm_split": pool.comm_split}
    futures._core = types.SimpleNamespace(**names, RemoteTraceback=tasks.RemoteTraceback)  # type: ignore[attr-defined]


def outcomes(words: list[str], size: int, limit_s: float, environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the outcome and the text of each test of a job."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*words, "--output", folder], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            stderr = process.communicate(timeout=limit_s)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            stderr = "the job did not end in time\n" + process.communicate()[1]
        results: dict[str, tuple[str, str]] = {}
        for rank in range(size):
            path = Path(folder, f"rank{rank}")
            mine = {}
            for line in path.read_text().splitlines() if path.exists() else ():
                test, outcome, text = json.loads(line)
                if mine.get(test, ("missing",))[0] != "failed":
                    mine[test] = outcome, text
            for test, (outcome, text) in mine.items():
                old = results.get(test)
                if old is None or _ORDER.index(outcome) < _ORDER.index(old[0]):
                    results[test] = outcome, f"rank {rank}: {text}" if text else stderr[-2000:] * (outcome == "missing")
        return results or {"(file)": ("failed", stderr[-3000:])}


def command(label: str, name: str, size: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command and the environment of a job."""
    words = [__file__, "--folder", str(folder), "--rank", name]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).strip(":")}
    if label not in MPIS:
        environ |= {"UNISONO_TRANSPORTS": label, "UNISONO_TIMEOUT_S": "200"}
        unisono = [sys.executable, "-m", "unisono", "run", "-n", str(size), "--mpi4py"]
        runner = ["-m", "mpi4py.futures"] if name == "test_futures" and size > 1 else []
        return [*unisono, *runner, *words, "--ours"], environ
    place, options = MPIS[label]
    launcher = [str(place / "bin" / "mpiexec"), "-n", str(size), *options, str(place / "bin" / "python")]
    return [*launcher, *words], environ | _AS_ROOT


def rows_of(label: str, name: str, size: int, results: dict[str, tuple[str, str]]) -> Iterator[Row]:
    """Yield the row of each test of a job."""
    reasons = json.loads(REASONS.read_text()) if label not in MPIS else {}
    for test, (outcome, text) in results.items():
        reason = next((why for part, why in reasons.items() if test.startswith(part)), "")
        kind = {"passed": "passed", "skipped": "none"}.get(outcome, "none" if reason else "failed")
        yield Row(label, name, size, test, kind, reason or text)


def cell(rows: list[Row]) -> str:
    """Return the cell of a table: the numbers of tests that passed, failed and do not apply."""
    counts = Counter(row.outcome for row in rows)
    return f"{counts['passed']}" + "".join(
        f"{sign}{counts[outcome]}" for outcome, sign in (("failed", "+"), ("none", "-")) if counts[outcome]
    )


def table(rows: list[Row], labels: list[str]) -> Iterator[str]:
    """Yield the lines of the table in Markdown, a line for each file, with the tests of all sizes together."""
    cells: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        cells[row.file, row.label].append(row)
        cells["all", row.label].append(row)
    yield f"| file | {' | '.join(labels)} |"
    yield f"|---|{'---|' * len(labels)}"
    for name in [*sorted({row.file for row in rows}), "all"]:
        yield f"| `{name}` | {' | '.join(cell(cells[name, label]) for label in labels)} |"


def behind(rows: list[Row]) -> Iterator[str]:
    """Yield the tests that both MPIs pass and a transport of Unisono does not, although they apply."""
    outcomes = {(row.label, row.size, row.test): row.outcome for row in rows}
    jobs = {(row.label, row.file, row.size) for row in rows if row.label not in MPIS}
    for row in rows:
        if any(outcomes.get((label, row.size, row.test)) != "passed" for label in MPIS) or row.label != "mpich":
            continue
        for label in sorted(label for label, file, size in jobs if (file, size) == (row.file, row.size)):
            if outcomes.get((label, row.size, row.test), "failed") == "failed":
                yield f"{row.test} at {row.size} over {label}"


def downloaded() -> Path:
    """Return the folder of the tests, after its download."""
    place = ROOT / "build" / "mpi4py-own-tests"
    folder = place / f"mpi4py-{VERSION}"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--no-binary=:all:", f"--dest={place}", f"mpi4py=={VERSION}"], check=True)
        with tarfile.open(place / f"mpi4py-{VERSION}.tar.gz") as archive:
            archive.extractall(place, filter="data")
    return folder / "test"


def main() -> None:
    """Run the jobs, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 3, 5])
    here = [label for label, (place, _) in MPIS.items() if place.exists()]
    parser.add_argument("--over", nargs="+", default=["shm", "tcp", *here], help="transports, openmpi and mpich")
    parser.add_argument("--only", nargs="+", default=[], help="parts of names of files")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds for each job")
    parser.add_argument("--json", type=Path, help="write the outcome of each test to this file")
    parser.add_argument("--with", dest="earlier", type=Path, nargs="+", default=[], help="earlier outcomes to add")
    parser.add_argument("--show", action="store_true", help="show why tests fail")
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = (options.folder or downloaded()).resolve()
    if options.rank:
        run_file(options.folder, options.rank, options.output, options.ours)
        return
    rows = [Row(*row) for path in options.earlier for row in json.loads(path.read_text())]
    names = sorted(path.stem for path in options.folder.glob("test_*.py"))
    names = [name for name in names if not options.only or any(part in name for part in options.only)]
    for name, size, label in itertools.product(names, options.sizes, options.over):
        words, environ = command(label, name, size, options.folder)
        of_job = list(rows_of(label, name, size, outcomes(words, size, options.limit_s, environ)))
        sys.stdout.write(f"{label:8} {name:24} {size}  {cell(of_job)}\n")
        for row in of_job:
            if options.show and row.outcome == "failed":
                sys.stdout.write(f"--- {row.test}\n{row.text}\n")
        sys.stdout.flush()
        rows = list({(row.label, row.size, row.test): row for row in [*rows, *of_job]}.values())  # a later one counts
        if options.json:
            options.json.write_text(json.dumps(rows, indent=0))
    lines = table(rows, list(dict.fromkeys(row.label for row in rows)))
    late = list(behind(rows))
    sys.stdout.write("\n".join([*lines, f"both MPIs pass {len(late)} tests that Unisono does not", *late, ""]))


if __name__ == "__main__":
    main()
elif __name__ == "__worker__":  # a worker of mpi4py.futures
    _add_private_names()
