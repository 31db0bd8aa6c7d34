"""The change of a view, as the member carries it out that proposes: see `membership` for the order of its requests.

The first member that answers proposes at once. Each later one waits a heartbeat longer than the one before it, and
proposes if the view has not changed by then. Two members that propose at once only lose time (agreement.py).
"""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.json_checks import checked
from unisono.swarm.agreement import Promise, proposal, quorum_of
from unisono.swarm.answers import Answers
from unisono.swarm.communicators import serve_store
from unisono.swarm.links import RefusedError
from unisono.swarm.membership import EXPELLED, Membership
from unisono.swarm.views import Ballot, Member, View, ballot_of, bars_of, new_id, view_fields, view_of
from unisono.transports.rendezvous import host_and_port

_log = log.get("rendezvous")

_LOOK_S = 0.05
# The least time for a meeting. It matters only if a meeting fails although everybody answers.
_MEETING_S = 10.0
_MOST_PAUSE_S = 2.0
_REPLY_GRACE_S = 2.0
# A member that knows of its expulsion waits for so many heartbeats until the others choose a view without it.
_VERDICT = 2.0
# A member is slow if it takes so many times as long between calls as the others, and at least so long.
_SLOW, _LEAST_PACE_S = 4.0, 0.05

Reply = dict[str, Any] | Exception


class Need(NamedTuple):
    """Why the view must change.

    Attributes:
        staying: the members that stay.
        joiners: the processes that enter.
        is_urgent: whether calls cannot end in the present view.
    """

    staying: tuple[Member, ...]
    joiners: tuple[Member, ...]
    is_urgent: bool


class Proposer:
    """Watches in a thread of its own whether the view must change, and changes it, until `close`."""

    def __init__(self, membership: Membership, answers: Answers) -> None:
        self._state = membership
        self._answers = answers
        self._waiting: tuple[Member, ...] = ()
        self._refused: dict[str, float] = {}  # processes that could not be met → when to try again
        self._highest = 0  # the number of the highest ballot that this member knows
        self._failures = 0
        self._needed_since: float | None = None
        self._expelled_since = time.monotonic()
        self._is_closed = False
        self._named: set[tuple[int, str]] = set()
        self._known_as_slow: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="unisono-swarm-proposer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop proposing, once the others know of a view that has been chosen."""
        self._is_closed = True
        with self._state.changed:
            self._state.changed.notify_all()
        self._thread.join(self._state.heartbeat_s)

    def offer(self, waiting: Sequence[Member]) -> None:
        """Note the processes that wait to enter."""
        with self._state.changed:
            barred = [joiner for joiner in waiting if self._state.barred.bar(joiner)]
            self._waiting = tuple(joiner for joiner in waiting if joiner not in barred)
            self._state.changed.notify_all()
        self._state.tell(barred, {"do": "barred"})

    def _run(self) -> None:
        while not self._is_closed:
            with self._state.changed:
                self._state.changed.wait(_LOOK_S if self._needed_since is not None else self._state.heartbeat_s / 4)
            with _logged("a change of the view"):
                self._step()

    def _step(self) -> None:
        state = self._state
        with state.changed:
            view = state.view
            if view is None or state.gone or self._is_closed:
                return
            self._note_late(view)
            self._note_slow(view)
            if self._is_expelled_for_long():
                state.end(EXPELLED)
                return
            need = self._need(view)
            if need is None:
                self._needed_since, self._failures = None, 0
                return
            now = time.monotonic()
            self._needed_since = now if self._needed_since is None else self._needed_since
            ended = self._ended()
            order = [id_ for id_ in view.ids if id_ not in ended]
            turn = order.index(state.me.id) if state.me.id in order else len(order)
            if now - self._needed_since < turn * state.heartbeat_s or (turn and not need.is_urgent):
                return
        if self._change(view, need):
            self._needed_since, self._failures = None, 0
        else:
            self._failures += 1
            time.sleep(min(_MOST_PAUSE_S, random.uniform(0, _LOOK_S) * 2**self._failures))

    def _ended(self) -> frozenset[str]:
        """Return the ids of members that make no further call: lost, expelled, slow, or gone by their own words."""
        state = self._state
        gone = {id_ for id_, reply in state.peers.replies().items() if reply.get("gone") is True}
        return state.peers.lost() | gone | state.expelled | state.slow

    def _is_expelled_for_long(self) -> bool:
        """Return whether this member has known for long that it is expelled, and the others choose no view without it.

        They may have ended at once. Until then, this member votes, because they may need it for a quorum.
        """
        state, now = self._state, time.monotonic()
        if state.me.id not in state.expelled:
            self._expelled_since = now
        return now - self._expelled_since >= _VERDICT * state.heartbeat_s

    def _need(self, view: View) -> Need | None:
        """Return how the view must change; None if it need not, or this member cannot know. Under the lock."""
        state = self._state
        lost = state.peers.lost()
        out = self._ended() | state.leaving
        if self._failures:  # those that members cannot reach, although they answer this one
            out |= state.suspects
        staying = tuple(member for member in view.members if member.id not in out)
        answering = [member for member in view.members if member.id not in lost]
        now = time.monotonic()
        joiners = tuple(
            joiner
            for joiner in self._waiting
            if joiner.id not in view.ids and joiner.id not in state.expelled and self._refused.get(joiner.id, 0) < now
        )
        is_urgent = bool(state.failure or state.is_frozen or len(staying) < len(view.members))
        if state.me.id in state.expelled or not (is_urgent or joiners) or not staying:
            return None
        if len(answering) < quorum_of(len(view.members), state.settings.min_size):
            return None
        return Need(staying, joiners, is_urgent)

    def _note_slow(self, view: View) -> None:
        """Name the members that take several times as long between calls as the others."""
        replies, names = self._state.peers.replies(), {member.id: member.name for member in view.members}
        given = {id_: reply.get("pace_s") for id_, reply in replies.items() if id_ in names}
        given[self._state.me.id] = self._state.pace.seconds()
        paces = {id_: pace_s for id_, pace_s in given.items() if isinstance(pace_s, float) and pace_s > 0}
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

    def _note_late(self, view: View) -> None:
        """Name the members that have not begun a call for which this one waits; leave them behind if asked."""
        state = self._state
        if state.call is None:
            return
        waited_s, number = time.monotonic() - state.call_began, state.call.number
        warn_after_s, patience_s = max(1.0, state.settings.options.warn_after_s), state.settings.patience_s
        if waited_s < min(warn_after_s, patience_s or warn_after_s) or state.call.has_result:
            return
        replies, lost = state.peers.replies(), state.peers.lost()
        for member in view.members:
            reply = replies.get(member.id)
            if reply is None or member.id in lost or reply.get("call", 0) or reply.get("has_result", 0) >= number:
                continue
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

    def _change(self, view: View, need: Need) -> bool:
        """Change the view; return whether a new one has been chosen."""
        joiners = () if need.is_urgent else self._answering(need.joiners)
        if not (need.is_urgent or joiners):
            return False
        candidate = View(new_id(), view.number + 1, view.id, 0, need.staying + joiners, self._state.barred)
        if not self._meet(view, candidate, need.staying):
            self._drop(candidate)
            return False
        if not need.is_urgent and not self._await_boundary(view, candidate, joiners):
            self._drop(candidate)
            return False
        chosen = self._choose(view, candidate, need.staying, for_entry=bool(joiners))
        if chosen is None:
            self._drop(candidate)
            return False
        everybody = {member.id: member for member in (*view.members, *chosen.members)}
        lost = self._state.peers.lost()
        told = [member for id_, member in everybody.items() if id_ not in lost]
        self._ask(told, {"do": "commit", "view": view_fields(chosen)})
        if chosen.id != candidate.id:
            self._drop(candidate)
        return True

    def _answering(self, joiners: Sequence[Member]) -> tuple[Member, ...]:
        """Return those of the waiting processes that answer a question of this member."""
        replies = self._ask(joiners, self._state.question(), limit_s=self._state.heartbeat_s / 2)
        for joiner in joiners:
            reply = replies[joiner.id]
            if isinstance(reply, Exception):
                self._refused[joiner.id] = time.monotonic() + self._state.heartbeat_s
            else:
                self._state.routes.note(joiner, reply)
        return tuple(joiner for joiner in joiners if not isinstance(replies[joiner.id], Exception))

    def _meet(self, view: View, candidate: View, staying: Sequence[Member]) -> bool:
        """Let the members of a candidate meet; return whether all have."""
        state = self._state
        limit_s = max(_MEETING_S, 2 * state.heartbeat_s)
        server = serve_store(state.me.host, candidate, state.settings.key, state.settings.job)
        if server is not None:
            state.routes.listen(host_and_port(server.url)[1], server.take)
        over = threading.Event()
        try:
            if server is not None:
                watcher = threading.Thread(target=self._watch, args=(over, server, candidate), daemon=True)
                watcher.start()
            request = {
                "do": "meet",
                "candidate": view_fields(candidate),
                "base": view_fields(view),
                "store": "" if server is None else server.url,
                "proposer": state.me._asdict(),
                "limit_s": limit_s,
            }
            replies = self._ask(candidate.members, request, limit_s=limit_s + _REPLY_GRACE_S)
        finally:
            over.set()
            if server is not None:
                server.close()
        failed = [member for member in candidate.members if isinstance(replies[member.id], Exception)]
        for member in failed:
            _log.debug("%s has not met the others: %s", member.name, replies[member.id])
            if member not in staying:
                self._refused[member.id] = time.monotonic() + 2 * state.heartbeat_s
        return not failed

    def _watch(self, over: threading.Event, server: Any, candidate: View) -> None:
        """Let a meeting fail for all if a member of it is lost."""
        while not over.wait(_LOOK_S):
            lost = self._state.peers.lost() & set(candidate.ids)
            if lost or self._is_closed:
                server.fail("a member was lost while the others met")
                return

    def _await_boundary(self, view: View, candidate: View, joiners: Sequence[Member]) -> bool:
        """Wait until all members have ended the same call and know the candidate, or make no call."""
        state = self._state
        request = {"do": "switch", "view": view.id, "candidate": candidate.id}
        if any(isinstance(reply, Exception) for reply in self._ask(view.members, request).values()):
            return False
        asked = 0.0
        while not self._is_closed:
            with state.changed:
                state.changed.wait(_LOOK_S)
                if state.view is not view:
                    return False
                if state.boundary == candidate.id:
                    return True
                need = self._need(view)
                if need is None or (need.is_urgent and not state.boundary):
                    return False
            if time.monotonic() - asked > state.heartbeat_s / 4:
                asked = time.monotonic()
                if len(self._answering(joiners)) < len(joiners):
                    return False
                replies = self._ask(view.members, state.question())
                facts = [reply for reply in replies.values() if not isinstance(reply, Exception)]
                are_idle = len(facts) == len(view.members) and not any(reply.get("call") for reply in facts)
                may_enter = all(reply.get("may_enter") for reply in facts)
                if are_idle and may_enter and len({reply.get("has_result") for reply in facts}) == 1:
                    return True
        return False

    def _choose(self, view: View, candidate: View, staying: Sequence[Member], *, for_entry: bool) -> View | None:
        """Let the members of the view choose the next one; return it, or None if this ballot has failed."""
        state = self._state
        ballot = Ballot(max(self._highest, state.acceptor.promised.number) + 1, state.me.id)
        lost = state.peers.lost()
        asked = [member for member in view.members if member.id not in lost]
        request = {
            "do": "prepare",
            "view": view.id,
            "base": view_fields(view),
            "ballot": ballot._asdict(),
            "for_entry": for_entry,
        }
        replies = {id_: _promise_of(reply) for id_, reply in self._ask(asked, request).items()}
        promises = {id_: promise for id_, promise in replies.items() if promise is not None}
        given = {id_: promise for id_, promise in promises.items() if promise.is_given}
        self._highest = max((ballot.number, *(promise.highest.number for promise in promises.values())))
        needed = quorum_of(len(view.members), state.settings.min_size)
        if len(given) < needed:
            return None
        chosen = proposal(given.values(), candidate)
        if chosen.id == candidate.id:
            if any(member.id not in given for member in staying):
                return None
            last = self._bring_up_to_date(candidate, staying, given)
            if last is None:
                return None
            barred = candidate.barred
            for promise in given.values():
                barred = barred.joined(promise.barred)
            chosen = candidate._replace(next_call=last + 1, barred=barred)
        accept = {"do": "accept", "ballot": ballot._asdict(), "view": view_fields(chosen)}
        answers = self._ask(asked, accept).values()
        accepted = [reply for reply in answers if not isinstance(reply, Exception) and reply.get("is_accepted") is True]
        return chosen if len(accepted) >= needed else None

    def _bring_up_to_date(
        self, candidate: View, staying: Sequence[Member], promises: Mapping[str, Promise]
    ) -> int | None:
        """Pass the newest result that a staying member has to all staying members.

        Return the number of the call that had this result, or None if a member did not get it.
        """
        results = [promises[member.id].has_result for member in staying]
        last = max(results)
        if min(results) == last:
            return last
        limit_s = self._state.settings.options.timeout_s
        request = {
            "do": "adopt",
            "candidate": candidate.id,
            "call": last,
            "holder": results.index(last),
            "staying": len(staying),
            "limit_s": limit_s,
        }
        replies = self._ask(staying, request, limit_s=limit_s)
        return None if any(isinstance(reply, Exception) for reply in replies.values()) else last

    def _drop(self, candidate: View) -> None:
        lost = self._state.peers.lost()
        self._ask([member for member in candidate.members if member.id not in lost], _drop_request(candidate))

    def _ask(
        self, members: Sequence[Member], request: Mapping[str, Any], limit_s: float | None = None
    ) -> dict[str, Reply]:
        """Send a request to members side by side, this one included; return their replies or errors, by id."""
        state = self._state
        others = [member for member in members if member.id != state.me.id]
        replies: dict[str, Reply] = {}

        def answer_myself() -> None:
            try:
                replies[state.me.id] = self._answers.answer(dict(request))
            except (ValueError, UnisonoError) as error:
                replies[state.me.id] = RefusedError(str(error))

        mine = threading.Thread(target=answer_myself, daemon=True)
        if len(others) < len(members):
            mine.start()
        requests = {member.id: (member, request) for member in others}
        asked = state.caller.ask_all(requests, state.heartbeat_s if limit_s is None else limit_s)
        if len(others) < len(members):
            mine.join()
        return {**asked, **replies}


def _drop_request(candidate: View) -> dict[str, Any]:
    return {"do": "drop", "candidate": candidate.id}


def _promise_of(reply: Reply) -> Promise | None:
    """Return the promise in a reply; None if the reply is an error or has no valid promise."""
    if isinstance(reply, Exception):
        return None
    try:
        checked(reply, {"is_given": bool, "has_result": int})
        accepted = reply.get("accepted")
        checked(accepted, (dict, type(None)))
        pair = None if accepted is None else (ballot_of(accepted.get("ballot")), view_of(accepted.get("view")))
        barred = bars_of(reply.get("barred"))
        return Promise(reply["is_given"], ballot_of(reply.get("highest")), pair, reply["has_result"], barred)
    except ValueError:
        return None


@contextlib.contextmanager
def _logged(what: str) -> Iterator[None]:
    """Log an error of the block, which nobody waits for."""
    try:
        yield
    except Exception:  # noqa: BLE001 - a thread that serves the others must go on
        _log.exception("%s failed", what)
