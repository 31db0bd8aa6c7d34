"""Faults on purpose: a message transport that delays, reorders, drops and repeats messages, by a seed.

Wrap the transport of each rank, `FaultyTransport(inner, Faults(seed=7, delay=0.3))`, to see what a program makes of a
bad network. Time is counted in calls of `progress`, not in seconds, and every rank draws from its own sequence, so that
a fault depends on the seed and on the messages that the rank sends, not on the clock. Flags and accesses to mapped
memory may be late, as messages are, but not lost or repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from unisono.algorithms.ir.plan import Span
from unisono.errors import UsageError
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Identity, MappedTransport, MessageTransport, Request
from unisono.transports.message.delegating import ForwardedTransport


@dataclass(frozen=True, slots=True)
class Faults:
    """What befalls the messages that a rank sends; the probabilities are per message.

    Attributes:
        seed: of the random sequence, of which each rank has its own.
        delay: probability that a message, a flag or an access is held back, for 1 to `max_hold` calls of `progress`;
            those that come later overtake it.
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


class FaultyTransport(ForwardedTransport):
    """A `MessageTransport` that carries messages by `inner`, with `faults`. It owns `inner` and closes it."""

    def __init__(self, inner: MessageTransport, faults: Faults) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, ordered=False)
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{inner.rank}")
        self._held: list[_Held] = []
        self.mapped = None if inner.mapped is None else FaultyMemory(inner.mapped, self._perhaps_late)

    def subgroup(self, ranks: tuple[int, ...], number: int) -> FaultyTransport:
        return FaultyTransport(self._inner.subgroup(ranks, number), self._faults)

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        # One draw for each kind of fault and message, so that turning one kind off leaves the others where they were.
        drop, duplicate, delay = (self._random.random() for _ in range(3))
        hold = self._random.randint(1, self._faults.max_hold)
        if drop < self._faults.drop:
            return _Lost()
        post = partial(super().post_send, peer, identity, signature, pieces)
        if duplicate < self._faults.duplicate:
            post()
        return self._post(post, delay, hold)

    def progress(self) -> None:
        for held in self._held:
            held.hold -= 1
            if held.hold == 0:
                held.posted = held.post()
        self._held = [held for held in self._held if held.posted is None]
        super().progress()

    def abort(self, error: Exception) -> None:
        self._held.clear()
        super().abort(error)

    def close(self) -> None:
        self._held.clear()
        super().close()

    def _perhaps_late(self, post: Callable[[], Request]) -> Request:
        return self._post(post, self._random.random(), self._random.randint(1, self._faults.max_hold))

    def _post(self, post: Callable[[], Request], delay: float, hold: int) -> Request:
        """Post at once or, if `delay` was drawn low, after `hold` calls of `progress`."""
        if delay >= self._faults.delay:
            return post()
        held = _Held(hold, post)
        self._held.append(held)
        return held


class FaultyMemory:
    """A `MappedTransport` by `inner`, in which `perhaps_late` posts what a rank does to others."""

    def __init__(self, inner: MappedTransport, perhaps_late: Callable[[Callable[[], Request]], Request]) -> None:
        self.publish, self.withdraw, self.wait = inner.publish, inner.withdraw, inner.wait
        self._inner = inner
        self._perhaps_late = perhaps_late

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._perhaps_late(partial(self._inner.read, peer, sequence, span, segment, pieces))

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._perhaps_late(partial(self._inner.write, peer, sequence, span, segment, pieces))

    def signal(self, peer: int, identity: Identity) -> Request:
        return self._perhaps_late(partial(self._inner.signal, peer, identity))


class _Lost:
    """The request of a message that has been dropped."""

    def done(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class _Held:
    """What is posted after so many more calls of `progress`, and then the request of the inner transport."""

    hold: int
    post: Callable[[], Request]
    posted: Request | None = None

    def done(self) -> bool:
        return self.posted is not None and self.posted.done()
