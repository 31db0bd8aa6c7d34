"""Calls of a communicator that are ready to run: collectives of Unisono, and exchanges of messages.

Both have `run`, which waits, and `start`, which returns the state of a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.compat.mpi4py.calls.messages import Port
from unisono.compat.mpi4py.calls.request import RequestState
from unisono.compat.mpi4py.memory.buffers import Block


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


class Nothing(NamedTuple):
    """A call that sends nothing."""

    finish: Callable[[], None] = nothing

    def run(self) -> None:
        """Finish."""
        self.finish()

    def start(self) -> RequestState:
        """Finish."""
        self.finish()
        return RequestState()


class Exchange(NamedTuple):
    """Messages of blocks to and from other ranks, for calls in which only some ranks know the counts.

    Attributes:
        port: the messages of the communicator.
        tag: a tag that only this call uses.
        sends, receives: pairs of a rank and a block.
        finish: called when all have arrived.
    """

    port: Port
    tag: int
    sends: Sequence[tuple[int, Block]]
    receives: Sequence[tuple[int, Block]]
    finish: Callable[[], None] = nothing

    def start(self) -> RequestState:
        """Start the messages."""
        arriving = [(block, block.target()) for _, block in self.receives]
        operations = [
            self.port.receive(array, rank, self.tag, in_background=True)
            for (rank, _), (_, array) in zip(self.receives, arriving, strict=True)
        ]
        outgoing = [(rank, block.array()) for rank, block in self.sends]
        operations += [self.port.send(array, rank, self.tag, in_background=True) for rank, array in outgoing]

        def finish(_: Any) -> None:
            for block, array in arriving:
                block.store(array)
            self.finish()

        return RequestState(operations, finish, self.port.limit_s)

    def run(self) -> None:
        """Make the messages, and wait for them."""
        self.start().complete()


def bytes_block(array: Any) -> Block:
    """Return the block of a flat array."""
    from unisono.compat.mpi4py.memory.datatype import BYTE

    raw = array.view(np.uint8)
    return Block(raw, BYTE._state, raw.size)
