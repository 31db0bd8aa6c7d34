"""The ranks of a transport that is judged, all in this process: opened by threads, and then driven by one.

Every call of a transport is nonblocking, so a check posts for all ranks and lets them make progress in turns.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from unisono.errors import RendezvousError, UnisonoError
from unisono.testing.differences import CheckError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Identity, MessageTransport, Request
from unisono.transports.message.plugin import Bootstrap, Factory
from unisono.transports.message.plugin_loading import open_transport

_OPENING_S = 20.0
_PATIENCE_S = 10.0
_GRACE_S = 1.0
_QUIET_S = 0.02
_PAUSE_S = 0.0002

CALL = Signature("allreduce", "uint8", (4,), "C", "sum", None, "direct", 1)
# Outside collectives, messages are on a lane of their own.
MESSAGES_LANE = -1


def message(count: int) -> Signature:
    """Return what both ends of a message of so many bytes agree on."""
    return Signature("send/recv", "uint8", (count,), "C", None, None, "direct", 1)


def at(group: int = 0, lane: int = 0, sequence: int = 0, segment: int = 0) -> Identity:
    """Return an identity."""
    return Identity(sequence, lane, group, segment)


class _Exchange:
    """What ranks of this process tell each other before they have a transport."""

    def __init__(self, size: int, deadline: float) -> None:
        self._told: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)
        self._deadline = deadline

    def __call__(self, rank: int, data: bytes) -> list[bytes]:
        self._told[rank] = bytes(data)
        try:
            self._barrier.wait(max(0.0, self._deadline - time.monotonic()))
            told = list(self._told)
            self._barrier.wait(max(0.0, self._deadline - time.monotonic()))
        except threading.BrokenBarrierError:
            raise RendezvousError(f"not all ranks came to an exchange of rank {rank}") from None
        return told

    def give_up(self) -> None:
        """Let nobody wait for a rank that has failed."""
        self._barrier.abort()


def open_ranks(factory: Factory, size: int) -> list[MessageTransport]:
    """Return a transport for each of `size` ranks, opened by threads of this process.

    Raises:
        UnisonoError: what a factory raised, or an error that says what is wrong with what it returned.
    """
    deadline = time.monotonic() + _OPENING_S
    exchange = _Exchange(size, deadline)
    opened: list[MessageTransport | None] = [None] * size
    failures: list[Exception] = []

    def open_one(rank: int) -> None:
        bootstrap = Bootstrap(rank, size, tuple(range(size)), partial(exchange, rank), deadline)
        try:
            opened[rank] = open_transport("under test", factory, bootstrap)
        except Exception as error:  # noqa: BLE001  (it is raised again below)
            failures.append(error)
            exchange.give_up()

    threads = [threading.Thread(target=open_one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()) + _GRACE_S)
    transports = [transport for transport in opened if transport is not None]
    if failures or len(transports) < size:
        for transport in transports:
            transport.close()
        raise failures[0] if failures else CheckError("a factory did not return by its deadline")
    return transports


class Ranks:
    """The transports of the ranks of a check, and what makes them go on."""

    def __init__(self, factory: Factory, size: int) -> None:
        self.factory = factory
        self.transports = open_ranks(factory, size)
        self.closed: set[int] = set()

    def __getitem__(self, rank: int) -> MessageTransport:
        return self.transports[rank]

    def progress(self) -> None:
        """Let every rank that is there make progress; errors are those of requests, and raised there."""
        for rank, transport in enumerate(self.transports):
            if rank not in self.closed:
                with contextlib.suppress(UnisonoError):
                    transport.progress()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Make progress until `condition` holds; it is wrong if it does not in time."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise CheckError(f"{what}: not within {_PATIENCE_S:g} s")
            self.progress()
            time.sleep(_PAUSE_S)

    def complete(self, requests: Sequence[Request], what: str) -> None:
        """Wait for requests."""
        left = list(requests)

        def all_done() -> bool:
            left[:] = [request for request in left if not request.done()]
            return not left

        self.until(all_done, what)

    def idle(self) -> None:
        """Make progress for a moment, in which what should not happen could."""
        until = time.monotonic() + _QUIET_S
        while time.monotonic() < until:
            self.progress()
            time.sleep(_PAUSE_S)

    def close(self, rank: int) -> None:
        """Close a rank."""
        self.closed.add(rank)
        self.transports[rank].close()

    def close_all(self) -> None:
        """Close all ranks that are there."""
        for rank in set(range(len(self.transports))) - self.closed:
            self.close(rank)


def send(transport: MessageTransport, peer: int, identity: Identity, data: Any, call: Signature = CALL) -> Request:
    """Post a message of the bytes in `data`."""
    return transport.post_send(peer, identity, call, [memoryview(data)])


def receive(
    transport: MessageTransport, peer: int, identity: Identity, nbytes: int = 4, call: Signature = CALL
) -> tuple[Request, bytearray]:
    """Post a receive; return it with its memory."""
    memory = bytearray(nbytes)
    return transport.post_recv(peer, identity, call, [memoryview(memory)] if nbytes else []), memory


def expect(truth: object, what: str) -> None:
    """Raise `CheckError` unless something is true."""
    if not truth:
        raise CheckError(what)


def error_of(ranks: Ranks, attempt: Callable[[], object], what: str) -> UnisonoError:
    """Return the error that `attempt` comes to raise."""
    found: list[UnisonoError] = []

    def failed() -> bool:
        try:
            attempt()
        except UnisonoError as error:
            found.append(error)
        return bool(found)

    ranks.until(failed, what)
    return found[0]
