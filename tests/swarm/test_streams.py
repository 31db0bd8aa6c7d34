"""Tests of streams and ways between processes of which some cannot be dialled. All run in this process.

A process that cannot be dialled names a port at which nobody listens. Only streams reach its service.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.deadlines import DEADLINE_S, eventually
from support.ports import free_port

from unisono.foundation.deadlines import Deadline
from unisono.swarm import links, routes, stream_server, streams, views
from unisono.swarm.links import NOTHING, Caller, Service
from unisono.swarm.routes import Routes
from unisono.swarm.views import Member, new_id
from unisono.transports.links.dialer import DialingRank
from unisono.transports.links.handshake import NO_RANK
from unisono.transports.links.listener import listen_tcp
from unisono.transports.tcp.tls import TlsPolicy

KEY, JOB = bytes(range(32)), b"j" * 16
HEARTBEAT_S = 60.0
SECRET = b"the weights of the model " * 100
DIALLER = DialingRank(KEY, JOB, 0, NO_RANK)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take long to answer those that dial."""
    monkeypatch.setattr(routes, "_DIAL_S", HEARTBEAT_S)


class StreamProcess:
    """A process of a swarm, as far as streams know it. It answers each request with the bytes that follow it."""

    def __init__(self, name: str, *, can_be_dialled: bool) -> None:
        listening = listen_tcp("127.0.0.1")
        self.port = listening.getsockname()[1]
        self.me = Member(new_id(), name, "127.0.0.1", self.port if can_be_dialled else free_port())
        tls = TlsPolicy("on")
        self.caller = Caller(KEY, JOB, tls)
        self.routes = Routes(self.me, KEY, JOB, self.caller, HEARTBEAT_S)
        self.service = Service(listening, KEY, JOB, tls, self._answer, self.routes.admit)
        self.routes.listen(self.me.port, self.service.take)

    def _answer(self, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if request["do"] == "who":
            return {"member": self.me.id}, NOTHING
        if request["do"] == "way":
            return self.routes.answer(request), NOTHING
        if request["do"] == "ping":
            return {"can_dial": self.routes.reaches(Member(**request["from"]))}, NOTHING
        return {}, payload

    def way_to(self, other: StreamProcess) -> tuple[str, str | None]:
        """Return the kind of the way to another process, and the name of the relay."""
        (way,) = self.routes.ways([other.me])
        return way.kind, way.relay and way.relay.name

    def ask(self, other: StreamProcess, payload: bytes = SECRET) -> bytes:
        """Let another process return some bytes."""
        return self.caller.ask(other.me, {"do": "echo"}, DEADLINE_S, payload)[1]

    def close(self) -> None:
        self.caller.close()
        self.service.close()
        self.routes.close()


@contextlib.contextmanager
def processes(**can_be_dialled: bool) -> Iterator[list[StreamProcess]]:
    with contextlib.ExitStack() as stack:
        made = [StreamProcess(name, can_be_dialled=value) for name, value in can_be_dialled.items()]
        for process in made:
            stack.callback(process.close)
        yield made


def meet(*members: StreamProcess) -> None:
    """Let processes ping each other until each has a way to all others."""

    def have_met() -> bool:
        for process in members:
            process.routes.greet([other.me for other in members])
        time.sleep(0.05)
        return all(len(process.routes.ways([other.me for other in members])) == len(members) - 1 for process in members)

    assert eventually(have_met)


def stream_to(process: StreamProcess) -> socket.socket:
    return streams.open_stream(DIALLER, "127.0.0.1", process.port, DEADLINE_S)


def test_requests_reach_processes_that_cannot_be_dialled_and_a_relay_that_ends_is_replaced() -> None:
    with processes(relay=True, other=True, b=False, c=False) as (relay, other, b, c):
        meet(relay, other, b, c)
        assert b.way_to(relay) == ("direct", None)

        def has_called_back() -> bool:  # the relay may have found a way through the other one before
            b.routes.greet([relay.me])
            return relay.way_to(b) == ("called back", None)

        assert eventually(has_called_back)
        assert relay.ask(b) == SECRET
        assert b.ask(c) == SECRET
        kind, name = b.way_to(c)
        assert kind == "relayed"
        first, second = (relay, other) if name == "relay" else (other, relay)
        first.close()
        assert b.ask(c) == SECRET
        assert b.way_to(c) == ("relayed", second.me.name)


def test_a_request_that_is_interrupted_leaves_no_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[socket.socket] = []

    def interrupted(link: socket.socket, *_: object) -> None:
        used.append(link)
        raise KeyboardInterrupt

    with processes(a=True, b=True) as (a, b):
        assert a.ask(b) == SECRET
        monkeypatch.setattr(links, "_send", interrupted)
        for _ in range(3):  # over the connections that are idle, and over a new one
            with pytest.raises(KeyboardInterrupt):
                a.caller.ask(("127.0.0.1", b.port), {"do": "echo"}, DEADLINE_S)
        assert [link.fileno() for link in used] == [-1, -1, -1]


def test_a_process_that_has_ended_is_gone_for_all_that_reach_it_by_streams() -> None:
    with processes(relay=True, b=False, c=False) as (relay, b, c):
        meet(relay, b, c)
        assert b.ask(c) == SECRET
        c.close()
        for process in (relay, b):
            for _ in range(2):
                with pytest.raises(ConnectionRefusedError):
                    process.ask(c)


def test_searches_for_two_processes_that_were_relays_for_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    both_search = threading.Barrier(2)
    called_back = routes.Routes._called_back

    def called_back_at_once(self: Routes, *arguments: Any) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_search.wait(DEADLINE_S / 4)
        return called_back(self, *arguments)

    with processes(relay=True, b=False, c=False) as (relay, b, c):
        meet(relay, b, c)
        assert eventually(lambda: relay.ask(b) == SECRET and relay.ask(c) == SECRET)
        b.close()
        c.close()
        monkeypatch.setattr(routes, "_AGAIN", 0.0)  # so that the ways to both are looked for again
        monkeypatch.setattr(Routes, "_called_back", called_back_at_once)
        errors: list[BaseException] = []

        def ask(process: StreamProcess) -> None:
            try:
                relay.ask(process)
            except OSError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(process,), daemon=True) for process in (b, c)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert [type(error) for error in errors] == [streams.GoneError] * 2


def test_as_many_requests_as_a_swarm_has_members_are_made_at_once() -> None:
    all_ask = threading.Barrier(views.MOST_MEMBERS)

    def ask() -> dict[str, Any]:
        all_ask.wait(DEADLINE_S)
        return {}

    with processes(a=True) as (a,):
        replies = a.caller.run_all({str(number): ask for number in range(views.MOST_MEMBERS)})
        assert list(replies.values()) == [{}] * views.MOST_MEMBERS


def test_replies_that_nobody_needs_any_more_are_not_awaited() -> None:
    end = threading.Event()

    def wait() -> dict[str, Any]:
        end.wait(DEADLINE_S)
        return {}

    with processes(a=True) as (a,):
        replies = a.caller.run_all({"stuck": wait}, is_over=lambda: True)
        end.set()
        assert isinstance(replies["stuck"], TimeoutError)


def test_a_relay_copies_encrypted_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    class Watched(socket.socket):
        """The stream from the relay to the reader; it notes what the relay sends."""

        def sendall(self, data: Any, flags: int = 0) -> None:
            seen.append(bytes(data))
            super().sendall(data, flags)

    copy = stream_server._copy_both_ways

    def copy_and_note(one: socket.socket, other: socket.socket, heartbeat_s: float) -> None:
        with Watched(fileno=os.dup(other.fileno())) as watched:
            copy(one, watched, heartbeat_s)

    monkeypatch.setattr(stream_server, "_copy_both_ways", copy_and_note)
    with processes(relay=True, b=False, c=False) as (relay, b, c):
        meet(relay, b, c)
        assert b.ask(c) == SECRET
        assert b.way_to(c) == ("relayed", "relay")
        copied = b"".join(seen)
        assert len(copied) > len(SECRET)
        assert SECRET[:20] not in copied


@pytest.mark.parametrize(
    ("member", "port", "error", "text"),
    [
        ("nobody", 1, streams.NoWayError, "keeps no connection open"),
        ("", 1, streams.GoneError, "nothing listens at port 1"),
        ("nobody", 1 << 70, streams.NoWayError, "more than 64 bits"),
    ],
)
def test_a_stream_to_a_wrong_name_or_port_is_refused(member: str, port: int, error: type[OSError], text: str) -> None:
    with processes(relay=True) as (relay,):
        stream = stream_to(relay)
        with stream, pytest.raises(error, match=text):
            streams.ask_to_connect(stream, member or relay.me.id, port, Deadline(DEADLINE_S))


def test_a_message_that_is_too_long_or_none_ends_the_stream() -> None:
    with processes(relay=True) as (relay,):
        for data in (struct.pack("!H", 0xFFFF), struct.pack("!H", 4) + b"null", struct.pack("!H", 0)):
            with stream_to(relay) as stream:
                stream.settimeout(DEADLINE_S)
                stream.sendall(data)
                answer = b""
                while part := stream.recv(1 << 16):
                    answer += part
                assert b"error" in answer


def test_a_relay_stops_reading_when_the_reader_does_and_passes_on_the_end_of_each_direction() -> None:
    data = os.urandom(64 << 20)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pairs = []
        for _ in range(2):
            near = socket.create_connection(listening.getsockname())
            pairs.append((near, listening.accept()[0]))
        (writer, one), (reader, other) = pairs
        relay = threading.Thread(target=stream_server._copy_both_ways, args=(one, other, HEARTBEAT_S))
        relay.start()
        writer.setblocking(False)
        sent, idle = 0, 0
        while idle < 100:  # nobody reads, so the writer stops before the end
            try:
                sent += writer.send(memoryview(data)[sent : sent + (1 << 20)])
                idle = 0
            except BlockingIOError:
                idle += 1
                time.sleep(0.01)
        assert sent < len(data)
        received = bytearray()

        def read() -> None:
            while part := reader.recv(1 << 20):
                received.extend(part)
            reader.sendall(b"thanks")
            reader.close()

        reading = threading.Thread(target=read)
        reading.start()
        writer.settimeout(DEADLINE_S)
        writer.sendall(memoryview(data)[sent:])
        writer.shutdown(socket.SHUT_WR)
        assert writer.recv(100) == b"thanks"
        assert writer.recv(100) == b""
        for thread in (relay, reading):
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        assert received == data
        for sock in (writer, one, other):
            sock.close()


def test_a_process_bounds_the_streams_and_the_searches_that_others_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MOST_CONNECTIONS", 4)
    with processes(relay=True) as (relay,), contextlib.ExitStack() as opened:
        for _ in range(4):
            opened.enter_context(stream_to(relay))
        refused = opened.enter_context(stream_to(relay))
        refused.settimeout(DEADLINE_S)
        assert refused.recv(1) == b""
        strangers = [Member(new_id(), "stranger", "192.0.2.1", 9) for _ in range(100)]
        before = threading.active_count()
        for stranger in strangers:
            relay.routes.reaches(stranger)
        assert threading.active_count() - before <= routes._MOST_SEARCHES
