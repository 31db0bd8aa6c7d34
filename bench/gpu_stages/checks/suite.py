"""Runs the tests that use a GPU. A plugin prints the outcome of each test when it ends.

The driver may leave files of events that processes share in `SHARED_MEMORY` after a SIGKILL. A record counts them.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from unisono.bench.gpu_stages.checks.outcomes import VARIABLE
from unisono.bench.gpu_stages.results.records import tell
from unisono.foundation.program import begin

# Pytest plugins that are installed by chance are not loaded.
ONLY = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PLUGINS = ("-p", "pytest_timeout", "-p", "no:cacheprovider", "-p", "unisono.bench.gpu_stages.checks.outcomes")
SHARED_MEMORY = Path("/dev/shm")


def left_files() -> set[str]:
    """Return the names of the driver's files in the shared memory."""
    return {path.name for path in SHARED_MEMORY.glob("cuda.shm.*")}


def side_by_side(workers: int) -> tuple[str, ...]:
    """Return the arguments by which pytest begins tests in order, `workers` at a time; none without pytest-xdist."""
    if workers < 2 or importlib.util.find_spec("xdist") is None:
        return ()
    return ("-p", "xdist", "-n", str(workers), "--maxschedchunk", "1")


def main() -> int:
    """Run the tests, and return the exit code of pytest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--timeout", help="the seconds after which a test has failed")
    parser.add_argument("--workers", type=int, default=1, help="the number of tests that run at a time")
    options = parser.parse_args()
    flags = ("-q", "--continue-on-collection-errors", "-m", "gpu", *side_by_side(options.workers))
    limit = ("--timeout", options.timeout) if options.timeout else ()
    output = os.dup(sys.stdout.fileno())  # pytest's own standard output is another one
    before = left_files()
    code = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *flags, *limit, *options.tests],
        env={**os.environ, **ONLY, VARIABLE: str(output)},
        stdout=sys.stderr,
        pass_fds=[output],
        check=False,
    ).returncode
    tell("left", name=f"files of the driver in {SHARED_MEMORY}", value=str(len(left_files() - before)))
    return code


if __name__ == "__main__":
    begin()
    sys.exit(main())
