"""`alltoallw`: every rank sends every rank an array of its own dtype and shape.

Used by: `Communicator`, which inherits from `BlockExchange`. The arrays of two ranks need not agree with those of
others, so no plan describes the call. The arrays travel as messages with a tag of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from unisono.collectives.api.point_to_point import Messages
from unisono.collectives.arrays import operands
from unisono.collectives.calls.displaced import FollowedWork
from unisono.collectives.calls.message_handoff import AllOperations
from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import ArrayOrBuffer
    from unisono.collectives.calls.work import Work

# Above the tags of objects.
_TAG = (1 << 32) - 2


class BlockExchange(Messages):
    """The method `alltoallw`."""

    @overload
    def alltoallw(
        self,
        x: Sequence[ArrayOrBuffer | None],
        out: Sequence[ArrayOrBuffer | None],
        *,
        timeout_s: float | None = ...,
        wait: Literal[False],
    ) -> Work[list[Any]]: ...

    @overload
    def alltoallw(
        self,
        x: Sequence[ArrayOrBuffer | None],
        out: Sequence[ArrayOrBuffer | None],
        *,
        timeout_s: float | None = ...,
        wait: Literal[True] = ...,
    ) -> list[Any]: ...

    def alltoallw(
        self,
        x: Sequence[ArrayOrBuffer | None],
        out: Sequence[ArrayOrBuffer | None],
        *,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> list[Any] | Work[list[Any]]:
        """Send rank r the array `x[r]`, receive the array of rank r into `out[r]`, and return the arrays of `out`.

        Every pair of ranks has its own dtype and shape, for which the rules of `send` and `recv` hold. All ranks of the
        communicator make the call.

        Args:
            x: an array for each rank; None to send this rank nothing.
            out: an array for each rank, as in `recv`; None to receive nothing from this rank. Rank r has an `out` for
                this rank if, and only if, this rank has an `x` for rank r. The arrays share no memory.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.
            wait: False starts the call and returns a `Work` at once.

        Raises:
            UsageError: the call is wrong; nothing has been sent.
            MismatchError: a rank sends another dtype, number of elements or shape than this one receives.
            PeerLostError, CollectiveTimeoutError, AbortedError: as in `send`.

        >>> import numpy as np, unisono as un
        >>> def exchanged(world):
        ...     x = [np.full(2, 0.5), np.arange(3)] if world.rank == 0 else [None, np.ones(1, bool)]
        ...     out = [np.zeros(2), None] if world.rank == 0 else [np.zeros(3, int), np.zeros(1, bool)]
        ...     return [None if array is None else array.tolist() for array in world.alltoallw(x, out)]
        >>> un.launch(exchanged, 2)
        [[[0.5, 0.5], None], [[0, 1, 2], [True]]]
        """
        self._check_alone()
        limit_s = self._limit_s(timeout_s)
        ranks = range(self.size)
        for name, arrays in (("x", x), ("out", out)):
            if not isinstance(arrays, (list, tuple)) or len(arrays) != self.size:
                raise UsageError(f"{name} must be a list of {self.size} arrays or None, one for each rank")
        if (x[self.rank] is None) != (out[self.rank] is None):
            raise UsageError(
                f"x[{self.rank}] and out[{self.rank}] are the message of this rank to itself: pass two arrays, "
                "or None twice"
            )
        incoming = [(rank, self._to_receive(out[rank], rank, limit_s)) for rank in ranks if out[rank] is not None]
        outgoing = [(rank, self._to_send(x[rank], rank, limit_s)) for rank in ranks if x[rank] is not None]
        operands.check_apart(
            [(sent.operand.flat, None) for _, sent in outgoing] + [(None, to.operand.flat) for _, to in incoming]
        )
        if x[self.rank] is not None:
            sent, received = dict(outgoing)[self.rank], dict(incoming)[self.rank]
            operands.check_message(sent.operand, received.operand)
        receives = [(to, to.start(self._executor, rank, _TAG)) for rank, to in incoming]
        # Each rank begins with another one, so that not all of them send to the same rank at once.
        outgoing.sort(key=lambda each: (each[0] - self.rank) % self.size)
        sends = [sent.start(self._executor, rank, _TAG) for rank, sent in outgoing]
        together = AllOperations([*(receive for _, receive in receives), *sends])

        def finish(_: Any) -> list[Any]:
            for to, receive in receives:
                to.finish(receive)
            return list(out)

        if not wait:
            together.run_in_background(limit_s)
            return FollowedWork(self._works.add(together, None, limit_s), finish)
        together.wait(limit_s)
        return finish(None)
