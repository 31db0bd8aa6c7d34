"""`Port` and `connect`: two running jobs meet, and get a communicator of the ranks of both.

Theory of operation. A job opens a port, which is a store that its rank 0 serves for as long as the port is open. The
name of the port has the address of this store and a key, and the user gives the name to another job. Each pair of jobs
that meet has a number n, from 0. Rank 0 of the job that connects sets the value ``knock/n`` in the store, with the
number of its ranks and a nonce. Rank 0 of the job that accepts answers with the value ``answer/n``: the number of its
own ranks, a nonce, and the URL of a second store, which it serves for this meeting alone. Each rank 0 broadcasts both
values to its job. Then all ranks of both jobs have a usual rendezvous at the second store.

Every rank computes the key of the meeting from the key of the port and both nonces, so that no key travels. The ranks
that accept compute the key of the port from the key of their own job.

Example: 2 ranks accept a job of 3 ranks. In the union, they have the ranks 0 and 1, and the others 2, 3 and 4.

Used by: programs of users, and `launchers.spawn`.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from unisono import errors
from unisono.collectives.bootstrap.environment import PORT, Launch, job_of_key
from unisono.collectives.bootstrap.init import meet, open_world
from unisono.errors import MismatchError, RendezvousError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.json_checks import checked, parsed_json
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.rendezvous import host_and_port
from unisono.transports.rendezvous.stores import StoreTimeoutError
from unisono.transports.rendezvous.tcp_store import StoreServer, TcpStore
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    from types import TracebackType

    from unisono.collectives.communicator import Communicator
    from unisono.options import Options
    from unisono.transports.links.session import Session

_NAME = re.compile(rf"(tcp://[^#]+)#([0-9a-f]{{{2 * KEY_NBYTES}}})")
_NONCE_NBYTES = 16
_MOST_RANKS = 1 << 20
# How long rank 0 waits for the other job before the ranks exchange a step.
_LOOK_S = 0.5
# The least time for a meeting, however short the caller wants to wait for the other job.
_MEETING_S = 5.0

# What rank 0 knows about a meeting, and broadcasts; empty while it waits for the other job.
Facts: TypeAlias = dict[str, Any]


class Bridge(NamedTuple):
    """Two jobs that have met; a context manager that closes `union` at its end.

    The ranks of both jobs are the ranks of `union`, on which they make calls together and send each other messages. The
    job that accepted comes first. Each job keeps its own communicators. If a rank is lost, `union` raises
    `PeerLostError` on all ranks, and the communicators of the other job go on.

    Attributes:
        union: the communicator of the ranks of both jobs.
        own: the ranks of this job in `union`, in their order.
        remote: the ranks of the other job in `union`, in their order.
    """

    union: Communicator
    own: tuple[int, ...]
    remote: tuple[int, ...]

    def close(self) -> None:
        """Close `union`. Every rank of both jobs does so."""
        self.union.close()

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Port:
    """A place where other jobs meet this one; a context manager that closes it at its end.

    All ranks of `world` make a port, accept with it and close it together. Its `name` is a secret: a job that knows it
    can connect. Pass it to the other job by a file or a pipe that only its user can read.

    Args:
        world: the communicator whose ranks meet other jobs; by default the open world of this process.

    Attributes:
        name: the name for `connect`, such as ``tcp://10.0.0.7:41234#`` and 64 hexadecimal digits.

    Raises:
        UsageError: `world` is over a plugin transport.
        RendezvousError: rank 0 cannot listen on its address.

    >>> import subprocess, sys, unisono as un
    >>> program = "import sys, numpy as np, unisono as un; " + (
    ...     "print(un.connect(sys.argv[1], un.init()).union.allreduce(np.ones(1)))")
    >>> with un.init() as world, un.Port(world) as port:
    ...     other = subprocess.Popen([sys.executable, "-c", program, port.name], stdout=subprocess.PIPE, text=True)
    ...     with port.accept() as bridge:
    ...         print(bridge.own, bridge.remote, bridge.union.allreduce(np.ones(1)), other.communicate()[0].strip())
    (0,) (1,) [2.] [2.]
    """

    def __init__(self, world: Communicator | None = None) -> None:
        world = open_world() if world is None else world
        session, _ = world.session_and_options()
        self._world = world
        self._server: StoreServer | None = None
        self._store: TcpStore | None = None
        self._accepted = 0  # jobs, as rank 0 counts them
        try:
            facts = _from_first(world, self._opened(session))
        except BaseException:
            self.close()
            raise
        self._key = _derived(session.identity.key, bytes.fromhex(facts["id"]))
        self._host = session.addresses.tcp_host
        self.name = f"{facts['url']}#{self._key.hex()}"

    def accept(self, *, timeout_s: float | None = None) -> Bridge:
        """Wait until another job connects to this port, and return the bridge to it. All ranks call this.

        Args:
            timeout_s: seconds to wait; by default the option `rendezvous_timeout_s`.

        Raises:
            UsageError: the port is closed.
            RendezvousError: no job connected in time, or some of its ranks did not arrive.
        """
        return self.accept_while(lambda: None, timeout_s)

    def accept_while(self, check: Callable[[], None], timeout_s: float | None) -> Bridge:
        """Accept as `accept` does. Rank 0 calls `check` again and again; if that raises an error, all ranks do."""
        deadline = _deadline(self._world, timeout_s)
        with contextlib.ExitStack() as served:
            facts = _from_first(self._world, self._answers(check, deadline, served))
            sizes = self._world.size, facts["size"]
            return _met(self._world, self._key, facts, deadline, sizes, is_first=True)

    def close(self) -> None:
        """Close the port. Jobs that have met stay connected. May be called twice."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._server is not None:
            self._server.close()

    def __enter__(self) -> Port:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<unisono.Port at {self.name.partition('#')[0]}>"

    def _opened(self, session: Session) -> Iterator[Facts]:
        """Serve the store of the port on rank 0; yield the facts from which all ranks compute its name."""
        token = os.urandom(_NONCE_NBYTES)
        key = _derived(session.identity.key, token)
        self._server = StoreServer(session.addresses.tcp_host, 0, key=key, job=job_of_key(key))
        self._store = _store_at(self._server.url, key, Deadline(self._world.timeout_s), self._world)
        yield {"id": token.hex(), "url": self._server.url}

    def _answers(self, check: Callable[[], None], deadline: Deadline, served: contextlib.ExitStack) -> Iterator[Facts]:
        """Wait for a knock and answer it; yield the facts of the meeting. The meeting's store is open in `served`."""
        if self._store is None:
            raise UsageError("this port is closed: open another one")
        number = self._accepted
        for value in _looks(self._store, f"knock/{number}", deadline):
            check()
            if value is None:
                yield {}
                continue
            self._accepted += 1
            knock = _checked(value, {"size": int})
            nonce = os.urandom(_NONCE_NBYTES).hex()
            key = _derived(self._key, bytes.fromhex(knock["nonce"] + nonce))
            server = StoreServer(self._host, 0, key=key, job=job_of_key(key))
            served.callback(server.close)
            answer = {"size": self._world.size, "nonce": nonce, "url": server.url}
            self._store.set(f"answer/{number}", json.dumps(answer).encode())
            yield {"size": knock["size"], "nonce": knock["nonce"] + nonce, "url": server.url}
        raise RendezvousError("no job connected to this port in time")


def connect(name: str, world: Communicator | None = None, *, timeout_s: float | None = None) -> Bridge:
    """Connect to the job that accepts at the port `name`, and return the bridge to it. All ranks of `world` call this.

    Args:
        name: the attribute `name` of the other job's `Port`, equal on all ranks.
        world: the communicator whose ranks meet the other job; by default the open world of this process.
        timeout_s: seconds until the other job must have accepted; by default the option `rendezvous_timeout_s`.

    Raises:
        UsageError: `name` is no name of a port, or `world` is over a plugin transport.
        MismatchError: the ranks passed different names.
        RendezvousError: the port is closed, the other job did not accept in time, or some of its ranks did not arrive.
    """
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise UsageError("the name of a port is tcp://host:port#key, with 64 hexadecimal digits: pass `Port.name`")
    world = open_world() if world is None else world
    deadline = _deadline(world, timeout_s)
    if len(set(world.allgather(np.array([zlib.crc32(name.encode())])).tolist())) > 1:
        raise MismatchError("the ranks connect to different ports: pass the same name on all ranks", rank=world.rank)
    url, key = match[1], bytes.fromhex(match[2])
    facts = _from_first(world, _knocks(url, key, world, deadline))
    return _met(world, key, facts, deadline, (facts["size"], world.size), is_first=False)


def _knocks(url: str, key: bytes, world: Communicator, deadline: Deadline) -> Iterator[Facts]:
    """Ask at a port to be accepted, and wait for the answer; yield the facts of the meeting."""
    nonce = os.urandom(_NONCE_NBYTES).hex()
    with contextlib.closing(_store_at(url, key, deadline, world)) as store:
        number = _first_free(store, json.dumps({"size": world.size, "nonce": nonce}).encode())
        for value in _looks(store, f"answer/{number}", deadline):
            answer = None if value is None else _checked(value, {"size": int, "url": str})
            yield {} if answer is None else {**answer, "nonce": nonce + answer["nonce"]}
    raise RendezvousError(f"the job at {url} did not accept in time")


def _looks(store: TcpStore, key: str, deadline: Deadline) -> Iterator[bytes | None]:
    """Yield None again and again until the deadline, and the value of a key as soon as it is in the store."""
    while not deadline.has_passed():
        try:
            yield store.get(key, min(_LOOK_S, deadline.remaining_s()))
        except StoreTimeoutError:
            yield None


def _first_free(store: TcpStore, knock: bytes) -> int:
    """Set the first knock that no other job has set; return its number."""
    for number in itertools.count():
        try:
            store.get(f"knock/{number}", 0.0)
        except StoreTimeoutError:
            # Another job may set this knock at the same moment. Then the next one is tried.
            with contextlib.suppress(UnisonoError):
                store.set(f"knock/{number}", knock)
                return number
    raise AssertionError("itertools.count never ends")


def _met(
    world: Communicator,
    key: bytes,
    facts: Mapping[str, Any],
    deadline: Deadline,
    sizes: tuple[int, int],
    *,
    is_first: bool,
) -> Bridge:
    """Meet the ranks of the other job at the store of the meeting. `sizes` are those of the job that accepts first."""
    of_meeting = _derived(key, bytes.fromhex(facts["nonce"]))
    first = 0 if is_first else sizes[0]
    launch = Launch(first + world.rank, sum(sizes), facts["url"], job_of_key(of_meeting), of_meeting, PORT)
    union = meet(launch, _options_of(world).adopting({"rendezvous_timeout_s": max(deadline.remaining_s(), _MEETING_S)}))
    ranks = tuple(range(sizes[0])), tuple(range(sizes[0], sum(sizes)))
    own, remote = ranks if is_first else ranks[::-1]
    return Bridge(union, own, remote)


def _from_first(world: Communicator, steps: Iterator[Facts]) -> Facts:
    """Return the first facts that are not empty of the iterator of rank 0, which alone runs it.

    The ranks exchange each step, so that no rank is in a call for long. If the iterator raises an error, every rank
    raises it.
    """
    while True:
        facts: Facts = {}
        if world.rank == 0:
            try:
                facts = next(steps)
            except UnisonoError as error:
                world.broadcast_object({"error": (type(error).__name__, error.message)})
                raise
        facts = world.broadcast_object(facts)
        if "error" in facts:
            name, message = facts["error"]
            raise getattr(errors, name)(f"rank 0: {message}", rank=world.rank)
        if facts:
            return facts


def _store_at(url: str, key: bytes, deadline: Deadline, world: Communicator) -> TcpStore:
    """Open the store of a port, which its job has served since before the name of the port existed."""
    host, port = host_and_port(url)
    tls, limit_s = TlsPolicy(_options_of(world).tls), deadline.remaining_s()
    return TcpStore(host, port, key=key, job=job_of_key(key), timeout_s=limit_s, is_served=True, tls=tls)


def _derived(key: bytes, public: bytes) -> bytes:
    """Return a key that nobody can compute without `key`."""
    return hmac.new(key, b"port" + public, "sha256").digest()


def _deadline(world: Communicator, timeout_s: float | None) -> Deadline:
    return Deadline(_options_of(world).rendezvous_timeout_s if timeout_s is None else checked_timeout_s(timeout_s))


def _options_of(world: Communicator) -> Options:
    return world.session_and_options()[1]


def _checked(value: bytes, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Return a knock or an answer, which the other job has written.

    Raises:
        RendezvousError: it has another shape.
    """
    try:
        facts: dict[str, Any] = checked(parsed_json(value), {**shape, "nonce": str})
        if not 0 < facts["size"] <= _MOST_RANKS or len(bytes.fromhex(facts["nonce"])) != _NONCE_NBYTES:
            raise ValueError("a number is out of range")
    except ValueError as error:
        raise RendezvousError(f"the other job does not follow the protocol of ports: {error}") from None
    return facts
