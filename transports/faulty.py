"""Faults on purpose: a message transport that delays, reorders, drops and repeats messages, by a seed.

Wrap the transport of each rank, `FaultyTransport(inner, Faults(seed=7, delay=0.3))`, to see what a program makes of a
bad network. Time is counted in calls of `progress`, not in seconds, and every rank draws from its own sequence, so that
a fault depends on the seed and on the messages that the rank sends, not on the clock.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from unisono.errors import UsageError
from unisono.transports.base import Capabilities, Identity, MessageTransport, Request, Signature, Traffic


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls the messages that a rank sends; the probabilities are per message.

    Attributes:
        seed: of the random sequence, of which each rank has its own.
        delay: probability that a message is held back, for 1 to `max_hold` calls of `progress`; messages that are sent
            later overtake it.
        max_hold: the longest that a message is held back.
        drop: probability that a message is lost. Its sender does not notice; its receiver waits in vain.
        duplicate: probability that a message is sent twice, which a transport must refuse.
    """

    seed: int
    delay: float = 0.0
    max_hold: int = 20
    drop: float = 0.0
    duplicate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay", "drop", "duplicate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"{name} must be a probability, from 0 to 1; got {getattr(self, name)!r}")
        if self.max_hold < 1:
            raise UsageError(f"max_hold must be at least 1; got {self.max_hold!r}")


class FaultyTransport:
    """A `MessageTransport` that carries messages by `inner`, with `faults`. It owns `inner` and closes it."""

    def __init__(self, inner: MessageTransport, faults: Faults) -> None:
        self.name = inner.name
        self.rank = inner.rank
        self.size = inner.size
        self.capabilities: Capabilities = replace(inner.capabilities, ordered=False)
        self._inner = inner
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{inner.rank}")
        self._held: list[_Held] = []

    def announce(self, sequence: int, signature: Signature) -> None:
        self._inner.announce(sequence, signature)

    def absent(self, sequence: int) -> Collection[int]:
        return self._inner.absent(sequence)

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        # One draw for each kind of fault and message, so that turning one kind off leaves the others where they were.
        drop, duplicate, delay = (self._random.random() for _ in range(3))
        hold = self._random.randint(1, self._faults.max_hold)
        if drop < self._faults.drop:
            return _Lost()
        if duplicate < self._faults.duplicate:
            self._inner.post_send(peer, identity, signature, pieces)
        if delay >= self._faults.delay:
            return self._inner.post_send(peer, identity, signature, pieces)
        held = _Held(hold, peer, identity, signature, pieces)
        self._held.append(held)
        return held

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        return self._inner.post_recv(peer, identity, signature, pieces)

    def progress(self) -> None:
        for held in self._held:
            held.hold -= 1
            if held.hold == 0:
                held.sent = self._inner.post_send(held.peer, held.identity, held.signature, held.pieces)
        self._held = [held for held in self._held if held.sent is None]
        self._inner.progress()

    def traffic(self) -> Mapping[int, Traffic]:
        return self._inner.traffic()

    def abort(self, error: Exception) -> None:
        self._held.clear()
        self._inner.abort(error)

    def close(self) -> None:
        self._held.clear()
        self._inner.close()


class _Lost:
    """The request of a message that has been dropped."""

    def done(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class _Held:
    """A message that is held back for so many more calls of `progress`, and then the request of the inner transport."""

    hold: int
    peer: int
    identity: Identity
    signature: Signature
    pieces: Sequence[memoryview]
    sent: Request | None = None

    def done(self) -> bool:
        return self.sent is not None and self.sent.done()
