"""What the groups share: the clock, which says whose turn it is, and the center of each layer.

Theory of operation. A group gets the layers as they are at their centers, trains them for some steps, and contributes
by how much they have changed since. The *staleness* of a contribution is the number of contributions of other groups
that have come between. To bound it, a group that wants to contribute asks the clock, and must wait as long as a group
that is still training would fall too far behind; those that wait are let through together, in their order, as soon as
that is so for none. A group that waits does not train, so that in the end nobody holds up the others. With a staleness
of 0 the groups go in step, and what comes out are the same bits each time.

Whoever is let through gets a *ticket*, the number of its contribution, and each center adds contributions in the order
of the tickets: all layers have the same history, though their servers know nothing of each other. If each server
decided for itself who has to wait, two groups might wait for each other at two of them. With a ticket, nobody waits
before having sent everything; so every center gets all tickets, and there is no deadlock.

References: Kurth et al., "Deep learning at 15PF", SC17, arXiv:1708.05256 (groups and a server for each layer); Ho et
al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013 (bounds).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from unisono.frameworks.arrays import Array
from unisono.frameworks.data_parallel.layers import Frame

# In the place of a version: this is a group's last contribution, for which it gets nothing.
LAST = -1


class Desk(Protocol):
    """What a server keeps, and takes messages for."""

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        """Take the message of a group; return the groups that get answers now, and those, in frames that they sent."""

    @property
    def left(self) -> int:
        """The number of groups that have not sent their last message."""


class Clock:
    """Lets groups contribute so that none is further behind than it may be.

    A message has `LAST` or any other number; its answer, the number of the ticket, and the version that the group is to
    get for it: the number of contributions that are in it, or `LAST`.

    Args:
        groups: the number of groups.
        staleness: the bound, 0 or more.

    Attributes:
        version: the number of tickets so far.
        longest: the greatest staleness of any contribution so far.
    """

    def __init__(self, groups: int, staleness: int) -> None:
        self.version = 0
        self.longest = 0
        self._staleness = staleness
        self._base = dict.fromkeys(range(groups), 0)  # the version that each group trains, or has trained
        self._waiting: dict[int, Frame] = {}

    @property
    def left(self) -> int:
        """See `Desk.left`."""
        return len(self._base)

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        """See `Desk.take`."""
        self._waiting[group] = frame
        training = self._base.keys() - self._waiting.keys()
        if any(self.version + len(self._waiting) - self._base[each] > self._staleness for each in training):
            return []
        let_through = sorted(self._waiting.items())
        self._waiting = {}
        self.longest = max(self.longest, *(self.version - self._base[each] for each, _ in let_through))
        first, self.version = self.version, self.version + len(let_through)
        for ticket, (each, answer) in enumerate(let_through, first):
            if answer.numbers[0] == LAST:
                del self._base[each]
                answer.numbers[:] = ticket, LAST
            else:
                self._base[each] = self.version
                answer.numbers[:] = ticket, self.version
        return let_through


class _Waiting(NamedTuple):
    group: int
    frame: Frame


class Center:
    """A layer, and what has been contributed to it.

    A message has a ticket, the version to be answered with, and by how much the group has changed the layer; the answer
    is that version of it.

    Args:
        values: the layer in the beginning, flat; this changes it.
        weights: of each group, by its number: what its contributions are multiplied by.

    Attributes:
        values: the layer as it is now.
        version: the number of contributions in it.
    """

    def __init__(self, values: Array, weights: Mapping[int, float]) -> None:
        self.values = values
        self.version = 0
        self.left = len(weights)
        self._weights = weights
        self._early: dict[int, _Waiting] = {}  # by ticket
        self._unanswered: list[_Waiting] = []

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        """See `Desk.take`."""
        self._early[int(frame.numbers[0])] = _Waiting(group, frame)
        answers = []
        while (next_one := self._early.pop(self.version, None)) is not None:
            self.values += next_one.frame.values * self.values.dtype.type(self._weights[next_one.group])
            self.version += 1
            if next_one.frame.numbers[1] == LAST:
                self.left -= 1
            else:
                self._unanswered.append(next_one)
            answers += self._answers()
        return answers

    def _answers(self) -> list[tuple[int, Frame]]:
        due = [each for each in self._unanswered if each.frame.numbers[1] == self.version]
        self._unanswered = [each for each in self._unanswered if each.frame.numbers[1] != self.version]
        for _, frame in due:
            frame.values[...] = self.values
        return list(due)
