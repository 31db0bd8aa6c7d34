"""Writes lines of commands to standard error."""

from __future__ import annotations

import sys

from unisono.foundation import streams
from unisono.foundation.printable import printable


def tell(message: str) -> None:
    """Write ``unisono: message`` to standard error."""
    streams.write(sys.stderr, f"unisono: {printable(message)}\n")
