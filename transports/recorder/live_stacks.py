"""Where each rank is in the program.

Each rank lets `faulthandler` write the stacks of its threads to a memfd when it gets SIGUSR2, unless the program uses
this signal itself (transports/recorder/stacks.py). `faulthandler` needs neither the interpreter's lock nor the thread
of the program, so it also answers for a rank that a library blocks. py-spy would show the same, but it is one more
package to install, and many systems let only root attach to a process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time

from unisono.foundation.printable import printable
from unisono.transports.recorder.live_ranks import open_memory
from unisono.transports.recorder.stacks import NAME

_ANSWER_S = 1.0
# This file is in the stacks of Unisono's own threads.
_OWN_LOOP = "transports/links/event_loop.py"
_PAUSE_S = 0.01
_MOST_NBYTES = 1 << 20


def stack(pid: int) -> str:
    """Return the stacks of the threads of a rank, as `faulthandler` writes them.

    Returns:
        The stacks, or a sentence that says why there are none.
    """
    path = next(open_memory(pid, NAME), None)
    if path is None:
        return "no stack: the process has ended, or the program handles SIGUSR2 itself"
    if not _handles_signal(pid):
        return "no stack: the program has replaced the handler of SIGUSR2"
    try:
        with open(path, "rb", buffering=0) as file:
            before = file.seek(0, os.SEEK_END)
            _signal(pid)
            _await_end(file.fileno(), before)
            file.seek(before)
            stacks = printable(file.read(_MOST_NBYTES).decode(errors="replace"))
            return _of_program(stacks) or "no stack: the process is stopped"
    except OSError as error:
        if error.errno == errno.EINVAL:
            return "no stack: the process is in another pid namespace"
        return f"no stack: {error.strerror}"


def _signal(pid: int) -> None:
    """Send SIGUSR2 to a process that /proc shows.

    /proc may be that of another pid namespace, in which the number belongs to another process. So this does not use the
    number, and the kernel refuses processes that are outside of the own namespace.
    """
    process = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY)
    try:
        signal.pidfd_send_signal(process, signal.SIGUSR2)
    finally:
        os.close(process)


def _of_program(stacks: str) -> str:
    """Return the stacks without those of threads that Unisono has started."""
    threads = stacks.strip().split("\n\n")
    return "\n\n".join(thread for thread in threads if _OWN_LOOP not in thread)


def _await_end(descriptor: int, before: int) -> None:
    """Wait until the file has grown beyond `before` and grows no more, or the time is over."""
    deadline, size = time.monotonic() + _ANSWER_S, before
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        grown = os.fstat(descriptor).st_size
        if grown > before and grown == size:
            return
        size = grown


def _handles_signal(pid: int) -> bool:
    """Return whether the process catches SIGUSR2, which would end it otherwise."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signal.SIGUSR2 - 1) & 1)
    return False
