"""`spawn`: a running job starts another job by ``unisono run``, and both meet. The new job calls `parent`.

The job that spawns opens a port. The new job finds the name of the port in the variable ``UNISONO_PARENT``.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Sequence

from unisono.collectives.bootstrap.bridge import Bridge, Port, connect
from unisono.collectives.bootstrap.init import open_world
from unisono.collectives.communicator import Communicator
from unisono.errors import RendezvousError, UsageError
from unisono.foundation import log
from unisono.foundation.processes import Child, python_command
from unisono.options import PARENT

_MAIN = "import sys; from unisono.cli.entry import command; sys.exit(command())"
_END_S = 10.0

_log = log.get("launcher")


def spawn(
    command: Sequence[str], ranks: int, world: Communicator | None = None, *, timeout_s: float | None = None
) -> Bridge:
    """Start a new job on the host of rank 0, and return the bridge to it. All ranks of `world` call this.

    Rank 0 runs ``unisono run -n ranks command`` as a child, with its own environment and standard streams. The program
    calls `parent`, or this call fails. Afterwards the jobs are independent: each one ends by itself. Rank 0 logs a
    warning if the new job fails.

    Args:
        command: the program and its arguments, as after ``unisono run -n 2``: ``["worker.py", "--steps", "5"]``.
        ranks: the number of ranks of the new job.
        world: the communicator whose ranks meet the new job; by default the open world of this process.
        timeout_s: seconds until the new job must have called `parent`; by default the option `rendezvous_timeout_s`.

    Raises:
        UsageError: `command` is no list of texts, or `ranks` is no positive number.
        RendezvousError: the new job ended before it called `parent`, or did not call it in time. It is ended then.
    """
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        raise UsageError(f"command must be a list of texts, such as ['worker.py', '--steps', '5'], not {command!r}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise UsageError(f"ranks must be a number of ranks, at least 1, not {ranks!r}")
    world = open_world() if world is None else world
    with Port(world) as port:
        child = _started(command, ranks, port.name) if world.rank == 0 else None
        try:
            bridge = port.accept_while(lambda: _check(child), timeout_s)
        except BaseException:
            if child is not None:
                _end(child)
            raise
    if child is not None:
        threading.Thread(target=_await, args=(child,), name="unisono-spawned", daemon=True).start()
    return bridge


def parent(world: Communicator | None = None, *, timeout_s: float | None = None) -> Bridge | None:
    """Return the bridge to the job that has spawned this one; None if no job has. All ranks of `world` call this once.

    Args:
        world: the communicator of all ranks; by default the open world of this process.
        timeout_s: as of `connect`, whose errors it raises.
    """
    name = os.environ.get(PARENT)
    return None if name is None else connect(name, world, timeout_s=timeout_s)


def _started(command: Sequence[str], ranks: int, name: str) -> Child:
    words = python_command(_MAIN, "run", "-n", str(ranks), *command)
    return Child(words, env={**os.environ, PARENT: name}, stdin=subprocess.DEVNULL)


def _check(child: Child | None) -> None:
    """Raise `RendezvousError` if the new job has ended."""
    if child is not None and (code := child.poll()) is not None:
        raise RendezvousError(f"the new job ended with exit code {code} before it called unisono.parent()")


def _end(child: Child) -> None:
    """End a job that has not met this one: `unisono run` ends its ranks when it gets SIGTERM."""
    child.terminate()
    try:
        child.wait(_END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _await(child: Child) -> None:
    if code := child.wait():
        _log.warning("the job that this rank has spawned ended with exit code %d", code)
