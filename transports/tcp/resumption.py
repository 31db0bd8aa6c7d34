"""`Resumption`: continues TCP channels and control links whose connection has broken although both ranks live.

Theory of operation. A call that waits on a channel notices that the connection of a stream has ended, and reports it
(`Control::lost_connections`). A control link, which has one stream, reports it at once. The rank that has dialled the
channel or link dials the stream again. If the other rank notices the loss first, it asks for that:

    rank that notices          rank that dials            rank that is dialled
          TCP_REDIAL      →
                                TCP_RESUME         →
                                STATE              →
                                                   ←      STATE

STATE holds how many bytes the rank has received over the stream, and how often the stream has been continued. Each rank
then sends the bytes that the other has not received (native/core/tcp/tcp_stream.h). Two ranks that notice the loss at
the same time may ask twice; the second request names an earlier connection, and is ignored.

The peer of a channel whose connection has ended is lost (`Control::suspect`) in three cases: the ranks do not connect
within half a second, they then do not exchange STATE within `Control::resumption_time`, or bytes are lost. A control
link has the longer time from the beginning, and ends at once if the peer refuses the connection.

Open questions
--------------
Tried: waiting for TCP to repeat the lost packets. After an outage of 1.8 s the next packet comes 3 s after its
beginning, so silent connections are dialled again. Further attempts on a channel once got further time each, and a call
on a communicator that the peer had closed did not end. Now they share the time of the first.

Doubted: half a second to connect may be too short on a crowded host. A similar wait of 300 ms for a new channel was, at
a load average of about 20 (docs/measurements/campaign.md). A relay that acknowledges bytes and then loses them is not
noticed: the sender keeps only the bytes that its kernel reports as not acknowledged.

This would change our mind: jobs over proxies that end their connections. Then the receiver should acknowledge bytes
itself, which costs messages while nothing is wrong.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.wire import more
from unisono.transports import _core
from unisono.transports.links.dialer import Dialer, Target
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.pending_sockets import PendingSockets
from unisono.transports.links.wire_lanes import lane_on_dialled_rank, must_dial
from unisono.transports.tcp.streams import stream_of, wire_stream
from unisono.transports.tcp.tls import connection_of

_log = log.get("links")

_STATE = struct.Struct("!IQ")  # resumptions, bytes received
_REQUEST = struct.Struct("!I")  # resumptions
_ANY_NUMBER = (1 << 32) - 1


class Stream(NamedTuple):
    """The name of a stream: its communicator or `CONTROL_LINKS`, the lane and peer of its channel, and its number."""

    communicator: int
    lane: int
    peer: int
    number: int


class Streams(Protocol):
    """The streams of a communicator, which `_core.Endpoint` has, or of the control links."""

    def retire_stream(self, lane: int, peer: int, stream: int, resumptions: int) -> tuple[int, int] | None:
        """End the use of a stream's connection.

        Return how often the stream has been continued, and how many bytes have been received over it; None if there is
        no such stream, or if it has been continued more often than `resumptions` times.
        """

    def resume_stream(
        self, lane: int, peer: int, stream: int, connection: _core.Connection, resumptions: int, received: int
    ) -> bool:
        """Continue a stream over another connection, which is taken over; return False if bytes are lost.

        `resumptions` is how often the stream has been continued now, and `received` is how many bytes the peer has
        received over it.
        """


class Resumption:
    """Continues the TCP channels and control links of a session. Its methods are called in the thread of `loop`.

    Args:
        rank: this rank.
        loop: the event loop of the listener.
        dialer: connects to other ranks.
        target: (peer, purpose, communicator, lane) → the target to dial.
        streams: returns the streams of a communicator or of `CONTROL_LINKS`; None if it is not open.
        on_refused: called with a stream whose peer cannot be reached any more.
    """

    def __init__(
        self,
        rank: int,
        loop: EventLoop,
        dialer: Dialer,
        target: Callable[[int, Purpose, int, int], Target],
        streams: Callable[[int], Streams | None],
        on_refused: Callable[[Stream], None],
    ) -> None:
        self._rank = rank
        self._dialer = dialer
        self._target = target
        self._streams = streams
        self._on_refused = on_refused
        self._pending = PendingSockets(loop)
        self._dialled: set[Stream] = set()

    def begin(self, stream: Stream, resumptions: int) -> None:
        """Connect a broken stream again, or ask the rank that has dialled it to do so.

        Args:
            stream: the stream.
            resumptions: how often it had been continued when its connection broke.
        """
        if stream in self._dialled:
            return
        self._dialled.add(stream)
        dials = must_dial(self._rank, stream.lane, stream.peer)
        purpose, connected = (
            (Purpose.TCP_RESUME, self._on_dialled) if dials else (Purpose.TCP_REDIAL, self._ask_to_dial)
        )
        target = self._target(stream.peer, purpose, stream.communicator, wire_stream(stream.lane, stream.number))
        on_connected, on_error = partial(connected, stream, resumptions), partial(self._on_error, stream)
        self._dialer.dial(target, on_connected, on_error, is_urgent=True)

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over a connection of purpose TCP_RESUME or TCP_REDIAL that another rank has dialled."""
        lane, asks = lane_on_dialled_rank(hello), hello.purpose is Purpose.TCP_REDIAL
        # A request comes from the rank that was dialled, so the lane of its sender is that of this rank's messages.
        if asks and lane == _core.RECEIVING_LANE:
            lane = _core.SENDING_LANE
        stream = Stream(hello.communicator, lane, hello.sender, stream_of(hello))
        if must_dial(self._rank, lane, stream.peer) != asks:
            sock.close()
        elif asks:
            self._await(stream, sock, _REQUEST, lambda resumptions: self._on_asked(stream, sock, resumptions))
        else:
            self._await(stream, sock, _STATE, partial(self._on_state_of_dialler, stream, sock))

    def close(self) -> None:
        """Close the sockets of unfinished connections."""
        self._pending.close(None)

    def _on_error(self, stream: Stream, _: UnisonoError) -> None:
        self._dialled.discard(stream)
        self._on_refused(stream)

    def _ask_to_dial(self, stream: Stream, resumptions: int, sock: socket.socket) -> None:
        self._dialled.discard(stream)
        with sock, contextlib.suppress(ConnectionError):  # this connection may break as well
            sock.sendall(_REQUEST.pack(resumptions))

    def _on_asked(self, stream: Stream, sock: socket.socket, resumptions: int) -> None:
        sock.close()
        self.begin(stream, resumptions)

    def _on_dialled(self, stream: Stream, resumptions: int, sock: socket.socket) -> None:
        done = partial(self._on_end, stream)
        try:
            own_resumptions = self._send_state(stream, resumptions, sock)
        except ConnectionError as error:
            sock.close()
            done(error)
        else:
            resume = lambda _, received: self._resume(stream, sock, own_resumptions, received)  # noqa: E731
            self._await(stream, sock, _STATE, resume, done)

    def _on_end(self, stream: Stream, _: object) -> None:
        self._dialled.discard(stream)

    def _on_state_of_dialler(self, stream: Stream, sock: socket.socket, resumptions: int, received: int) -> None:
        self._send_state(stream, _ANY_NUMBER, sock)
        self._resume(stream, sock, resumptions, received)

    def _send_state(self, stream: Stream, resumptions: int, sock: socket.socket) -> int:
        """Send the state of a stream of this rank; return how often it has been continued.

        Raises:
            ConnectionError: the connection has broken too, or the stream needs no other connection (any more).
        """
        streams = self._streams(stream.communicator)
        state = None if streams is None else streams.retire_stream(*stream[1:], resumptions)
        if state is None:
            raise ConnectionAbortedError(
                "this stream of the channel has ended, or another connection has continued it already"
            )
        sock.sendall(_STATE.pack(*state))
        return state[0]

    def _resume(self, stream: Stream, sock: socket.socket, resumptions: int, received: int) -> None:
        streams = self._streams(stream.communicator)
        if streams is None:
            sock.close()
            return
        goes_on = streams.resume_stream(*stream[1:], connection_of(sock), (resumptions + 1) & _ANY_NUMBER, received)
        outcome = "goes on over another one" if goes_on else "cannot go on: bytes that were sent are lost"
        _log.warning("the connection to rank %d broke, and %s", stream.peer, outcome)

    def _await(
        self,
        stream: Stream,
        sock: socket.socket,
        message: struct.Struct,
        take: Callable[..., None],
        done: Callable[[object], None] = lambda _: None,
    ) -> None:
        """Call `take` with the fields of a message once it has arrived on `sock`; then, or on an error, `done`."""
        data = bytearray()

        def read() -> bool:
            if not more(sock, data, message.size, socket.MSG_DONTWAIT):
                return False
            self._pending.end(sock)
            take(*message.unpack(data))
            return True

        self._pending.await_bytes(self, sock, read, done)
