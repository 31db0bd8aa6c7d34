"""Becomes a rank: ties this process to its launcher, pins it to a core, and executes the rank's command in its place.

Run by path as ``python -I -S exec_rank.py LAUNCHER_PID CORE COMMAND…`` (CORE is -1 for no binding). It is a program of
its own, and not a `preexec_fn` of `subprocess`, because that would run Python code in the fork of a process that may
have threads. Both settings survive `execve`. It imports the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def become(launcher: int, core: int, command: list[str]) -> None:
    """Execute `command` in place of this process; returns never, or exits with 126 or 127 as a shell does."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:  # It died before prctl took effect, so no signal will come.
        sys.exit(1)
    if core >= 0:
        os.sched_setaffinity(0, {core})
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the command would inherit that.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"unisono: cannot start {command[0]!r}: {error.strerror}\n")
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    become(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
