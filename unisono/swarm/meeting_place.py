"""Where processes find the members of a swarm: `MeetingPlace` is the server, and `Places` asks one or several.

Theory of operation
-------------------
A meeting place knows who is there, and forgets everybody who does not register again. Each member registers with its
view, and each process that waits with its address. So a place that is started anew, or at another address, knows the
same after two heartbeats. No call of the members needs it.

Example: a place at A serves three members and is killed. Their calls go on. A process that wants to enter asks A, which
does not answer, and then B, where a second place runs and the members register too. B answers that there are members.
They see the process in the answer of B to their own registration, and admit it.

If no member is registered, the place lets one of the processes that wait found the swarm, once as many are there as
each of them asks for. So a new process does not begin without one that has lost its quorum and holds the newest state.
A place that has just been started first waits for members of a running swarm.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from unisono.collectives.bootstrap.environment import job_of_key, key_of_file
from unisono.errors import RendezvousError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.forks import closed_in_child
from unisono.foundation.json_checks import checked
from unisono.swarm.links import NOTHING, Caller, RefusedError, Service
from unisono.swarm.views import MOST_MEMBERS, Member, member_of
from unisono.transports.host.bind_address import lookup
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.links.handshake_io import BACKLOG
from unisono.transports.rendezvous import host_and_port, serving_host
from unisono.transports.rendezvous.roster import release
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

_log = log.get("rendezvous")

_SERVER = "meeting place"
# What to do about an error of the address.
_ADVICE = {
    errno.EADDRINUSE: "; pass another port, or end the process that listens there",
    errno.EADDRNOTAVAIL: "; pass an address of this machine, or tcp://0.0.0.0:PORT for all of them",
}
# A process that does not register for this many of its heartbeats is forgotten.
_FORGOTTEN = 3.0
# A place that was started anew waits for members for this many heartbeats.
_GRACE = 1.5
_LONGEST_HEARTBEAT_S = 600.0
_MOST_PROCESSES = 1024
_ASK_S = 5.0
_REQUEST = {"member": dict, "view": int, "heartbeat_s": float, "found_with": int, "release": str}


class News(NamedTuple):
    """The answers of the meeting places, as one.

    Attributes:
        answered: how many places have answered.
        waiting: the processes that wait to enter, in the order in which they came.
        members: the members of a swarm, for a process that waits.
        has_members: whether a member of a swarm is registered.
        found_with: with how many processes the asking process founds the swarm; 0 if it does not.
        problem: why a place did not answer, as text; empty if one did.
    """

    answered: int
    waiting: tuple[Member, ...]
    members: tuple[Member, ...]
    has_members: bool
    found_with: int
    problem: str


class _Entry(NamedTuple):
    member: Member
    view: int  # the number of its view, or 0 for a process that waits
    found_with: int  # how many processes must wait before one founds the swarm
    ends: float


class MeetingPlace:
    """Serves a meeting place in threads of its own, from construction to `close`; a context manager.

    Any process that holds the key of the job may serve one, also one that is no member. ``unisono swarm serve`` does.

    Args:
        url: ``tcp://host:port``. Port 0 means any free port, which the attribute `url` shows.
        key: the key of the job, 32 bytes; by default that in the file of ``UNISONO_KEY_FILE``.

    Attributes:
        url: the address, with the port.
        is_everywhere: whether it listens on all addresses of this machine. It does if the host is a name, because a
            name may belong to a service that forwards to this machine.

    Raises:
        UsageError: the URL or the key cannot be used.
        RendezvousError: the port is in use, or the address is none of this machine.
    """

    def __init__(self, url: str, key: bytes | None = None) -> None:
        key = checked_key(key)
        job = job_of_key(key)
        host, port = _address_of(url)
        listening = _listen(serving_host(url, has_key=True), port, url)
        self.is_everywhere = listening.getsockname()[0] in ("0.0.0.0", "::")
        self.url = f"tcp://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._founder: str | None = None
        self._service = Service(listening, key, job, TlsPolicy.offering(), self._answer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. May be called twice."""
        self._service.close()

    def _answer(self, request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        checked(request, _REQUEST, "a registration")
        if request["release"] != release():
            raise ValueError(f"this process runs {request['release']}, and the meeting place {release()}")
        member, heartbeat_s = member_of(request["member"]), min(request["heartbeat_s"], _LONGEST_HEARTBEAT_S)
        with self._lock:
            now = time.monotonic()
            self._entries = {id_: entry for id_, entry in self._entries.items() if entry.ends > now}
            if request.get("leaves"):
                self._entries.pop(member.id, None)
                return {"waiting": [], "members": [], "has_members": False, "found_with": 0}, NOTHING
            if member.id not in self._entries and len(self._entries) >= _MOST_PROCESSES:
                raise ValueError(f"{_MOST_PROCESSES} processes are registered here, and a meeting place takes no more")
            ends = now + _FORGOTTEN * heartbeat_s
            self._entries[member.id] = _Entry(member, request["view"], request["found_with"], ends)
            waiting = [entry.member for entry in self._entries.values() if not entry.view]
            members = [entry.member for entry in self._entries.values() if entry.view]
            has_members = bool(members)
            found_with = 0 if has_members else self._found_with(member, heartbeat_s)
        return {
            "waiting": [other._asdict() for other in waiting],
            "members": [] if request["view"] else [other._asdict() for other in members[:MOST_MEMBERS]],
            "has_members": has_members,
            "found_with": found_with,
        }, NOTHING

    def _found_with(self, member: Member, heartbeat_s: float) -> int:
        """Return with how many processes this one founds the swarm; 0 if it does not, because all of them wait.

        Another process may do so only when the first has been forgotten.
        """
        least = max(entry.found_with for entry in self._entries.values())
        if len(self._entries) < least or time.monotonic() - self._began < _GRACE * heartbeat_s:
            return 0
        if self._founder not in self._entries:
            self._founder = member.id
        return least if self._founder == member.id else 0


class Places:
    """The meeting places that a process knows.

    Args:
        urls: their addresses, the preferred one first.
        caller: makes the requests.
        serves: whether this process serves a place at the first address that is of its machine and that nobody serves.
        key: the key of the job.

    Raises:
        UsageError: there is none, or an address cannot be used.
    """

    def __init__(self, urls: Sequence[str], caller: Caller, *, serves: bool, key: bytes) -> None:
        if not urls:
            raise UsageError("a swarm needs the address of a meeting place, such as tcp://host.example:29400")
        self._addresses = [_address_of(url) for url in urls]
        self.urls = tuple(urls)
        self._caller = caller
        self._serves, self._key = serves, key
        self._place: MeetingPlace | None = None

    @property
    def served(self) -> str | None:
        """The address of the place that this process serves; None if it serves none."""
        return None if self._place is None else self._place.url

    def try_to_serve(self) -> None:
        """Serve a meeting place at the first address of this machine that is free, if the program asks for it."""
        if not self._serves or self._place is not None:
            return
        for url in self.urls:
            try:
                self._place = MeetingPlace(url, self._key)
            except (RendezvousError, OSError):
                continue
            _log.info("this process serves the meeting place at %s", self._place.url)
            return

    def close(self) -> None:
        """Serve no place any more."""
        if self._place is not None:
            self._place.close()

    def register(self, member: Member, view: int, heartbeat_s: float, found_with: int, *, leaves: bool = False) -> News:
        """Register at all meeting places, and return their answers as one.

        Args:
            member: this process.
            view: the number of its view; 0 if it waits.
            heartbeat_s: it registers at least twice in this time.
            found_with: how many processes must wait before one founds the swarm.
            leaves: whether to forget this process instead.

        Raises:
            RendezvousError: a place refuses this process.
            TransportUnavailableError: this process has another key than a place.
        """
        request = {
            "member": member._asdict(),
            "view": view,
            "heartbeat_s": float(heartbeat_s),
            "found_with": found_with,
            "release": release(),
            "leaves": leaves,
        }
        replies, problem = [], ""
        for address in self._addresses:
            try:
                replies.append(self._ask(*address, request, min(_ASK_S, heartbeat_s)))
            except (OSError, ValueError) as error:
                problem = f"{address[0]} port {address[1]} {_shown(error)}"
            except RefusedError as error:
                raise RendezvousError(f"the meeting place at {address[0]} refuses this process: {error}") from None
        waiting = {other.id: other for reply in replies for other in map(member_of, reply["waiting"])}
        members = {other.id: other for reply in replies for other in map(member_of, reply["members"])}
        has_members = any(reply["has_members"] for reply in replies)
        found_with = replies[0]["found_with"] if replies and not has_members else 0
        return News(
            len(replies),
            tuple(waiting.values()),
            tuple(members.values()),
            has_members,
            found_with,
            "" if replies else problem,
        )

    def _ask(self, host: str, port: int, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        numeric = str(socket.getaddrinfo(lookup(host), port, type=socket.SOCK_STREAM)[0][4][0])
        reply, _ = self._caller.ask((numeric, port), request, timeout_s)
        shape = {"waiting": [dict], "members": [dict], "has_members": bool, "found_with": int}
        fields: dict[str, Any] = checked(reply, shape, "the answer of a meeting place")
        return fields

    def leave(self, member: Member, heartbeat_s: float) -> None:
        """Let the places forget this process at once."""
        with contextlib.suppress(UnisonoError):
            self.register(member, 0, heartbeat_s, 1, leaves=True)


def _address_of(url: str) -> tuple[str, int]:
    if not isinstance(url, str) or not url.startswith("tcp://"):
        raise UsageError(f"the {_SERVER} {url!r} cannot be used: it must have the form tcp://HOST:PORT")
    return host_and_port(url, _SERVER)


def _shown(error: Exception) -> str:
    why = getattr(error, "strerror", None) or error
    if isinstance(error, ConnectionResetError):
        return f"does not answer as one of this job, so it may have another key: {why}"
    return f"cannot be asked: {why}; check the address, or serve a meeting place there by `unisono swarm serve`"


def checked_key(key: bytes | None) -> bytes:
    """Return the key of the job that a program has passed, or that in the file of ``UNISONO_KEY_FILE``.

    Raises:
        UsageError: there is none, or it is no key.
    """
    key = key_of_file(os.environ) if key is None else key
    if key is None:
        raise UsageError(
            f"a swarm needs the key of its job: make a file by `(umask 077; head -c {KEY_NBYTES} /dev/urandom > key)`, "
            "copy it to each machine, and set UNISONO_KEY_FILE to its path"
        )
    if not isinstance(key, bytes) or len(key) != KEY_NBYTES:
        raise UsageError(f"key must be {KEY_NBYTES} bytes")
    return key


def _listen(host: str, port: int, url: str) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            lookup(host) if host else None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = closed_in_child(socket.socket(family, kind, protocol))
    except OSError as error:
        raise RendezvousError(f"no meeting place can be served at {url}: {error.strerror or error}") from None
    try:
        # So a new place can use the port of one that has just ended.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        advice = _ADVICE.get(error.errno or 0, "")
        raise RendezvousError(f"no meeting place can be served at {url}: {error.strerror or error}{advice}") from None
    return sock
