"""A rank of a pool: `main` runs the functions that the pool sends over a socket, whose descriptor is its argument.

The communicator is opened for the first function and stays open. After an exception the communicator is closed and the
process ends. Its peers may be waiting for it inside a collective: the farewell of the communicator tells them that it
will not come, and why.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import traceback
from typing import TYPE_CHECKING

from unisono.foundation.forks import closed_in_child
from unisono.launchers.pool_protocol import Failure, PoolCall, RankSetup, Success, encoded, pickled, receive

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator


def serve(sock: socket.socket) -> int:
    """Run tasks until the parent closes the socket or a task fails; return the exit code."""
    setup: RankSetup = receive(sock)
    sys.path[:] = setup.path
    communicator: Communicator | None = None
    try:
        while (task := _next_task(sock)) is not None:
            if communicator is None:
                communicator = _init(setup)
            sock.sendall(encoded(Success(task.function(communicator, *task.arguments))))
        if communicator is not None:
            communicator.close()
    except Exception as error:  # noqa: BLE001 - the parent raises every error of the function.
        with contextlib.suppress(OSError):
            sock.sendall(encoded(_failure(error)))
        if communicator is not None:
            communicator.close()  # While the error is being handled, so that the farewell names it.
        return 1
    return 0


def _next_task(sock: socket.socket) -> PoolCall | None:
    task: PoolCall | None = receive(sock)
    return task


def _init(setup: RankSetup) -> Communicator:
    import unisono

    return unisono.init(setup.options)


def _failure(error: Exception) -> Failure:
    here = error.__traceback__
    trace = "".join(traceback.format_exception(type(error), error, here.tb_next if here else None))
    try:
        exception = pickled(error)
    except Exception:  # noqa: BLE001 - an exception that cannot be pickled is sent as text.
        exception = b""
    return Failure(exception, f"{type(error).__qualname__}: {error}", trace)


def main() -> None:
    """Run as a rank until the parent closes the socket or a function fails; then end the process."""
    with closed_in_child(socket.socket(fileno=int(sys.argv[1]))) as sock:
        sock.set_inheritable(False)
        code = serve(sock)
    sys.exit(code)
