"""How a process joins a running job: where it waits, and how the leader of the members reaches it.

Theory of operation
-------------------
A process that wants to join (a *joiner*) knows the key, the id and the store of the job, but none of its members. It
listens at a port, and puts its address into the store as the next free request: ``request/0``, ``request/1`` and so on.
The leader is rank 0 of the members. When the members call `grow`, it reads the requests that it has not read yet, and
dials each joiner. The handshake proves on both sides that the other one holds the key of the job. From then on the
joiner and the leader watch the connection, which ends when the process at the other end does.

The leader puts its answer to each request into the store. So a later leader, which reads all requests again, passes
over those that an earlier one has answered. A joiner that no leader can reach finds the reason in the answer. It asks
again, with a new request, if the leader answers so or is lost.

Over the connection the leader asks whether the joiner still waits, because a stopped process keeps its connections.
Then it sends the invitation: rank, size, epoch and the store of the rendezvous. After the rendezvous the members agree
whether all of them have met. If they have, the leader lets the joiner begin. If not, it sends an error or closes the
connection, and in the second case the joiner asks again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import threading
from typing import Any, NamedTuple

from unisono.errors import PeerLostError, RendezvousError, UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.foundation.records import record
from unisono.foundation.wire import json_of
from unisono.transports.links.dialer import Connection, DialingRank, Target
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import NO_RANK, Admission, Hello, Purpose
from unisono.transports.links.handshake_io import HandshakeServer
from unisono.transports.links.link_messages import readable, receive, send
from unisono.transports.links.listener import Addresses, listen_tcp
from unisono.transports.links.liveness import watch
from unisono.transports.rendezvous.roster import release
from unisono.transports.rendezvous.stores import Store, StoreTimeoutError
from unisono.transports.tcp.tls import TlsPolicy

_log = log.get("rendezvous")

# How long a joiner may take to answer. One that takes longer asks again, and so waits for the next call of `grow`.
_ANSWER_S = 2.0
# The same while all members wait for it.
_READY_S = 1.0
# How often a joiner looks for the answer to its request.
_LOOK_S = 0.2
_PENDING_LIMIT = 64
_JOINERS_HAVE_NO_EPOCH = 0
# The fields of an invitation and of a request, with their types.
_INVITATION = {**dict.fromkeys(("rank", "size", "epoch", "meeting"), int), "store": str}
_REQUEST = {"release": str, "host": str, "port": int, "node": str, "pid": int}


class Invitation(NamedTuple):
    """The invitation of a joiner: its rank in the new job, and the URL of the store where all ranks meet."""

    rank: int
    size: int
    epoch: int
    meeting: int
    store: str

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Invitation:
        """Return the invitation in a message; raises ValueError if it has none."""
        checked(fields, _INVITATION, "an invitation")
        invitation = cls(**{name: fields[name] for name in _INVITATION})
        if not 0 < invitation.rank < invitation.size or invitation.epoch < 1:
            raise ValueError(
                f"an invitation has rank {invitation.rank} of {invitation.size} and epoch {invitation.epoch}"
            )
        return invitation


@record
class JoinRequest:
    """The request of a joiner, as it is in the store.

    Attributes:
        release: the version of Unisono.
        host, port: where the joiner listens.
        node, pid: its host name and its process, for people.
    """

    release: str
    host: str
    port: int
    node: str
    pid: int

    @classmethod
    def parse(cls, value: bytes) -> JoinRequest:
        """Return the request in a value of the store; raises ValueError if it is malformed."""
        fields = json_of(value, _REQUEST, "a request")
        request = cls(**{name: fields[name] for name in _REQUEST})
        if not 0 < request.port < 1 << 16:
            raise ValueError(f"a request has port {request.port}, which is no TCP port")
        return request

    def pack(self) -> bytes:
        """Return the value for the store."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.node} ({self.host} port {self.port})"


class _Dialled(NamedTuple):
    """A joiner to which the leader is connecting."""

    request: JoinRequest
    connection: Connection
    deadline: Deadline


class Joiners:
    """The processes that wait to join, for the leader of the members.

    Args:
        store: the part of the job's store for requests and answers.
        key, job: the key and the id of the job.
        heartbeat_timeout_s: seconds after which a joiner whose host is silent is lost.
        tls: which connections to joiners use TLS.
    """

    def __init__(self, store: Store, key: bytes, job: bytes, heartbeat_timeout_s: float, tls: TlsPolicy) -> None:
        self._store = store
        self._caller = DialingRank(key, job, _JOINERS_HAVE_NO_EPOCH, NO_RANK, tls)
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._next = 0  # the first request that has not been read
        self._waiting: list[socket.socket] = []
        self._dialled: dict[int, _Dialled] = {}  # by request

    def look(self, patience_s: float = 0.0) -> int:
        """Dial the joiners that have made new requests. Return the number of all joiners that wait now.

        A joiner that does not answer at once is looked at again in the next call. With `patience_s`, this call waits so
        long for those that have been dialled.

        Raises:
            RendezvousError: the store has failed.
        """
        for link in readable(self._waiting):
            self._waiting.remove(link)
            link.close()
        while (value := _read(self._store, _request(self._next))) is not None:
            number, self._next = self._next, self._next + 1
            if _read(self._store, _answer(number)) is None:
                self._begin(number, value)
        patience = Deadline(patience_s)
        while self._dialled and not self._advance(patience):
            pass
        return len(self._waiting)

    def ready(self, most: int) -> list[socket.socket]:
        """Return the connections of the first joiners that answer now, at most `most`. The caller owns them."""
        asked, self._waiting = self._waiting[:most], self._waiting[most:]
        for link in asked:
            send(link, {"ask": "ready"})
        links: list[socket.socket] = []
        deadline = Deadline(_READY_S)
        for link in asked:
            try:
                receive(link, deadline)
            except (OSError, ValueError) as error:
                _log.debug("a process that waits to join does not answer: %s", error)
                link.close()
            else:
                links.append(link)
        return links

    def wait_again(self, links: list[socket.socket]) -> None:
        """Tell joiners that `ready` has returned to wait for the next round."""
        self._waiting = links + self._waiting

    def close(self) -> None:
        """Close all connections and the store."""
        for link in self._waiting:
            link.close()
        for each in self._dialled.values():
            each.connection.close()
        self._waiting.clear()
        self._dialled.clear()
        self._store.close()

    def _begin(self, number: int, value: bytes) -> None:
        """Begin to connect to the joiner of a request, or answer the request."""
        try:
            request = JoinRequest.parse(value)
        except ValueError as error:
            self._put(number, {"error": f"the request to join cannot be used: {error}"})
            return
        if request.release != release():
            text = f"this process runs {request.release}, and the job {release()}: all must run the same"
            self._put(number, {"error": text})
            return
        addresses = Addresses("", "", request.host, request.port, request.pid)
        try:
            connection = Connection(self._caller, Target(NO_RANK, addresses, False, Purpose.JOIN))
        except UnisonoError as error:
            self._put(number, _unreached(request, error))
        else:
            self._dialled[number] = _Dialled(request, connection, Deadline(_ANSWER_S))

    def _advance(self, patience: Deadline) -> bool:
        """Go on with the connections that can; return whether `patience` has passed."""
        poll = select.poll()
        earliest_s = min(each.deadline.remaining_s() for each in self._dialled.values())
        for each in self._dialled.values():
            poll.register(each.connection.sock, select.POLLOUT if each.connection.is_connecting else select.POLLIN)
        is_over = patience.has_passed()
        active = {number for number, _ in poll.poll(1e3 * min(earliest_s, patience.remaining_s()))}
        for number, each in list(self._dialled.items()):
            if each.connection.sock.fileno() in active:
                self._go_on(number, each)
            elif each.deadline.has_passed():
                del self._dialled[number]
                each.connection.close()
                self._put(number, {"again": "it did not answer in time"})
        return is_over

    def _go_on(self, number: int, each: _Dialled) -> None:
        try:
            if each.connection.advance() is None:
                return
        except UnisonoError as error:
            each.connection.close()
            answer = _unreached(each.request, error)
        else:
            watch(each.connection.sock, self._heartbeat_timeout_s)
            self._waiting.append(each.connection.sock)
            answer = {"reached": str(each.request)}
        del self._dialled[number]
        self._put(number, answer)

    def _put(self, number: int, answer: dict[str, Any]) -> None:
        try:
            self._store.set(_answer(number), json.dumps(answer).encode())
        except RendezvousError as error:  # the leader of another part of a job that has fallen into parts was faster
            _log.debug("request %d to join has an answer already: %s", number, error.message)


class Joiner:
    """A process that waits to join a job.

    Args:
        store: the part of the job's store for requests and answers.
        key, job: the key and the id of the job.
        bind_address: the address to listen on, as of the option.
        heartbeat_timeout_s: seconds after which a leader whose host is silent is lost.
        tls: whether the connection of the leader uses TLS.

    Raises:
        UsageError: `bind_address` cannot be used.
    """

    def __init__(
        self, store: Store, key: bytes, job: bytes, bind_address: str, heartbeat_timeout_s: float, tls: TlsPolicy
    ) -> None:
        self._store = store
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._changed = threading.Condition()
        self._arrived: socket.socket | None = None  # the connection of a leader that `invitation` has not taken yet
        self._link: socket.socket | None = None
        self._number: int | None = None  # of the request that is not answered yet
        self._listening = listen_tcp(bind_address)
        try:
            admission = Admission(job, _JOINERS_HAVE_NO_EPOCH, NO_RANK, frozenset({NO_RANK}), frozenset({Purpose.JOIN}))
            self._loop = EventLoop("unisono-joiner", lambda _: self._listening.close())
            self._handshakes = HandshakeServer(self._loop, key, admission, _PENDING_LIMIT, self._admit, tls)
            self._handshakes.watch(self._listening)
            self._loop.start()
        except BaseException:
            self._listening.close()
            raise

    def invitation(self, deadline: Deadline) -> Invitation:
        """Wait until the members invite this process.

        Raises:
            RendezvousError: they did not before `deadline`, or refuse this process; or the store has failed.
        """
        while True:
            link = self._link = self._await_leader(deadline)
            try:
                while "ask" in (message := receive(link, deadline)):
                    send(link, {"ready": True})
                _raise_refusal(message)
                return Invitation.of(message)
            except TimeoutError:
                raise _not_admitted() from None
            except (OSError, ValueError) as error:
                self._drop(f"the leader of the members has gone: {error}")

    def tell_met(self) -> None:
        """Tell the leader, and the launcher by the store, that this process has met the members and other joiners."""
        assert self._link is not None
        with contextlib.suppress(RendezvousError):  # it has been set in an attempt that has failed
            self._store.set(joined(os.getpid()), b"")
        send(self._link, {"met": True})

    def may_begin(self, deadline: Deadline) -> bool:
        """Wait until the leader lets this process begin; return False if it must ask again.

        Raises:
            RendezvousError: the members refuse this process, or did not agree before `deadline`.
        """
        try:
            return self._verdict(deadline)
        except TimeoutError:
            raise _not_admitted() from None

    def await_reason(self, error: UnisonoError, deadline: Deadline) -> None:
        """Wait until the leader ends an attempt that has failed here with `error`; then this process must ask again.

        Raises:
            UnisonoError: `error`, because the leader knows of no failure before `deadline`.
            RendezvousError: the members refuse this process.
        """
        try:
            self._verdict(deadline)
        except TimeoutError:
            raise error from None

    def _verdict(self, deadline: Deadline) -> bool:
        assert self._link is not None
        try:
            message = receive(self._link, deadline)
        except TimeoutError:
            raise
        except (OSError, ValueError) as error:
            self._drop(f"the members begin again: {error}")
            return False
        _raise_refusal(message)
        return True

    def close(self) -> None:
        """Stop waiting, and close all connections."""
        self._loop.close(self._handshakes.close)
        self._listening.close()
        for link in (self._arrived, self._link):
            if link is not None:
                link.close()
        self._store.close()

    def _drop(self, why: str) -> None:
        _log.debug("%s", why)
        if self._link is not None:
            self._link.close()
            self._link = None

    def _admit(self, _: Hello, link: socket.socket) -> None:
        """Accept the connection of a leader, unless this process has one."""
        with self._changed:
            if self._arrived is not None or self._link is not None:
                link.close()
                return
            watch(link, self._heartbeat_timeout_s)
            self._arrived = link
            self._changed.notify_all()

    def _await_leader(self, deadline: Deadline) -> socket.socket:
        self._number = self._ask()
        reached: Deadline | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._arrived is not None, min(_LOOK_S, deadline.remaining_s()))
                link, self._arrived = self._arrived, None
                if link is not None:
                    return link
            if deadline.has_passed():
                raise _not_admitted()
            answer = _parsed_answer(_read(self._store, _answer(self._number)) or b"{}")
            _raise_refusal(answer)
            if "reached" in answer:
                reached = reached or Deadline(_ANSWER_S)
            if "again" in answer or (reached is not None and reached.has_passed()):
                self._number, reached = self._ask(), None

    def _ask(self) -> int:
        """Put a request into the store, and return its number."""
        host, port = self._listening.getsockname()[:2]
        request = JoinRequest(release(), host, port, os.uname().nodename, os.getpid()).pack()
        number = 0 if self._number is None else self._number + 1
        while True:
            if _read(self._store, _request(number)) is None:
                try:
                    self._store.set(_request(number), request)
                except RendezvousError:
                    if _read(self._store, _request(number)) is None:
                        raise
                else:
                    return number
            number += 1


def _unreached(request: JoinRequest, error: UnisonoError) -> dict[str, Any]:
    """Return the answer to a request whose joiner cannot be reached."""
    _log.info("%s asked to join and cannot be reached: %s", request, error.message)
    if isinstance(error, PeerLostError) and not isinstance(error.__cause__, ConnectionRefusedError):
        return {"again": "it did not answer in time"}
    needs = "a process that joins needs the key of the job, and on another host UNISONO_BIND_ADDRESS"
    return {"error": f"the members of the job cannot reach {request}: {error.message}; {needs}"}


def _parsed_answer(value: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = json_of(value, dict, "an answer")
        return answer
    except ValueError as error:
        raise RendezvousError(f"the store has no valid answer of a member ({error}): join again") from None


def _raise_refusal(message: dict[str, Any]) -> None:
    if "error" in message:
        raise RendezvousError(str(message["error"]))


def _not_admitted() -> RendezvousError:
    return RendezvousError("the members of the job did not admit this process in time: all of them must call grow()")


def _read(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key, 0.0)
    except StoreTimeoutError:
        return None


def joined(pid: int) -> str:
    """Return the key that is set once the process `pid` has met the members of the job."""
    return f"joined/{pid}"


def _request(number: int) -> str:
    return f"request/{number}"


def _answer(number: int) -> str:
    return f"answer/{number}"
