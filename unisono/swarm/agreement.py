"""The choice of the next view by the members of the present one: single-decree Paxos, without I/O.

Theory of operation
-------------------
The members of view v choose one view v+1, although any of them may be lost at any moment and several may propose at
once. Each choice is one instance of Paxos (Lamport, "Paxos Made Simple", 2001). The acceptors are the members of v.

1. A proposer takes a ballot that is higher than all that it knows, and asks the members of v for a promise.
2. A member promises to accept no lower ballot. It names the view that it has accepted before, if any. From its promise
   on, it begins no call in v, and says which call it has the result of.
3. If a quorum has promised, the proposer proposes the view that was accepted with the highest ballot; if none was
   accepted, its own candidate. It asks the members of v to accept that.
4. A member accepts unless it has promised a higher ballot.
5. If a quorum has accepted, the view is chosen. Every member that learns so installs it.

Two quorums of v have a member in common. So a proposer that comes later hears of the view that may have been chosen
already, and proposes the same one.

Example: A, B and C are the members of view 4, and C is lost. A proposes view 5 with A and B by ballot (1, A). A and B
promise; B accepts, and then A is lost too. Nobody is left that could form view 5 or another one: B alone is no quorum
of view 4. If C answers again, B proposes by ballot (2, B). B and C promise, and B names view 5. So B proposes view 5,
both accept, and B alone goes on in view 5. Its next choice needs a quorum of A and B.

`tests/swarm/test_agreement.py` tries random orders, losses and repetitions of these messages.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from unisono.swarm.views import NO_BALLOT, NO_BARS, Ballot, Bars, View


class Promise(NamedTuple):
    """The answer of a member to a ballot.

    Attributes:
        is_given: whether the member has promised.
        highest: the highest ballot that the member has promised.
        accepted: the ballot and the view that the member has accepted; None if there is none.
        has_result: the number of the last call of which it has the result.
        barred: the processes that may not enter again, as far as the member knows.
    """

    is_given: bool
    highest: Ballot
    accepted: tuple[Ballot, View] | None
    has_result: int
    barred: Bars = NO_BARS


class Acceptor:
    """One member's part in the choice of the view after its present one. Its owner holds a lock during each call."""

    def __init__(self) -> None:
        self.promised = NO_BALLOT
        self.accepted: tuple[Ballot, View] | None = None

    def promise(self, ballot: Ballot, has_result: int) -> Promise:
        """Promise to accept no lower ballot, unless a higher one has been promised."""
        is_given = ballot >= self.promised
        if is_given:
            self.promised = ballot
        return Promise(is_given, self.promised, self.accepted, has_result)

    def accept(self, ballot: Ballot, view: View) -> bool:
        """Accept a view, unless a higher ballot has been promised; return whether it has been accepted."""
        if ballot < self.promised:
            return False
        self.promised = ballot
        self.accepted = ballot, view
        return True


def quorum_of(size: int, min_size: int | None) -> int:
    """Return how many members of a view of `size` must take part in the choice of the next one.

    >>> [quorum_of(size, None) for size in range(1, 7)], quorum_of(6, 2), quorum_of(2, 3)
    ([1, 2, 2, 3, 3, 4], 2, 2)
    """
    return size // 2 + 1 if min_size is None else min(min_size, size)


def proposal(promises: Iterable[Promise], candidate: View) -> View:
    """Return the view to propose: the one that was accepted with the highest ballot, or else `candidate`."""
    accepted = [promise.accepted for promise in promises if promise.accepted is not None]
    return max(accepted, key=lambda pair: pair[0])[1] if accepted else candidate
