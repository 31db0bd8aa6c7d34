"""The state that hybrid groups share: the clock, which says when a group may contribute, and a center for each layer.

Theory of operation
-------------------
A group gets the layers from their centers, trains them for some steps, and contributes its changes. The *staleness* of
a contribution is the number of contributions of other groups that came between. To bound it, a group asks the clock
before it contributes. The clock makes it wait as long as a group that is still training would fall too far behind. As
soon as none would, the clock lets all waiting groups through, in the order of their numbers. A waiting group does not
train, so it holds up no other group. With a staleness of 0 the groups run in lockstep, and the results have the same
bits each time.

A group that is let through gets a *ticket*, the number of its contribution, and each center adds contributions in the
order of tickets. So all layers have the same history, although their servers do not communicate. If each server decided
by itself, two groups could wait for each other at two servers. With tickets, no group waits before it has sent all its
messages, so every center gets all tickets, and there is no deadlock.

References: Kurth et al., "Deep learning at 15PF", SC17, arXiv:1708.05256 (groups and a server for each layer); Ho et
al., "More effective distributed ML via a stale synchronous parallel parameter server", NIPS 2013 (bounds).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from unisono.frameworks.arrays import Array
from unisono.frameworks.data_parallel.layers import Frame

# Stands for the version in the last contribution of a group, which gets no answer from the centers.
LAST = -1


class Handler(Protocol):
    """The clock or a center, either of which handles messages of the groups on a server."""

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        """Handle the message of a group of ranks. Return (group, answer) for each group that gets an answer now.

        An answer is the frame that its group has sent, with new content.
        """

    @property
    def active_groups(self) -> int:
        """The number of groups that have not sent their last message."""


class StalenessClock:
    """Decides when each group may contribute, so that the staleness of no contribution exceeds a bound.

    A message of a group holds `LAST` if it is its last one, and any other number otherwise. The answer holds the ticket
    and the version of the centers that the group gets for its contribution, or `LAST`. A version is a number of
    contributions.

    Args:
        groups: the number of groups.
        staleness: the bound, 0 or more.

    Attributes:
        version: the number of tickets so far.
        longest: the greatest staleness of a contribution so far.
    """

    def __init__(self, groups: int, staleness: int) -> None:
        self.version = 0
        self.longest = 0
        self._staleness = staleness
        self._base = dict.fromkeys(range(groups), 0)  # the version from which each group started to train
        self._waiting: dict[int, Frame] = {}

    @property
    def active_groups(self) -> int:
        return len(self._base)

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        self._waiting[group] = frame
        training = self._base.keys() - self._waiting.keys()
        if any(self.version + len(self._waiting) - self._base[other] > self._staleness for other in training):
            return []
        let_through = sorted(self._waiting.items())
        self._waiting = {}
        self.longest = max(self.longest, *(self.version - self._base[waiting] for waiting, _ in let_through))
        first, self.version = self.version, self.version + len(let_through)
        for ticket, (waiting, answer) in enumerate(let_through, first):
            if answer.numbers[0] == LAST:
                del self._base[waiting]
                answer.numbers[:] = ticket, LAST
            else:
                self._base[waiting] = self.version
                answer.numbers[:] = ticket, self.version
        return let_through


class _Waiting(NamedTuple):
    group: int
    frame: Frame


class Center:
    """The values of a layer with all contributions so far.

    A message of a group holds its ticket, the version that it wants as the answer, and its change of the layer. The
    answer is that version of the layer.

    Args:
        values: the flat values of the layer at the start; they are changed in place.
        weights: by group, the factor of its contributions.

    Attributes:
        values: the present values of the layer.
        version: the number of contributions in them.
        active_groups: the number of groups that have not sent their last message.
    """

    def __init__(self, values: Array, weights: Mapping[int, float]) -> None:
        self.values = values
        self.version = 0
        self.active_groups = len(weights)
        self._weights = weights
        self._early: dict[int, _Waiting] = {}  # by ticket
        self._unanswered: list[_Waiting] = []

    def take(self, group: int, frame: Frame) -> list[tuple[int, Frame]]:
        self._early[int(frame.numbers[0])] = _Waiting(group, frame)
        answers = []
        while (contribution := self._early.pop(self.version, None)) is not None:
            self.values += contribution.frame.values * self.values.dtype.type(self._weights[contribution.group])
            self.version += 1
            if contribution.frame.numbers[1] == LAST:
                self.active_groups -= 1
            else:
                self._unanswered.append(contribution)
            answers += self._answers()
        return answers

    def _answers(self) -> list[tuple[int, Frame]]:
        due = [waiting for waiting in self._unanswered if waiting.frame.numbers[1] == self.version]
        self._unanswered = [waiting for waiting in self._unanswered if waiting.frame.numbers[1] != self.version]
        for _, frame in due:
            frame.values[...] = self.values
        return list(due)
