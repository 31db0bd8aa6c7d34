"""Runs the tests that use a GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from unisono.bench.gpu_stages.records import tell
from unisono.program import begin

# Pytest plugins that are installed by chance are not loaded.
ONLY = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PLUGINS = ("-p", "pytest_timeout", "-p", "no:cacheprovider")


def main() -> int:
    """Run the tests, and print the outcome of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tests", nargs="+")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            *PLUGINS,
            "-q",
            "--continue-on-collection-errors",
            "-m",
            "gpu",
            f"--junitxml={report}",
            *options.tests,
        ]
        code = subprocess.run(command, env={**os.environ, **ONLY}, stdout=sys.stderr, check=False).returncode
        for case in ElementTree.parse(report).iter("testcase"):
            ended = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
            outcome = "passed" if ended is None else ended.tag
            message = "" if ended is None else str(ended.get("message", "")).partition("\n")[0]
            tell("test", name=f"{case.get('classname')}::{case.get('name')}", outcome=outcome, said=message)
    return code


if __name__ == "__main__":
    begin()
    sys.exit(main())
