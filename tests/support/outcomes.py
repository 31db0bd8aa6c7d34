"""What comes of calls and ranks that fail."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from support.deadlines import DEADLINE_S

import unisono as un


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """Return class and text of the error that `call` raises; both are empty if there is none.

    That is an error of Unisono, or Ctrl-C, which some tests send; others go on.
    """
    try:
        call()
    except (un.UnisonoError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error)
    return "", ""


def survivors_of_rank_1(program: str, *words: str) -> list[str]:
    """Run a program of three ranks, of which rank 1 kills itself; return what the others have written, both well.

    Each gets its rank and then `words` as arguments.
    """
    ranks = [
        subprocess.Popen([sys.executable, "-c", program, str(rank), *words], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    try:
        written = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0, -signal.SIGKILL, 0]
    return [written[0], written[2]]
