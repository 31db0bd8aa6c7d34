"""Processes that Unisono starts: commands of Python interpreters, and exit codes that are never guessed.

The kernel keeps the exit status of a child until its parent takes it, with two exceptions. A process that ignores
SIGCHLD gets no status at all; some daemons, SSH wrappers and entry points of containers start programs in this state.
And another thread of the program may take the status first, as ``os.waitpid(-1, 0)`` does. `subprocess` reports 0 in
both cases.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

# The exit code of a child whose status was lost. No process can end with this code.
LOST = 256

_PAUSE_S = 0.005
# The first statements of an interpreter that we start. With "-c", Python looks for modules in the current folder first,
# where a user may have a random.py. The folder of this copy of Unisono comes last, so that it hides no other module.
_PREPARE_PATH = "import sys; sys.path[:1] == [''] and sys.path.pop(0); sys.path.append({folder!r}); "


class Child(subprocess.Popen[bytes]):
    """A child whose `returncode` is its exit code, minus the number of the signal that killed it, or `LOST`."""

    def poll(self) -> int | None:
        """Return the `returncode` if the child has ended, and None otherwise."""
        return self._take_status(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the child has ended and return its `returncode`.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self._take_status(0 if deadline is None else os.WNOHANG)) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(_PAUSE_S)
        return code

    def _take_status(self, flags: int) -> int | None:
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:
                self.returncode = LOST
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def python_command(statement: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of an interpreter that runs `statement`, with `arguments` in ``sys.argv[1:]``.

    The interpreter imports the same copy of Unisono as this process, and no modules from the current folder.
    """
    folder = str(Path(__file__).parents[2])
    return (sys.executable, "-c", _PREPARE_PATH.format(folder=folder) + statement, *arguments)


_lock = threading.Lock()
_users = 0  # the number of blocks of `exit_statuses_kept` that run


@contextlib.contextmanager
def exit_statuses_kept() -> Iterator[None]:
    """Make the kernel keep the exit statuses of children inside the block, even if the program ignores SIGCHLD.

    It works in any thread. If the program ignores SIGCHLD, other children that end inside the block become zombies.
    """
    global _users  # noqa: PLW0603 (the disposition of a signal belongs to the whole process)
    with _lock:
        _users += 1
        _set_ignored_sigchld(signal.SIG_DFL)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                _set_ignored_sigchld(signal.SIG_IGN)


def _set_ignored_sigchld(disposition: signal.Handlers) -> None:
    """Set the disposition of SIGCHLD if the program ignores that signal, as far as Python knows.

    The C library is called, because `signal.signal` works only in the main thread and would change the result of
    `signal.getsignal` for the program.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        ctypes.CDLL(None).signal(int(signal.SIGCHLD), ctypes.c_void_p(int(disposition)))
