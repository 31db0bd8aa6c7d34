"""A plugin of pytest that writes a record of each test when it ends, so that a deadline loses only the test that runs.

The environment variable `VARIABLE` names the descriptor to write to, because pytest captures the standard output.
"""

from __future__ import annotations

import json
import os
from typing import Any

VARIABLE = "BENCH_OUTCOMES_FD"


def pytest_configure(config: Any) -> None:
    """Leave the records to the process that starts others, which gets their reports."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.unregister(name=__name__)


def pytest_runtest_logreport(report: Any) -> None:
    """Write the outcome of a test: after its call, or when its setup or teardown does not pass."""
    if report.when == "call" or report.outcome != "passed":
        _write(report)


def pytest_collectreport(report: Any) -> None:
    """Write the failure of a file that cannot be collected."""
    if report.outcome == "failed":
        _write(report)


def _write(report: Any) -> None:
    outcome = {"failed": "failure"}.get(report.outcome, report.outcome)
    said = "" if outcome == "passed" else _reason(report)
    record = {"kind": "test", "name": report.nodeid, "outcome": outcome, "said": said}
    os.write(int(os.environ[VARIABLE]), (json.dumps(record) + "\n").encode())


def _reason(report: Any) -> str:
    """Return the message of a failure or a skip in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longrepr
    return str(text[-1] if isinstance(text, tuple) else text).partition("\n")[0]
