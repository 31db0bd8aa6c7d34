"""`Native`: a collective of Unisono that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.compat.mpi4py.calls.request import RequestState


def nothing() -> None:
    """Do nothing when a call has ended."""


class WorkOperation:
    """A `Work` as the operation of a request."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self.ended = work.done

    def wait(self, timeout_s: float) -> None:
        self._work.wait()


class Native(NamedTuple):
    """A collective of Unisono.

    Attributes:
        method: the method of the communicator.
        args, kwargs: its arguments.
        finish: called when it has ended.
    """

    method: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[], None] = nothing

    def run(self) -> None:
        """Make the call, and wait for it."""
        self.method(*self.args, **self.kwargs)
        self.finish()

    def start(self) -> RequestState:
        """Start the call."""
        work = self.method(*self.args, wait=False, **self.kwargs)
        return RequestState([WorkOperation(work)], lambda _: self.finish())
