"""Messages between two ranks: arrays with tags, of any rank and any tag if wished, and the looking for them.

Messages of numpy's arrays to be waited for do not come here, but are passed on by the native core, once a channel is
open. Objects travel with tags of their own, and neither get in the way of these messages nor are they seen here.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.dispatch import Dispatcher, checked_integer, fast_message
from unisono.collectives.calls.message_handoff import ReceiveOperand, SendOperand
from unisono.collectives.calls.wildcards import ANY_SOURCE, ANY_TAG, MOST_TAG, AnySource, AnyTag
from unisono.collectives.calls.work import Work
from unisono.deadlines import Deadline
from unisono.errors import UsageError
from unisono.transports.contracts.executor import Message

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import ArrayOrBuffer, Target


class Messages(Dispatcher):
    """Sending arrays, receiving them, and looking for them without receiving them."""

    @overload
    def send(
        self, x: ArrayOrBuffer, dest: int, tag: int = ..., *, timeout_s: float | None = ..., wait: Literal[False]
    ) -> Work[None]: ...

    @overload
    def send(
        self, x: ArrayOrBuffer, dest: int, tag: int = ..., *, timeout_s: float | None = ..., wait: Literal[True] = ...
    ) -> None: ...

    @fast_message
    def send(
        self, x: ArrayOrBuffer, dest: int, tag: int = 0, *, timeout_s: float | None = None, wait: bool = True
    ) -> Work[None] | None:
        """Send an array to rank `dest`, which must receive it with the same tag, dtype and number of elements.

        Returns when `x` may be changed: a small array has been buffered then, a large one mostly received.

        Args:
            x: an array or a buffer of any kind and layout.
            dest: another rank.
            tag: 0 to 2^31 - 1. Messages of one tag arrive in the order in which they were sent.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.
            wait: with False, the call goes on by itself, and a `Work` is returned at once; `x` must not be changed
                until it has ended.

        Raises:
            UsageError: the call is wrong; nothing has been sent.
            PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the call failed.
        """
        limit_s = self._limit_s(timeout_s)
        if not wait and (started := self._messages.start_send(x, dest, tag, limit_s)):
            return self._works.add(started, None, limit_s)
        dest, tag = self._peer_of(dest, "dest"), checked_integer(tag, "tag", 0, MOST_TAG)
        outgoing = self._to_send(x, dest, limit_s)
        start = partial(outgoing.start, self._executor, dest, tag)
        if self._group is not None:
            return self._group.add(start, lambda _: None, limit_s)
        operation = start()
        if not wait:
            operation.go_on(limit_s)
            return self._works.add(operation, None, limit_s)
        operation.wait(limit_s)
        return None

    @overload
    def recv(
        self,
        out: Target,
        source: int | AnySource,
        tag: int | AnyTag = ...,
        *,
        timeout_s: float | None = ...,
        wait: Literal[False],
    ) -> Work[Target]: ...

    @overload
    def recv(
        self,
        out: Target,
        source: int | AnySource,
        tag: int | AnyTag = ...,
        *,
        timeout_s: float | None = ...,
        wait: Literal[True] = ...,
    ) -> Target: ...

    @fast_message
    def recv(
        self,
        out: Target,
        source: int | AnySource,
        tag: int | AnyTag = 0,
        *,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Target | Work[Target]:
        """Receive the next message with this tag from rank `source` into `out`, and return `out`.

        Args:
            out: a writable, contiguous array or buffer of the dtype and number of elements that were sent.
            source: another rank, or `ANY_SOURCE`; `probe` says before from which the next message is.
            tag: as in `send`, or `ANY_TAG`. A message that several receives want goes to the one that was called first.
                Of a call that does not wait, `Work.message` tells which it was.
            timeout_s: as in `send`.
            wait: as in `send`; until the call has ended, `out` must not be read.

        Raises:
            MismatchError: another dtype or number of elements was sent; also raised on the other ranks.
            PeerLostError: that rank, or all others, have left; also raised on the other ranks.
            UsageError, CollectiveTimeoutError, AbortedError: as in `send`.
        """
        limit_s = self._limit_s(timeout_s)
        if not wait and (started := self._messages.start_receive(out, source, tag, limit_s)):
            return self._works.add(started, out, limit_s, message=started.found)
        source_rank, tag_number = self._source_of(source), tag_of(tag)
        incoming = self._to_receive(out, source_rank, limit_s)
        start = partial(incoming.start, self._executor, source_rank, tag_number)
        if self._group is not None:
            return self._group.add(start, incoming.finish, limit_s)
        operation = start()
        if not wait:
            operation.go_on(limit_s)
            return incoming.work(self._works, operation, limit_s)
        operation.wait(limit_s)
        received: Target = incoming.finish(operation)
        return received

    @fast_message
    def sendrecv(
        self, x: ArrayOrBuffer, dest: int, out: Target, source: int, tag: int = 0, *, timeout_s: float | None = None
    ) -> Target:
        """Send `x` to rank `dest` and receive `out` from rank `source`, neither after the other; return `out`.

        Args:
            x: an array, as in `send`.
            dest: another rank; or this one, if `source` is this one as well: then `x` is copied to `out`.
            out: an array to receive into, as in `recv`, that shares no memory with `x`.
            source: another rank; or this one, as above.
            tag: as in `send`, for both messages.
            timeout_s: as in `send`, for both together.

        Raises:
            The same as `send` and `recv`.

        >>> import numpy as np, unisono as un
        >>> def shift(world):
        ...     x, out = np.full(2, world.rank), np.zeros(2, int)
        ...     return world.sendrecv(x, (world.rank + 1) % world.size, out, (world.rank - 1) % world.size).tolist()
        >>> un.launch(shift, 3)
        [[2, 2], [0, 0], [1, 1]]
        """
        if self._group is not None:
            raise UsageError("there is no sendrecv in a group: send and recv there do not wait for each other")
        limit_s, tag = self._limit_s(timeout_s), checked_integer(tag, "tag", 0, MOST_TAG)
        self._check_usable()
        dest, source = self._rank_of(dest, "dest"), self._rank_of(source, "source")
        if not dest == source == self.rank:
            dest, source = self._peer_of(dest, "dest"), self._peer_of(source, "source")
        sent, received = self._to_send(x, dest, limit_s), self._to_receive(out, source, limit_s)
        operands.share_memory(sent.operand, received.operand, None)
        if dest == source == self.rank:
            operands.copy(sent.operand, received.operand)
            return received.finish(None)  # type: ignore[no-any-return]
        deadline = Deadline(limit_s)
        receiving = received.start(self._executor, source, tag)
        sent.start(self._executor, dest, tag).wait(limit_s)
        receiving.wait(deadline.left_s())
        return received.finish(receiving)  # type: ignore[no-any-return]

    def probe(
        self,
        source: int | AnySource = ANY_SOURCE,
        tag: int | AnyTag = ANY_TAG,
        *,
        timeout_s: float | None = None,
    ) -> Message:
        """Wait until there is a message that `recv` with the same `source` and `tag` would get, and return which.

        It stays there: `recv` with the `source` and `tag` of what is returned gets it, unless another thread does.

        Args:
            source: another rank, or `ANY_SOURCE`.
            tag: as in `send`, or `ANY_TAG`.
            timeout_s: as in `send`.

        Raises:
            UsageError: the call is wrong, or there is no other rank.
            PeerLostError: that rank, or all others, have left; also raised on the other ranks.
            CollectiveTimeoutError, AbortedError, MismatchError: as in `send`.

        >>> import numpy as np, unisono as un
        >>> def ask_for_anything(world):
        ...     if world.rank > 0:
        ...         return world.send(np.full(world.rank, 0.5), 0, tag=7)
        ...     found = world.probe(un.ANY_SOURCE, 7)
        ...     x = world.recv(np.empty(found.count, found.dtype), found.source, found.tag)
        ...     return x.tolist(), found
        >>> un.launch(ask_for_anything, 2)[0]
        ([0.5], Message(source=1, tag=7, dtype='float64', count=1))
        """
        message = self._probe(source, tag, timeout_s, once=False)
        assert message is not None, "a probe is done when it has found a message"
        return message

    def iprobe(self, source: int | AnySource = ANY_SOURCE, tag: int | AnyTag = ANY_TAG) -> Message | None:
        """Return what `probe` would, or None if there is no such message now; does not wait for one.

        Raises:
            The same as `probe`; `PeerLostError` if there can never be one.
        """
        return self._probe(source, tag, None, once=True)

    def _probe(
        self, source: int | AnySource, tag: int | AnyTag, timeout_s: float | None, *, once: bool
    ) -> Message | None:
        limit_s = self._limit_s(timeout_s)
        probe = self._executor.probe(self._source_of(source), tag_of(tag), once=once)
        probe.wait(limit_s)
        return probe.found()

    def _to_send(self, x: Any, dest: int, limit_s: float) -> SendOperand:
        """Return the message of an array to a rank, as it can be sent."""
        return self._devices.messages.outgoing(x, dest, limit_s) if on_device(x) else SendOperand(operands.source(x))

    def _to_receive(self, out: Any, source: int | None, limit_s: float) -> ReceiveOperand:
        """Return what receives for an array from a rank, or any."""
        if on_device(out):
            return self._devices.messages.incoming(out, source, limit_s)
        return ReceiveOperand(operands.target(out), out)

    def _source_of(self, source: int | AnySource) -> int | None:
        """Return the rank that is to be received from; None for any."""
        if source is not ANY_SOURCE:
            return self._peer_of(source, "source")
        self._check_usable()
        if self.size == 1:
            raise UsageError("there is no other rank: messages go between two ranks")
        return None


def tag_of(tag: int | AnyTag) -> int | None:
    """Return the tag that is to be received; None for any."""
    return None if tag is ANY_TAG else checked_integer(tag, "tag", 0, MOST_TAG)
