"""Calls whose shares do not follow each other in an array, but lie at displacements.

Used by: `api/vector_collectives.py`, and persistent calls.

Theory of operation
-------------------
A plan reads and writes shares that follow each other in the order of ranks. If the displacements say just that, the
call runs on this part of the caller's array. Otherwise the shares are copied to an array beside it before the call, or
from there after it. The call itself is the same in all cases, and other ranks need not know the displacements.

Example: rank 0 gathers 2 and 3 rows to the displacements 4 and 0 of an `out` of 8 rows. The call writes 5 rows beside
`out`. Then rows 0 and 1 of them are copied to rows 4 and 5 of `out`, and rows 2 to 4 to rows 0 to 2.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.row_blocks import Blocks, Moved
from unisono.collectives.calls.work import Work
from unisono.errors import UnisonoError, UsageError


class DisplacedCall:
    """The arrays of a call whose shares lie at displacements.

    Args:
        x, out: the arrays of the caller.
        read, written: the shares that the call reads from `x`, and those that it writes to `out`; None if they follow
            each other in the whole array.

    Attributes:
        source, target: the arrays on which the call runs.

    Raises:
        UsageError: a share ends behind its array, two shares of `out` overlap, or there is no `out` for them.
    """

    def __init__(self, x: Any, out: Any, read: Blocks | None, written: Blocks | None) -> None:
        self._x, self._out = x, out
        self.source, self._begin = Moved(x, _nothing) if read is None else _source(x, read)
        self.target, self._end = Moved(out, _nothing) if written is None else _target(out, written)

    def make(self, call: Callable[[bool], Any], wait: bool) -> Any:
        """Make a call on `source` and `target` by ``call(wait)``, and return its result for the caller, or its work."""
        self._begin()
        result = call(wait)
        return self._finish(result) if wait else FollowedWork(result, self._finish)

    def _finish(self, result: Any) -> Any:
        """Return the result for the caller, from that of the call, which has ended."""
        self._end()
        if result is None or self._out is not None:
            return None if result is None else self._out
        return result if on_device(self._x) else adapters.adapter_of(self._x, "x").wrap(result, self._x)


def _source(x: Any, blocks: Blocks) -> Moved:
    if on_device(x):
        from unisono.collectives.device.displaced import device_source

        return device_source(x, blocks)
    view = adapters.view(x, "x")
    blocks.check_inside("x", view.shape)
    if (run := blocks.run) is not None:
        return Moved(view[run], _nothing)
    packed = np.empty((blocks.total, *view.shape[1:]), view.dtype)

    def pack() -> None:
        for _, rows, place in blocks.blocks:
            packed[place] = view[rows]

    return Moved(packed, pack)


def _target(out: Any, blocks: Blocks) -> Moved:
    blocks.check_apart()
    if out is None:
        raise UsageError(f"{blocks.names[1]} need an out, whose other rows stay as they are: pass an out")
    if on_device(out):
        from unisono.collectives.device.displaced import device_target

        return device_target(out, blocks)
    view = adapters.view_to_write(out, "out")
    blocks.check_inside("out", view.shape)
    if not view.flags.writeable:
        raise UsageError("out is read-only: pass an array that can be written")
    run = blocks.run
    if run is not None and view.flags.c_contiguous:
        return Moved(view[run], _nothing)
    packed = np.empty((blocks.total, *view.shape[1:]), view.dtype)

    def unpack() -> None:
        for _, rows, place in blocks.blocks:
            view[rows] = packed[place]

    return Moved(packed, unpack)


def _nothing() -> None:
    """Do nothing: the call runs on the memory of the caller."""


class FollowedWork(Work[Any]):
    """The work of a call that has not ended before `follow` has made the result of the caller from that of the call."""

    __slots__ = ("_followed",)

    def __init__(self, work: Work[Any], follow: Callable[[Any], Any]) -> None:
        super().__init__(work._works, work._operation, None, work._limit_s, lambda _: follow(work.wait()))
        self.is_counted = work.is_counted
        self._followed = work
        self._works.keep(self)

    def done(self) -> bool:
        if not self._followed.done():
            return False
        with suppress(UnisonoError):  # `wait` raises it again
            self.wait()
        return True

    def synchronize(self, timeout_s: float | None = None) -> Any:
        """Wait until the host may read the result; see `Work.synchronize`."""
        self._followed.synchronize(timeout_s)
        return self.wait(timeout_s)
