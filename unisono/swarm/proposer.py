"""The change of a view, carried out by the member that proposes the next one.

`membership` describes the order of its requests.

The first member that answers proposes at once. Each later one waits a heartbeat longer than the one before it, and
proposes if the view has not changed by then. Two members that propose at once only lose time (agreement.py).
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from unisono.foundation import log
from unisono.foundation.json_checks import checked
from unisono.swarm.agreement import Promise, proposal, quorum_of
from unisono.swarm.answers import Answers
from unisono.swarm.communicators import abort_quietly, serve_store
from unisono.swarm.links import RefusedError, Reply
from unisono.swarm.membership import EXPELLED, Membership
from unisono.swarm.needs import Need, Needs
from unisono.swarm.views import Ballot, Member, View, ballot_of, bars_of, new_id, view_fields, view_of
from unisono.transports.rendezvous import host_and_port

_log = log.get("rendezvous")

_LOOK_S = 0.05
# The least time for a meeting. It matters only if a meeting fails although everybody answers.
_MEETING_S = 10.0
_MOST_PAUSE_S = 2.0
_REPLY_GRACE_S = 2.0


class Proposer:
    """Watches in a thread of its own whether the view must change, and changes it, until `close`."""

    def __init__(self, membership: Membership, answers: Answers) -> None:
        self._state = membership
        self._answers = answers
        self._needs = Needs(membership)
        self._highest = 0  # the number of the highest ballot that this member knows
        self._failures = 0
        self._needed_since: float | None = None
        self._is_closed = False
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
            self._needs.offer([joiner for joiner in waiting if joiner not in barred])
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
            self._needs.name_late(view)
            self._needs.name_slow(view)
            if self._needs.is_expelled_for_long():
                state.end(EXPELLED)
                return
            need = self._need(view)
            if need is None:
                self._needed_since, self._failures = None, 0
                if not self._needs.has_quorum(view):
                    self._state.fail_call("too few members of the swarm answer")
                return
            now = time.monotonic()
            self._needed_since = now if self._needed_since is None else self._needed_since
            ended = self._needs.ended()
            order = [id_ for id_ in view.ids if id_ not in ended]
            turn = order.index(state.me.id) if state.me.id in order else len(order)
            if now - self._needed_since < turn * state.heartbeat_s or (turn and not need.is_urgent):
                return
        if self._change(view, need):
            self._needed_since, self._failures = None, 0
        else:
            self._failures += 1
            time.sleep(min(_MOST_PAUSE_S, random.uniform(0, _LOOK_S) * 2**self._failures))

    def _need(self, view: View) -> Need | None:
        return self._needs.need(view, has_failed=self._failures > 0)

    def _change(self, view: View, need: Need) -> bool:
        """Change the view; return whether a new one has been chosen."""
        joiners = () if need.is_urgent else self._answering(need.joiners)
        if not (need.is_urgent or joiners):
            return False
        candidate = View(new_id(), view.number + 1, view.id, 0, need.staying + joiners, self._state.barred)
        if not self._meet(view, candidate, need):
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
                self._needs.refuse(joiner, self._state.heartbeat_s)
            else:
                self._state.routes.note(joiner, reply)
        return tuple(joiner for joiner in joiners if not isinstance(replies[joiner.id], Exception))

    def _meet(self, view: View, candidate: View, need: Need) -> bool:
        """Let the members of a candidate meet; return whether all have."""
        state = self._state
        limit_s = max(_MEETING_S, 2 * state.heartbeat_s)
        server = serve_store(state.me.host, candidate, state.settings.key, state.settings.job)
        if server is not None:
            state.routes.listen(host_and_port(server.url)[1], server.take)

        def end_meeting() -> None:
            if server is not None:
                server.fail("a process was lost while the others met, or could not take part")

        request = {
            "do": "meet",
            "candidate": view_fields(candidate),
            "base": view_fields(view),
            "store": "" if server is None else server.url,
            "proposer": state.me._asdict(),
            "limit_s": limit_s,
        }
        is_vain = partial(self._is_vain, view, need)
        try:
            limit_s += _REPLY_GRACE_S
            replies = self._ask_together(candidate.members, request, limit_s, end_meeting, is_vain)
        finally:
            if server is not None:
                server.close()
        failed = [member for member in candidate.members if isinstance(replies[member.id], Exception)]
        for member in failed:
            _log.debug("%s has not met the others: %s", member.name, replies[member.id])
        with state.changed:
            for joiner in () if is_vain() else set(need.joiners).intersection(failed):
                self._needs.refuse(joiner, 2 * state.heartbeat_s)
        return not failed

    def _is_vain(self, view: View, need: Need) -> bool:
        """Return whether a change that meets `need` is useless by now: another one is needed, or has happened."""
        state = self._state
        with state.changed:
            now = self._need(view)
            is_urgent_now = now is not None and now.is_urgent and not need.is_urgent
            is_lost = not state.peers.lost().isdisjoint(member.id for member in need.staying)
            return self._is_closed or state.view is not view or is_lost or is_urgent_now

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
                if need is None or need.is_urgent:
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
            last = self._bring_up_to_date(view, candidate, staying, given)
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
        self, view: View, candidate: View, staying: Sequence[Member], promises: Mapping[str, Promise]
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
        is_vain = partial(self._is_vain, view, Need(tuple(staying), (), is_urgent=True))
        replies = self._ask_together(staying, request, limit_s, partial(self._abort, candidate), is_vain)
        return None if any(isinstance(reply, Exception) for reply in replies.values()) else last

    def _abort(self, candidate: View) -> None:
        """End the calls of all members on the communicator of a candidate, because one member does not take part."""
        with self._state.changed:
            _, comm = self._state.candidates.get(candidate.id, (None, None))
        abort_quietly(comm, "a member could not take part in passing a result on")

    def _drop(self, candidate: View) -> None:
        lost = self._state.peers.lost()
        self._ask([member for member in candidate.members if member.id not in lost], _drop_request(candidate))

    def _ask_together(
        self,
        members: Sequence[Member],
        request: Mapping[str, Any],
        limit_s: float,
        end: Callable[[], None],
        is_vain: Callable[[], bool],
    ) -> dict[str, Reply]:
        """Send a request on which members work together; return their replies or errors, by id.

        As soon as a member fails, or the request is in vain, `end` is called, which lets it fail on the other members.
        A lost member may never reply. So the replies that come long after that are not awaited.
        """
        ended = list[float]()

        def fail() -> None:
            ended.append(time.monotonic())
            end()

        def is_over() -> bool:
            if not ended and is_vain():
                fail()
            return bool(ended) and time.monotonic() - ended[0] > self._state.heartbeat_s / 4

        return self._ask(members, request, limit_s, fail, is_over)

    def _ask(
        self,
        members: Sequence[Member],
        request: Mapping[str, Any],
        limit_s: float | None = None,
        on_error: Callable[[], None] = lambda: None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> dict[str, Reply]:
        """Send a request to members side by side, this one included; return their replies or errors, by id.

        `on_error` and `is_over` are as of `Caller.run_all`.
        """
        state = self._state

        def answer_of(member: Member) -> dict[str, Any]:
            if member.id != state.me.id:
                return state.caller.ask(member, request, state.heartbeat_s if limit_s is None else limit_s)[0]
            try:
                return self._answers.answer(dict(request))
            except ValueError as error:
                raise RefusedError(str(error)) from None

        return state.caller.run_all({each.id: partial(answer_of, each) for each in members}, on_error, is_over)


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
