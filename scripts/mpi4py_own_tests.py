"""Run mpi4py's own tests over Unisono, or over a real MPI, and print a table.

    python scripts/mpi4py_own_tests.py [--folder FOLDER] [--sizes 1 2 3 5] [--transports auto tcp] [--only comm p2p]

FOLDER is the folder `test` of mpi4py's source; by default it is downloaded to `build/`.
Each of its files runs as a job of its own with a deadline. A test has
passed if it has on every rank. `mpi4py_own_tests.json` says why tests do not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERSION = "4.1.2"
REASONS = Path(__file__).with_suffix(".json")
_ORDER = ("failed", "missing", "skipped", "passed")  # the outcome of a test is the first of those of its ranks


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

    with (output / f"rank{MPI.COMM_WORLD.rank}").open("w") as file:
        _Recorder.file = file
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        with open(os.devnull, "w") as nowhere:
            unittest.TextTestRunner(nowhere, resultclass=_Recorder).run(suite)


def outcomes(command: list[str], size: int, limit_s: float, environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Return the outcome and the text of each test of a job."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [*command, "--output", folder], env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
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


def jobs(options: argparse.Namespace) -> Iterator[tuple[str, str, int, list[str], dict[str, str]]]:
    """Return the label, the file, the size, the command and the environment of each job."""
    names = sorted(path.stem for path in options.folder.glob("test_*.py"))
    names = [name for name in names if not options.only or any(part in name for part in options.only)]
    for name in names:
        for size in options.sizes:
            rank = [__file__, "--folder", str(options.folder), "--rank", name]
            if options.mpiexec:
                yield "MPI", name, size, [options.mpiexec, "-n", str(size), options.python, *rank], dict(os.environ)
                continue
            for transport in options.transports:
                environ = {**os.environ, "UNISONO_TRANSPORTS": transport, "UNISONO_TIMEOUT_S": "20"}
                unisono = [sys.executable, "-m", "unisono", "run", "-n", str(size)]
                yield transport, name, size, [*unisono, *rank, "--ours"], environ


def downloaded() -> Path:
    """Return the folder of the tests, after its download."""
    place = REASONS.parents[1] / "build" / "mpi4py-own-tests"
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
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3, 5])
    parser.add_argument("--transports", nargs="+", default=["auto", "tcp"])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--limit-s", type=float, default=60.0)
    parser.add_argument("--mpiexec", default="", help="run over the MPI of this command instead")
    parser.add_argument("--python", default=sys.executable, help="the Python whose mpi4py --mpiexec runs")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--ours", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = (options.folder or downloaded()).resolve()
    if options.rank:
        run_file(options.folder, options.rank, options.output, options.ours)
        return
    reasons = json.loads(REASONS.read_text()) if REASONS.exists() else {}
    total: Counter[str] = Counter()
    rows = []
    for label, name, size, command, environ in jobs(options):
        results = outcomes(command, size, options.limit_s, environ)
        counts: Counter[str] = Counter()
        for test, (outcome, text) in results.items():
            reason = next((why for part, why in reasons.items() if test.startswith(part)), None)
            kind = "does not apply" if reason and outcome != "passed" else outcome
            counts[kind] += 1
            rows.append([label, name, size, test, kind, reason or text])
            if options.show and kind in {"failed", "missing"}:
                sys.stdout.write(f"--- {label} {size} {test}: {kind}\n{text}\n")
        total += counts
        sys.stdout.write(f"{label:6} {name:24} {size}  {dict(counts)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"total: {dict(total)}\n")
    if options.output:
        options.output.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
