"""The messages of a rank to itself, in the generic executor: a queue in the place of a transport."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unisono.errors import MismatchError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import OWN_BUFFER_NBYTES, OWN_MESSAGE_NBYTES, Identity, Request


class OwnMessages:
    """The messages that a rank has sent to itself and not received, and the receives that wait for one.

    A message that finds room in the buffer (`OWN_BUFFER_NBYTES`) is copied there, which ends its send. The send of
    another one ends when it is received.

    Args:
        name: the number of the rank in the job, which errors show.
    """

    def __init__(self, name: int) -> None:
        self._name = name
        self._waiting: dict[Identity, _OwnMessage] = {}
        self._expected: dict[Identity, _OwnMessage] = {}
        self._used = 0

    def has_room(self, nbytes: int) -> bool:
        """Return whether the buffer has room for a message of `nbytes`."""
        return self._used + nbytes + OWN_MESSAGE_NBYTES <= OWN_BUFFER_NBYTES

    def expects(self, tag: int) -> bool:
        """Return whether a receive waits for a message of this tag."""
        return any(identity.group == tag for identity in self._expected)

    def post_send(
        self, identity: Identity, signature: Signature, pieces: Sequence[memoryview], *, buffers: bool
    ) -> Request:
        """Send a message, as `MessageTransport.post_send` does; `buffers` allows the buffer."""
        message = _OwnMessage(signature, pieces)
        receive = self._expected.pop(identity, None)
        if receive is not None:
            self._deliver(message, receive)
        else:
            self._waiting[identity] = message
            if buffers and self.has_room(message.nbytes):
                message.pieces = [memoryview(b"".join(pieces))]
                message.is_buffered = message.is_done = True
                self._used += message.nbytes + OWN_MESSAGE_NBYTES
        return message

    def post_recv(self, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        """Receive a message, as `MessageTransport.post_recv` does."""
        receive = _OwnMessage(signature, pieces)
        message = self._waiting.pop(identity, None)
        if message is None:
            self._expected[identity] = receive
        else:
            self._deliver(message, receive)
            self._used -= message.nbytes + OWN_MESSAGE_NBYTES if message.is_buffered else 0
        return receive

    def arrived(self) -> Collection[tuple[Identity, Signature]]:
        """Return the messages that have been sent and not received, as `MessageTransport.arrived` does."""
        return [(identity, message.signature) for identity, message in self._waiting.items()]

    def _deliver(self, message: _OwnMessage, receive: _OwnMessage) -> None:
        if message.signature.agrees(receive.signature):
            for target, source in zip(receive.pieces, message.pieces, strict=True):
                target[:] = source
        else:
            receive.error = MismatchError(
                f"rank {self._name} sent {message.signature} to itself where it receives {receive.signature}",
                peer=self._name,
            )
        message.is_done = receive.is_done = True


class _OwnMessage:
    """The request of a message or of a receive."""

    def __init__(self, signature: Signature, pieces: Sequence[memoryview]) -> None:
        self.signature = signature
        self.pieces = pieces
        self.nbytes = sum(piece.nbytes for piece in pieces)
        self.is_buffered = self.is_done = False
        self.error: MismatchError | None = None

    def done(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done
