"""Why this process leaves a job: what the other ranks are told."""

from __future__ import annotations

import sys


def reason_to_leave() -> str:
    """Return the error because of which this process leaves, or an empty text if it leaves well."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
