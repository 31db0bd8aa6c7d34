"""Records of a stage: lines of JSON on standard output."""

from __future__ import annotations

import json
import sys
from typing import Any

LONGEST = 200


def tell(kind: str, **fields: Any) -> None:
    """Print a record with these fields."""
    sys.stdout.write(json.dumps({"kind": kind, **fields}) + "\n")
    sys.stdout.flush()


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure in one line of moderate length."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:LONGEST]
