"""Progress: runs the plans of all ranks without data, and checks that every message has two ends and that the run ends.

In such a run messages are synchronous: neither side's step ends before the other side has posted its step. A flag is
one-sided: `Signal` ends at once, and its `Wait` ends when the flag has been raised. An *instance* is one group of one
lane in one segment. Every lane posts its instances in canonical order. Messages between two ranks on a lane are matched
first in, first out. Nothing in this system is a choice: there is no wildcard and no shared credit. All complete runs
are therefore equal, except for the order of independent events, and one run decides. Buffering in a link can only make
a step end earlier, so a plan that ends here ends with any amount of buffering.

Most plans need no run at all: those in which both ends of every message have the same group number, and no group comes
`after` a group of another lane. All ranks together can then run group 0 of a lane to its end, then group 1, and so on.

A plan that ends with one segment ends with any number of segments. Both ends of a message are in the same group. So an
instance waits only for instances of earlier segments and, in its own segment, for the instances that its group waits
for in a run of one segment. Neither kind of wait leads back to the instance itself.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.plan import Recv, RecvReduce, Send, Signal, Wait, canonical_order
from unisono.algorithms.verifier.error_pictures import cycle
from unisono.algorithms.verifier.unrolled import FLAGS, RECEIVING, SENDING, Action, StepLocation, UnrolledPlan
from unisono.errors import PlanError


class GroupPosted(NamedTuple):
    """An event: a group starts. The groups that it waited for have ended, and its steps are posted."""

    rank: int
    lane: int
    group: int


class Delivered(NamedTuple):
    """An event: a message arrives or a flag is seen. Both steps are posted; the receiver's step has not ended."""

    lane: int
    group: int
    sender: int
    sending: Action
    receiver: int
    receiving: Action


Event: TypeAlias = GroupPosted | Delivered

# (sender, receiver) → the step that sends the message or flag, and the same for the step that receives it.
_Ends: TypeAlias = tuple[dict[tuple[int, int], Action], dict[tuple[int, int], Action]]


class _PlanChannel(NamedTuple):
    """The messages, or the flags, of one lane from one rank to another, which are matched in order."""

    lane: int
    sender: int
    receiver: int
    flags: bool


class _Instance(NamedTuple):
    """An instance: one group of one lane of one rank, in one segment."""

    rank: int
    lane: int
    group: int
    segment: int

    def __str__(self) -> str:
        return f"rank {self.rank}, lane {self.lane}, group {self.group}, segment {self.segment}"


_Post: TypeAlias = tuple[_Instance, Action]


def run(unrolled_plans: Sequence[UnrolledPlan], segments: int = 1) -> list[Event]:
    """Return the events of one segment, in a possible order.

    With one segment, plans that need no run are not run; see the explanation of this module.

    Raises:
        PlanError: a message has only one end, or its two ends differ in group or segment, or ranks wait for each other
            in a cycle, which the message shows.
    """
    events = _in_step(unrolled_plans)
    if (
        events is None
        or segments > 1
        or any(row.after for unrolled in unrolled_plans for rows in unrolled.lanes for row in rows)
    ):
        _check_pairs(unrolled_plans)
        run_ = _Run(unrolled_plans, segments)
        run_.go()
        events = run_.events
    return events


def _in_step(unrolled_plans: Sequence[UnrolledPlan]) -> list[Event] | None:
    """Return the events lane by lane, group by group; None if the two ends of a message are in different groups."""
    events: list[Event] = []
    for lane in range(max(len(unrolled.lanes) for unrolled in unrolled_plans)):
        running = [unrolled for unrolled in unrolled_plans if lane < len(unrolled.lanes)]
        for group in range(max(len(unrolled.lanes[lane]) for unrolled in running)):
            matched = _match(
                [unrolled for unrolled in running if group < len(unrolled.lanes[lane])], lane, group, events
            )
            if not matched:
                return None
    return events


def _match(unrolled_plans: Sequence[UnrolledPlan], lane: int, group: int, events: list[Event]) -> bool:
    """Append the events of one group of all ranks. Return whether each of its messages has two ends in this group."""
    messages: _Ends = ({}, {})
    flags: _Ends = ({}, {})
    sides = {Send: messages[0], Recv: messages[1], RecvReduce: messages[1], Signal: flags[0], Wait: flags[1]}
    for unrolled in unrolled_plans:
        rank, row = unrolled.plan.rank, unrolled.lanes[lane][group]
        events.append(GroupPosted(rank, lane, group))
        for action in row.actions:
            kind = type(action.step)
            side: dict[tuple[int, int], Action] | None = sides.get(kind)
            if side is None:
                continue
            ends = (rank, action.peer) if kind in SENDING else (action.peer, rank)
            if ends in side:
                direction = "sends to" if kind in SENDING else "receives from"
                raise unrolled.location(lane, group, action).error(
                    f"the group {direction} rank {action.peer} twice; a group may do so only once"
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


def _check_pairs(unrolled_plans: Sequence[UnrolledPlan]) -> None:
    """Check that every channel has as many receives as sends. The error names the first channel that does not."""
    sent: dict[_PlanChannel, list[StepLocation]] = defaultdict(list)
    received: dict[_PlanChannel, list[StepLocation]] = defaultdict(list)
    for unrolled in unrolled_plans:
        for lane, rows in enumerate(unrolled.lanes):
            for number, row in enumerate(rows):
                for index, action in enumerate(row.actions):
                    if (channel := _channel(unrolled.plan.rank, lane, action)) is not None:
                        side = sent if type(action.step) in SENDING else received
                        side[channel].append(StepLocation(unrolled.plan.rank, lane, number, index))
    for channel in sorted(sent.keys() | received.keys()):
        _check_pair_counts(channel, sent[channel], received[channel])


def _check_pair_counts(channel: _PlanChannel, sent: list[StepLocation], received: list[StepLocation]) -> None:
    if len(sent) == len(received):
        return
    more, fewer = (sent, received) if len(sent) > len(received) else (received, sent)
    matched = {location.group for location in fewer}
    location = next(location for location in more if location.group not in matched)
    kind = "flag" if channel.flags else "message"
    counts = f"{len(sent)} {kind}s sent, {len(received)} received in this lane"
    if more is sent:
        raise location.error(f"rank {channel.receiver} does not receive the {kind} that this step sends ({counts})")
    raise location.error(f"rank {channel.sender} does not send the {kind} that this step receives ({counts})")


def _channel(rank: int, lane: int, action: Action) -> _PlanChannel | None:
    kind = type(action.step)
    if kind in SENDING:
        return _PlanChannel(lane, rank, action.peer, kind in FLAGS)
    return _PlanChannel(lane, action.peer, rank, kind in FLAGS) if kind in RECEIVING else None


class _Run:
    """A run of plans that have passed `_check_pairs`. `events` are the events of segment 0."""

    def __init__(self, unrolled_plans: Sequence[UnrolledPlan], segments: int) -> None:
        self.unrolled_plans = unrolled_plans
        self.events: list[Event] = []
        self._orders = [
            [list(canonical_order(len(rows), segments)) for rows in unrolled.lanes] for unrolled in unrolled_plans
        ]
        self._posted = [[0] * len(unrolled.lanes) for unrolled in unrolled_plans]
        self._undelivered: dict[_Instance, int] = {}  # posted instance that has not ended → messages to be delivered
        self._ended: set[_Instance] = set()
        self._awake = deque(range(len(unrolled_plans)))
        self._channels: dict[_PlanChannel, tuple[deque[_Post], deque[_Post]]] = defaultdict(lambda: (deque(), deque()))

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
        return self.unrolled_plans[instance.rank].lanes[instance.lane][instance.group].actions

    def _next(self, rank: int, lane: int) -> _Instance | None:
        """Return the instance that the lane posts next; None if it has posted all."""
        posted, order = self._posted[rank][lane], self._orders[rank][lane]
        return _Instance(rank, lane, *order[posted]) if posted < len(order) else None

    def _unmet(self, instance: _Instance) -> _Instance | None:
        """Return an instance that has not ended and must end before `instance` starts; None if there is none."""
        rank, lane, group, segment = instance
        needed = [_Instance(rank, *before, segment) for before in self.unrolled_plans[rank].predecessors(lane, group)]
        if segment:
            needed.append(_Instance(rank, lane, group, segment - 1))
        return next((other for other in needed if other not in self._ended), None)

    def _post(self, instance: _Instance) -> None:
        self._posted[instance.rank][instance.lane] += 1
        if instance.segment == 0:
            self.events.append(GroupPosted(instance.rank, instance.lane, instance.group))
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
                self.unrolled_plans[post[0].rank].location(*post[0][1:3], post[1]) for post in (sending, receiving)
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
        """Return the error that shows a cycle of waiting instances, which `instance` is in or waits for."""
        path: list[_Instance] = []
        while instance not in path:
            path.append(instance)
            instance = self._waits_for(instance)
        return PlanError(f"waiting cycle:{cycle([str(member) for member in path[path.index(instance) :]])}")

    def _waits_for(self, instance: _Instance) -> _Instance:
        """Return an instance for which `instance`, which has not ended, waits.

        If `instance` is not posted, the result is an instance that must end first, or one that its lane posts first.
        Otherwise the result is the instance at the other end of a message that has not been delivered.
        """
        if instance not in self._undelivered:
            head = self._next(instance.rank, instance.lane)
            assert head is not None, "a lane with an instance that is not posted has a next instance"
            return self._unmet(instance) or head
        for action in self._actions(instance):
            channel = _channel(instance.rank, instance.lane, action)
            if channel is None or isinstance(action.step, Signal):
                continue
            if (instance, action) in self._channels[channel][type(action.step) in RECEIVING]:
                return self._next_on(channel, action.peer)
        raise AssertionError("an instance that has not ended has a message that is not delivered")

    def _next_on(self, channel: _PlanChannel, rank: int) -> _Instance:
        """Return the next instance of `rank` that uses `channel`. There is one, because every message has two ends."""
        lane = channel.lane
        for group, segment in self._orders[rank][lane][self._posted[rank][lane] :]:
            instance = _Instance(rank, lane, group, segment)
            if any(_channel(rank, lane, action) == channel for action in self._actions(instance)):
                return instance
        raise AssertionError("a message has one end only")
