"""The streams that reach a process: it keeps, answers or relays them, as `streams` says."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable

from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.swarm.parking import Parking
from unisono.swarm.streams import MESSAGE_S, MOST_NBYTES, GoneError, NoWayError, hang_up, lift_limit, receive, send
from unisono.transports.links.liveness import exchange_heartbeats, watch

_log = log.get("links")

_BUFFER_NBYTES = 1 << 18
_CONNECT = {"do": str, "member": str, "port": int}
_MOST_RELAYED = 256

Take = Callable[[socket.socket], None]


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
        deadline = Deadline(MESSAGE_S)
        try:
            message = receive(stream, deadline, {"do": str, "member": str})
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
                send(stream, {"error": str(error)[: MOST_NBYTES // 4], "gone": gone}, deadline)
            stream.close()

    def close(self) -> None:
        """End all relayed and parked connections."""
        with self._lock:
            self._is_closed = True
            relayed = list(self._relayed)
            self._listeners.clear()
        for sock in relayed:
            hang_up(sock)
        self.parking.close()

    def _deliver(self, stream: socket.socket, port: int, deadline: Deadline) -> None:
        with self._lock:
            method = self._listeners.get(port)
        take = None if method is None else method()
        if take is None:
            raise GoneError(f"nothing listens at port {port}")
        send(stream, {"is_open": True}, deadline)
        lift_limit(stream)
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
            send(stream, {"is_open": True}, deadline)
            _copy_both_ways(stream, onward, self._heartbeat_s)
        finally:
            with self._lock:
                self._relayed -= {stream, onward}
            onward.close()
            stream.close()


def _copy_both_ways(one: socket.socket, other: socket.socket, heartbeat_s: float) -> None:
    """Copy bytes between two connections until both directions have ended."""
    began = time.monotonic()
    counts = [0, 0]
    for sock in (one, other):
        lift_limit(sock)
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
            hang_up(source)
            hang_up(sink)

    back = threading.Thread(target=copy, args=(1, other, one), name="unisono-swarm-relay", daemon=True)
    back.start()
    copy(0, one, other)
    back.join()
    _log.debug("relayed %d and %d bytes in %.1f s", *counts, time.monotonic() - began)
