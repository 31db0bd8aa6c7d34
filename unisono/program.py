"""What every program of ours does first, whoever has started it and however."""

from __future__ import annotations

import signal

from unisono.streams import endure


def begin() -> None:
    """Let this process learn the exit codes of its children, and write whatever its output is; in the main thread."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    endure()
