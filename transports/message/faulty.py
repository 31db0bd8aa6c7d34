"""`FaultyTransport`: delays, reorders, drops and duplicates messages at random, for tests.

Wrap the transport of each rank, `FaultyTransport(inner, Faults(seed=7, delay=0.3))`, to see how a program behaves on a
bad network. Delays are counted in calls of `progress`, not in seconds, and every rank draws from its own random
sequence. So faults depend on the seed and on the messages that the rank sends, and not on the clock. Flags and accesses
to mapped memory may be delayed too, but are never lost or repeated.
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
from unisono.transports.message.delegating import DelegatingTransport


@dataclass(frozen=True, slots=True)
class Faults:
    """The faults of the messages that a rank sends. Probabilities are per message.

    Attributes:
        seed: the seed of the random sequences; each rank has a sequence of its own.
        delay: probability that a message, a flag or an access is held back for 1 to `max_hold` calls of `progress`.
            Later messages overtake it.
        max_hold: the largest number of calls of `progress` that a message is held back.
        drop: probability that a message is lost. The sender does not notice, and the receiver waits until its deadline.
        duplicate: probability that a message is sent twice. A transport must refuse the second one.
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


class FaultyTransport(DelegatingTransport):
    """A `MessageTransport` that carries messages over `inner`, which it owns, and adds `faults`."""

    def __init__(self, inner: MessageTransport, faults: Faults) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, ordered=False)
        self._faults = faults
        self._random = random.Random(f"{faults.seed}/{inner.rank}")
        self._held: list[_Held] = []
        self.mapped = None if inner.mapped is None else FaultyMemory(inner.mapped, self._post_or_hold)

    def subgroup(self, ranks: tuple[int, ...], number: int) -> FaultyTransport:
        return FaultyTransport(self._inner.subgroup(ranks, number), self._faults)

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        # Every message draws once for each kind of fault, so turning one kind off does not move the others.
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

    def _post_or_hold(self, post: Callable[[], Request]) -> Request:
        return self._post(post, self._random.random(), self._random.randint(1, self._faults.max_hold))

    def _post(self, post: Callable[[], Request], delay: float, hold: int) -> Request:
        """Post after `hold` calls of `progress` if `delay` is below the probability of a delay; otherwise at once."""
        if delay >= self._faults.delay:
            return post()
        held = _Held(hold, post)
        self._held.append(held)
        return held


class FaultyMemory:
    """A `MappedTransport` over `inner` that passes every access to a peer to `post_or_hold`, which may delay it."""

    def __init__(self, inner: MappedTransport, post_or_hold: Callable[[Callable[[], Request]], Request]) -> None:
        self.publish, self.withdraw, self.wait = inner.publish, inner.withdraw, inner.wait
        self._inner = inner
        self._post_or_hold = post_or_hold

    def read(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._post_or_hold(partial(self._inner.read, peer, sequence, span, segment, pieces))

    def write(self, peer: int, sequence: int, span: Span, segment: int, pieces: Sequence[memoryview]) -> Request:
        return self._post_or_hold(partial(self._inner.write, peer, sequence, span, segment, pieces))

    def signal(self, peer: int, identity: Identity) -> Request:
        return self._post_or_hold(partial(self._inner.signal, peer, identity))


class _Lost:
    """The request of a message that was dropped.

    It says that it is done, as that of a message which is lost on its way.
    """

    def done(self) -> bool:
        return True


@dataclass(slots=True, eq=False)
class _Held:
    """A request that is posted after `hold` more calls of `progress`; from then on it stands for `posted`."""

    hold: int
    post: Callable[[], Request]
    posted: Request | None = None

    def done(self) -> bool:
        return self.posted is not None and self.posted.done()
