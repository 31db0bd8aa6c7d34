"""Runs the tests that use a GPU. A plugin prints the outcome of each test when it ends."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from unisono.bench.gpu_stages.outcomes import VARIABLE
from unisono.program import begin

# Pytest plugins that are installed by chance are not loaded.
ONLY = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PLUGINS = ("-p", "pytest_timeout", "-p", "no:cacheprovider", "-p", "unisono.bench.gpu_stages.outcomes")


def main() -> int:
    """Run the tests, and return the exit code of pytest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="+")
    options = parser.parse_args()
    flags = ("-q", "--continue-on-collection-errors", "-m", "gpu")
    output = os.dup(sys.stdout.fileno())  # pytest's own standard output is another one
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *flags, *options.tests],
        env={**os.environ, **ONLY, VARIABLE: str(output)},
        stdout=sys.stderr,
        pass_fds=[output],
        check=False,
    ).returncode


if __name__ == "__main__":
    begin()
    sys.exit(main())
