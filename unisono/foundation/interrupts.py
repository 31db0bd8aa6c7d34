"""Ctrl-C while a command of Unisono imports its modules, or ends.

Python raises KeyboardInterrupt between any two statements. During imports, code of other modules may show it as a
traceback, drop it, or turn it into another error. So Ctrl-C ends the process at once in these phases, because nothing
has been started that must be closed. In all other phases it raises KeyboardInterrupt.

This module imports little, because Ctrl-C shows a traceback until it has been imported.
"""

from __future__ import annotations

import os
import signal
import sys

# The exit code of a command that Ctrl-C has ended.
INTERRUPTED = 130


def end_process() -> None:
    """Let Ctrl-C end the process at once with code 130, if it raises KeyboardInterrupt now.

    It does not change how a program handles SIGINT, or ignores it, as in the background of a shell. A thread other
    than the main thread cannot change it either.
    """
    _replace(signal.default_int_handler, _end)


def raise_error() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, after `end_process`."""
    _replace(_end, signal.default_int_handler)


def _replace(present: object, other: object) -> None:
    if signal.getsignal(signal.SIGINT) is present:
        try:  # noqa: SIM105 (contextlib takes as long to import as all of this)
            signal.signal(signal.SIGINT, other)  # type: ignore[arg-type]
        except ValueError:  # This is not the main thread.
            pass


def _end(*_: object) -> None:
    try:
        if sys.__stderr__ is not None:
            os.write(sys.__stderr__.fileno(), b"unisono: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
