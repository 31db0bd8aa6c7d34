"""The need of a change of the present view, as one member sees it: the members that stay, enter, are late or slow.

Used by: `proposer`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from unisono.foundation import log
from unisono.swarm.agreement import quorum_of
from unisono.swarm.membership import Membership
from unisono.swarm.views import Member, View

_log = log.get("rendezvous")

# A member that knows of its expulsion waits this number of heartbeats for the others to choose a view without it.
_VERDICT = 2.0
# A member is slow if its time between calls is more than this multiple of the usual one, and than this many seconds.
_SLOW, _LEAST_PACE_S = 4.0, 0.05


class Need(NamedTuple):
    """The members of the next view, and whether the change is urgent.

    Attributes:
        staying: the members that stay.
        joiners: the processes that enter.
        is_urgent: whether the present view must change before calls can end, for example because a member is lost.
    """

    staying: tuple[Member, ...]
    joiners: tuple[Member, ...]
    is_urgent: bool


class Needs:
    """Decides for one member whether the view must change. All methods are called under the lock of `membership`."""

    def __init__(self, membership: Membership) -> None:
        self._waiting: tuple[Member, ...] = ()
        self._state = membership
        self._refused: dict[str, float] = {}  # the ids of processes that could not be met → when to try again
        self._expelled_since = time.monotonic()
        self._named: set[tuple[int, str]] = set()
        self._known_as_slow: set[str] = set()

    def need(self, view: View, *, has_failed: bool) -> Need | None:
        """Return the change that the view needs; None if it needs none, or if this member cannot know.

        Args:
            view: the present view.
            has_failed: whether the last change has failed. Then members that other members cannot reach do not stay.
        """
        state = self._state
        out = self.ended() | state.leaving
        if has_failed:  # other members cannot reach the suspects, although the suspects answer this member
            out |= state.suspects
        staying = tuple(member for member in view.members if member.id not in out)
        joiners = self._joiners(view)
        is_urgent = bool(state.failure or state.is_frozen or len(staying) < len(view.members))
        if state.me.id in state.expelled or not (is_urgent or joiners) or not staying:
            return None
        return Need(staying, joiners, is_urgent) if self.has_quorum(view) else None

    def has_quorum(self, view: View) -> bool:
        """Return whether enough members answer, so that they can choose the next view."""
        answering = set(view.ids) - self._state.peers.lost()
        return len(answering) >= quorum_of(len(view.members), self._state.settings.min_size)

    def ended(self) -> frozenset[str]:
        """Return the ids of members that make no further call: they are lost, expelled or slow, or have left."""
        state = self._state
        gone = {id_ for id_, reply in state.peers.replies().items() if reply.get("gone") is True}
        return state.peers.lost() | gone | state.expelled | state.slow

    def offer(self, waiting: Sequence[Member]) -> None:
        """Note the processes that wait to enter."""
        self._waiting = tuple(waiting)
        ids = {joiner.id for joiner in waiting}
        self._refused = {id_: again for id_, again in self._refused.items() if id_ in ids}

    def refuse(self, joiner: Member, seconds: float) -> None:
        """Keep a process from entering for some seconds, because the members could not meet it."""
        self._refused[joiner.id] = time.monotonic() + seconds

    def is_expelled_for_long(self) -> bool:
        """Return whether this member has known of its expulsion for long, while the others chose no view without it.

        The others may all have ended meanwhile. Until then, this member votes, because they may need it for a quorum.
        """
        state, now = self._state, time.monotonic()
        if state.me.id not in state.expelled:
            self._expelled_since = now
        return now - self._expelled_since >= _VERDICT * state.heartbeat_s

    def name_slow(self, view: View) -> None:
        """Log the names of members that take several times as long between calls as the others, once for each."""
        replies, names = self._state.peers.replies(), {member.id: member.name for member in view.members}
        known = {id_: reply.get("pace_s") for id_, reply in replies.items() if id_ in names}
        known[self._state.me.id] = self._state.pace.seconds()
        paces = {id_: pace_s for id_, pace_s in known.items() if isinstance(pace_s, float) and pace_s > 0}
        usual = statistics.median_low(paces.values() or [0.0])
        slow = {id_ for id_, pace_s in paces.items() if pace_s > max(_SLOW * usual, _LEAST_PACE_S)}
        for id_ in slow - self._known_as_slow:
            _log.warning(
                "member %s takes %.2g s between calls, and most others %.2g s: patience_s leaves slow members behind",
                names[id_],
                paces[id_],
                usual,
            )
            self._known_as_slow.add(id_)

    def name_late(self, view: View) -> None:
        """Log the names of members that have not begun the call of this one; count them as slow after `patience_s`."""
        state = self._state
        if state.call is None or state.call.has_result:
            return
        waited_s, number = time.monotonic() - state.call_began, state.call.number
        warn_after_s, patience_s = max(1.0, state.settings.options.warn_after_s), state.settings.patience_s
        if waited_s < min(warn_after_s, patience_s or warn_after_s):
            return
        for member in self._late(view, number):
            if (number, member.id) not in self._named:
                self._named = {each for each in self._named if each[0] == number} | {(number, member.id)}
                _log.warning(
                    "member %s has not begun call #%d, for which the others have waited for %.1f s",
                    member.name,
                    number,
                    waited_s,
                )
            if patience_s is not None and waited_s >= patience_s:
                state.slow.add(member.id)

    def _late(self, view: View, number: int) -> Sequence[Member]:
        """Return the members that answer, but have neither begun a call nor have the result of this one."""
        replies, lost = self._state.peers.replies(), self._state.peers.lost()
        answering = ((member, replies[member.id]) for member in view.members if member.id in replies.keys() - lost)
        return [
            member for member, reply in answering if reply.get("call", 0) == 0 and reply.get("has_result", 0) < number
        ]

    def _joiners(self, view: View) -> tuple[Member, ...]:
        """Return the processes that enter next.

        Processes that wait for the first time enter together. A process that the members could not meet enters after
        them and alone, so a process that some member cannot reach keeps the others out only once.
        """
        new = [each for each in self._waiting if each.id not in view.ids and each.id not in self._state.expelled]
        if trusted := tuple(each for each in new if each.id not in self._refused):
            return trusted
        again = min(new, key=lambda each: self._refused[each.id], default=None)
        return () if again is None or self._refused[again.id] > time.monotonic() else (again,)
