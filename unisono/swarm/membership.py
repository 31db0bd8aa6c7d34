"""One member's part in the views: it answers the other members, and installs the views that they choose.

Theory of operation
-------------------
All members are equal. Each answers requests in threads of its own, also while its program computes:

    who       which process answers at this address? way   how far is a third process? (routes.py)
    ping      are you there? The reply has the view, the last call that has begun, and the last one with a result
    meet      meet the other members of a candidate for the next view, and keep its communicator
    switch    pass this candidate in the second phase of your calls (calls.py)
    prepare   promise a ballot, and begin no further call in this view
    adopt     get the result of the last call from a member that has it, over the communicator of the candidate
    accept    accept a view (agreement.py)
    commit    this view has been chosen: install it
    drop      close the communicator of this candidate
    failed    a call has failed; leave, expel   a member leaves, or must; barred   the receiver may not enter again

A member *proposes* (proposer.py) if the present view must change. So the order of a change is meet, prepare, adopt,
accept, commit. A candidate has met before it is chosen, and each of its members has the results of all calls before the
next one. So a view that has been chosen can be used at once, whoever dies meanwhile.

Members that miss a commit learn of the view from the next ping, in either direction. A member of a former view that is
in no later one has been *left behind*: it was silent for too long, too slow, or expelled.

Example: A, B and C train, and D enters. D registers at the meeting place, and A, which is the first member, sees it. A
serves a store, at which all four meet, while A, B and C make call 11. A asks all to switch. In the second phase of call
12 all three pass the candidate, so each knows that call 12 has ended everywhere. They begin no call. A asks for
promises and acceptances, two round trips, and commits view 5. Its next call is 13, which all four make.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    LeftBehindError,
    PeerLostError,
    QuorumLostError,
    TransportUnavailableError,
    UnisonoError,
    UsageError,
)
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.options import Options
from unisono.swarm.agreement import Acceptor, quorum_of
from unisono.swarm.calls import SwarmCall, second_phase
from unisono.swarm.communicators import close_quietly, meet
from unisono.swarm.links import Caller, RefusedError
from unisono.swarm.peers import Peers
from unisono.swarm.routes import Routes
from unisono.swarm.views import Member, View, ballot_of, member_of, new_id, view_fields, view_of

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_log = log.get("rendezvous")

_MOST_CANDIDATES = 8
# The share of the newest pause in the pace, which says little before so many pauses.
_PACE_SHARE, _LEAST_PAUSES = 0.2, 10
_LEFT_BEHIND = "the other members have gone on without this one"
_EXPELLED = "the members have expelled this process"


class Membership:
    """The state of one member, and its answers. All attributes are read and written under `changed`.

    Args:
        me: this process.
        caller: makes requests to other members.
        routes: the ways to other members.
        key, job: the key and the id of the job.
        options: the options of the communicators.
        min_size: the least number of members; None for a majority of the view before.
        quorum_timeout_s: how long a call waits for a quorum.

    Attributes:
        changed: the lock, and the condition that is notified of every change.
        view: the present view; None before this process is a member.
        failure: why calls in the present view fail; empty as long as they do not.
        is_frozen: whether this member has promised to begin no call in the present view.
        boundary: the id of the candidate that all members have passed in a second phase, or empty.
        gone: why this process is no member any more; empty as long as it is one, or has not been one.
        has_lost_quorum: whether the last call has raised `QuorumLostError`.
        obstacle: why this process could not meet the others the last time; empty if it could.
        leaving, expelled, slow: the ids of members that leave, must leave, or are left behind because they are slow.
        barred: the names of processes that may not enter again.
        suspects: the ids of members that calls of members have named as lost.
        has_result: the number of the last call of which this member has the result.
        uses_state: whether the program has called `Swarm.state`. Then newcomers enter only after a call of it.
        may_enter: whether newcomers may enter after the last call of which this member has the result.
        call: the call that the program makes; None between two calls.
        call_began: the time at which it began.
    """

    def __init__(
        self,
        me: Member,
        caller: Caller,
        routes: Routes,
        key: bytes,
        job: bytes,
        options: Options,
        min_size: int | None,
        quorum_timeout_s: float,
    ) -> None:
        self.me = me
        self.caller = caller
        self.routes = routes
        self.key, self.job = key, job
        self.options = options
        self.min_size = min_size
        self.heartbeat_s = options.heartbeat_timeout_s
        self._quorum_timeout_s = quorum_timeout_s
        self.changed = threading.Condition(threading.RLock())
        self.view: View | None = None
        self.failure = ""
        self.is_frozen = False
        self.boundary = ""
        self.gone = ""
        self.leaving: set[str] = set()
        self.expelled: set[str] = set()
        self.slow: set[str] = set()
        self.barred: set[str] = set()
        self.suspects: set[str] = set()
        self.has_result = 0
        self.uses_state = False
        self.may_enter = True
        self.call: SwarmCall | None = None
        self.call_began = 0.0
        self.acceptor = Acceptor()
        self._comm: Communicator | None = None
        self._candidates: dict[str, tuple[View, Communicator]] = {}
        self._switch = ""
        self._quorum_lost_at: float | None = None
        self.has_lost_quorum = False
        self.obstacle = ""
        self._pace_s = 0.0
        self._call_ended: float | None = None
        self._pauses = 0
        self.peers = Peers(caller, self.heartbeat_s, self.question, self._on_pong, self._notify)
        self._handlers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "who": lambda _: {"member": self.me.id},
            "way": routes.answer,
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

    # Calls of the program.

    def make(self, call: SwarmCall, timeout_s: float) -> None:
        """Make a call until it has the contributions of all current members.

        Raises:
            QuorumLostError, LeftBehindError, CollectiveTimeoutError: the call has no result.
            UsageError, MismatchError and others: as by the collective on a communicator.
        """
        deadline = Deadline(timeout_s)
        with self.changed:
            self.check()
            call.number = self.has_result + 1
            now = time.monotonic()
            if self._call_ended is not None:
                pause_s = now - self._call_ended
                self._pace_s += (_PACE_SHARE if self._pauses else 1.0) * (pause_s - self._pace_s)
                self._pauses += 1
            self.call, self.call_began, self._quorum_lost_at = call, now, None
            self.has_lost_quorum = False
        try:
            while (view_and_comm := self._await_view(call, deadline)) is not None:
                if self._attempt(call, *view_and_comm, deadline):
                    return
        finally:
            with self.changed:
                self.call, self._call_ended = None, time.monotonic()

    def check(self) -> None:
        """Raise `LeftBehindError` if this process is no member any more."""
        if self.gone:
            raise LeftBehindError(self.gone)

    def _attempt(self, call: SwarmCall, view: View, comm: Communicator, deadline: Deadline) -> bool:
        """Make a call in a view; return whether both phases have ended."""
        call.attempts += 1
        try:
            result = call.make(comm, deadline.remaining_s())
        except UnisonoError as error:
            self._failed(view, comm, error, deadline)
            return False
        with self.changed:
            if self.view is not view or self.is_frozen:
                return False
            self._hold(call, result, view)
            switch = self._switch if self.may_enter else ""
        try:
            is_boundary = second_phase(comm, switch, deadline.remaining_s())
        except UnisonoError as error:
            self._failed(view, comm, error, deadline)
            return False
        with self.changed:
            if is_boundary and self.view is view:
                self.is_frozen, self.boundary = True, switch
            self.suspects.clear()
            self.changed.notify_all()
        return True

    def _hold(self, call: SwarmCall, result: Any, view: View) -> None:
        call.result, call.has_result, call.contributors = result, True, view.members
        self.has_result = call.number
        self.may_enter = call.is_state or not self.uses_state

    def _failed(self, view: View, comm: Communicator, error: UnisonoError, deadline: Deadline) -> None:
        """Note that a call has failed in a view, and tell the others; raise the error if it is one of the program."""
        with self.changed:
            if self.view is not view or self._comm is not comm:  # it was closed meanwhile
                return
        is_of_view = isinstance(error, (AbortedError, PeerLostError, CollectiveTimeoutError, TransportUnavailableError))
        if not is_of_view and (error.peer in (None, comm.rank) or len(view.members) == 1):
            self.leave_for(error)
            raise error
        suspect = view.ids[error.peer] if error.peer is not None and 0 <= error.peer < len(view.ids) else ""
        with self.changed:
            if not is_of_view and suspect:  # it makes another call than the others
                self.expelled.add(suspect)
            if isinstance(error, PeerLostError) and suspect not in ("", self.me.id):
                self.suspects.add(suspect)
            is_first, self.failure = not self.failure, self.failure or error.message
            self.changed.notify_all()
        if is_first:
            facts = {"view": view.id, "why": error.message, "suspects": sorted(self.suspects)}
            self.tell(view.members, {"do": "failed", **facts})
            self.peers.look()
        if isinstance(error, CollectiveTimeoutError) and deadline.has_passed():
            raise error

    def leave_for(self, error: UnisonoError) -> None:
        """Leave the swarm after an error of this member alone, so that the others go on."""
        if isinstance(error, UsageError):
            return  # nothing has been sent
        with self.changed:
            view = self.view
            self.gone = f"this process has left the swarm after an error: {error.message}"
        if view is not None:
            self.tell(view.members, {"do": "expel", "member": self.me.id})

    def _await_view(self, call: SwarmCall, deadline: Deadline) -> tuple[View, Communicator] | None:
        """Return the view in which to make a call, and its communicator; None if the call has a result.

        Raises:
            QuorumLostError: too few members answer.
            LeftBehindError: this process is no member any more.
            CollectiveTimeoutError: there was no view before the deadline.
        """
        with self.changed:
            while True:
                view = self.view
                if view is not None and call.number < view.next_call:
                    if not call.has_result:
                        self.gone = _LEFT_BEHIND
                    self.check()
                    return None
                self.check()
                if view is not None and self._comm is not None and self._may_call(view):
                    return view, self._comm
                self._check_quorum()
                if deadline.has_passed():
                    raise CollectiveTimeoutError(f"call #{call.number} {call.name} has not been made in time")
                self.changed.wait(min(self.heartbeat_s / 4, deadline.remaining_s()))

    def _may_call(self, view: View) -> bool:
        return not (self.is_frozen or self.failure) and len(view.members) >= (self.min_size or 1)

    def _check_quorum(self) -> None:
        """Raise `QuorumLostError` if too few members have answered for too long."""
        view = self.view
        if view is None:
            return
        lost = self.peers.lost()
        answering = [member for member in view.members if member.id not in lost]
        needed = self.quorum()
        if len(answering) >= needed:
            self._quorum_lost_at = None
            return
        now = time.monotonic()
        self._quorum_lost_at = now if self._quorum_lost_at is None else self._quorum_lost_at
        if now - self._quorum_lost_at >= self._quorum_timeout_s:
            names = ", ".join(member.name for member in view.members if member.id in lost)
            silent = f": {names} did not answer for {self.heartbeat_s:g} s" if names else ""
            self.has_lost_quorum = True
            raise QuorumLostError(
                f"{len(answering)} of {len(view.members)} members answer, and {needed} are needed to go on{silent}"
            )

    def pace_s(self) -> float:
        """Return the time between two calls of the program, as a moving average; 0 before there were enough calls."""
        with self.changed:
            return self._pace_s if self._pauses >= _LEAST_PAUSES else 0.0

    def quorum(self) -> int:
        """Return how many members of the present view must answer, so that it goes on."""
        with self.changed:
            least = self.min_size or 1
            return least if self.view is None else max(least, quorum_of(len(self.view.members), self.min_size))

    def ids_of(self, comm: Communicator) -> tuple[str, ...]:
        """Return the ids of the members of the present view, by their ranks in its communicator."""
        with self.changed:
            if self.view is None or comm is not self._comm:
                raise AbortedError("the members of the swarm have changed")
            return self.view.ids

    # Views.

    def found(self) -> None:
        """Make the first view, of this process alone."""
        view = View(new_id(), 1, "", 1, (self.me,))
        comm = self._met(view, self.me, "", Deadline(self.heartbeat_s))
        with self.changed:
            self._candidates[view.id] = view, comm
        self.install(view)

    def _met(self, view: View, proposer: Member, store_url: str, limit: Deadline) -> Communicator:
        return meet(view, self.me.id, proposer, store_url, self.routes, self.key, self.job, self.options, limit)

    def install(self, view: View) -> None:
        """Enter a view that the members have chosen, unless this member has it or a newer one."""
        with self.changed:
            before = self.view
            if self.gone or (before is not None and view.number <= before.number):
                return
            if self.me.id not in view.ids:
                if before is not None:
                    is_leaving = self.me.id in self.leaving
                    self.gone = "this process has left the swarm" if is_leaving else _LEFT_BEHIND
                    if self.me.id in self.expelled:
                        self.gone = _EXPELLED
                self._end_view()
                self.changed.notify_all()
                return
            if before is not None and self.has_result < view.next_call - 1:
                self.gone = _LEFT_BEHIND
                self._end_view()
                self.changed.notify_all()
                return
            self.has_result = view.next_call - 1
            _, comm = self._candidates.pop(view.id, (view, None))
            self._end_view()
            self.view, self._comm = view, comm
            self.failure = "" if comm is not None else "this member was not at the meeting of the view"
            self.is_frozen, self.boundary, self._switch = False, "", ""
            self.acceptor = Acceptor()
            self._quorum_lost_at = None
            self.leaving &= set(view.ids)
            self.expelled &= set(view.ids)
            self.suspects &= set(view.ids)
            self.barred |= set(view.barred)
            self.slow.clear()
            self.peers.follow(member for member in view.members if member.id != self.me.id)
            self.changed.notify_all()
        names = ", ".join(member.name for member in view.members)
        _log.info("view %d of the swarm: %s; the next call is #%d", view.number, names, view.next_call)

    def _end_view(self) -> None:
        comms = [comm for _, comm in self._candidates.values()]
        if self._comm is not None:
            comms.append(self._comm)
        self._candidates.clear()
        self._comm = None
        for comm in comms:
            close_quietly(comm, in_background)

    def close(self) -> None:
        """Leave the view and close its communicators. Later calls raise `LeftBehindError`."""
        with self.changed:
            self.gone = self.gone or "this process has left the swarm"
            self._end_view()
            self.changed.notify_all()
        self.peers.follow(())

    # Requests of other members.

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request; raises ValueError if it cannot be answered."""
        handler = self._handlers.get(str(request.get("do")))
        if handler is None:
            raise ValueError("there is no such request")
        return handler(request)

    def tell(self, members: Sequence[Member], message: dict[str, Any]) -> None:
        """Send a message to other processes, without waiting."""
        for member in members:
            if member.id != self.me.id:
                in_background(partial(self._tell, member, message))

    def _tell(self, member: Member, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, RefusedError, UnisonoError):
            self.caller.ask(member, message, self.heartbeat_s)

    def question(self) -> dict[str, Any]:
        """Return the ping of this member."""
        with self.changed:
            number = 0 if self.view is None else self.view.number
        return {"do": "ping", "view": number, "from": self.me._asdict()}

    def _on_pong(self, member: Member, reply: dict[str, Any]) -> None:
        self.routes.note(member, reply)
        with self.changed:
            view = self.view
        if reply.get("record") is not None:
            with contextlib.suppress(ValueError):
                self.install(view_of(reply["record"]))
        elif view is not None and checked(reply, {"view": int})["view"] < view.number:
            self._tell(member, {"do": "commit", "view": view_fields(view)})

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()

    def _ping(self, request: dict[str, Any]) -> dict[str, Any]:
        known = checked(request, {"view": int, "from": dict})["view"]
        can_dial = self.routes.reaches(member_of(request["from"]))
        with self.changed:
            view = self.view
            number = 0 if view is None else view.number
            record = view_fields(view) if view is not None and number > known else None
            return {
                "view": number,
                "record": record,
                "has_result": self.has_result,
                "may_enter": self.may_enter,
                "call": 0 if self.call is None else self.call.number,
                "gone": bool(self.gone),
                "can_dial": can_dial,
                "pace_s": self.pace_s(),
            }

    def _meet(self, request: dict[str, Any]) -> dict[str, Any]:
        checked(request, {"candidate": dict, "store": str, "proposer": dict, "limit_s": float})
        candidate, proposer = view_of(request["candidate"]), member_of(request["proposer"])
        self._catch_up(request)
        with self.changed:
            self._require(candidate.base)
        if self.me.id not in candidate.ids:
            raise ValueError("this process is not in the candidate")
        limit = Deadline(min(request["limit_s"], self.options.rendezvous_timeout_s))
        try:
            comm = self._met(candidate, proposer, request["store"], limit)
        except (UnisonoError, OSError, RuntimeError) as error:
            self.obstacle = f"{self.me.name} could not meet the others: {error}"
            raise ValueError(self.obstacle) from None
        self.obstacle = ""
        with self.changed:
            is_wanted = not self.gone and (self.view is None or self.view.id == candidate.base)
            if is_wanted:
                self._candidates[candidate.id] = candidate, comm
                while len(self._candidates) > _MOST_CANDIDATES:
                    close_quietly(self._candidates.pop(next(iter(self._candidates)))[1], in_background)
        if not is_wanted:
            close_quietly(comm, in_background)
            raise ValueError("this process is in another view now")
        return {}

    def _on_switch(self, request: dict[str, Any]) -> dict[str, Any]:
        checked(request, {"view": str, "candidate": str})
        with self.changed:
            self._require(request["view"], is_member=True)
            self._switch = request["candidate"]
        return {}

    def _prepare(self, request: dict[str, Any]) -> dict[str, Any]:
        ballot = ballot_of(request.get("ballot"))
        self._catch_up(request)
        with self.changed:
            self._require(checked(request, {"view": str, "for_entry": bool})["view"], is_member=True)
            if request["for_entry"] and not self.may_enter:
                raise ValueError("no process may enter after this call")
            promise = self.acceptor.promise(ballot, self.has_result)
            self.is_frozen = self.is_frozen or promise.is_given
            comm = self._comm if promise.is_given and self.call is not None else None
            self.changed.notify_all()
        if comm is not None:
            with contextlib.suppress(UnisonoError):
                comm.abort("the members of the swarm change")
        accepted = promise.accepted and {
            "ballot": promise.accepted[0]._asdict(),
            "view": view_fields(promise.accepted[1]),
        }
        return {
            "is_given": promise.is_given,
            "highest": promise.highest._asdict(),
            "accepted": accepted,
            "has_result": promise.has_result,
        }

    def _adopt(self, request: dict[str, Any]) -> dict[str, Any]:
        checked(request, {"candidate": str, "call": int, "holder": int, "staying": int, "limit_s": float})
        with self.changed:
            candidate, call, view = self._candidates.get(request["candidate"]), self.call, self.view
            if candidate is None or view is None or call is None or call.number != request["call"]:
                raise ValueError("this member does not make that call")
        try:
            with candidate[1].subgroup(range(request["staying"])) as staying:
                result = call.adopt(staying, request["holder"], len(view.members), request["limit_s"])
        except UnisonoError as error:
            raise ValueError(f"the result could not be passed on: {error.message}") from None
        with self.changed:
            if self.view is view and not call.has_result:
                self._hold(call, result, view)
        return {}

    def _accept(self, request: dict[str, Any]) -> dict[str, Any]:
        ballot, view = ballot_of(request.get("ballot")), view_of(request.get("view"))
        with self.changed:
            self._require(view.base, is_member=True)
            self.is_frozen = True
            return {"is_accepted": self.acceptor.accept(ballot, view)}

    def _commit(self, request: dict[str, Any]) -> dict[str, Any]:
        self.install(view_of(request.get("view")))
        return {}

    def _drop(self, request: dict[str, Any]) -> dict[str, Any]:
        id_ = checked(request, {"candidate": str})["candidate"]
        with self.changed:
            accepted = self.acceptor.accepted
            if self._switch == id_:
                self._switch = ""
            if accepted is not None and accepted[1].id == id_:
                return {}
            _, comm = self._candidates.pop(id_, (None, None))
        if comm is not None:
            close_quietly(comm, in_background)
        return {}

    def _on_failed(self, request: dict[str, Any]) -> dict[str, Any]:
        checked(request, {"view": str, "why": str, "suspects": [str]})
        with self.changed:
            if self.view is not None and self.view.id == request["view"]:
                self.failure = self.failure or request["why"]
                self.suspects |= set(request["suspects"]) & set(self.view.ids)
                self.changed.notify_all()
        self.peers.look()
        return {}

    def _on_leave(self, request: dict[str, Any]) -> dict[str, Any]:
        return self._remove(request, self.leaving)

    def _on_expel(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("for_good") is True:
            with self.changed:
                id_ = checked(request, {"member": str})["member"]
                members = () if self.view is None else self.view.members
                self.barred |= {member.name for member in members if member.id == id_}
        return self._remove(request, self.expelled)

    def _on_barred(self, _: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            if self.view is None:
                self.gone = _EXPELLED
                self.changed.notify_all()
        return {}

    def _remove(self, request: dict[str, Any], members: set[str]) -> dict[str, Any]:
        id_ = checked(request, {"member": str})["member"]
        with self.changed:
            if self.view is not None and id_ in self.view.ids:
                members.add(id_)
                self.changed.notify_all()
        return {}

    def _catch_up(self, request: dict[str, Any]) -> None:
        """Install the view on which a request is based, if this member has missed it."""
        if request.get("base") is not None:
            base = view_of(request["base"])
            if self.view is not None and self.me.id in base.ids:
                self.install(base)

    def _require(self, view: str, *, is_member: bool = False) -> None:
        """Raise ValueError if this member is in another view than `view`; a process that waits is in none."""
        if self.gone:
            raise ValueError(self.gone)
        if (is_member and self.view is None) or (self.view is not None and self.view.id != view):
            raise ValueError("this member is in another view")


def in_background(task: Callable[[], None]) -> None:
    """Run `task` in a thread of its own."""
    threading.Thread(target=task, name="unisono-swarm-task", daemon=True).start()


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Log an error of the block, which nobody waits for."""
    try:
        yield
    except Exception:  # noqa: BLE001 - a thread that serves the others must go on
        _log.exception("%s failed", what)
