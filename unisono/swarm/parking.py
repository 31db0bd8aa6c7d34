"""Connections that processes park at others which cannot dial them: see `streams`."""

from __future__ import annotations

import select
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.swarm.streams import MESSAGE_S, GoneError, NoWayError, hang_up, lift_limit, open_stream, send
from unisono.swarm.views import MOST_MEMBERS, Member
from unisono.transports.links.dialer import DialingRank
from unisono.transports.links.liveness import watch
from unisono.transports.tcp.tcp_info import least_round_trip_s

_log = log.get("links")

# So many connections a process parks where it cannot be dialled. A channel needs several at once.
_PARKED = 4
_MOST_PARKED = 2 * _PARKED


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
                    raise GoneError("all connections that the member kept open to this process have ended")
                if parked is None:
                    raise NoWayError("the member keeps no connection open by which this process could reach it")
                if parked:
                    stream = parked.popleft()
                    lift_limit(stream)
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
                hang_up(stream)

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
                    send(stream, {"do": "park", "member": self._me}, Deadline(MESSAGE_S))
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


def _has_ended(stream: socket.socket) -> bool:
    """Return whether the other end of a parked connection, which is nonblocking, has closed it."""
    try:
        return not stream.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
