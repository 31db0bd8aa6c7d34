"""Requests and replies between processes of a job: `Service` answers them, and `Caller` makes them.

A request is a message in JSON (transports/links/link_messages.py), and may be followed by bytes. So may its reply.
Every connection begins with the handshake, which proves that both ends hold the key of the job, and goes on with TLS
unless the options say otherwise. The sizes of all messages are bounded, and so is the number of connections.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Protocol

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.foundation.json_checks import checked
from unisono.foundation.wire import more
from unisono.swarm.streams import hang_up
from unisono.swarm.views import MOST_MEMBERS, Member
from unisono.transports.links import dialer
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import NO_RANK, Admission, Hello, Purpose
from unisono.transports.links.handshake_io import HandshakeServer
from unisono.transports.links.link_messages import receive, send
from unisono.transports.links.listener import Addresses
from unisono.transports.tcp.tls import TlsPolicy, certificate_of

_log = log.get("links")

MOST_PAYLOAD = 1 << 23
"""The most bytes that follow a message."""

_MOST_CONNECTIONS = 1024
_PENDING_LIMIT = 64
_MOST_IDLE = 2
# All members must be asked at once, because a request such as "meet" ends only when all of them take part.
_MOST_ASKED, _MOST_SEARCHED = 2 * MOST_MEMBERS, 32
_LOOK_S = 0.05
# How long the rest of a request may take, once it has begun.
_REST_S = 30.0
_NO_EPOCH = 0
NOTHING = b""

# (request, bytes behind it) → (reply, bytes behind it)
Answer = Callable[[dict[str, Any], bytes], tuple[dict[str, Any], bytes]]


# A process to ask: a member, or the host and the port to dial.
Target = Member | tuple[str, int]

Reply = dict[str, Any] | Exception


class RefusedError(Exception):
    """The other process has answered a request with an error. The message is its text."""


class BarredError(RefusedError):
    """The other process answers no request of this one, whose certificate is barred."""


class Guard(Protocol):
    """Decides by certificates with which processes this one has to do. Several threads may use it."""

    def bars(self, certificate: str) -> bool:
        """Return whether a certificate is barred; a process without one presents the empty text."""

    def note_bar(self) -> None:
        """Note that another process has barred the certificate of this one."""


class Service:
    """Answers the requests of processes of the job, each connection in a thread of its own, until `close`.

    Args:
        listening: a nonblocking listening socket, which the service takes over.
        key, job: the key and the id of the job.
        tls: which connections use TLS.
        answer: called with each request and the bytes behind it. A ValueError becomes the reply ``{"error": text}``.
        stream: called with each stream (streams.py), which it then owns, in a thread of its own; by default there are
            none.
        guard: says whose requests are refused; by default nobody's.
    """

    def __init__(
        self,
        listening: socket.socket,
        key: bytes,
        job: bytes,
        tls: TlsPolicy,
        answer: Answer,
        stream: Callable[[socket.socket], object] | None = None,
        guard: Guard | None = None,
    ) -> None:
        self._listening = listening
        self._answer = answer
        self._guard = guard
        self._stream = stream
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._is_closed = False
        purposes = frozenset({Purpose.SWARM} if stream is None else {Purpose.SWARM, Purpose.STREAM})
        try:
            admission = Admission(job, _NO_EPOCH, NO_RANK, frozenset({NO_RANK}), purposes)
            self._loop = EventLoop("unisono-swarm", lambda _: listening.close())
            self._handshakes = HandshakeServer(self._loop, key, admission, _PENDING_LIMIT, self._admit, tls)
            self._handshakes.watch(listening)
            self._loop.start()
        except BaseException:
            listening.close()
            raise

    def take(self, link: socket.socket) -> None:
        """Answer on a nonblocking connection that another process has made, and close it once this one is closed."""
        with self._lock:
            if not self._is_closed:
                self._loop.submit(partial(self._handshakes.take, link))
                return
        link.close()

    def close(self) -> None:
        """Stop answering, and close all connections. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.close(self._handshakes.close)
        self._listening.close()
        with self._lock:
            links = list(self._links)
        for link in links:
            hang_up(link)

    def _admit(self, hello: Hello, link: socket.socket) -> None:
        with self._lock:
            if self._is_closed or len(self._links) >= _MOST_CONNECTIONS:
                link.close()
                return
            self._links.add(link)
        serve = self._serve if hello.purpose is Purpose.SWARM else self._serve_stream
        threading.Thread(target=serve, args=(link,), name="unisono-swarm-link", daemon=True).start()

    def _serve_stream(self, link: socket.socket) -> None:
        assert self._stream is not None
        try:
            self._stream(link)
        finally:
            with self._lock:
                self._links.discard(link)

    def _serve(self, link: socket.socket) -> None:
        try:
            while not self._is_closed:
                request, payload = _received(link, Deadline(LONGEST_WAIT_S))
                _send(link, *self._reply(link, request, payload))
        except (OSError, ValueError, UnisonoError) as error:
            _log.debug("a connection of the swarm has ended: %s", error)
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _reply(self, link: socket.socket, request: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        if self._guard is not None and self._guard.bars(certificate_of(link)):
            return {"error": "the certificate of the asking process is barred", "is_barred": True}, NOTHING
        try:
            return self._answer(request, payload)
        except ValueError as error:
            return {"error": str(error)}, NOTHING


class MemberWays(Protocol):
    """The ways to members of which some cannot be dialled (routes.py)."""

    def connect(self, member: Member, port: int, timeout_s: float, *, is_search: bool = False) -> socket.socket | None:
        """Return a connection to the listener of a member at a port; None to dial it. Raises OSError.

        With `is_search`, it uses the way that is known, and looks for no other.
        """

    def forget(self, member: Member) -> None:
        """Look for another way to a member from now on."""


class Caller:
    """Makes requests to the services of other processes. Several threads may do so at once.

    Args:
        key, job: the key and the id of the job.
        tls: which connections use TLS.

    Attributes:
        ways: the ways to members; None to dial all.
        guard: says which members are asked nothing; None to ask all.
    """

    def __init__(self, key: bytes, job: bytes, tls: TlsPolicy) -> None:
        self._caller = dialer.DialingRank(key, job, _NO_EPOCH, NO_RANK, tls)
        self._lock = threading.Lock()
        self._idle: defaultdict[Target, list[socket.socket]] = defaultdict(list)
        self._is_closed = False
        self.ways: MemberWays | None = None
        self.guard: Guard | None = None
        self._certificate = tls.certificate
        self._asking = ThreadPoolExecutor(_MOST_ASKED, "unisono-swarm-ask")
        self._searching = ThreadPoolExecutor(_MOST_SEARCHED, "unisono-swarm-search")

    def ask(
        self,
        target: Target,
        request: Mapping[str, Any],
        timeout_s: float,
        payload: bytes = NOTHING,
        *,
        is_search: bool = False,
    ) -> tuple[dict[str, Any], bytes]:
        """Return the reply to a request, and the bytes behind it.

        Args:
            target: a member, which is reached by its way; or the host and the port to dial.
            request: the message, with `payload` behind it.
            timeout_s: seconds until the reply must be complete.
            payload: bytes.
            is_search: whether the request is part of a search for a way. It then begins no other search, which could
                wait for this one.

        Raises:
            RefusedError: the other process refuses the request, or its certificate is barred.
            BarredError: it refuses the request because the certificate of this process is barred.
            OSError: it does not answer in time (TimeoutError), nobody listens there (ConnectionRefusedError), or the
                connection has ended. A member presents another certificate than it registered with.
            TransportUnavailableError: it has another key, another job or another wire version.
        """
        deadline, guard = Deadline(timeout_s), self.guard
        if guard is not None and isinstance(target, Member) and guard.bars(target.certificate):
            raise RefusedError(f"the certificate of {target.name} is barred")
        link = self._taken(target)
        is_fresh = link is None
        link = link or self._connected(target, deadline, is_search)
        try:
            _send(link, request, payload)
            reply, following = _received(link, deadline)
        except (OSError, ValueError) as error:
            link.close()
            if is_fresh or isinstance(error, TimeoutError):
                raise error if isinstance(error, OSError) else ConnectionAbortedError(str(error)) from None
            # An idle connection had ended.
            return self.ask(target, request, deadline.remaining_s(), payload, is_search=is_search)
        except BaseException:  # such as an interrupt
            link.close()
            raise
        self._give_back(target, link)
        if reply.get("is_barred") is True:
            if guard is not None:
                guard.note_bar()
            raise BarredError(str(reply.get("error", "")))
        if "error" in reply:
            raise RefusedError(str(reply["error"]))
        return reply, following

    def run_all(
        self,
        tasks: Mapping[str, Callable[[], dict[str, Any]]],
        on_error: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
        *,
        is_search: bool = False,
    ) -> dict[str, Reply]:
        """Run tasks in threads, side by side, and return the reply or the error of each task by the name of the task.

        Args:
            tasks: functions by name. Each makes a request, and returns the reply or raises an error of `ask`. Up to
                twice as many as a swarm has members run at once.
            on_error: called as soon as a task has failed, in its thread.
            is_over: called again and again. Once it returns True, nobody waits for the other replies: a TimeoutError
                takes the place of each.
            is_search: as of `ask`.
        """

        def attempt(task: Callable[[], dict[str, Any]]) -> Reply:
            try:
                return task()
            except (OSError, RefusedError, UnisonoError) as error:
                on_error()
                return error

        # A task may begin a search, whose requests must not wait for a thread until that task has ended.
        threads = self._searching if is_search else self._asking
        try:
            replies = {name: threads.submit(attempt, task) for name, task in tasks.items()}
        except RuntimeError:  # this process leaves the swarm while it asks
            return dict.fromkeys(tasks, ConnectionAbortedError("this process has closed its connections"))
        awaited = set(replies.values())
        while awaited and not is_over():
            awaited = wait(awaited, _LOOK_S).not_done
        late = TimeoutError("it has not answered before the others ended")
        return {name: late if reply in awaited else reply.result() for name, reply in replies.items()}

    def close(self) -> None:
        """Close all idle connections, and the others once they have their reply."""
        self._asking.shutdown(wait=False)
        self._searching.shutdown(wait=False)
        with self._lock:
            self._is_closed = True
            links = [link for idle in self._idle.values() for link in idle]
            self._idle.clear()
        for link in links:
            link.close()

    def _taken(self, target: Target) -> socket.socket | None:
        with self._lock:
            idle = self._idle.get(target)
            return idle.pop() if idle else None

    def _give_back(self, target: Target, link: socket.socket) -> None:
        with self._lock:
            if not self._is_closed and len(self._idle[target]) < _MOST_IDLE:
                self._idle[target].append(link)
                return
        link.close()

    def _connected(self, target: Target, deadline: Deadline, is_search: bool) -> socket.socket:
        if not isinstance(target, Member):
            return self._dialled(*target, None, deadline)
        ways = self.ways
        limit_s = deadline.remaining_s()
        link = None if ways is None else ways.connect(target, target.port, limit_s, is_search=is_search)
        try:
            return self._checked(target, self._dialled(target.host, target.port, link, deadline))
        except ConnectionRefusedError:
            raise
        except OSError:
            if ways is not None:
                ways.forget(target)
            raise

    def _checked(self, member: Member, link: socket.socket) -> socket.socket:
        if self._certificate and certificate_of(link) != member.certificate:
            link.close()
            raise ConnectionAbortedError(f"{member.name} presents another certificate than it registered with")
        return link

    def _dialled(self, host: str, port: int, link: socket.socket | None, deadline: Deadline) -> socket.socket:
        service = dialer.Target(NO_RANK, Addresses("", "", host, port, 0), False, Purpose.SWARM)
        try:
            return dialer.dial(self._caller, service, deadline.remaining_s(), link)[0]
        except UnisonoError as error:
            if isinstance(error, TimeoutError):
                raise TimeoutError(error.message) from None
            if isinstance(error.__cause__, OSError):
                raise error.__cause__ from None
            raise


def _send(link: socket.socket, message: Mapping[str, Any], payload: bytes) -> None:
    send(link, {**message, "nbytes": len(payload)})
    if payload:
        link.settimeout(_REST_S)
        link.sendall(payload)


def _received(link: socket.socket, deadline: Deadline) -> tuple[dict[str, Any], bytes]:
    message = receive(link, deadline)
    nbytes = checked(message, {"nbytes": int})["nbytes"]
    if not 0 <= nbytes <= MOST_PAYLOAD:
        raise ValueError("more bytes follow a message than may")
    payload = bytearray()
    while len(payload) < nbytes:
        link.settimeout(min(_REST_S, deadline.checked_remaining_s()))
        more(link, payload, nbytes)
    return message, bytes(payload)
