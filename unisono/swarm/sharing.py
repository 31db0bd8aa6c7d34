"""The call of `Swarm.state`: a newcomer gets the state of the members, and members tell revisions and compare digests.

See `state` for the theory of operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.errors import MismatchError, PeerLostError
from unisono.foundation.deadlines import Deadline
from unisono.swarm.calls import SwarmCall
from unisono.swarm.links import Caller
from unisono.swarm.membership import Membership
from unisono.swarm.state import Offer, StateExchange, StateSummary, check_drift, ranks_with_state
from unisono.swarm.views import Member

Make = Callable[[SwarmCall, Deadline], Any]


class Asked(NamedTuple):
    """The arguments of `Swarm.state`.

    Attributes:
        state, revision: the state of this process, and its revision.
        check_every: members compare their states in each call whose number it divides; 0 for none.
        must_end: whether a member whose state has drifted raises an error.
    """

    state: Any
    revision: int
    check_every: int
    must_end: bool


class Sharing:
    """The calls of `Swarm.state` of a process, from when it enters.

    Args:
        membership: its part in the views.
        caller: makes the requests.

    Attributes:
        exchange: serves the state of this process, and gets that of the members.
    """

    def __init__(self, membership: Membership, caller: Caller) -> None:
        self._membership = membership
        self.exchange = StateExchange(caller, lambda: membership.has_result)
        self._is_new = True  # it has not the state of the members
        self._has_state = False  # it has made this call

    def share(self, asked: Asked, make: Make, limit: Deadline) -> tuple[Any, int]:
        """Return the state and its revision, which are those of the other members on a newcomer.

        Args:
            asked: the arguments of the program.
            make: makes a call of the swarm before a deadline, and returns its result.
            limit: the deadline.

        Raises:
            UnisonoError: as of `Swarm.state`.
        """
        member = self._membership
        with member.changed:
            member.uses_state = True
            call, members = member.has_result, () if member.view is None else member.view.members
        if self._is_new and call:
            others = [other for other in members if other.id != member.me.id]
            fetched = self._fetched(asked.state, call, others, limit)
            if fetched is not None:
                return self._adopted(*fetched, call)
        return self._compared(asked, make, limit)

    def _compared(self, asked: Asked, make: Make, limit: Deadline) -> tuple[Any, int]:
        """Make the call in which members tell their revisions and compare digests; return the newest state."""
        number = self._membership.has_result + 1
        offer = Offer(asked.state, asked.revision, number)
        digest = offer.number() if asked.check_every and number % asked.check_every == 0 else 0
        row = np.array([[asked.revision, digest, self._has_state]], np.int64)
        self.exchange.offer(offer)
        call = SwarmCall(
            "state",
            lambda comm, limit_s: comm.allgather(row, timeout_s=limit_s),
            lambda size: np.zeros((size, row.shape[1]), np.int64),
            is_state=True,
        )
        rows = [StateSummary(*fields) for fields in make(call, limit).tolist()]
        me = call.contributors.index(self._membership.me)
        right = ranks_with_state(rows)
        if all(row.has_state for row in rows):
            check_drift([member.name for member in call.contributors], right, me, must_end=asked.must_end)
        if me in right:
            self._is_new, self._has_state = False, True
            return asked.state, asked.revision
        fetched = self._fetched(asked.state, number, [call.contributors[rank] for rank in right], limit)
        if fetched is None:
            raise PeerLostError("this process could not read the state from any member")
        return self._adopted(*fetched, number)

    def _fetched(self, state: Any, call: int, members: Sequence[Member], limit: Deadline) -> tuple[Any, int] | None:
        try:
            return self.exchange.fetch(state, call, members, limit)
        except MismatchError as error:
            self._membership.leave_for(error)
            raise

    def _adopted(self, state: Any, revision: int, call: int) -> tuple[Any, int]:
        self._is_new, self._has_state = False, True
        self.exchange.offer(Offer(state, revision, call))
        return state, revision
