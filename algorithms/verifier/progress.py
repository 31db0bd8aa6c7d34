"""Progress: match the messages of all ranks' programs, run them without data, and see whether they end.

A message is a rendezvous: neither side's step ends before the other side's is posted. A flag is one-sided: `Signal`
ends at once, and its `Wait` when it has been raised. Every lane posts its (group, segment) instances in canonical
order, and messages between two ranks on a lane are matched first in, first out. There is no choice in this system (no
wildcard, no shared credit), so all maximal runs are the same but for the order of independent events: one run decides.
A buffer in a link can only make a step end earlier, so what ends here ends at every capacity.

Mostly there is nothing to run. If both ends of every message stand in groups of the same number, and no group comes
`after` one of another lane, then all ranks together can run group 0 of a lane to its end, then group 1, and so on.

What ends with one segment ends with any number. As both ends of a message are in the same group, an instance waits for
instances of earlier segments and, in its own segment, for those that its group waits for in a run of one segment. None
of the two leads back to itself, so no instance waits for itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.plan import Recv, RecvReduce, Send, Signal, Wait, canonical_order
from unisono.algorithms.verifier.error_pictures import cycle
from unisono.algorithms.verifier.unrolled import FLAGS, RECEIVING, SENDING, Action, Place, UnrolledPlan
from unisono.errors import PlanError


class Posted(NamedTuple):
    """A group starts: what it waited for has ended, and its steps are posted."""

    rank: int
    lane: int
    group: int


class Delivered(NamedTuple):
    """A message is moved, or a flag seen: both its steps have been posted, and the receiver's has not ended."""

    lane: int
    group: int
    sender: int
    sending: Action
    receiver: int
    receiving: Action


Event: TypeAlias = Posted | Delivered

# Where messages, or flags, are sent and where they are received, by (sender, receiver).
_Ends: TypeAlias = tuple[dict[tuple[int, int], Action], dict[tuple[int, int], Action]]


class _Channel(NamedTuple):
    """Where the messages, or the flags, of one lane from one rank to another are matched."""

    lane: int
    sender: int
    receiver: int
    flags: bool


class _Instance(NamedTuple):
    """A group in one segment."""

    rank: int
    lane: int
    group: int
    segment: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, group {self.group}, segment {self.segment}"


_Post: TypeAlias = tuple[_Instance, Action]


def run(programs: Sequence[UnrolledPlan], segments: int = 1) -> list[Event]:
    """Return the events of one segment, in a possible order.

    With one segment, plans that need no run are not run; see above.

    Raises:
        PlanError: a message has one end only, the two ends of a message do not agree on its group and segment, or ranks
            wait for each other in a cycle, which is named.
    """
    events = _in_step(programs)
    if (
        events is None
        or segments > 1
        or any(row.after for program in programs for rows in program.lanes for row in rows)
    ):
        _check_pairs(programs)
        run_ = _Run(programs, segments)
        run_.go()
        events = run_.events
    return events


def _in_step(programs: Sequence[UnrolledPlan]) -> list[Event] | None:
    """Return the events of running lane by lane and group by group; None if ends of messages are apart."""
    events: list[Event] = []
    for lane in range(max(len(program.lanes) for program in programs)):
        running = [program for program in programs if lane < len(program.lanes)]
        for group in range(max(len(program.lanes[lane]) for program in running)):
            matched = _match([program for program in running if group < len(program.lanes[lane])], lane, group, events)
            if not matched:
                return None
    return events


def _match(programs: Sequence[UnrolledPlan], lane: int, group: int, events: list[Event]) -> bool:
    """Append the events of one group of all ranks; return whether its messages have two ends each."""
    messages: _Ends = ({}, {})
    flags: _Ends = ({}, {})
    sides = {Send: messages[0], Recv: messages[1], RecvReduce: messages[1], Signal: flags[0], Wait: flags[1]}
    for program in programs:
        rank, row = program.plan.rank, program.lanes[lane][group]
        events.append(Posted(rank, lane, group))
        for action in row.actions:
            kind = type(action.step)
            side: dict[tuple[int, int], Action] | None = sides.get(kind)
            if side is None:
                continue
            ends = (rank, action.peer) if kind in SENDING else (action.peer, rank)
            if ends in side:
                direction = "sends to" if kind in SENDING else "receives from"
                raise program.place(lane, group, action).error(
                    f"the group {direction} rank {action.peer} twice; one message is all it may"
                )
            side[ends] = action
    for sent, received in (messages, flags):
        if sent.keys() != received.keys():
            return False
        events += [
            Delivered(lane, group, sender, sending, receiver, received[sender, receiver])
            for (sender, receiver), sending in sent.items()
        ]
    return True


def _check_pairs(programs: Sequence[UnrolledPlan]) -> None:
    """Check that as many messages are received as are sent, on every channel; name the first that is not."""
    sent: dict[_Channel, list[Place]] = defaultdict(list)
    received: dict[_Channel, list[Place]] = defaultdict(list)
    for program in programs:
        for lane, rows in enumerate(program.lanes):
            for number, row in enumerate(rows):
                for index, action in enumerate(row.actions):
                    if (channel := _channel(program.plan.rank, lane, action)) is not None:
                        side = sent if type(action.step) in SENDING else received
                        side[channel].append(Place(program.plan.rank, lane, number, index))
    for channel in sorted(sent.keys() | received.keys()):
        _check_pair_counts(channel, sent[channel], received[channel])


def _check_pair_counts(channel: _Channel, sent: list[Place], received: list[Place]) -> None:
    if len(sent) == len(received):
        return
    more, fewer = (sent, received) if len(sent) > len(received) else (received, sent)
    matched = {place.group for place in fewer}
    place = next(place for place in more if place.group not in matched)
    what = "flags" if channel.flags else "messages"
    counts = f"{len(sent)} {what} sent, {len(received)} received in this lane"
    if more is sent:
        raise place.error(f"rank {channel.receiver} does not receive what this sends to it ({counts})")
    raise place.error(f"rank {channel.sender} does not send what this receives from it ({counts})")


def _channel(rank: int, lane: int, action: Action) -> _Channel | None:
    kind = type(action.step)
    if kind in SENDING:
        return _Channel(lane, rank, action.peer, kind in FLAGS)
    return _Channel(lane, action.peer, rank, kind in FLAGS) if kind in RECEIVING else None


class _Run:
    """A run of programs that have passed `_check_pairs`; `events` are those of segment 0."""

    def __init__(self, programs: Sequence[UnrolledPlan], segments: int) -> None:
        self.programs = programs
        self.events: list[Event] = []
        self._orders = [[list(canonical_order(len(rows), segments)) for rows in program.lanes] for program in programs]
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
                        raise self._cycle(instance)

    def _actions(self, instance: _Instance) -> Sequence[Action]:
        return self.programs[instance.rank].lanes[instance.lane][instance.group].actions

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
        messages = [action for action in self._actions(instance) if type(action.step) in SENDING | RECEIVING]
        self._undelivered[instance] = 1 + sum(not isinstance(action.step, Signal) for action in messages)
        for action in messages:
            channel = _channel(instance.rank, instance.lane, action)
            assert channel is not None
            sends, receives = self._channels[channel]
            (sends if type(action.step) in SENDING else receives).append((instance, action))
            if sends and receives:
                self._deliver(sends.popleft(), receives.popleft())
        self._count_down(instance)

    def _deliver(self, sending: _Post, receiving: _Post) -> None:
        (source, send), (target, receive) = sending, receiving
        if source[2:] != target[2:]:
            sent, received = (
                self.programs[post[0].rank].place(*post[0][1:3], post[1]) for post in (sending, receiving)
            )
            raise sent.error(
                f"the message is received by {received} (segments {source.segment} and {target.segment}): "
                "both ends must have the same group and segment"
            )
        if source.segment == 0:
            self.events.append(Delivered(source.lane, source.group, source.rank, send, target.rank, receive))
        if not isinstance(send.step, Signal):
            self._count_down(source)
        self._count_down(target)

    def _count_down(self, instance: _Instance) -> None:
        self._undelivered[instance] -= 1
        if not self._undelivered[instance]:
            del self._undelivered[instance]
            self._ended.add(instance)
            self._awake.append(instance.rank)

    def _cycle(self, instance: _Instance) -> PlanError:
        """Return the error that shows the cycle which `instance` is in, or waits for."""
        path: list[_Instance] = []
        while instance not in path:
            path.append(instance)
            instance = self._waits_for(instance)
        return PlanError(f"waiting cycle:{cycle([str(member) for member in path[path.index(instance) :]])}")

    def _waits_for(self, instance: _Instance) -> _Instance:
        """Return what an instance that has not ended waits for."""
        if instance not in self._undelivered:
            head = self._next(instance.rank, instance.lane)
            assert head is not None, "an instance that is not posted leaves its lane with a next one"
            return self._unmet(instance) or head
        for action in self._actions(instance):
            channel = _channel(instance.rank, instance.lane, action)
            if channel is None or isinstance(action.step, Signal):
                continue
            if (instance, action) in self._channels[channel][type(action.step) in RECEIVING]:
                return self._next_on(channel, action.peer)
        raise AssertionError("an instance that has not ended has a message that is not delivered")

    def _next_on(self, channel: _Channel, rank: int) -> _Instance:
        """Return the next instance that `rank` posts on `channel`; as messages come in pairs, there is one."""
        lane = channel.lane
        for group, segment in self._orders[rank][lane][self._posted[rank][lane] :]:
            instance = _Instance(rank, lane, group, segment)
            if any(_channel(rank, lane, action) == channel for action in self._actions(instance)):
                return instance
        raise AssertionError("a message has one end only")
