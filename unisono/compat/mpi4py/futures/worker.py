"""The loop of a worker, which runs tasks until the master sends None."""

from __future__ import annotations

import itertools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from unisono.compat.mpi4py.calls.parcels import Parcel
from unisono.compat.mpi4py.futures.tasks import Outcome, Task, Welcome
from unisono.compat.mpi4py.values.pickles import Pickle

BACKOFF_S = 0.001
_TAG = 0
_pickle = Pickle()
_here = threading.local()


def get_comm_workers() -> Any:
    """Return the communicator of the workers; tasks call it.

    Raises:
        RuntimeError: this thread is not a worker.
    """
    comm = getattr(_here, "comm", None)
    if comm is None:
        raise RuntimeError("there is no communicator of workers outside of a task")
    return comm


def pauses(most_s: float) -> Callable[[], None]:
    """Return a function that sleeps, longer with each call, up to `most_s`."""
    lengths = itertools.chain((0.0, 0.0, *(most_s / 2**n for n in (5, 4, 3, 2, 1))), itertools.repeat(most_s))
    return lambda: time.sleep(next(lengths))


def send(port: Any, obj: Any, rank: int) -> None:
    """Send an object to a rank of a port."""
    for operation in Parcel.of(obj, _pickle).send(port, rank, _TAG):
        operation.wait(port.limit_s)


def take(port: Any) -> tuple[int, Callable[[], Any]] | None:
    """Return the sender of a message and a function that loads its object; None if there is no message."""
    message = port.take(None, _TAG, once=True)
    if message is None:
        return None
    envelope, header, acknowledge = message
    acknowledge()
    parcel = Parcel.arriving(header)
    for operation in parcel.receive(port, envelope.source, _TAG):
        operation.wait(port.limit_s)
    return envelope.source, lambda: parcel.unpacked(_pickle)


class Runner:
    """Runs the tasks of a worker, with the initializers of their executors before them."""

    def __init__(self, comm: Any) -> None:
        _here.comm = comm
        self._broken: dict[int, str] = {}

    def outcome(self, task: Task) -> Outcome:
        """Run a task."""
        number, initializer, initargs = task.start
        if number not in self._broken:
            self._broken[number] = _failure_of(initializer, *initargs) if initializer else ""
        if self._broken[number]:
            return Outcome(broken=self._broken[number])
        try:
            return Outcome(task.run())
        except BaseException as error:  # noqa: BLE001 - functions of the program raise any error
            return Outcome.of_error(error)


def _failure_of(function: Callable[..., object], *args: Any) -> str:
    """Call a function, and return the traceback of its exception; "" if there is none."""
    try:
        function(*args)
    except BaseException:  # noqa: BLE001 - functions of the program raise any error
        return traceback.format_exc()
    return ""


def serve(port: Any, master: int, comm: Any, backoff_s: float = BACKOFF_S) -> None:
    """Run the tasks that the rank `master` of a port sends, until it sends None.

    Args:
        port: the messages to the master.
        master: its rank.
        comm: the communicator of the workers.
        backoff_s: the longest pause between two looks for a message.
    """
    runner, broken = Runner(comm), ""
    try:
        while True:
            load = _awaited(port, backoff_s)
            try:
                request = load()
            except Exception as error:  # noqa: BLE001 - functions of the program raise any error
                _reply(port, master, Outcome.of_error(error))  # the task cannot be unpickled
                continue
            if request is None:
                return
            if isinstance(request, Welcome):
                broken = _failure_of(request.apply)
            else:
                _reply(port, master, Outcome(broken=broken) if broken else runner.outcome(request))
    finally:
        _here.comm = None


def _awaited(port: Any, backoff_s: float) -> Callable[[], Any]:
    pause = pauses(backoff_s)
    while (message := take(port)) is None:
        pause()
    return message[1]


def _reply(port: Any, master: int, outcome: Outcome) -> None:
    try:
        send(port, outcome, master)
    except Exception as error:  # noqa: BLE001 - the result cannot be pickled
        send(port, Outcome.of_error(error), master)
