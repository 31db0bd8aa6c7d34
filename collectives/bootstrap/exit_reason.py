"""The reason why this process leaves a job: the exception that ends the program, if there is one.

The farewell to the other ranks carries it.
"""

from __future__ import annotations

import sys


def reason_to_leave() -> str:
    """Return the exception that ends this process, as ``ValueError: text``; an empty text if there is none."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return "" if error is None or isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
