"""The answers of a member to the requests of others, which `membership` lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.swarm.communicators import abort_quietly, close_quietly
from unisono.swarm.membership import EXPELLED, Membership, in_background
from unisono.swarm.views import View, ballot_of, bars_fields, bars_of, member_of, view_fields, view_of

_MOST_CANDIDATES = 8


class Answers:
    """Answers the requests of other members to `membership`. Several threads may ask at once."""

    def __init__(self, membership: Membership) -> None:
        self._state = membership
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "who": lambda _: {"member": membership.me.id},
            "way": membership.routes.answer,
            "ping": self._ping,
            "meet": self._meet,
            "switch": self._on_switch,
            "prepare": self._prepare,
            "adopt": self._adopt,
            "accept": self._accept,
            "commit": self._commit,
            "drop": self._drop,
            "failed": self._on_failed,
            "leave": self._on_leave,
            "expel": self._on_expel,
            "barred": self._on_barred,
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; raises ValueError if it cannot be answered."""
        handler = self._handlers.get(str(request.get("do")))
        if handler is None:
            raise ValueError("there is no such request")
        return handler(request)

    def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        known = checked(request, {"view": int, "from": dict})["view"]
        can_dial = state.routes.reaches(member_of(request["from"]))
        with state.changed:
            view = state.view
            number = 0 if view is None else view.number
            record = view_fields(view) if view is not None and number > known else None
            return {
                "view": number,
                "record": record,
                "has_result": state.has_result,
                "may_enter": state.may_enter,
                "call": 0 if state.call is None else state.call.number,
                "gone": bool(state.gone),
                "can_dial": can_dial,
                "pace_s": state.pace.seconds(),
            }

    def _meet(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        checked(request, {"candidate": dict, "store": str, "proposer": dict, "limit_s": float})
        candidate, proposer = view_of(request["candidate"]), member_of(request["proposer"])
        self._catch_up(request)
        with state.changed:
            self._require_membership()
            self._require(candidate.base)
        if state.me.id not in candidate.ids:
            raise ValueError("this process is not in the candidate")
        if self._has_barred(candidate):
            raise ValueError("a process in the candidate is barred")
        limit = Deadline(min(request["limit_s"], state.settings.options.rendezvous_timeout_s))
        try:
            comm = state.met(candidate, proposer, request["store"], limit)
        except (UnisonoError, OSError, RuntimeError) as error:
            state.obstacle = f"{state.me.name} could not meet the others: {error}"
            raise ValueError(state.obstacle) from None
        state.obstacle = ""
        with state.changed:
            is_wanted = not state.gone and (state.view is None or state.view.id == candidate.base)
            if is_wanted:
                state.candidates[candidate.id] = candidate, comm
                while len(state.candidates) > _MOST_CANDIDATES:
                    close_quietly(state.candidates.pop(next(iter(state.candidates)))[1], in_background)
        if not is_wanted:
            close_quietly(comm, in_background)
            raise ValueError("this process is in another view now")
        return {}

    def _on_switch(self, request: dict[str, Any]) -> dict[str, Any]:
        checked(request, {"view": str, "candidate": str})
        with self._state.changed:
            self._require_membership()
            self._require(request["view"], is_member=True)
            self._state.switch = request["candidate"]
        return {}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        ballot = ballot_of(request.get("ballot"))
        self._catch_up(request)
        with state.changed:
            self._require(checked(request, {"view": str, "for_entry": bool})["view"], is_member=True)
            if request["for_entry"] and not state.may_enter:
                raise ValueError("no process may enter after this call")
            promise = state.acceptor.promise(ballot, state.has_result)
            state.is_frozen = state.is_frozen or promise.is_given
            comm = state.comm if promise.is_given and state.call is not None else None
            state.changed.notify_all()
        abort_quietly(comm, "the members of the swarm change")
        accepted = promise.accepted and {
            "ballot": promise.accepted[0]._asdict(),
            "view": view_fields(promise.accepted[1]),
        }
        return {
            "is_given": promise.is_given,
            "highest": promise.highest._asdict(),
            "accepted": accepted,
            "has_result": promise.has_result,
            "barred": bars_fields(state.barred),
        }

    def _adopt(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        checked(request, {"candidate": str, "call": int, "holder": int, "staying": int, "limit_s": float})
        with state.changed:
            candidate, call, view = state.candidates.get(request["candidate"]), state.call, state.view
            if candidate is None or view is None or call is None or call.number != request["call"]:
                raise ValueError("this member does not make that call")
        try:
            with candidate[1].subgroup(range(request["staying"])) as staying:
                result = call.adopt(staying, request["holder"], len(view.members), request["limit_s"])
        except UnisonoError as error:
            raise ValueError(f"the result could not be passed on: {error.message}") from None
        with state.changed:
            if state.view is view and not call.has_result:
                state.hold(call, result, view)
        return {}

    def _accept(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        ballot, view = ballot_of(request.get("ballot")), view_of(request.get("view"))
        with state.changed:
            self._require(view.base, is_member=True)
            state.is_frozen = True
            return {"is_accepted": state.acceptor.accept(ballot, view)}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        self._state.install(view_of(request.get("view")))
        return {}

    def _drop(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        id_ = checked(request, {"candidate": str})["candidate"]
        with state.changed:
            accepted = state.acceptor.accepted
            if state.switch == id_:
                state.switch = ""
            if accepted is not None and accepted[1].id == id_:
                return {}
            _, comm = state.candidates.pop(id_, (None, None))
        if comm is not None:
            close_quietly(comm, in_background)
        return {}

    def _on_failed(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        checked(request, {"view": str, "why": str, "suspects": [str]})
        with state.changed:
            if state.view is not None and state.view.id == request["view"]:
                state.failure = state.failure or request["why"]
                state.suspects |= set(request["suspects"]) & set(state.view.ids)
                state.changed.notify_all()
        state.peers.look()
        return {}

    def _on_leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """Note that a member leaves, and its will: facts that nobody else may know yet."""
        state = self._state
        expelled, barred = checked(request, {"expelled": [str], "barred": dict})["expelled"], bars_of(request["barred"])
        with state.changed:
            state.barred = state.barred.joined(barred)
            for id_ in expelled:
                self._remove({"member": id_}, state.expelled)
            return self._remove(request, state.leaving)

    def _on_expel(self, request: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        if request.get("for_good") is True:
            with state.changed:
                view, id_ = state.view, checked(request, {"member": str})["member"]
                if view is not None:
                    state.barred = state.barred.joined(view.bars_of(id_))
        return self._remove(request, state.expelled)

    def _on_barred(self, _: dict[str, Any]) -> dict[str, Any]:
        state = self._state
        with state.changed:
            if state.view is None:
                state.gone = EXPELLED
                state.changed.notify_all()
        return {}

    def _remove(self, request: dict[str, Any], members: set[str]) -> dict[str, Any]:
        state = self._state
        id_ = checked(request, {"member": str})["member"]
        with state.changed:
            if state.view is not None and id_ in state.view.ids:
                members.add(id_)
                state.changed.notify_all()
        return {}

    def _has_barred(self, candidate: View) -> bool:
        """Return whether a process that may not enter is new in a candidate."""
        state = self._state
        with state.changed:
            ids = None if state.view is None else state.view.ids
            return ids is not None and any(state.barred.bar(new) for new in candidate.members if new.id not in ids)

    def _catch_up(self, request: dict[str, Any]) -> None:
        """Install the view on which a request is based, if this member has missed it."""
        state = self._state
        if request.get("base") is not None:
            base = view_of(request["base"])
            if state.view is not None and state.me.id in base.ids:
                state.install(base)

    def _require_membership(self) -> None:
        """Raise ValueError if this process is no member any more; until the others know so, it still votes."""
        if self._state.gone:
            raise ValueError(self._state.gone)

    def _require(self, view: str, *, is_member: bool = False) -> None:
        """Raise ValueError if this member is in another view than `view`; a process that waits is in none."""
        state = self._state
        if (is_member and state.view is None) or (state.view is not None and state.view.id != view):
            raise ValueError("this member is in another view")
