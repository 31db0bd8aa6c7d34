"""The calls of the program: each is made, attempt after attempt, until it has the contributions of all members."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    PeerLostError,
    QuorumLostError,
    TransportUnavailableError,
    UnisonoError,
)
from unisono.foundation.deadlines import Deadline
from unisono.swarm.calls import SwarmCall, second_phase
from unisono.swarm.membership import LEFT_BEHIND, Membership
from unisono.swarm.settling import Settling
from unisono.swarm.views import View

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

# A call of a swarm of one member waits for nobody. A program that makes such calls without a pause would keep the
# interpreter from the threads that answer newcomers, which then could not enter.
_ALONE_S = 100e-6

_OF_VIEW = (AbortedError, PeerLostError, CollectiveTimeoutError, TransportUnavailableError)


class Attempts:
    """Makes the calls of the program in the views of `membership`, one at a time."""

    def __init__(self, membership: Membership) -> None:
        self._state = membership
        self._quorum_lost: tuple[View, float] | None = None  # and when
        self._settling = Settling(membership.me.id, membership.routes)

    def make(self, call: SwarmCall, deadline: Deadline) -> None:
        """Make a call until it has the contributions of all current members.

        Raises:
            QuorumLostError, LeftBehindError, CollectiveTimeoutError: the call has no result.
            UsageError, MismatchError and others: as by the collective on a communicator.
        """
        state = self._state
        with state.changed:
            state.check()
            call.number = state.has_result + 1
            state.pace.begin()
            state.call, state.call_began, state.has_lost_quorum = call, time.monotonic(), False
            self._quorum_lost = None
        try:
            while (view_and_comm := self._await_view(call, deadline)) is not None:
                if self._attempt(call, *view_and_comm, deadline):
                    return
        finally:
            with state.changed:
                state.call = None
                state.pace.end()

    def _attempt(self, call: SwarmCall, view: View, comm: Communicator, deadline: Deadline) -> bool:
        """Make a call in a view; return whether both phases have ended."""
        state = self._state
        call.attempts += 1
        try:
            self._settling.measure_if_due(view, comm, deadline.remaining_s())
            result = call.make(comm, deadline.remaining_s())
        except UnisonoError as error:
            self._failed(view, comm, error, deadline)
            return False
        with state.changed:
            if state.view is not view or state.is_frozen:
                return False
            state.hold(call, result, view)
            switch = state.switch if state.may_enter else ""
        try:
            phase = second_phase(comm, switch, self._settling.age_s(view), deadline.remaining_s())
        except UnisonoError as error:
            self._failed(view, comm, error, deadline)
            return False
        if len(view.members) == 1:
            time.sleep(_ALONE_S)
        self._settling.note(phase.least_age_s)
        with state.changed:
            if phase.is_boundary and state.view is view:
                state.is_frozen, state.boundary = True, switch
            state.suspects.clear()
            state.changed.notify_all()
        return True

    def _failed(self, view: View, comm: Communicator, error: UnisonoError, deadline: Deadline) -> None:
        """Note that a call has failed in a view, and tell the others; raise the error if it is one of the program."""
        state = self._state
        with state.changed:
            if state.view is not view or state.comm is not comm:  # it was closed meanwhile
                return
        is_of_view = isinstance(error, _OF_VIEW)
        if not is_of_view and (error.peer in (None, comm.rank) or len(view.members) == 1):
            state.leave_for(error)
            raise error
        suspect = view.ids[error.peer] if error.peer is not None and 0 <= error.peer < len(view.ids) else ""
        with state.changed:
            if not is_of_view and suspect:  # it makes another call than the others
                state.expelled.add(suspect)
            if isinstance(error, PeerLostError) and suspect not in ("", state.me.id):
                state.suspects.add(suspect)
            is_first, state.failure = not state.failure, state.failure or error.message
            state.changed.notify_all()
        if is_first:
            facts = {"view": view.id, "why": error.message, "suspects": sorted(state.suspects)}
            state.tell(view.members, {"do": "failed", **facts})
            state.peers.look()
        if isinstance(error, CollectiveTimeoutError) and deadline.has_passed():
            raise error

    def _await_view(self, call: SwarmCall, deadline: Deadline) -> tuple[View, Communicator] | None:
        """Return the view in which to make a call, and its communicator; None if the call has a result.

        Raises:
            QuorumLostError: too few members answer.
            LeftBehindError: this process is no member any more.
            CollectiveTimeoutError: there was no view before the deadline.
        """
        state = self._state
        with state.changed:
            while True:
                view = state.view
                if view is not None and call.number < view.next_call:
                    if not call.has_result:
                        state.gone = LEFT_BEHIND
                    state.check()
                    return None
                state.check()
                if view is not None and state.comm is not None and self._may_call(view):
                    return view, state.comm
                self._check_quorum()
                if deadline.has_passed():
                    raise CollectiveTimeoutError(
                        f"the members of the swarm did not make call #{call.number} {call.name} within its time limit"
                    )
                state.changed.wait(min(state.heartbeat_s / 4, deadline.remaining_s()))

    def _may_call(self, view: View) -> bool:
        state = self._state
        return not (state.is_frozen or state.failure) and len(view.members) >= (state.settings.min_size or 1)

    def _check_quorum(self) -> None:
        """Raise `QuorumLostError` if too few members have answered for too long."""
        state = self._state
        view = state.view
        if view is None:
            return
        lost = state.peers.lost()
        answering = [member for member in view.members if member.id not in lost]
        needed = state.quorum()
        if len(answering) >= needed:
            self._quorum_lost = None
            return
        now = time.monotonic()
        if self._quorum_lost is None or self._quorum_lost[0] is not view:
            self._quorum_lost = view, now
        if now - self._quorum_lost[1] >= state.settings.quorum_timeout_s:
            names = ", ".join(member.name for member in view.members if member.id in lost)
            silent = f": {names} did not answer for {state.heartbeat_s:g} s" if names else ""
            state.has_lost_quorum = True
            raise QuorumLostError(
                f"{len(answering)} of {len(view.members)} members answer, and {needed} are needed to go on{silent}"
            )
