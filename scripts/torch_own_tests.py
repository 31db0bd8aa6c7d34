#!/usr/bin/env python3
"""Run torch's own distributed tests over the backends "gloo" and "unisono".

torch installs these tests as ``torch.testing._internal.distributed.distributed_test``. They take a backend by its name,
and some of them run for "gloo" only. Here all tests that run for Gloo run for Unisono too.

The exit code is 1 if a test passes over Gloo and fails over Unisono, except those in `EXPECTED`, or if a test of
`EXPECTED` passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

from unisono.bench.peers import make_environment

FOLDER = Path(".torch/own-tests")
# Packages that torch's tests import and torch does not install.
LIBRARIES = ("expecttest==0.3.0",)
BACKENDS = ("gloo", "unisono")
MODULE = "torch.testing._internal.distributed.distributed_test"
# Lines of torch's module that recognise backends, and what takes their place.
LINES = {'BACKEND = os.environ["BACKEND"]': "BACKEND = _BACKEND", "check(dist.Backend(BACKEND))": "check(BACKEND)"}
# By the name of a test that passes over Gloo and fails over Unisono: the reason.
_MONITORED = "up to version 2.13 torch asks for Gloo by its name there; un.torch.monitored_barrier does the same"
EXPECTED = {
    "test_monitored_barrier_gloo": _MONITORED,
    "test_monitored_barrier_gloo_rank_0_timeout": _MONITORED,
    "test_monitored_barrier_gloo_subgroup": _MONITORED,
}


class LikeGloo(str):
    """The name of a backend that also equals "gloo", so that torch's tests treat both alike."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == other or other == "gloo"

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash("gloo")


def tests_for(backend: str) -> Any:
    """Return torch's test case for a backend."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    for line, instead in LINES.items():
        assert line in source, f"{spec.origin} has no line {line!r}, as it had in torch 2.13"
        source = source.replace(line, instead)
    module = types.ModuleType(MODULE)
    module.__file__ = spec.origin
    sys.modules[MODULE] = module
    module.__dict__["_BACKEND"] = LikeGloo(backend)
    exec(compile(source, spec.origin, "exec"), module.__dict__)

    class Forked(module.TestDistBackend, module.DistributedTest._DistTestBase):  # type: ignore[misc,name-defined]
        """Torch's tests, whose ranks are forked, because imports would take most of their time."""

        def setUp(self) -> None:
            import torch

            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


class TorchOutcomes(unittest.TestResult):
    """The outcome of each test: "passed", "skipped", or the last lines of its error."""

    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def _write(self, test: Any, outcome: str) -> None:
        json.dump([test._testMethodName, outcome], self._file)
        self._file.write("\n")
        self._file.flush()

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self._write(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._write(test, "skipped")

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self._write(test, f"{err[0].__name__}: {err[1]}")

    addFailure = addError  # noqa: N815


def run(backend: str, word: str, ranks: int, outcomes: Path) -> None:
    """Run the tests whose name contains a word, in this process and forked ones; write their outcomes to a file."""
    os.environ.update(BACKEND=backend, WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1")
    case = tests_for(backend)
    suite = unittest.TestSuite(case(name) for name in unittest.TestLoader().getTestCaseNames(case) if word in name)
    with outcomes.open("w") as file:
        suite.run(TorchOutcomes(file))


def run_apart(backend: str, word: str, ranks: int) -> dict[str, str]:
    """Run the tests in a process of their own; return the outcomes by test."""
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder, "outcomes"), Path(folder, "log")
        python = str(FOLDER.absolute() / "bin" / "python")
        command = [python, __file__, "-k", word, "--ranks", str(ranks), "--run", backend, str(file)]
        with log.open("w") as output:
            ended = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
        if ended.returncode:
            raise SystemExit(f"torch's tests over {backend} ended with {ended.returncode}:\n{log.read_text()[-4000:]}")
        return dict(json.loads(line) for line in file.read_text().splitlines())


def say(line: str) -> None:
    """Write a line for the user."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the tests over both backends and compare the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="word", default="", help="only tests whose name contains this word")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--run", nargs=2, metavar=("BACKEND", "FILE"), help="write the outcomes for one backend")
    options = parser.parse_args()
    if options.run:
        return run(options.run[0], options.word, options.ranks, Path(options.run[1]))
    make_environment(FOLDER, LIBRARIES, sees=sysconfig.get_path("purelib"))
    outcomes = {backend: run_apart(backend, options.word, options.ranks) for backend in BACKENDS}
    for backend, of_backend in outcomes.items():
        passed, skipped = (sum(outcome == word for outcome in of_backend.values()) for word in ("passed", "skipped"))
        failed = len(of_backend) - passed - skipped
        say(f"{backend}: {passed} passed, {skipped} skipped, {failed} failed, with {options.ranks} ranks")
    failures = {
        name: outcome for name, outcome in outcomes["unisono"].items() if outcomes["gloo"][name] == "passed" != outcome
    }
    for name, outcome in failures.items():
        say(f"{name}: {EXPECTED.get(name) or outcome}")
    passing = [name for name in EXPECTED if outcomes["unisono"].get(name) == "passed"]
    for name in passing:
        say(f"{name}: passes, but is expected to fail")
    sys.exit(bool(failures.keys() - EXPECTED.keys() or passing))


if __name__ == "__main__":
    main()
