"""The store of a job. A launcher serves it, and reports ranks that ended before they joined the job.

`JobStore` is the store of a job on one machine. If several launchers start the ranks of a job, one on each machine (a
*node*), each of them has a `NodeStore`. The launcher of node 0 puts its *announcement* into the store: how many nodes
and ranks the job has, and where rank 0 serves the store of torch. Each launcher reads it, and puts its own arrival into
the store, with an error if it was started differently. When all have arrived, the launcher of node 0 lets them start
their ranks, or passes the error on to all of them. It waits until they have read that, because its own ranks may end at
once, and the store with them.

Launchers that nobody coordinates have a `PeerNodeStore`, through which each of them hears that a rank of another one
has failed. The agents of an ssh job need none, because the launcher sends them a message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from unisono.errors import RendezvousError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.json_checks import checked, parsed_json
from unisono.foundation.records import record
from unisono.launchers.process import Exit, JobPart, Meeting, above_standard_streams
from unisono.options import variable
from unisono.transports.links.handshake import KEY_NBYTES
from unisono.transports.rendezvous import host_and_port, next_prefix, open_store, open_waiting_place, serving_host
from unisono.transports.rendezvous.roster import give_up, has_arrived
from unisono.transports.rendezvous.stores import PrefixStore, Store, StoreTimeoutError
from unisono.transports.rendezvous.tcp_store import StoreServer

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 5.0
JOB_NBYTES = 16
_ANNOUNCEMENT = "announcement"
_READY = "ready"
_SHAPE_OF_ANNOUNCEMENT = {"nodes": int, "ranks": int, "host": str, "port": int, "key": str}
_FAILURE = "failure"
# How often a launcher looks whether a rank of another one has failed.
_LOOK_S = 0.5


@record
class LauncherNode:
    """One of the launchers that start the ranks of a job together.

    Attributes:
        number: its number. The launcher of node 0 serves a store whose URL begins with ``tcp://``. Then its port may be
            0, for any free port.
        nodes: the number of launchers.
        store: the URL of the store.
        address: an address of this machine that the other machines reach.
        job, key: the id and the key of the job.
    """

    number: int
    nodes: int
    store: str
    address: str
    job: bytes
    key: bytes


class JobStore:
    """The store of a job whose ranks all run on this machine, at a free port of the loopback interface.

    Attributes:
        url: the URL of the store.
        job: the id of the job, 16 bytes.
        torch_host, torch_port: a free port for the store of torch.distributed, which rank 0 serves if it needs one.
    """

    def __init__(self) -> None:
        """Start the server of the store of a new job.

        Raises:
            RendezvousError: no port can be listened on.
        """
        self.job = os.urandom(JOB_NBYTES)
        self._key = os.urandom(KEY_NBYTES)
        self._reader: Store | None = None
        self._waiting_place: Store | None = None
        self._reserved = _reserved_port()
        self.torch_host, self.torch_port = HOST, int(self._reserved.getsockname()[1])
        with contextlib.ExitStack() as undo:
            undo.callback(self._reserved.close)
            self._server = StoreServer(HOST, 0, key=self._key, job=self.job)
            undo.pop_all()
        self.url = self._server.url

    @contextmanager
    def meeting(self) -> Iterator[Meeting]:
        """Yield where a rank meets the others. It can read the key once, and must be started in the block."""
        reader, writer = os.pipe()
        reader = above_standard_streams(reader)
        try:
            os.write(writer, self._key)
            os.close(writer)
            yield Meeting(self.url, self.job.hex(), reader, self.torch_host, self.torch_port)
        finally:
            os.close(reader)

    def rank_ended(self, ended: Exit) -> None:
        """If the rank ended before it joined the job, make the other ranks fail with an error that says so."""
        if not self.has_arrived(ended.rank):
            self._server.fail(_early(ended))

    def publish_failure(self, ended: Exit) -> None:
        """Make the launchers of other machines end their ranks, because a rank of this one has failed."""

    def failure_elsewhere(self) -> str:
        """Return which rank of another machine has failed; empty if none has."""
        return ""

    def close(self) -> None:
        """Stop the server."""
        for store in (self._reader, self._waiting_place):
            if store is not None:
                store.close()
        self._server.close()
        self._reserved.close()

    def has_arrived(self, rank: int) -> bool:
        """Return whether the rank has taken part in the first rendezvous, or is about to."""
        try:
            return has_arrived(self._roster(rank), rank)
        except RendezvousError:
            return False

    def has_joined(self, pid: int) -> bool:
        """Return whether a process that was started anew has met the members of the running job."""
        from unisono.transports.links.joiners import joined

        try:
            if self._waiting_place is None:
                self._waiting_place = open_waiting_place(self.url, self._key, self.job, ANSWER_TIMEOUT_S)
            self._waiting_place.get(joined(pid), 0.0)
        except RendezvousError:
            return False
        return True

    def _roster(self, rank: int) -> Store:
        """Return the store of the first rendezvous, whose keys each rank uses that opens the store for the first time.

        Raises:
            RendezvousError: the store cannot be reached.
        """
        if self._reader is None:
            prefix = next_prefix(self.url, rank=rank, job=self.job)
            self._reader = open_store(self.url, prefix, key=self._key, job=self.job, timeout_s=ANSWER_TIMEOUT_S)
        return self._reader


class NodeStore(JobStore):
    """The store of a job whose ranks several launchers start, as one of these launchers uses it."""

    def __init__(
        self, node: LauncherNode, share: JobPart, timeout_s: float, on_open: Callable[[str], object] = lambda url: None
    ) -> None:
        """Open the store, and wait until all launchers have; that of node 0 serves it.

        Args:
            node: this launcher.
            share: the ranks that it starts.
            timeout_s: how long to wait for the other launchers.
            on_open: is called with the URL of the store before this launcher waits for the others.

        Raises:
            RendezvousError: the store cannot be served or reached.
            UsageError: launchers are missing, have one number, or were started for different numbers of nodes or ranks.
        """
        self.url, self.job, self._key = node.store, node.job, node.key
        self._share = share
        self._reserved = _reserved_port()
        with contextlib.ExitStack() as undo:
            undo.callback(self._reserved.close)
            self._node_server = _server(node)
            if self._node_server is not None:
                undo.callback(self._node_server.close)
                if host_and_port(node.store)[1] == 0:
                    self.url = self._node_server.url
            # One connection serves for both, because the server may be gone when this launcher looks at the roster.
            prefix = f"unisono/{node.job.hex()}/"
            store = open_store(self.url, prefix, key=node.key, job=node.job, timeout_s=timeout_s)
            undo.callback(store.close)
            self._launchers = PrefixStore(store, "launchers/")
            of_roster = next_prefix(self.url, rank=share.first, job=self.job).removeprefix(prefix)
            self._reader = PrefixStore(store, of_roster)
            on_open(self.url)
            deadline = Deadline(timeout_s)
            announcement = self._announce(node) if node.number == 0 else self._announcement(node, deadline)
            error = self._difference(node, announcement)
            self._take(_arrival(node.number), error.encode(), node)
            if node.number == 0:
                error = self._arrivals(node, deadline)
                self._let_start(error, node)
            self._require_ready(error, node, deadline)
            undo.pop_all()
        self.torch_host, self.torch_port = announcement["host"], announcement["port"]

    def rank_ended(self, ended: Exit) -> None:
        with contextlib.suppress(RendezvousError):
            store = self._roster(ended.rank)
            if not has_arrived(store, ended.rank):
                give_up(store, ended.rank, self._share.size, _early(ended))

    def close(self) -> None:
        """Close the store; the launcher of node 0 stops the server."""
        with contextlib.suppress(RendezvousError):
            self._launchers.clear()
        self._launchers.close()
        if self._node_server is not None:
            self._node_server.close()
        self._reserved.close()

    def _announce(self, node: LauncherNode) -> dict[str, Any]:
        port = int(self._reserved.getsockname()[1])
        announcement = {"nodes": node.nodes, "ranks": self._share.size, "host": node.address, "port": port}
        announcement["key"] = _digest(node.key)
        self._take(_ANNOUNCEMENT, json.dumps(announcement).encode(), node)
        return announcement

    def _announcement(self, node: LauncherNode, deadline: Deadline) -> dict[str, Any]:
        try:
            value = self._launchers.get(_ANNOUNCEMENT, deadline.remaining_s())
        except StoreTimeoutError:
            raise UsageError(_missing([0], node)) from None
        announcement: dict[str, Any] = checked(parsed_json(value), _SHAPE_OF_ANNOUNCEMENT)
        return announcement

    def _difference(self, node: LauncherNode, announcement: dict[str, Any]) -> str:
        """Return in which way this launcher was started differently from that of node 0; empty if it was not."""
        if announcement["key"] != _digest(node.key):
            return (
                f"the launchers of nodes 0 and {node.number} have different keys: copy the file that "
                f"{variable('key_file')} names from one machine to all others"
            )
        for name, ours in (("nodes", node.nodes), ("ranks", self._share.size)):
            if announcement[name] != ours:
                return (
                    f"the launcher of node 0 was started for {announcement[name]} {name}, and that of node "
                    f"{node.number} for {ours}: start all of them with the same -n and --nnodes"
                )
        return ""

    def _arrivals(self, node: LauncherNode, deadline: Deadline) -> str:
        """Wait for all launchers; return why the job cannot start, which is empty if it can."""
        missing = []
        for number in range(node.nodes):
            try:
                if error := self._launchers.get(_arrival(number), deadline.remaining_s()):
                    return error.decode()
            except StoreTimeoutError:
                missing.append(number)
        return _missing(missing, node) if missing else ""

    def _let_start(self, error: str, node: LauncherNode) -> None:
        """Let all launchers start their ranks, or pass an error on to them.

        The launcher of node 0 returns when every launcher that has arrived has read its answer, or does not answer.
        """
        self._launchers.set(_READY, error.encode())
        deadline = Deadline(ANSWER_TIMEOUT_S)
        for number in range(1, node.nodes):
            with contextlib.suppress(StoreTimeoutError):  # it never came, or has been killed
                self._launchers.get(_arrival(number), 0.0)
                self._launchers.get(_informed(number), deadline.remaining_s())

    def _require_ready(self, error: str, node: LauncherNode, deadline: Deadline) -> None:
        """Wait until the launcher of node 0 lets all of them start their ranks.

        Raises:
            UsageError: there is an `error`, of this launcher or another one.
        """
        if node.number:
            error = error or self._launchers.get(_READY, deadline.remaining_s() + ANSWER_TIMEOUT_S).decode()
            with contextlib.suppress(RendezvousError):  # the launcher of node 0 has waited for this long enough
                self._launchers.set(_informed(node.number), b"")
        if error:
            raise UsageError(error)

    def _take(self, key: str, value: bytes, node: LauncherNode) -> None:
        """Set a value, unless another launcher has set it, which is an error."""
        try:
            self._launchers.set(key, value)
        except RendezvousError as error:
            with contextlib.suppress(StoreTimeoutError):
                self._launchers.get(key, 0.0)
                raise UsageError(
                    f"another launcher with --node-rank {node.number} uses the store {node.store}, or has used it "
                    "until it was killed: give each machine its own number, and each job its own store or port"
                ) from error
            raise


class PeerNodeStore(NodeStore):
    """A store by which each launcher also learns that a rank of another one has failed."""

    _next_look = 0.0
    _has_failed = False

    def publish_failure(self, ended: Exit) -> None:
        self._has_failed = True
        with contextlib.suppress(RendezvousError):
            self._launchers.set(_FAILURE, f"{ended.rank} {ended} on host {socket.gethostname()}".encode())

    def failure_elsewhere(self) -> str:
        """Return which rank of another machine has failed. It asks the store twice a second."""
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + _LOOK_S
        try:
            rank, _, how = self._launchers.get(_FAILURE, 0.0).decode().partition(" ")
        except StoreTimeoutError:
            return ""
        except RendezvousError:  # the launcher of node 0 has ended
            self._next_look = math.inf
            return ""
        return "" if int(rank) in self._share.ranks else f"rank {rank} {how}"

    def close(self) -> None:
        """Close the store; the launcher of node 0 stops the server, after all others have seen a failure."""
        if self._has_failed and self._node_server is not None:
            time.sleep(2 * _LOOK_S)
        super().close()


def _server(node: LauncherNode) -> StoreServer | None:
    """Return the server of the store, if this launcher serves it."""
    if node.number or not node.store.startswith("tcp://"):
        return None
    host, port = serving_host(node.store, has_key=True), host_and_port(node.store)[1]
    return StoreServer(host, port, key=node.key, job=node.job)


def _digest(key: bytes) -> str:
    """Return a text by which keys can be compared, and from which no key can be computed."""
    return hashlib.sha256(b"compared " + key).hexdigest()[:16]


def _arrival(number: int) -> str:
    return f"node/{number}"


def _informed(number: int) -> str:
    return f"informed/{number}"


def _missing(numbers: Sequence[int], node: LauncherNode) -> str:
    launchers = f"launcher{'s' * (len(numbers) > 1)} of node{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
    return (
        f"the {launchers} did not come to {node.store} in time: start one on each of the {node.nodes} machines within "
        f"{variable('rendezvous_timeout_s')} seconds"
    )


def _early(ended: Exit) -> str:
    return f"rank {ended.rank} {ended} before it called un.init()"


def _reserved_port() -> socket.socket:
    """Return a socket that reserves a port for another process until the socket is closed.

    The kernel does not give the port to a process that asks for any free port. A process that names the port can listen
    there if it sets SO_REUSEADDR, as torch does, because this socket does not listen.
    """
    holder = closed_in_child(socket.socket())
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder
