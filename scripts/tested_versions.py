"""Runs tests with several versions of a library, each in an environment of its own. Scripts beside this file use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence

from unisono.errors import UsageError


def test_versions(library: str, install: Callable[[str], str], default_tests: Sequence[str]) -> None:
    """Run the tests with each version that ``sys.argv`` names, and print the outcomes; exit with 1 if tests failed.

    Args:
        library: its name.
        install: creates the environment of a version and returns the path of its Python. It raises `UsageError` if pip
            cannot install this version here; then the version is skipped.
        default_tests: the arguments of pytest, if none follow "--" in ``sys.argv``.
    """
    outcomes = {}
    versions, _, tests = " ".join(sys.argv[1:]).partition(" -- ")
    for version in versions.split():
        _say(f"{library} {version}")
        outcomes[version] = _outcome(version, install, tests.split() or default_tests)
    for version, outcome in outcomes.items():
        _say(f"{library} {version}: {outcome}")
    sys.exit("failed" in outcomes.values())


def _outcome(version: str, install: Callable[[str], str], tests: Sequence[str]) -> str:
    """Return the outcome of the tests with a version: "passed", "failed", or "skipped" with the reason."""
    try:
        python = install(version)
    except UsageError as error:
        return f"skipped: {error}"
    command = [python, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-q", *tests]
    return "failed" if subprocess.run(command, check=False).returncode else "passed"


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
