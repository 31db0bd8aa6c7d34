"""`StartedCall`: a call on this rank, from its start to its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from unisono.compat.horovod.errors import HorovodInternalError
from unisono.compat.horovod.requests import ReadyCall
from unisono.errors import UnisonoError
from unisono.frameworks.pending import Pending


class StartedCall:
    """A call that this rank has started. Any thread may wait for it.

    Args:
        request: the call, as the other ranks see it.
        arrays: the arrays of the call, contiguous and in memory that a communicator takes. A reduction and a broadcast
            overwrite them. The function to run, for a request of the kind "together", and for one of the kind
            "sparse_allreduce", where it starts the sum.
        finish: makes the result of the caller from the arrays that the communicator returned. It is called once, in the
            thread that waits first.

    Attributes:
        request, arrays: the arguments.
        explain: returns the error to raise for an error of Unisono.
    """

    def __init__(
        self, request: ReadyCall, arrays: Sequence[Any] = (), finish: Callable[[Any], Any] = lambda x: x
    ) -> None:
        self.request = request
        self.arrays = list(arrays)
        self.explain: Callable[[UnisonoError], HorovodInternalError] = as_internal
        self._finish: Callable[[Any], Any] | None = finish
        self._works: Sequence[Pending] = ()
        self._pick: Callable[[list[Any]], Any] = lambda results: results
        self._result: Any = None
        self._error: Exception | None = None
        self._has_started = threading.Event()
        self._lock = threading.Lock()  # of the result, because several threads may wait

    def start(self, works: Sequence[Pending], pick: Callable[[list[Any]], Any] = lambda results: results) -> None:
        """Note that the call has been made: its arrays are ``pick([work.wait() for work in works])``."""
        self._works, self._pick = works, pick
        self._has_started.set()

    def fail(self, error: Exception) -> None:
        """Note that the call cannot be made; `wait` raises `error`."""
        self._error = error
        self._has_started.set()

    def done(self) -> bool:
        """Return whether the call has ended, with a result or an error; does not block."""
        return self._has_started.is_set() and (self._error is not None or all(work.done() for work in self._works))

    def wait(self) -> Any:
        """Wait until the call has ended, and return its result.

        Raises:
            HorovodInternalError: the call failed; its cause, if it has one, is the error of Unisono.
        """
        self._has_started.wait()
        with self._lock:
            if self._error is None and self._finish is not None:
                try:
                    arrays = self._pick([work.wait() for work in self._works])
                except UnisonoError as error:
                    self._error = self.explain(error)
                else:
                    self._result, self._finish = self._finish(arrays), None
                    self.arrays = []
        if self._error is not None:
            raise self._error
        return self._result


def as_internal(error: UnisonoError) -> HorovodInternalError:
    """Return the error of Horovod for an error of Unisono, which becomes its cause."""
    if isinstance(error, HorovodInternalError):
        return error
    internal = HorovodInternalError(f"{type(error).__name__}: {error}")
    internal.__cause__ = error
    return internal
