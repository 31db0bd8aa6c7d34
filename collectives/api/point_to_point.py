"""Messages from rank to rank: `send`, `recv`, `sendrecv`, `probe` and `iprobe`, on arrays, with tags and wildcards.

Used by: `Communicator`, which inherits from `Messages`. Most messages do not reach this file: once a channel is open,
the native core handles blocking calls on numpy arrays by itself. Pickled objects have tags of their own, so these
methods never see them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from unisono.collectives.arrays import operands
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.arguments import checked_flag, checked_integer
from unisono.collectives.calls.cached_methods import fast_message
from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.message_handoff import (
    NO_RANK,
    BesideReceive,
    ReceiveFromNobody,
    ReceiveOperand,
    SendOperand,
    SendToNobody,
    waits_for_itself,
)
from unisono.collectives.calls.taken_message import TakenMessage
from unisono.collectives.calls.work import Work
from unisono.errors import UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import OF_NOBODY, Message
from unisono.transports.contracts.transport import OWN_BUFFER_NBYTES
from unisono.transports.contracts.wildcards import ANY_SOURCE, ANY_TAG, MOST_TAG, AnySource, AnyTag

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import ArrayOrBuffer, Target


class Messages(Dispatcher):
    """The methods that send, receive and probe messages."""

    @overload
    def send(
        self,
        x: ArrayOrBuffer,
        dest: int,
        tag: int = ...,
        *,
        synchronous: bool = ...,
        timeout_s: float | None = ...,
        wait: Literal[False],
    ) -> Work[None]: ...

    @overload
    def send(
        self,
        x: ArrayOrBuffer,
        dest: int,
        tag: int = ...,
        *,
        synchronous: bool = ...,
        timeout_s: float | None = ...,
        wait: Literal[True] = ...,
    ) -> None: ...

    @fast_message
    def send(
        self,
        x: ArrayOrBuffer,
        dest: int,
        tag: int = 0,
        *,
        synchronous: bool = False,
        timeout_s: float | None = None,
        wait: bool = True,
    ) -> Work[None] | None:
        """Send an array to rank `dest`, which must receive it with the same tag, dtype and number of elements.

        The elements travel in the order of their indices, whatever the memory order of the two arrays. The arrays must
        have the same shape, but for axes of length 1. A flat array, which has only one other axis, fits every shape.

        It returns when the caller may change `x`. By then a small array has been buffered, and a large one has mostly
        been received. A synchronous send returns when `dest` has received the message, as `MPI_Ssend` does.

        Args:
            x: an array or a buffer of any library and layout.
            dest: a rank, or `NOBODY`. A message to this rank itself must be received too. At least 1 MiB of messages to
                itself are buffered.
            tag: 0 to 2^31 - 1. Messages of one tag arrive in the order in which they were sent.
            synchronous: True to end the call only when a receive has got the message. The receiver acknowledges it,
                which takes about as long as a small message. A message to this rank itself is not buffered then. A
                probe receives no message; the `recv` of a message that a probe has taken does.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.
            wait: False starts the call and returns a `Work` at once. Do not change `x` before the call has ended.

        Raises:
            UsageError: the call is wrong; nothing has been sent. It is also raised if a message to this rank itself
                would wait for ever: the buffer has no room or the send is synchronous, no receive is posted, and there
                is no other thread.
            PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the call failed.
        """
        limit_s = self._limit_s(timeout_s)
        if not wait and synchronous is False and (started := self._messages.start_send(x, dest, tag, limit_s)):
            return self._works.add(started, None, limit_s)
        checked_flag(synchronous, "synchronous")
        dest, tag = self._peer_of(dest, "dest"), checked_integer(tag, "tag", 0, MOST_TAG)
        outgoing = self._to_send(x, dest, limit_s)
        start = partial(outgoing.start, self._executor, dest, tag, synchronous=synchronous)
        if self._group is not None:
            return self._group.add(start, lambda _: None, limit_s)
        if wait and dest == self.rank:
            self._check_taken(outgoing, tag, synchronous=synchronous)
        operation = start()
        if not wait:
            operation.run_in_background(limit_s)
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
            out: a writable, contiguous array or buffer of the dtype and number of elements that were sent, and of the
                shape of the sender's array, unless one of the two is flat: see `send`.
            source: a rank, `ANY_SOURCE`, or `NOBODY`, from whom `out` stays as it is. `probe` returns the source of
                the next message beforehand. A receive from any rank may get a message of this rank itself.
            tag: as in `send`, or `ANY_TAG`. If several receives match a message, the first call gets it. After a call
                with ``wait=False``, `Work.message` returns the source and tag.
            timeout_s: as in `send`.
            wait: as in `send`. Do not read `out` before the call has ended.

        Raises:
            MismatchError: the sender sent another dtype, number of elements or shape; also raised on the other ranks.
            PeerLostError: the source has left, or all other ranks have; also raised on the other ranks.
            UsageError, CollectiveTimeoutError, AbortedError: as in `send`.
        """
        limit_s = self._limit_s(timeout_s)
        if not wait and (started := self._messages.start_receive(out, source, tag, limit_s)):
            return self._works.add(started, out, limit_s, message=started.message)
        source_rank, tag_number = self._source_of(source), tag_of(tag)
        incoming = self._to_receive(out, source_rank, limit_s)
        start = partial(incoming.start, self._executor, source_rank, tag_number)
        if self._group is not None:
            return self._group.add(start, incoming.finish, limit_s)
        operation = start()
        if not wait:
            operation.run_in_background(limit_s)
            return incoming.work(self._works, operation, limit_s)
        operation.wait(limit_s)
        received: Target = incoming.finish(operation)
        return received

    @fast_message
    def sendrecv(
        self,
        x: ArrayOrBuffer,
        dest: int,
        out: Target,
        source: int | AnySource,
        tag: int = 0,
        *,
        recv_tag: int | AnyTag | None = None,
        timeout_s: float | None = None,
    ) -> Target:
        """Send `x` to rank `dest` and receive `out` from rank `source` at the same time; return `out`.

        Args:
            x: an array, as in `send`.
            dest: a rank, or `NOBODY`.
            out: an array to receive into, as in `recv`, that shares no memory with `x`.
            source: as in `recv`.
            tag: as in `send`, for both messages; or for the sent one, with a `recv_tag`.
            recv_tag: the tag of the received message, as in `recv`.
            timeout_s: seconds until the call fails, for both messages together; by default the option `timeout_s`.

        Raises:
            The errors of `send` and `recv`.

        >>> import numpy as np, unisono as un
        >>> def shift(world):
        ...     x, out = np.full(2, world.rank), np.zeros(2, int)
        ...     return world.sendrecv(x, (world.rank + 1) % world.size, out, (world.rank - 1) % world.size).tolist()
        >>> un.launch(shift, 3)
        [[2, 2], [0, 0], [1, 1]]
        """
        if self._group is not None:
            raise UsageError(
                "a group has no sendrecv: call send and recv instead, which run at the same time in a group"
            )
        limit_s, tag = self._limit_s(timeout_s), checked_integer(tag, "tag", 0, MOST_TAG)
        tag_received = tag if recv_tag is None else recv_tag
        recv_number = tag_of(tag_received, "recv_tag")
        dest_rank, source_rank = self._peer_of(dest, "dest"), self._source_of(source)
        sent, received = self._to_send(x, dest_rank, limit_s), self._to_receive(out, source_rank, limit_s)
        operands.share_memory(sent.operand, received.operand, None)
        if dest_rank == self.rank:
            is_own = source_rank == self.rank and recv_number in {None, tag}
            if is_own and not self._has_arrived(self.rank, tag_received):
                operands.check_message(sent.operand, received.operand)
            else:
                self._check_taken(sent, tag)
        deadline = Deadline(limit_s)
        receiving = received.start(self._executor, source_rank, recv_number)
        sent.start(self._executor, dest_rank, tag).wait(limit_s)
        receiving.wait(deadline.remaining_s())
        return received.finish(receiving)  # type: ignore[no-any-return]

    @overload
    def probe(
        self,
        source: int | AnySource = ...,
        tag: int | AnyTag = ...,
        *,
        take: Literal[True],
        timeout_s: float | None = ...,
    ) -> TakenMessage: ...

    @overload
    def probe(
        self,
        source: int | AnySource = ...,
        tag: int | AnyTag = ...,
        *,
        take: Literal[False] = ...,
        timeout_s: float | None = ...,
    ) -> Message: ...

    def probe(
        self,
        source: int | AnySource = ANY_SOURCE,
        tag: int | AnyTag = ANY_TAG,
        *,
        take: bool = False,
        timeout_s: float | None = None,
    ) -> Message | TakenMessage:
        """Wait for a message that `recv` with the same `source` and `tag` would get, and return its description.

        The message is not received. `recv` with the returned `source` and `tag` receives it, unless another thread of
        this rank receives it first. With `take` the message is taken, so no other thread can receive it: its `recv`
        does so.

        Args:
            source: a rank, `ANY_SOURCE`, or `NOBODY`.
            tag: as in `send`, or `ANY_TAG`.
            take: True to take the message, and return a `TakenMessage`. It has arrived as a whole then.
            timeout_s: as in `send`.

        Raises:
            UsageError: the call is wrong.
            PeerLostError: the source has left, or all other ranks have; also raised on the other ranks.
            CollectiveTimeoutError, AbortedError, MismatchError: as in `send`.

        >>> import numpy as np, unisono as un
        >>> def ask_for_anything(world):
        ...     if world.rank > 0:
        ...         return world.send(np.full(world.rank, 0.5), 0, tag=7)
        ...     message = world.probe(un.ANY_SOURCE, 7)
        ...     x = world.recv(np.empty(message.count, message.dtype), message.source, message.tag)
        ...     return x.tolist(), message
        >>> un.launch(ask_for_anything, 2)[0]
        ([0.5], Message(source=1, tag=7, dtype='float64', count=1))
        """
        message: Message | TakenMessage | None = self._probe(source, tag, timeout_s, once=False, take=take)
        assert message is not None, "a probe ends when there is a message"
        return message

    @overload
    def iprobe(
        self, source: int | AnySource = ..., tag: int | AnyTag = ..., *, take: Literal[True]
    ) -> TakenMessage | None: ...

    @overload
    def iprobe(
        self, source: int | AnySource = ..., tag: int | AnyTag = ..., *, take: Literal[False] = ...
    ) -> Message | None: ...

    def iprobe(
        self, source: int | AnySource = ANY_SOURCE, tag: int | AnyTag = ANY_TAG, *, take: bool = False
    ) -> Message | TakenMessage | None:
        """Return the description of a message as `probe` does, or None if none has arrived; does not wait.

        With `take`, it waits for the rest of a message that has begun to arrive.

        Raises:
            The errors of `probe`. It raises `PeerLostError` if no rank is left that could send such a message.
        """
        message: Message | TakenMessage | None = self._probe(source, tag, None, once=True, take=take)
        return message

    def _probe(
        self, source: int | AnySource, tag: int | AnyTag, timeout_s: float | None, *, once: bool, take: bool = False
    ) -> Any:
        limit_s, source_rank, tag_number = self._limit_s(timeout_s), self._source_of(source), tag_of(tag)
        if source_rank == NO_RANK:
            return TakenMessage(None, ReceiveFromNobody, limit_s) if take else OF_NOBODY
        probe = self._executor.probe(source_rank, tag_number, once=once, takes=take)
        probe.wait(limit_s)
        message = probe.message()
        return TakenMessage(probe, self._of_taken, limit_s) if take and message is not None else message

    def _of_taken(self, out: Any) -> ReceiveOperand:
        """Return the operand of an array that receives a message in memory of the host."""
        return self._devices.messages.staged(out) if on_device(out) else self._to_receive(out, None, 0.0)

    def _to_send(self, x: Any, dest: int, limit_s: float) -> SendOperand:
        """Return the operand of an array that is sent to rank `dest`."""
        if dest == NO_RANK:
            return SendToNobody(x)
        if on_device(x):
            return self._devices.messages.outgoing(x, dest, limit_s)
        return SendOperand(operands.source(x, any_order=False))

    def _to_receive(self, out: Any, source: int | None, limit_s: float) -> ReceiveOperand:
        """Return the operand of an array that receives from a rank; `source` is None for any rank."""
        if source == NO_RANK:
            return ReceiveFromNobody(out)
        if on_device(out):
            return self._devices.messages.incoming(out, source, limit_s)
        target = operands.target(out)
        return BesideReceive(target, out) if target.order == "F" else ReceiveOperand(target, out)

    def _source_of(self, source: int | AnySource) -> int | None:
        """Return the checked rank to receive from; None for any rank, and `NO_RANK` for `NOBODY`."""
        if source is not ANY_SOURCE:
            return self._peer_of(source, "source")
        self._check_usable()
        return None

    def _has_arrived(self, source: int, tag: int | AnyTag) -> bool:
        """Return whether a message has arrived that no receive has got."""
        return self._probe(source, tag, None, once=True) is not None

    def _check_taken(self, outgoing: SendOperand, tag: int, *, synchronous: bool = False) -> None:
        """Check that a blocking send to this rank itself does not wait for a receive that this rank makes later.

        Raises:
            UsageError: no receive is posted for it, and the buffer for such messages has no room.
        """
        nbytes = outgoing.operand.flat.nbytes
        if waits_for_itself(self._executor, tag, OWN_BUFFER_NBYTES if synchronous else nbytes):
            room = f"it does not fit into the rest of a buffer of {OWN_BUFFER_NBYTES} bytes"
            raise UsageError(
                f"a message of {nbytes} bytes to this rank itself ({self.rank}) waits for its receive, because "
                f"{'the send is synchronous' if synchronous else room}: call recv(wait=False) before, "
                "or sendrecv, or send(wait=False)"
            )


def tag_of(tag: int | AnyTag, name: str = "tag") -> int | None:
    """Return the checked tag to receive, which errors call `name`; None for any tag."""
    return None if tag is ANY_TAG else checked_integer(tag, name, 0, MOST_TAG)
