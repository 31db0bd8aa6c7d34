"""The ranks of a transport under test, all in this process: threads open them, and then one thread drives them.

Calls of a transport do not block, so a check posts for all ranks and lets them make progress in turns.
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
# Messages outside collectives have a lane of their own.
MESSAGES_LANE = -1


def message(count: int) -> Signature:
    """Return the signature of a message of `count` bytes."""
    return Signature("send/recv", "uint8", (count,), "C", None, None, "direct", 1)


def at(group: int = 0, lane: int = 0, sequence: int = 0, segment: int = 0) -> Identity:
    """Return the identity of a message, from its parts."""
    return Identity(sequence, lane, group, segment)


class _BytesExchange:
    """The exchange of bytes between ranks of this process before they have a transport."""

    def __init__(self, size: int, deadline: float) -> None:
        self._data: list[bytes] = [b""] * size
        self._barrier = threading.Barrier(size)
        self._deadline = deadline

    def __call__(self, rank: int, data: bytes) -> list[bytes]:
        self._data[rank] = bytes(data)
        try:
            self._barrier.wait(max(0.0, self._deadline - time.monotonic()))
            of_all_ranks = list(self._data)
            self._barrier.wait(max(0.0, self._deadline - time.monotonic()))
        except threading.BrokenBarrierError:
            raise RendezvousError(f"not all ranks came to an exchange of rank {rank}") from None
        return of_all_ranks

    def give_up(self) -> None:
        """End all waits, because a rank has failed."""
        self._barrier.abort()


def open_ranks(factory: Factory, size: int) -> list[MessageTransport]:
    """Return a transport for each of `size` ranks, opened by threads of this process.

    Raises:
        UnisonoError: a factory raised it, or it says why the returned object is not a transport.
    """
    deadline = time.monotonic() + _OPENING_S
    exchange = _BytesExchange(size, deadline)
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
    """The transports of all ranks of a check, and their progress."""

    def __init__(self, factory: Factory, size: int) -> None:
        self.factory = factory
        self.transports = open_ranks(factory, size)
        self.closed: set[int] = set()

    def __getitem__(self, rank: int) -> MessageTransport:
        return self.transports[rank]

    def progress(self) -> None:
        """Let every open rank make progress. Errors are ignored here, because requests raise them again."""
        for rank, transport in enumerate(self.transports):
            if rank not in self.closed:
                with contextlib.suppress(UnisonoError):
                    transport.progress()

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Make progress until `condition` holds; raise `CheckError`, which names `what`, if that takes too long."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                raise CheckError(f"{what}: not within {_PATIENCE_S:g} s")
            self.progress()
            time.sleep(_PAUSE_S)

    def complete(self, requests: Sequence[Request], what: str) -> None:
        """Make progress until all requests are done; raise `CheckError`, which names `what`, if that takes too long."""
        pending = list(requests)

        def all_done() -> bool:
            pending[:] = [request for request in pending if not request.done()]
            return not pending

        self.until(all_done, what)

    def idle(self) -> None:
        """Make progress for a moment, so that an event that must not happen would have had the time to."""
        until = time.monotonic() + _QUIET_S
        while time.monotonic() < until:
            self.progress()
            time.sleep(_PAUSE_S)

    def close(self, rank: int) -> None:
        """Close a rank."""
        self.closed.add(rank)
        self.transports[rank].close()

    def close_all(self) -> None:
        """Close all open ranks."""
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
    """Raise `CheckError` unless `truth` holds."""
    if not truth:
        raise CheckError(what)


def error_of(ranks: Ranks, attempt: Callable[[], object], what: str) -> UnisonoError:
    """Return the error that `attempt` raises, now or after some progress."""
    errors: list[UnisonoError] = []

    def failed() -> bool:
        try:
            attempt()
        except UnisonoError as error:
            errors.append(error)
        return bool(errors)

    ranks.until(failed, what)
    return errors[0]
