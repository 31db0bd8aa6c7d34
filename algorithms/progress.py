"""Progress: run all ranks' programs together, without data, and see whether they end.

A message is a rendezvous: neither side's step ends before the other side's is posted. Every lane posts its (group,
segment) instances in canonical order, and messages between two ranks on a lane are matched first in, first out. There
is no choice in this system (no wildcard, no shared credit), so all maximal runs are the same but for the order of
independent events: one run decides. A buffer in a link can only make a step end earlier, so what ends here ends at
every capacity.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.plan import Group, MessageStep, Send, canonical_order
from unisono.algorithms.program import Place, Program
from unisono.errors import PlanError


class Posted(NamedTuple):
    """A group starts: what it waited for has ended, and its steps are posted."""

    rank: int
    lane: int
    group: int


class Delivered(NamedTuple):
    """A message is moved: both its steps have been posted, and neither has ended."""

    sending: Place
    receiving: Place


Event: TypeAlias = Posted | Delivered


class _Instance(NamedTuple):
    """A group in one segment."""

    rank: int
    lane: int
    group: int
    segment: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, group {self.group}, segment {self.segment}"


class _Channel(NamedTuple):
    """Where the messages of one lane from one rank to another are matched."""

    lane: int
    sender: int
    receiver: int


_Post: TypeAlias = tuple[_Instance, int]  # an instance, and the index in its group of one of its message steps


def check_pairs(programs: Sequence[Program]) -> int:
    """Return the number of messages (in one segment); check that as many are received as are sent, on every channel.

    Raises:
        PlanError: not so; names the first step whose other half is missing.
    """
    sent: dict[_Channel, list[Place]] = defaultdict(list)
    received: dict[_Channel, list[Place]] = defaultdict(list)
    for program in programs:
        for place, step in program.steps():
            if isinstance(step, MessageStep):
                side = sent if isinstance(step, Send) else received
                side[_channel(place.lane, place.rank, step)].append(place)
    for channel in sorted(sent.keys() | received.keys()):
        _check_pair_counts(channel, sent[channel], received[channel])
    return sum(len(places) for places in sent.values())


def _check_pair_counts(channel: _Channel, sent: list[Place], received: list[Place]) -> None:
    if len(sent) == len(received):
        return
    more, fewer = (sent, received) if len(sent) > len(received) else (received, sent)
    matched = {place.group for place in fewer}
    place = next(place for place in more if place.group not in matched)
    counts = f"{len(sent)} messages sent, {len(received)} received in this lane"
    if more is sent:
        raise place.error(f"rank {channel.receiver} does not receive what this sends to it ({counts})")
    raise place.error(f"rank {channel.sender} does not send what this receives from it ({counts})")


def run(programs: Sequence[Program], segments: int) -> list[Event]:
    """Run the programs over `segments` segments; return the events of segment 0, in a possible order.

    The programs must have passed `check_pairs`.

    Raises:
        PlanError: ranks wait for each other in a cycle, which is named, or the two ends of a message do not agree
            on its group and segment.
    """
    run_ = _Run(programs, segments)
    run_.go()
    return run_.events


class _Run:
    def __init__(self, programs: Sequence[Program], segments: int) -> None:
        self.programs = programs
        self.events: list[Event] = []
        self._orders = [
            [list(canonical_order(len(groups), segments)) for groups in program.lanes] for program in programs
        ]
        self._posted = [[0] * len(program.lanes) for program in programs]
        self._undelivered: dict[_Instance, int] = {}  # messages left, of each instance posted and not ended
        self._ended: set[_Instance] = set()
        self._awake = deque(range(len(programs)))
        self._channels: dict[_Channel, tuple[deque[_Post], deque[_Post]]] = defaultdict(lambda: (deque(), deque()))

    def go(self) -> None:
        while self._awake:
            rank = self._awake.popleft()
            for lane in range(len(self._orders[rank])):
                while (instance := self._next(rank, lane)) is not None and self._unmet(instance) is None:
                    self._post(instance)
        for rank, orders in enumerate(self._orders):
            for lane, order in enumerate(orders):
                for group, segment in order:
                    instance = _Instance(rank, lane, group, segment)
                    if instance not in self._ended:
                        raise PlanError(f"waiting cycle: {self._cycle(instance)}")

    def _group(self, instance: _Instance) -> Group:
        return self.programs[instance.rank].lanes[instance.lane][instance.group]

    def _next(self, rank: int, lane: int) -> _Instance | None:
        """Return the instance that the lane posts next."""
        posted, order = self._posted[rank][lane], self._orders[rank][lane]
        return _Instance(rank, lane, *order[posted]) if posted < len(order) else None

    def _unmet(self, instance: _Instance) -> _Instance | None:
        """Return an instance that must end before this one starts, and has not ended."""
        rank, lane, group, segment = instance
        needed = [_Instance(rank, *before, segment) for before in self.programs[rank].predecessors(lane, group)]
        if segment:
            needed.append(_Instance(rank, lane, group, segment - 1))
        return next((other for other in needed if other not in self._ended), None)

    def _post(self, instance: _Instance) -> None:
        self._posted[instance.rank][instance.lane] += 1
        if instance.segment == 0:
            self.events.append(Posted(instance.rank, instance.lane, instance.group))
        messages = [
            (index, step) for index, step in enumerate(self._group(instance).steps) if isinstance(step, MessageStep)
        ]
        self._undelivered[instance] = len(messages)
        for index, step in messages:
            channel = _channel(instance.lane, instance.rank, step)
            sends, receives = self._channels[channel]
            (sends if isinstance(step, Send) else receives).append((instance, index))
            if sends and receives:
                self._deliver(sends.popleft(), receives.popleft())
        if not messages:
            self._end(instance)

    def _deliver(self, sending: _Post, receiving: _Post) -> None:
        (source, send), (target, receive) = sending, receiving
        event = Delivered(Place(*source[:3], send), Place(*target[:3], receive))
        if source[2:] != target[2:]:
            raise event.sending.error(
                f"the message is received by {event.receiving} (segments {source.segment} and {target.segment}): "
                "both ends must have the same group and segment"
            )
        if source.segment == 0:
            self.events.append(event)
        for instance in (source, target):
            self._undelivered[instance] -= 1
            if not self._undelivered[instance]:
                self._end(instance)

    def _end(self, instance: _Instance) -> None:
        del self._undelivered[instance]
        self._ended.add(instance)
        self._awake.append(instance.rank)

    def _cycle(self, instance: _Instance) -> str:
        """Return the cycle that `instance` is in, or waits for, in words."""
        path: list[_Instance] = []
        while instance not in path:
            path.append(instance)
            instance = self._waits_for(instance)
        return " waits for ".join(str(member) for member in (*path[path.index(instance) :], instance))

    def _waits_for(self, instance: _Instance) -> _Instance:
        """Return what an instance that has not ended waits for."""
        if instance not in self._undelivered:
            head = self._next(instance.rank, instance.lane)
            assert head is not None, "an instance that is not posted leaves its lane with a next one"
            return self._unmet(instance) or head
        for index, step in enumerate(self._group(instance).steps):
            if isinstance(step, MessageStep):
                channel = _channel(instance.lane, instance.rank, step)
                if (instance, index) in self._channels[channel][not isinstance(step, Send)]:
                    return self._next_on(channel, step.peer)
        raise AssertionError("an instance that has not ended has a message that is not delivered")

    def _next_on(self, channel: _Channel, rank: int) -> _Instance:
        """Return the next instance that `rank` posts on `channel`; as messages come in pairs, there is one."""
        lane = channel.lane
        for group, segment in self._orders[rank][lane][self._posted[rank][lane] :]:
            instance = _Instance(rank, lane, group, segment)
            for step in self._group(instance).steps:
                if isinstance(step, MessageStep) and _channel(lane, rank, step) == channel:
                    return instance
        raise AssertionError("a message has one end only")


def _channel(lane: int, rank: int, step: MessageStep) -> _Channel:
    return _Channel(lane, rank, step.peer) if isinstance(step, Send) else _Channel(lane, step.peer, rank)
