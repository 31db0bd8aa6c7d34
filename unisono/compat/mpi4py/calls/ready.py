"""`Native`: a collective of Unisono that is ready to run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from unisono.compat.mpi4py.calls.request import RequestState
from unisono.compat.mpi4py.memory.buffers import no_store


class _Started:
    """A `Work` as the operation of a request."""

    __slots__ = ("ended", "wait")

    def __init__(self, work: Any) -> None:
        self.ended, self.wait = work.done, work.wait


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
    finish: Callable[[], None] = no_store

    def run(self) -> None:
        """Make the call, and wait for it."""
        self.method(*self.args, **self.kwargs)
        self.finish()

    def start(self) -> RequestState:
        """Start the call."""
        work = self.method(*self.args, wait=False, **self.kwargs)
        return RequestState((_Started(work),), lambda _: self.finish(), None)
