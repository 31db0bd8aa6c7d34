"""`Lane`: posts the groups of one lane of a running collective, in order, and tracks which have ended.

An instance is one group for one segment. A lane posts its instances strictly in canonical order, each as soon as the
instances that it depends on have ended. So both ends of every channel post in the same order. A group is expanded from
the plan when its first segment is posted, and dropped after its last, so a long `Repeat` is never unrolled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from unisono.algorithms.ir.plan import Group, Step, canonical_order
from unisono.transports.contracts.call import Call
from unisono.transports.contracts.transport import Request


@dataclass(slots=True)
class Posted:
    """A posted message to or from `peer`, and a function to call once when it is done."""

    peer: int
    request: Request
    finish: Callable[[], None] | None = None

    def done(self) -> bool:
        if not self.request.done():
            return False
        if self.finish is not None:
            self.finish()
        return True


# (step, lane, group, segment): carries out a local step and returns None, or posts a message and returns it.
Post: TypeAlias = Callable[[Step, int, int, int], Posted | None]


class Lane:
    """One lane of a started collective.

    Args:
        index: the number of the lane in the plan of `call`.
        call: the call, whose plan and segments define the instances.
        post: carries out one step of an instance.

    Attributes:
        ended: for each segment, the number of groups that have ended; they end in order.
    """

    def __init__(self, index: int, call: Call, post: Post) -> None:
        self._index = index
        self._post_step = post
        self._segments = call.segments
        self._unexpanded = call.plan.groups(index)
        self._expanded: dict[int, Group] = {}
        self._order = canonical_order(call.plan.group_count(index), call.segments)
        self._next = next(self._order, None)
        self._running: dict[int, list[Posted]] = {}
        self.ended = [0] * call.segments

    def advance(self, lanes: Sequence[Lane]) -> bool:
        """Record the instances that have ended, and post those that may start; return whether there was any."""
        moved = False
        for segment, posted in list(self._running.items()):
            posted[:] = [message for message in posted if not message.done()]
            if not posted:
                del self._running[segment]
                self.ended[segment] += 1
                moved = True
        while self._next is not None and self._may_start(*self._next, lanes):
            self._post(*self._next)
            self._next = next(self._order, None)
            moved = True
        return moved

    def posted(self) -> Iterator[Posted]:
        """Yield the messages that have been posted and have not ended."""
        return chain.from_iterable(self._running.values())

    def is_finished(self) -> bool:
        """Return whether every group of every segment has ended."""
        return self._next is None and not self._running

    def _may_start(self, group: int, segment: int, lanes: Sequence[Lane]) -> bool:
        return (
            self.ended[segment] == group
            and (segment == 0 or self.ended[segment - 1] > group)
            and all(lanes[lane].ended[segment] > other for lane, other in self._group(group).after)
        )

    def _post(self, group: int, segment: int) -> None:
        posted = [self._post_step(step, self._index, group, segment) for step in self._group(group).steps]
        self._running[segment] = [message for message in posted if message is not None]
        if segment == self._segments - 1:
            del self._expanded[group]

    def _group(self, group: int) -> Group:
        """Return a group of the plan, with its loops unrolled.

        Groups are first needed in ascending order. So the next one is taken from a generator of unrolled groups, and
        kept until its last segment has run.
        """
        if group not in self._expanded:
            self._expanded[group] = next(self._unexpanded)
        return self._expanded[group]
