"""Lets other processes of the user see where this process is in the program: `unisono top --stacks`.

`faulthandler` writes the stacks of all threads to a memfd when the process gets SIGUSR2. A program that handles SIGUSR2
itself keeps it.
"""

from __future__ import annotations

import os
import signal

# The name of the memory in /proc.
NAME = "unisono-stacks"
# The memory, which stays open until the process ends; None before `offer_stacks`.
_memory: int | None = None


def offer_stacks() -> None:
    """Let SIGUSR2 write the stacks of this process, unless it does something else already. A second call does nothing.

    It needs a descriptor. If there is none, nothing is offered, because no call depends on it.
    """
    global _memory  # noqa: PLW0603 - it belongs to the process, like the signal
    if _memory is not None or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return
    try:
        _memory = os.memfd_create(NAME, os.MFD_CLOEXEC)
    except OSError:
        return
    import faulthandler

    faulthandler.register(signal.SIGUSR2, file=_memory, all_threads=True)
