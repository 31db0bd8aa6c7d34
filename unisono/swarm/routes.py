"""Routes: how this process connects to each other process of the swarm, which may be unable to listen for it.

Theory of operation
-------------------
A process dials another one, unless that fails. Then it takes a connection that the other one has parked here, or asks
a relay (streams.py). It asks once, and then remembers the *way*. A way that was no direct one is looked for again after
some heartbeats, because the other process may have moved a cable, or a nearer relay may have come.

Processes learn by their pings who must park where. A ping names its sender. The process that answers looks for a way to
the sender, and says in its reply whether it can dial it. A sender that cannot be dialled parks connections there.

Each process that this one can dial, or that has parked here, may be the relay to a third one. The asking process takes
the relay with the least delay. A relay uses no other relay, so a stream has at most one.

Only one thread searches for a way to a process, and the others wait for it. The questions of a search go over ways that
are known, so a search never waits for another one.

Example: A listens at a public address; B and C are at home. B and C ping A, which cannot dial them and says so, so both
park at A. B cannot dial C, and C has parked nothing at B. B asks A, which reaches C within 20 ms, and B reaches A
within 15 ms. So B connects to C through A, in 35 ms.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.swarm.links import Caller, RefusedError, Reply
from unisono.swarm.parking import Parkers
from unisono.swarm.stream_server import StreamServer, Take
from unisono.swarm.streams import GoneError, NoWayError, ask_to_connect, open_stream
from unisono.swarm.views import Member
from unisono.transports.links.dialer import DialingRank
from unisono.transports.links.handshake import NO_RANK

_log = log.get("links")

_MOST_KNOWN = 1024
_MOST_SEARCHES = 32
# A process that does not answer a dialler for this share of a heartbeat timeout, or for so long, cannot be dialled.
_DIAL_HEARTBEATS, _DIAL_S = 0.25, 3.0
# A way that is no direct one is looked for again after so many heartbeat timeouts, and a failed search after so long.
_AGAIN = 8.0
_PAUSE_S = 0.1
_STREAM_S = 10.0
# So many relays are tried before a connection fails.
_RELAYS = 3
# Once a relay has answered, the others have so long to answer too. One that is farther away would be the worse relay.
_LATER_S = 0.1
_UNKNOWN = -1.0


class Way(NamedTuple):
    """How this process reaches a member.

    Attributes:
        member: the member.
        kind: "direct" if this process dials it; "called back" if it has dialled this process; or "relayed".
        relay: the member that relays; None if none does.
        round_trip_s: the least round trip that was measured, in seconds.
    """

    member: Member
    kind: str
    relay: Member | None
    round_trip_s: float


class _Known:
    """The knowledge of this process about another one."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.way: Way | None = None
        self.found = 0.0  # when the way was found
        self.can_dial: bool | None = None  # None before the first attempt
        self.dialled = 0.0  # when the last attempt to dial it ended
        self.must_dial = False  # because there was no other way
        self.finding = threading.Lock()


class Routes:
    """The ways from this process to others, and its part in theirs. Several threads may use it.

    Args:
        me: this process.
        key, job: the key and the id of the job.
        caller: makes the requests; it uses the ways.
        heartbeat_s: the heartbeat timeout.
    """

    def __init__(self, me: Member, key: bytes, job: bytes, caller: Caller, heartbeat_s: float) -> None:
        self._me = me
        self._caller = caller
        self._heartbeat_s = heartbeat_s
        self._dialler = DialingRank(key, job, 0, NO_RANK)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._greeting = threading.Lock()
        self._searches = threading.Semaphore(_MOST_SEARCHES)  # those for senders of pings, which name any address
        caller.ways = self
        self._streams = StreamServer(me.id, self._onward, heartbeat_s)
        self._parkers = Parkers(me.id, self._dialler, heartbeat_s, self._serve_parked)

    def admit(self, stream: socket.socket) -> None:
        """Serve a stream that another process has dialled; it blocks until the stream is relayed or passed on."""
        self._streams.serve(stream)

    def listen(self, port: int, take: Take) -> None:
        """Let streams reach a listener of this process: pass them to a method, as long as its object exists."""
        self._streams.listen(port, take)

    def of(self, members: Sequence[Member]) -> RanksWays:
        """Return the ways to members, which are ranks in the order of `members`."""
        return RanksWays(self, members)

    def ways(self, members: Iterable[Member]) -> tuple[Way, ...]:
        """Return the known ways to these members."""
        with self._lock:
            known = [self._known.get(member.id) for member in members if member.id != self._me.id]
        return tuple(each.way for each in known if each is not None and each.way is not None)

    def is_direct(self, member: Member) -> bool:
        """Return whether this process dials a member, as far as it knows."""
        ways = self.ways([member])
        return bool(ways) and ways[0].kind == "direct"

    def connect(self, member: Member, port: int, timeout_s: float, *, is_search: bool = False) -> socket.socket | None:
        """Return a connection to the listener of a member at a port; None if this process must dial it.

        With `is_search`, it uses the way that is known, and looks for no other. Two searches that asked each other's
        members over ways that have ended would wait for each other.

        Raises:
            ConnectionRefusedError: the member has ended.
            OSError: there is no way to it now, or it does not answer in time.
        """
        deadline = Deadline(timeout_s)
        for _ in range(1 if is_search else _RELAYS):
            way = self._known_of(member).way if is_search else self._way_to(member, deadline)
            if way is None:
                break
            if way.kind == "direct":
                return None
            try:
                return self._stream(way.relay or member, member.id, port, deadline)
            except OSError as error:
                self.forget(member)
                if way.relay is None or isinstance(error, GoneError):
                    raise
                self._forget_ways_by(way.relay)
                _log.info("%s does not relay to %s: %s", way.relay.name, member.name, error)
        raise self._no_way_to(member)

    def reaches(self, member: Member) -> bool | None:
        """Return whether this process can dial a member; None if it does not know yet, and finds out."""
        known = self._known_of(member)
        is_needed = (known.way is None or self._is_old(known)) and not known.finding.locked()
        if is_needed and self._searches.acquire(blocking=False):
            threading.Thread(target=self._find_quietly, args=(member,), name="unisono-swarm-way", daemon=True).start()
        return known.can_dial

    def note(self, member: Member, reply: dict[str, Any]) -> None:
        """Note the reply of a process to a ping: whether it can dial this one."""
        can_dial = reply.get("can_dial")
        if can_dial is False:
            self._parkers.park_at(member)
        elif can_dial is True:
            self._parkers.leave(member.id)

    def greet(self, members: Iterable[Member]) -> None:
        """Ping processes in the background, so that they and this one find ways to each other."""
        threading.Thread(target=self._greet, args=(list(members),), name="unisono-swarm-greet", daemon=True).start()

    def _greet(self, members: Sequence[Member]) -> None:
        if not self._greeting.acquire(blocking=False):
            return
        try:
            self._ping_all(members)
        finally:
            self._greeting.release()

    def _ping_all(self, members: Sequence[Member]) -> None:
        request = {"do": "ping", "view": 0, "from": self._me._asdict()}
        by_id = {member.id: member for member in members if member.id != self._me.id}

        def ask(member: Member) -> dict[str, Any]:
            return self._caller.ask(member, request, self._heartbeat_s)[0]

        replies = self._caller.run_all({id_: partial(ask, member) for id_, member in by_id.items()})
        for id_, reply in replies.items():
            if not isinstance(reply, Exception):
                self.note(by_id[id_], reply)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to the question for a way to a third process."""
        id_ = checked(request, {"member": str})["member"]
        with self._lock:
            known = self._known.get(id_)
        way = None if known is None else known.way
        if way is not None and way.kind == "direct":
            return {"round_trip_s": way.round_trip_s, "gone": False}
        try:
            parked_s = self._streams.parking.round_trip_s(id_)
        except GoneError:
            return {"round_trip_s": _UNKNOWN, "gone": True}
        return {"round_trip_s": _UNKNOWN if parked_s is None else parked_s, "gone": False}

    def close(self) -> None:
        """End all parked and relayed connections."""
        self._parkers.close()
        self._streams.close()

    def _serve_parked(self, stream: socket.socket) -> None:
        self._streams.serve(stream, may_park=False)

    def _known_of(self, member: Member) -> _Known:
        with self._lock:
            known = self._known.get(member.id)
            if known is None:
                known = self._known[member.id] = _Known(member)
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)
            self._known.move_to_end(member.id)
            return known

    def forget(self, member: Member) -> None:
        """Look for another way to a member from now on."""
        self._known_of(member).way = None

    def _forget_ways_by(self, relay: Member) -> None:
        with self._lock:
            for known in self._known.values():
                if known.way is not None and known.way.relay == relay:
                    known.way = None

    def _is_old(self, known: _Known) -> bool:
        """Return whether to look for a better way than the one that is known."""
        way = known.way
        if way is None or way.kind == "direct":
            return False
        is_nearer = way.kind == "relayed" and self._streams.parking.has(way.member.id)
        return is_nearer or _age_s(known.found) > _AGAIN * self._heartbeat_s

    def _find_quietly(self, member: Member) -> None:
        try:
            self._way_to(member, Deadline(self._heartbeat_s))
        except (OSError, UnisonoError) as error:
            _log.debug("there is no way to %s: %s", member.name, error)
        finally:
            self._searches.release()

    def _way_to(self, member: Member, deadline: Deadline) -> Way:
        known = self._known_of(member)
        if known.way is not None and not self._is_old(known):
            return known.way
        if not known.finding.acquire(timeout=deadline.remaining_s()):
            raise TimeoutError(f"the search for a way to {member.name} has not ended in time")
        try:
            if known.way is not None and not self._is_old(known):
                return known.way
            try:
                way = self._find(known, deadline)
            except OSError:
                time.sleep(min(_PAUSE_S, deadline.remaining_s()))
                raise
            before = known.way
            known.way, known.found = way, time.monotonic()
        finally:
            known.finding.release()
        if way.kind != "direct" and (before is None or before[1:3] != way[1:3]):
            _log.info("%s", _shown(way))
        return way

    def _find(self, known: _Known, deadline: Deadline) -> Way:
        """Look for a way; raises OSError as `connect` does if there is none."""
        is_fresh = _age_s(known.dialled) < _AGAIN * self._heartbeat_s
        skips_dial = known.can_dial is False and is_fresh and not known.must_dial
        error: OSError = self._no_way_to(known.member)
        attempts: list[Callable[[_Known, Deadline], Way | None]] = [self._called_back, self._relayed]
        for attempt in attempts if skips_dial else [self._dialled, *attempts]:
            try:
                way = attempt(known, deadline)
            except OSError as failed:
                error = failed if isinstance(failed, ConnectionRefusedError) else error
            else:
                if way is not None:
                    return way
        known.must_dial = skips_dial and not isinstance(error, GoneError)
        _log.debug("no way to %s: %s", known.member.name, error)
        raise error

    def _no_way_to(self, member: Member) -> NoWayError:
        return NoWayError(
            errno.EHOSTUNREACH,
            f"{self._me.name} and {member.name} cannot dial each other now, and no member relays between them: "
            "start a member on a host that both can dial",
        )

    def _dialled(self, known: _Known, deadline: Deadline) -> Way | None:
        member = known.member
        limit_s = self._dial_s(deadline)
        known.must_dial = False
        way = None
        try:
            self._caller.ask((member.host, member.port), {"do": "who"}, limit_s)  # it makes the connection
            began = time.monotonic()
            reply, _ = self._caller.ask((member.host, member.port), {"do": "who"}, limit_s)
            if reply.get("member") == member.id:
                way = Way(member, "direct", None, _age_s(began))
        except (RefusedError, UnisonoError) as error:
            _log.debug("%s does not answer at its address: %s", member.name, error)
        finally:
            known.can_dial, known.dialled = way is not None, time.monotonic()
        return way

    def _dial_s(self, deadline: Deadline) -> float:
        return min(_DIAL_HEARTBEATS * self._heartbeat_s, _DIAL_S, deadline.remaining_s())

    def _called_back(self, known: _Known, _: Deadline) -> Way | None:
        round_trip_s = self._streams.parking.round_trip_s(known.member.id)
        return None if round_trip_s is None else Way(known.member, "called back", None, round_trip_s)

    def _relayed(self, known: _Known, deadline: Deadline) -> Way | None:
        with self._lock:
            near = [
                each.way
                for each in self._known.values()
                if each.way is not None and each.way.kind != "relayed" and each is not known
            ]
        replies = self._ask_relays(near, known.member, min(self._heartbeat_s / 2, deadline.remaining_s()))
        ways, is_gone = [], False
        for way in near:
            reply = replies[way.member.id]
            if isinstance(reply, Exception):
                continue
            if (further_s := _further_s(reply)) is not None:
                ways.append(Way(known.member, "relayed", way.member, way.round_trip_s + further_s))
            is_gone = is_gone or reply.get("gone") is True
        if is_gone and not ways:
            raise GoneError("it has ended")
        return min(ways, key=lambda way: way.round_trip_s, default=None)

    def _ask_relays(self, near: Sequence[Way], member: Member, limit_s: float) -> dict[str, Reply]:
        """Ask processes how far a member is from them; return their replies or errors, by id."""
        reached: list[float] = []  # the times of the replies of those that reach it

        def ask(relay: Member) -> dict[str, Any]:
            reply, _ = self._caller.ask(relay, {"do": "way", "member": member.id}, limit_s, is_search=True)
            if _further_s(reply) is not None:
                reached.append(time.monotonic())
            return reply

        def is_over() -> bool:
            return bool(reached) and _age_s(reached[0]) > _LATER_S

        tasks = {way.member.id: partial(ask, way.member) for way in near}
        return self._caller.run_all(tasks, is_over=is_over, is_search=True)

    def _stream(self, hop: Member, member: str, port: int, deadline: Deadline) -> socket.socket:
        """Return a stream through `hop`, or to it, that is connected to the listener of a member."""
        if not self.is_direct(hop):
            return _connected(self._streams.parking.take(hop.id, deadline), member, port, deadline)
        try:
            stream = open_stream(self._dialler, hop.host, hop.port, self._dial_s(deadline))
        except OSError:
            self.forget(hop)
            raise
        return _connected(stream, member, port, deadline)

    def _onward(self, member: str, port: int) -> socket.socket:
        """Return a stream to a listener of a third process, for relaying; only over one hop."""
        with self._lock:
            known = self._known.get(member)
        if known is not None and known.way is not None and known.way.kind == "direct":
            return self._stream(known.member, member, port, Deadline(_STREAM_S))
        deadline = Deadline(_STREAM_S)
        return _connected(self._streams.parking.take(member, deadline), member, port, deadline)


class RanksWays:
    """The ways to the ranks of a view, for its session."""

    def __init__(self, routes: Routes, members: Sequence[Member]) -> None:
        self._routes = routes
        self._members = members

    def is_direct(self, peer: int) -> bool:
        return self._routes.is_direct(self._members[peer])

    def connect(self, peer: int, port: int, timeout_s: float) -> socket.socket | None:
        return self._routes.connect(self._members[peer], port, timeout_s)

    def shown(self, peer: int) -> str:
        ways = self._routes.ways([self._members[peer]])
        return "" if not ways or ways[0].kind == "direct" else _way_in_words(ways[0])


def _connected(stream: socket.socket, member: str, port: int, deadline: Deadline) -> socket.socket:
    try:
        ask_to_connect(stream, member, port, deadline)
    except BaseException:
        stream.close()
        raise
    return stream


def _way_in_words(way: Way) -> str:
    if way.relay is None:
        return "over connections that it has dialled"
    return f"relayed by {way.relay.name}, {1e3 * way.round_trip_s:.1f} ms"


def _shown(way: Way) -> str:
    return f"{way.member.name} is reached {_way_in_words(way)}"


def _further_s(reply: dict[str, Any]) -> float | None:
    """Return the round trip from a relay to a member by its reply; None if it does not reach it."""
    further_s = reply.get("round_trip_s")
    return further_s if type(further_s) is float and further_s >= 0 else None


def _age_s(since: float) -> float:
    return time.monotonic() - since
