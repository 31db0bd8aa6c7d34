"""The protocol of transports/native/core/shm/shm_channel.cpp, operation by operation, for the checker in `weak_memory`.

Two sides, 0 and 1, have a ring of slots for each direction. Names are those of the C++ code. Each `Mutation` leaves out
or weakens one operation, to test that the checker finds the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import Enum

from models.weak_memory import Await, Checker, Exchange, Fence, Load, Operation, RemoteFence, Store

Steps = Generator[Operation, int, bool]


class Mutation(Enum):
    """A fault in the protocol."""

    NONE = "nothing"
    TURN_STORED_RELAXED = "the turn of a slot is stored without release"
    TURN_LOADED_RELAXED = "the turn of a slot is loaded without acquire"
    CONSUMED_STORED_RELAXED = "what has been consumed is stored without release"
    NO_LIGHT_FENCE = "who publishes does not pass the light fence"
    NO_HEAVY_FENCE = "who goes to sleep does not pass the heavy fence"
    HEAVY_FENCE_IS_LOCAL = "the heavy fence does not reach the other side"
    FLAG_READ_FIRST = "who publishes looks for sleepers before"
    NO_SECOND_LOOK = "who goes to sleep does not look once more"
    NO_RING = "nobody rings"
    ONE_SLOT_TOO_MANY = "a slot is taken before it is free"
    ACKNOWLEDGED_EARLY = "slots are acknowledged before they are read"


@dataclass
class Side:
    """One end of a channel: the private state of `ShmChannel`, and its steps."""

    me: int
    slots: int
    membarrier: bool
    mutation: Mutation
    published: int = 0
    known_consumed: int = 0
    released: int = 0

    @property
    def peer(self) -> int:
        return 1 - self.me

    def is_(self, mutation: Mutation) -> bool:
        return self.mutation is mutation

    def light_fence(self) -> Generator[Operation, int, None]:
        if not self.membarrier and not self.is_(Mutation.NO_LIGHT_FENCE):
            yield Fence()

    def heavy_fence(self) -> Generator[Operation, int, None]:
        if self.is_(Mutation.NO_HEAVY_FENCE):
            return
        yield Fence()
        if self.membarrier and not self.is_(Mutation.HEAVY_FENCE_IS_LOCAL):
            yield RemoteFence(self.peer)

    def change_and_wake(self, change: Operation, flag: str) -> Generator[Operation, int, None]:
        """Make a change visible, and ring if the other side may be asleep waiting for it."""
        waits = 0
        if self.is_(Mutation.FLAG_READ_FIRST):
            waits = yield Load(flag)
        yield change
        yield from self.light_fence()
        if not self.is_(Mutation.FLAG_READ_FIRST):
            waits = yield Load(flag)
        if waits and not self.is_(Mutation.NO_RING):
            yield Exchange(f"bell{self.peer}", 1)

    def send(self, payload: int) -> Steps:
        """Send one message of one slot, if a slot is free."""
        room = self.slots + self.is_(Mutation.ONE_SLOT_TOO_MANY)
        if self.published - self.known_consumed == room:
            self.known_consumed = yield Load(f"consumed{self.me}", acquire=True)
        if self.published - self.known_consumed >= room:
            return False
        slot = f"{self.me}.{self.published % self.slots}"
        early = self.is_(Mutation.ACKNOWLEDGED_EARLY)
        yield Store(f"payload{slot}", payload)
        yield Store(f"acknowledged{slot}", self.released + early)
        self.published += 1
        release = not self.is_(Mutation.TURN_STORED_RELAXED)
        yield from self.change_and_wake(Store(f"turn{slot}", self.published, release), f"receiver_waits{self.me}")
        return True

    def receive(self, payload: int, meanwhile: Callable[[], Steps] | None = None) -> Steps:
        """Receive one message and expect `payload` in it, if one has arrived.

        `meanwhile` runs before the payload is read.
        """
        slot = f"{self.peer}.{self.released % self.slots}"
        turn = yield Load(f"turn{slot}", acquire=not self.is_(Mutation.TURN_LOADED_RELAXED))
        if turn != self.released + 1:
            return False
        acknowledged = yield Load(f"acknowledged{slot}")
        if self.known_consumed < acknowledged <= self.published:
            self.known_consumed = acknowledged
        if meanwhile is not None:
            yield from meanwhile()
        yield Load(f"payload{slot}", expect=payload)
        self.released += 1
        release = not self.is_(Mutation.CONSUMED_STORED_RELAXED)
        change = Store(f"consumed{self.peer}", self.released, release)
        yield from self.change_and_wake(change, f"sender_waits{self.peer}")
        return True

    def until_sent(self, payload: int) -> Steps:
        """Send, and wait for a free slot as long as necessary."""
        return self.until(lambda: self.send(payload), f"sender_waits{self.me}")

    def until_received(self, payload: int, meanwhile: Callable[[], Steps] | None = None) -> Steps:
        """Receive, and wait for a message as long as necessary."""
        return self.until(lambda: self.receive(payload, meanwhile), f"receiver_waits{self.peer}")

    def until(self, attempt: Callable[[], Steps], flag: str) -> Steps:
        """Try repeatedly, and sleep between the attempts, as Endpoint::sleep does."""
        while not (yield from attempt()):
            yield Store(flag, 1)
            yield from self.heavy_fence()
            moved = False if self.is_(Mutation.NO_SECOND_LOOK) else (yield from attempt())
            if not moved:
                yield Await(f"bell{self.me}")
            yield Store(flag, 0)
            yield Exchange(f"bell{self.me}", 0)
            if moved:
                break
        return True


Script = Callable[[Side], Generator[Operation, int, None]]


def streams(messages: int) -> tuple[Script, Script]:
    """One side sends, and the other one receives."""

    def sender(side: Side) -> Generator[Operation, int, None]:
        for payload in range(1, messages + 1):
            yield from side.until_sent(payload)

    def receiver(side: Side) -> Generator[Operation, int, None]:
        for payload in range(1, messages + 1):
            yield from side.until_received(payload)

    return sender, receiver


def ping_pongs(messages: int) -> tuple[Script, Script]:
    """The sides answer each other, and an answer also reports free slots."""

    def side_of(first: bool) -> Script:
        def script(side: Side) -> Generator[Operation, int, None]:
            for payload in range(1, messages + 1):
                if first:
                    yield from side.until_sent(payload)
                yield from side.until_received(payload)
                if not first:
                    yield from side.until_sent(payload)

        return script

    return side_of(True), side_of(False)


def answers_first(messages: int) -> tuple[Script, Script]:
    """One side sends twice. The other one receives the first header, answers, and reads the first payload only then."""

    def sender(side: Side) -> Generator[Operation, int, None]:
        yield from side.until_sent(1)
        yield from side.until_received(1)
        for payload in range(2, messages + 1):
            yield from side.until_sent(payload)

    def receiver(side: Side) -> Generator[Operation, int, None]:
        yield from side.until_received(1, meanwhile=lambda: side.until_sent(1))
        for payload in range(2, messages + 1):
            yield from side.until_received(payload)

    return sender, receiver


def checker_of(scripts: tuple[Script, Script], slots: int, *, membarrier: bool, mutation: Mutation) -> Checker:
    """Return a checker of two sides that run `scripts`."""

    def program(index: int) -> Callable[[], Generator[Operation, int, None]]:
        return lambda: scripts[index](Side(index, slots, membarrier, mutation))

    values: dict[str, range] = {}
    for side in (0, 1):
        for slot in range(slots):
            values[f"turn{side}.{slot}"] = values[f"acknowledged{side}.{slot}"] = range(4)
        for flag in ("sender_waits", "receiver_waits"):
            values[f"{flag}{side}"] = range(2)
    return Checker([program(0), program(1)], values)
