"""Streams: connections to a process that cannot be dialled, over one that it has dialled, or through a relay.

Theory of operation
-------------------
A stream begins with the handshake, without TLS, so both ends hold the key of the job. Then the dialer sends

    park      this is process B, which you cannot dial: keep this connection until you need one to B
    connect   pass on everything that follows to the listener of process B at this port

A process that is B itself answers, and gives the connection to its listener. Any other process is a *relay*. It opens a
stream to B, sends ``connect`` there, and then copies bytes both ways. Over a parked connection, the process that keeps
it sends ``connect``. So one of two processes must be able to dial the other, or both a relay:

    A → B             B parks at A         B, C park at R                C cannot be dialled by A
    dials             A: connect → B       B: connect C → R → C          A: connect C → R → C

The listener then sees a connection like any other: it begins with its own handshake and TLS between the two ends. So a
relay copies encrypted bytes, and can at most end the connection.

A relay reads at most `_BUFFER_NBYTES` before it has written them, so a slow reader slows the writer. All messages here
have at most `_MOST_NBYTES`.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.foundation.wire import Framing, json_of
from unisono.swarm.views import MOST_MEMBERS, Member
from unisono.transports.links.dialer import DialingRank, Target, dial
from unisono.transports.links.handshake import NO_RANK, Purpose
from unisono.transports.links.listener import Addresses
from unisono.transports.links.liveness import exchange_heartbeats, watch
from unisono.transports.tcp.round_trips import least_round_trip_s

_log = log.get("links")

_BUFFER_NBYTES = 1 << 18
_MOST_NBYTES = 512
_FRAMING = Framing(struct.Struct("!H"), limit=_MOST_NBYTES)
_CONNECT = {"do": str, "member": str, "port": int}
# So many connections a process parks where it cannot be dialled. A channel needs several at once.
_PARKED = 4
_MOST_PARKED = 2 * _PARKED
_MOST_RELAYED = 256
# How long a message may take, once a stream has begun.
_MESSAGE_S = 10.0

Take = Callable[[socket.socket], None]


class GoneError(ConnectionRefusedError):
    """The process at the other end of a stream has ended."""


class NoWayError(OSError):
    """A process cannot be reached now."""


def open_stream(caller: DialingRank, host: str, port: int, timeout_s: float) -> socket.socket:
    """Dial a process, and return the stream; raises OSError if it does not answer as one of this job in time."""
    target = Target(NO_RANK, Addresses("", "", host, port, 0), False, Purpose.STREAM)
    try:
        return dial(caller, target, timeout_s)[0]
    except UnisonoError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise NoWayError(error.message) from None


def ask_to_connect(stream: socket.socket, member: str, port: int, deadline: Deadline) -> None:
    """Let the other end of a stream pass it on to a listener.

    Raises:
        GoneError: the process of the listener has ended.
        OSError: the other end has gone, or cannot pass it on.
    """
    _send(stream, {"do": "connect", "member": member, "port": port}, deadline)
    try:
        reply = _receive(stream, deadline)
    except ValueError as error:
        raise NoWayError(str(error)) from None
    if reply.get("is_open") is not True:
        why = str(reply.get("error", "it does not pass the connection on"))
        raise GoneError(why) if reply.get("gone") is True else NoWayError(why)


class StreamServer:
    """Serves the streams that reach this process.

    Args:
        me: the id of this process.
        onward: (id of a process, port) → a stream that is connected to that listener, for relaying. It raises OSError.
        heartbeat_s: a relayed connection ends if a host is silent for so long.
    """

    def __init__(self, me: str, onward: Callable[[str, int], socket.socket], heartbeat_s: float) -> None:
        self._me = me
        self._onward = onward
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._listeners: dict[int, weakref.WeakMethod[Take]] = {}
        self._relayed: set[socket.socket] = set()
        self._is_closed = False
        self.parking = Parking()

    def listen(self, port: int, take: Take) -> None:
        """Pass connections to `port` to a method, which then owns them, as long as its object exists."""
        with self._lock:
            self._listeners = {port: method for port, method in self._listeners.items() if method() is not None}
            self._listeners[port] = weakref.WeakMethod(take)

    def serve(self, stream: socket.socket, *, may_park: bool = True) -> None:
        """Read the first message of a stream, and do what it asks. It blocks until then."""
        deadline = Deadline(_MESSAGE_S)
        try:
            message = _receive(stream, deadline, {"do": str, "member": str})
            if message["do"] == "park" and may_park:
                watch(stream, self._heartbeat_s)
                stream.setblocking(False)
                self.parking.keep(message["member"], stream)
                return
            checked(message, _CONNECT)
            if message["member"] == self._me:
                self._deliver(stream, message["port"], deadline)
            else:
                self._relay(stream, message["member"], message["port"], deadline)
        except (OSError, ValueError) as error:
            _log.debug("a stream has ended: %s", error)
            with contextlib.suppress(OSError):
                gone = isinstance(error, ConnectionRefusedError)
                _send(stream, {"error": str(error)[: _MOST_NBYTES // 4], "gone": gone}, deadline)
            stream.close()

    def close(self) -> None:
        """End all relayed and parked connections."""
        with self._lock:
            self._is_closed = True
            relayed = list(self._relayed)
            self._listeners.clear()
        for sock in relayed:
            _hang_up(sock)
        self.parking.close()

    def _deliver(self, stream: socket.socket, port: int, deadline: Deadline) -> None:
        with self._lock:
            method = self._listeners.get(port)
        take = None if method is None else method()
        if take is None:
            raise GoneError(f"nothing listens at port {port}")
        _send(stream, {"is_open": True}, deadline)
        _lift_limit(stream)
        stream.setblocking(False)
        take(stream)

    def _relay(self, stream: socket.socket, member: str, port: int, deadline: Deadline) -> None:
        onward = self._onward(member, port)
        with self._lock:
            is_refused = self._is_closed or len(self._relayed) >= 2 * _MOST_RELAYED
            if not is_refused:
                self._relayed |= {stream, onward}
        if is_refused:
            onward.close()
            raise NoWayError("this process relays too many connections")
        try:
            _send(stream, {"is_open": True}, deadline)
            _copy_both_ways(stream, onward, self._heartbeat_s)
        finally:
            with self._lock:
                self._relayed -= {stream, onward}
            onward.close()
            stream.close()


class Parking:
    """The connections that other processes have parked here, by their ids."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._parked: OrderedDict[str, deque[socket.socket]] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()  # those whose connections have ended
        self._is_closed = False

    def keep(self, member: str, stream: socket.socket) -> None:
        """Keep a connection of a process, beside others of it up to a limit."""
        with self._changed:
            self._gone.pop(member, None)
            parked = self._parked.setdefault(member, deque())
            self._parked.move_to_end(member)
            dropped = [parked.popleft()] if len(parked) >= _MOST_PARKED else []
            if len(self._parked) > MOST_MEMBERS:
                dropped.extend(self._parked.popitem(last=False)[1])
            (dropped if self._is_closed else parked).append(stream)
            self._changed.notify_all()
        for sock in dropped:
            sock.close()

    def take(self, member: str, deadline: Deadline) -> socket.socket:
        """Return a connection of a process, once there is one.

        Raises:
            GoneError: its connections have ended.
            NoWayError: there is none before the deadline.
        """
        with self._changed:
            while True:
                self._drop_ended(member)
                parked = self._parked.get(member)
                if member in self._gone:
                    raise GoneError("its parked connections have ended")
                if parked is None:
                    raise NoWayError("it has parked no connection here")
                if parked:
                    stream = parked.popleft()
                    _lift_limit(stream)
                    return stream
                if deadline.has_passed() or not self._changed.wait(deadline.remaining_s()):
                    raise NoWayError("it has parked too few connections here")

    def has(self, member: str) -> bool:
        """Return whether a process has parked connections."""
        with self._changed:
            return bool(self._parked.get(member))

    def round_trip_s(self, member: str) -> float | None:
        """Return the least round trip to a process that parks here; None if it does not.

        Raises:
            GoneError: its connections have ended.
        """
        with self._changed:
            self._drop_ended(member)
            if member in self._gone:
                raise GoneError("its parked connections have ended")
            parked = self._parked.get(member)
            return None if parked is None else max(map(least_round_trip_s, parked), default=0.0)

    def close(self) -> None:
        """Close all connections."""
        with self._changed:
            self._is_closed = True
            parked = [stream for streams in self._parked.values() for stream in streams]
            self._parked.clear()
            self._changed.notify_all()
        for stream in parked:
            stream.close()

    def _drop_ended(self, member: str) -> None:
        """Close the connections of a process that have ended. If none is left, it is gone."""
        parked = self._parked.get(member, deque())
        ended = [stream for stream in parked if _has_ended(stream)]
        for stream in ended:
            parked.remove(stream)
            stream.close()
        if ended and not parked:
            del self._parked[member]
            self._gone[member] = None
            if len(self._gone) > MOST_MEMBERS:
                self._gone.popitem(last=False)


class Parkers:
    """Parks connections of this process at others which cannot dial it.

    Args:
        me: the id of this process.
        caller: dials the others.
        heartbeat_s: a connection ends if the other host is silent for so long.
        serve: called in a thread of its own with each connection over which the other process asks for something.
    """

    def __init__(
        self, me: str, caller: DialingRank, heartbeat_s: float, serve: Callable[[socket.socket], None]
    ) -> None:
        self._me = me
        self._caller = caller
        self._heartbeat_s = heartbeat_s
        self._serve = serve
        self._lock = threading.Lock()
        self._at: dict[str, set[socket.socket]] = {}
        self._is_closed = False

    def park_at(self, member: Member) -> None:
        """Keep connections parked at a process, as long as it lives and until `leave`."""
        with self._lock:
            if self._is_closed or member.id in self._at or len(self._at) >= MOST_MEMBERS:
                return
            self._at[member.id] = set()
        threading.Thread(target=self._keep, args=(member,), name="unisono-swarm-park", daemon=True).start()

    def leave(self, member: str) -> None:
        """Park no connections at a process any more."""
        with self._lock:
            for stream in self._at.pop(member, ()):
                _hang_up(stream)

    def close(self) -> None:
        """Park no connections any more."""
        with self._lock:
            self._is_closed = True
            ids = list(self._at)
        for id_ in ids:
            self.leave(id_)

    def _keep(self, member: Member) -> None:
        parked: list[socket.socket] = []
        try:
            while self._is_kept(member.id, parked):
                while len(parked) < _PARKED:
                    stream = open_stream(self._caller, member.host, member.port, self._heartbeat_s)
                    watch(stream, self._heartbeat_s)
                    parked.append(stream)
                    _send(stream, {"do": "park", "member": self._me}, Deadline(_MESSAGE_S))
                    stream.setblocking(False)
                if self._is_kept(member.id, parked):
                    self._serve_those_asked(parked)
        except OSError as error:
            _log.debug("no connection is parked at %s any more: %s", member.name, error)
        finally:
            self.leave(member.id)
            for stream in parked:
                stream.close()

    def _is_kept(self, member: str, parked: list[socket.socket]) -> bool:
        with self._lock:
            if member not in self._at:
                return False
            self._at[member] = set(parked)
            return True

    def _serve_those_asked(self, parked: list[socket.socket]) -> None:
        """Wait until another process needs connections, or has ended."""
        poll = select.poll()
        by_descriptor = {stream.fileno(): stream for stream in parked}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        for descriptor, _ in poll.poll():
            stream = by_descriptor[descriptor]
            if _has_ended(stream):
                raise ConnectionResetError("it has closed them")
            parked.remove(stream)
            threading.Thread(target=self._serve, args=(stream,), name="unisono-swarm-stream", daemon=True).start()


def _copy_both_ways(one: socket.socket, other: socket.socket, heartbeat_s: float) -> None:
    """Copy bytes between two connections until both directions have ended."""
    began = time.monotonic()
    counts = [0, 0]
    for sock in (one, other):
        _lift_limit(sock)
        exchange_heartbeats(sock, heartbeat_s)
        sock.settimeout(None)

    def copy(number: int, source: socket.socket, sink: socket.socket) -> None:
        buffer = memoryview(bytearray(_BUFFER_NBYTES))
        try:
            while nbytes := source.recv_into(buffer):
                sink.sendall(buffer[:nbytes])
                counts[number] += nbytes
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            _hang_up(source)
            _hang_up(sink)

    back = threading.Thread(target=copy, args=(1, other, one), name="unisono-swarm-relay", daemon=True)
    back.start()
    copy(0, one, other)
    back.join()
    _log.debug("relayed %d and %d bytes in %.1f s", *counts, time.monotonic() - began)


def _send(stream: socket.socket, message: dict[str, Any], deadline: Deadline) -> None:
    stream.settimeout(deadline.checked_remaining_s())
    stream.sendall(_FRAMING.framed(json.dumps(message).encode()))


def _receive(stream: socket.socket, deadline: Deadline, shape: Any = dict) -> dict[str, Any]:
    message: dict[str, Any] = json_of(_FRAMING.receive(stream, deadline), shape)
    return message


def _has_ended(stream: socket.socket) -> bool:
    """Return whether the other end of a parked connection, which is nonblocking, has closed it."""
    try:
        return not stream.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _lift_limit(stream: socket.socket) -> None:
    """Let data wait on a connection as long as its reader computes, other than on a parked one."""
    with contextlib.suppress(OSError):
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)


def _hang_up(sock: socket.socket) -> None:
    """Wake the threads that use a connection, which then close it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
