"""The first call of every program of Unisono, because programs may be started in any state."""

from __future__ import annotations

import signal

from unisono.foundation.streams import protect_standard_streams


def begin() -> None:
    """Make exit codes of children available and standard streams robust. Call it in the main thread."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    protect_standard_streams()
