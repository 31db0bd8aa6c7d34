#!/usr/bin/env python3
"""Run Horovod's own tests over `unisono.compat.horovod`: those for torch, or with an argument for TensorFlow.

The tests come with Horovod's source distribution 0.19.5, which pip downloads to ``.torch/horovod``. Later ones contain
no tests. The import is changed, and stand-ins take the place of what Python and the frameworks have removed since. Each
rank runs all tests, in one job; a test passes if it passes on all ranks.

The exit code is 1 if a test fails that is not among the expected ones of `SUITES`, or if one of these passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import types
import unittest
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from unisono.compat.horovod import job
from unisono.compat.horovod.errors import HorovodInternalError
from unisono.compat.horovod.objects import allgather_object

FOLDER = Path(".torch/horovod")
VERSION = "0.19.5"


class Suite(NamedTuple):
    """The tests of a framework.

    Attributes:
        files: the files of the tests.
        lines: what the files import or call that no longer exists, and what takes its place.
        expected: by the name of a test that does not apply, the reason.
    """

    files: tuple[str, ...]
    lines: dict[str, str]
    expected: dict[str, str]


_AVERAGES = (
    "from 0.21 on, the gradient of an allgather or a broadcast is the average over ranks, and the test wants the sum"
)
# Horovod's Adasum needs MPI and mostly a GPU; ours needs neither.
LINES_OF_ADASUM = {
    "if not hvd.mpi_enabled() or not torch.cuda.is_available():": "if False:",
    "if not hvd.mpi_enabled():": "if False:",
    "torch.device('cuda:{}'.format(hvd.local_rank()))": "torch.device('cpu')",
}
SUITES = {
    "torch": Suite(
        ("test_torch.py", "test_adasum_pytorch.py"),
        {
            "import horovod.torch as hvd": "import unisono.compat.horovod.torch as hvd",
            "from horovod.torch.mpi_ops import synchronize": "from unisono.compat.horovod.torch import synchronize",
            "from distutils.version import LooseVersion": (
                "from torch.torch_version import TorchVersion as LooseVersion"
            ),
            "inspect.getargspec": "inspect.getfullargspec",
            "torch.FatalError": "RuntimeError",
            "np.alltrue": "np.all",
            # An optimizer of torch that is newer than the tests, and only takes matrices.
            "subclass != torch.optim.LBFGS": "subclass not in (torch.optim.LBFGS, torch.optim.Muon)",
            # Integers divided by integers were integers.
            ".sub(tensor_a * (size - 1) / size)": ".sub((tensor_a * (size - 1) / size).to(tensor_a.dtype))",
            ".sub(tensor_b * (size - 1) / size)": ".sub((tensor_b * (size - 1) / size).to(tensor_b.dtype))",
        },
        {
            "test_horovod_allgather_grad": _AVERAGES,
            "test_horovod_broadcast_grad": _AVERAGES,
            "test_broadcast_state_no_grad": "it changes no gradient, and Horovod's sets them to 0",
            "test_dynamic_requires_grad": "a parameter without a gradient has None, as in torch 2, and not zeros",
        },
    ),
    "tensorflow": Suite(
        ("test_tensorflow.py", "test_tensorflow2_keras.py"),
        {
            "import horovod.tensorflow as hvd": "import unisono.compat.horovod.tensorflow as hvd",
            "import horovod.tensorflow.keras as hvd": "import unisono.compat.horovod.tensorflow.keras as hvd",
            "from horovod.tensorflow.util import _executing_eagerly, _has_eager": (
                "_executing_eagerly, _has_eager, config = tf.executing_eagerly, True, None"
            ),
            "hvd.util._executing_eagerly": "_executing_eagerly",
            # In eager mode, errors are those of Horovod for torch; in a graph, TensorFlow makes its own of them.
            "self.assertRaises(tf.errors.FailedPreconditionError)": (
                "self.assertRaises(hvd.HorovodInternalError if _executing_eagerly() else tf.errors.UnknownError)"
            ),
            # Keras 3 has these no longer.
            "keras.losses.mean_squared_error": "keras.losses.MeanSquaredError()",
            "keras.metrics.categorical_accuracy": "keras.metrics.CategoricalAccuracy()",
            "lr=0.0001": "learning_rate=0.0001",
            "model.add(keras.layers.ThresholdedReLU(0.5))": "",
            ", input_length=10": "",
            "experimental_run_tf_function=False": "",
        },
        {"test_horovod_allgather_grad_cpu": _AVERAGES, "test_horovod_broadcast_grad_cpu": _AVERAGES},
    ),
}


def fetched() -> Path:
    """Download the tests, if they are not there yet, and return their folder."""
    folder = FOLDER / VERSION
    if folder.is_dir():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "horovod"]
    subprocess.run([*download, "--dest", str(FOLDER), f"horovod=={VERSION}"], check=True)
    folder.mkdir()
    with tarfile.open(FOLDER / f"horovod-{VERSION}.tar.gz") as archive:
        for name in (name for suite in SUITES.values() for name in suite.files):
            member = archive.extractfile(f"horovod-{VERSION}/test/{name}")
            assert member is not None
            (folder / name).write_bytes(member.read())
    return folder


def cases(suite: Suite, folder: Path) -> list[Any]:
    """Return the test cases of all files of a suite."""
    common = types.ModuleType("common")  # the distribution lacks this module
    common.__dict__.update(
        mpi_env_rank_and_size=lambda: (int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])),
        temppath=_unused_path,
    )
    sys.modules["common"] = common
    found = []
    ranks = int(os.environ["UNISONO_SIZE"])
    for name in suite.files:
        if "adasum" in name and ranks & (ranks - 1):
            continue  # an Adasum needs 2, 4, 8, … ranks
        source = (folder / name).read_text()
        for line, instead in {**suite.lines, **(LINES_OF_ADASUM if "adasum" in name else {})}.items():
            source = source.replace(line, instead)
        module = types.ModuleType(name.removesuffix(".py"))
        exec(compile(source, str(folder / name), "exec"), module.__dict__)
        found += [case for case in vars(module).values() if isinstance(case, type)]
    return [case for case in found if issubclass(case, unittest.TestCase) and case is not unittest.TestCase]


@contextlib.contextmanager
def _unused_path() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield str(Path(folder, "file"))


class Outcomes(unittest.TestResult):
    """The outcome of each test: "passed", "skipped: …", or its error."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, str] = {}

    def startTest(self, test: Any) -> None:  # noqa: N802
        job.init()
        super().startTest(test)

    def stopTest(self, test: Any) -> None:  # noqa: N802
        with contextlib.suppress(HorovodInternalError):  # raised if a test has failed on some ranks
            allgather_object(None, name=f"end of {test}")
        job.shutdown()  # so that no call of this test is in the way of the next one
        super().stopTest(test)

    def addSuccess(self, test: Any) -> None:  # noqa: N802
        self.outcomes.setdefault(test._testMethodName, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        # TensorFlow runs some tests twice, as subtests in a graph and in eager mode.
        self.outcomes.setdefault(getattr(test, "test_case", test)._testMethodName, f"skipped: {reason}")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:  # noqa: N802
        if err is not None:
            self.addError(test, err)

    def addError(self, test: Any, err: Any) -> None:  # noqa: N802
        self.outcomes[test._testMethodName] = f"{err[0].__name__}: {err[1]} ({self._place(err[2])})"

    addFailure = addError  # noqa: N815

    def _place(self, traceback: Any) -> str:
        while traceback.tb_next is not None and "test_" not in traceback.tb_frame.f_code.co_name:
            traceback = traceback.tb_next
        return f"line {traceback.tb_lineno}"


def run(suite: Suite, word: str, folder: Path) -> None:
    """Run the tests of this rank, and write their outcomes to a file for each rank."""
    os.environ["HOROVOD_RANK"] = os.environ["UNISONO_RANK"]  # as under horovodrun with Gloo
    os.environ["HOROVOD_SIZE"] = os.environ["UNISONO_SIZE"]
    warnings.filterwarnings("ignore")
    result = Outcomes()
    for case in cases(suite, fetched()):
        names = unittest.TestLoader().getTestCaseNames(case)
        unittest.TestSuite(case(name) for name in names if re.search(word, name)).run(result)
    (folder / os.environ["UNISONO_RANK"]).write_text(json.dumps(result.outcomes))


def run_ranks(framework: str, word: str, ranks: int) -> dict[str, list[str]]:
    """Run the tests on all ranks; return the outcomes of each rank by test."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python_with(framework), "-m", "unisono", "run", "-n", str(ranks), __file__]
        words = [framework, "--run", folder, "-k", word]
        variables = {"OMP_NUM_THREADS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10", "TF_CPP_MIN_LOG_LEVEL": "3"}
        variables["TF_NUM_INTEROP_THREADS"] = "64"  # because each call of a session blocks a thread
        ended = subprocess.run([*command, *words], env={**os.environ, **variables}, check=False)
        if ended.returncode:
            raise SystemExit(f"the tests ended with exit code {ended.returncode}")
        of_ranks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    return {name: [outcomes.get(name, "not run") for outcomes in of_ranks] for name in of_ranks[0]}


def python_with(framework: str) -> str:
    """Return a Python with a framework: this one, or that of `make tensorflow`."""
    if framework != "tensorflow":
        return sys.executable
    python = Path(".tensorflow", "bin", "python")
    if not python.exists():
        raise SystemExit("TensorFlow is not installed: run `make tensorflow` first")
    return str(python.absolute())


def say(line: str) -> None:
    """Write a line for the user."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run the tests and compare their outcomes with what is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", nargs="?", default="torch", choices=list(SUITES))
    parser.add_argument("-k", dest="word", default="", help="only tests whose name matches this pattern")
    parser.add_argument("-n", "--ranks", type=int, default=2)
    parser.add_argument("--run", metavar="FOLDER", help="run the tests of this rank, and write the outcomes there")
    options = parser.parse_args()
    if options.run:
        return run(SUITES[options.framework], options.word, Path(options.run))
    fetched()
    expected_failures = SUITES[options.framework].expected
    outcomes = run_ranks(options.framework, options.word, options.ranks)
    failures = {name: of_ranks for name, of_ranks in outcomes.items() if not _is_good(of_ranks)}
    for name, of_ranks in outcomes.items():
        if name in failures:
            say(f"{name}: {expected_failures.get(name) or ' | '.join(of_ranks)}")
        elif of_ranks[0] != "passed":
            say(f"{name}: {of_ranks[0]}")
    skipped = sum(of_ranks[0].startswith("skipped") for of_ranks in outcomes.values())
    passed = len(outcomes) - skipped - len(failures)
    expected = len(failures.keys() & expected_failures.keys())
    others = len(failures) - expected
    say(f"{passed} passed, {skipped} skipped, {expected} do not apply, {others} failed, with {options.ranks} ranks")
    passing = [name for name in expected_failures if outcomes.get(name, [""])[0] == "passed"]
    for name in passing:
        say(f"{name}: passes, but is expected to fail")
    sys.exit(bool(failures.keys() - expected_failures.keys() or passing))


def _is_good(of_ranks: list[str]) -> bool:
    return all(outcome == "passed" or outcome.startswith("skipped") for outcome in of_ranks)


if __name__ == "__main__":
    main()
