"""What Unisono tells people on stderr: one logger, set up in one place.

Modules write to ``logging.getLogger("unisono")``; nothing is shown before `configure`, except warnings by Python's own
last resort.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

NAME = "unisono"


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at that moment, which notebooks and tests replace."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def configure(level: str, rank: int | None = None, size: int | None = None) -> logging.Logger:
    """Send messages of `level` ("error", "warning", "info" or "debug") and above to stderr; return the logger.

    Each line reads ``unisono [rank/size] message``, or ``unisono message`` outside a job. Calling it again changes the
    level and the rank. Handlers that the program has put on the logger are left as they are.
    """
    logger = logging.getLogger(NAME)
    handler = next((handler for handler in logger.handlers if isinstance(handler, _Stderr)), None)
    if handler is None:
        handler = _Stderr()
        logger.addHandler(handler)
        logger.propagate = False
    who = NAME if rank is None else f"{NAME} [{rank}/{size}]"
    handler.setFormatter(logging.Formatter(f"{who} %(message)s"))
    logger.setLevel(level.upper())
    return logger
