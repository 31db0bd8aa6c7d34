"""One member's part in the views: its state, and how it installs the views that the members choose.

Theory of operation
-------------------
All members are equal. Each answers requests (answers.py) in threads of its own, also while its program computes:

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
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    AbortedError,
    LeftBehindError,
    UnisonoError,
    UsageError,
)
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.json_checks import checked
from unisono.swarm.agreement import Acceptor, quorum_of
from unisono.swarm.calls import SwarmCall
from unisono.swarm.communicators import abort_quietly, close_quietly, meet
from unisono.swarm.links import Caller, RefusedError
from unisono.swarm.pace import Pace
from unisono.swarm.peers import Peers
from unisono.swarm.routes import Routes
from unisono.swarm.settings import Settings
from unisono.swarm.views import NO_BARS, Bars, Member, View, bars_fields, new_id, view_fields, view_of

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

_log = log.get("rendezvous")

LEFT_BEHIND = "the other members have gone on without this one"
LEFT = "this process has left the swarm"
EXPELLED = "the members have expelled this process"


class Membership:
    """The state of one member, and its answers. All attributes are read and written under `changed`.

    Args:
        me: this process.
        caller: makes requests to other members.
        routes: the ways to other members.
        settings: the arguments of the swarm.
        barred: the processes that may not enter.

    Attributes:
        changed: the lock, and the condition that is notified of every change.
        view: the present view; None before this process is a member.
        failure: why calls in the present view fail; empty as long as they do not.
        is_frozen: whether this member has promised to begin no call in the present view.
        boundary: the id of the candidate that all members have passed in a second phase, or empty.
        gone: why this process is no member any more; empty as long as it is one, or has not been one.
        is_out: whether the others know so, because they have chosen a view without it. Before, it still votes.
        has_lost_quorum: whether the last call has raised `QuorumLostError`.
        obstacle: why this process could not meet the others the last time; empty if it could.
        leaving, expelled, slow: the ids of members that leave, must leave, or are left behind because they are slow.
        barred: the processes that may not enter again.
        suspects: the ids of members that calls of members have named as lost.
        has_result: the number of the last call of which this member has the result.
        uses_state: whether the program has called `Swarm.state`. Then newcomers enter only after a call of it.
        may_enter: whether newcomers may enter after the last call of which this member has the result.
        call: the call that the program makes; None between two calls.
        call_began: the time at which it began.
        pace: the time between two calls.
        comm: the communicator of the present view; None if it has ended.
        candidates: the candidates that this member has met, and their communicators, by id.
        switch: the id of the candidate that it passes in the second phase of its calls.
    """

    def __init__(self, me: Member, caller: Caller, routes: Routes, settings: Settings, barred: Bars = NO_BARS) -> None:
        self.me = me
        self.caller = caller
        self.routes = routes
        self.settings = settings
        self.heartbeat_s = settings.heartbeat_s
        self.changed = threading.Condition(threading.RLock())
        self.view: View | None = None
        self.failure = ""
        self.is_frozen = False
        self.boundary = ""
        self.gone = ""
        self.is_out = False
        self.leaving: set[str] = set()
        self.expelled: set[str] = set()
        self.slow: set[str] = set()
        self.barred = barred
        self.suspects: set[str] = set()
        self.has_result = 0
        self.uses_state = False
        self.may_enter = True
        self.call: SwarmCall | None = None
        self.call_began = 0.0
        self.acceptor = Acceptor()
        self.comm: Communicator | None = None
        self.candidates: dict[str, tuple[View, Communicator]] = {}
        self.switch = ""
        self.has_lost_quorum = False
        self.obstacle = ""
        self.pace = Pace()
        caller.guard = self
        self.peers = Peers(caller, self.heartbeat_s, self.question, self._on_pong, self._notify)

    def check(self) -> None:
        """Raise `LeftBehindError` if this process is no member any more."""
        if self.gone:
            raise LeftBehindError(self.gone)

    def hold(self, call: SwarmCall, result: Any, view: View) -> None:
        """Note the result of a call in a view. Under the lock."""
        call.result, call.has_result, call.contributors = result, True, view.members
        self.has_result = call.number
        self.may_enter = call.is_state or not self.uses_state

    def leave_for(self, error: UnisonoError) -> None:
        """Leave the swarm after an error of this member alone, so that the others go on."""
        if isinstance(error, UsageError):
            return  # nothing has been sent
        with self.changed:
            view = self.view
            self.gone = f"this process has left the swarm after an error: {error.message}"
        if view is not None:
            self.tell(view.members, {"do": "expel", "member": self.me.id})

    def fail_call(self, why: str) -> None:
        """Let the call in progress fail in the present view, because it could wait for a silent member for long."""
        with self.changed:
            comm = None if self.call is None or self.failure else self.comm
            if comm is None:
                return
            self.failure = why
            self.changed.notify_all()
        in_background(partial(abort_quietly, comm, why))

    def quorum(self) -> int:
        """Return how many members of the present view must answer, so that it goes on."""
        with self.changed:
            least = self.settings.min_size or 1
            return least if self.view is None else max(least, quorum_of(len(self.view.members), self.settings.min_size))

    def ids_of(self, comm: Communicator) -> tuple[str, ...]:
        """Return the ids of the members of the present view, by their ranks in its communicator."""
        with self.changed:
            if self.view is None or comm is not self.comm:
                raise AbortedError("the members of the swarm have changed")
            return self.view.ids

    # Views.

    def found(self) -> None:
        """Make the first view, of this process alone."""
        view = View(new_id(), 1, "", 1, (self.me,), self.barred)
        comm = self.met(view, self.me, "", Deadline(self.heartbeat_s))
        with self.changed:
            self.candidates[view.id] = view, comm
        self.install(view)

    def met(self, view: View, proposer: Member, store_url: str, limit: Deadline) -> Communicator:
        """Meet the other members of a view that has not been chosen yet; return its communicator, as `meet` does."""
        return meet(view, self.me.id, proposer, store_url, self.routes, self.settings, limit)

    def install(self, view: View) -> None:
        """Enter a view that the members have chosen, unless this member has it or a newer one."""
        with self.changed:
            before = self.view
            if before is not None and view.number <= before.number:
                return
            is_member = self.me.id in view.ids
            if before is not None and not is_member:
                self.is_out = True
                self.changed.notify_all()
            if self.gone:
                return
            if not is_member or (before is not None and self.has_result < view.next_call - 1):
                self.gone = self._why_gone(view) if before is not None else ""
                self._end_view()
                self.changed.notify_all()
                return
            self.has_result = view.next_call - 1
            _, comm = self.candidates.pop(view.id, (view, None))
            self._end_view()
            self.view, self.comm = view, comm
            self.failure = "" if comm is not None else "this member was not at the meeting of the view"
            self.is_frozen, self.boundary, self.switch = False, "", ""
            self.acceptor = Acceptor()
            self.leaving &= set(view.ids)
            self.expelled &= set(view.ids)
            self.suspects &= set(view.ids)
            self.barred = self.barred.joined(view.barred)
            self.slow.clear()
            self.peers.follow(member for member in view.members if member.id != self.me.id)
            self.changed.notify_all()
        names = ", ".join(member.name for member in view.members)
        _log.info("view %d of the swarm: %s; the next call is #%d", view.number, names, view.next_call)

    def _why_gone(self, view: View) -> str:
        if self.me.id in view.ids:
            return LEFT_BEHIND
        if self.me.id in self.expelled or view.barred.bar(self.me):
            return EXPELLED
        return LEFT if self.me.id in self.leaving else LEFT_BEHIND

    def _end_view(self) -> None:
        comms = [comm for _, comm in self.candidates.values()]
        if self.comm is not None:
            comms.append(self.comm)
        self.candidates.clear()
        self.comm = None
        for comm in comms:
            close_quietly(comm, in_background)

    def close(self) -> None:
        """Leave the view and close its communicators. Later calls raise `LeftBehindError`."""
        self.end(LEFT)
        self.peers.follow(())

    def end(self, why: str) -> None:
        """End the membership of this process: its calls raise `LeftBehindError` with this text."""
        with self.changed:
            self.gone = self.gone or why
            self._end_view()
            self.changed.notify_all()

    # The bars by certificate, as `Guard` names them.

    def bars(self, certificate: str) -> bool:
        """Return whether this process neither asks nor answers one with a certificate: none of its members."""
        with self.changed:
            members = () if self.view is None else self.view.members
            return certificate in self.barred.certificates and all(
                member.certificate != certificate for member in members
            )

    def note_bar(self) -> None:
        """End the membership of this process, because its certificate is barred."""
        with self.changed:
            self.is_out = True
            self.end(EXPELLED)

    # Messages to other members.

    def will(self) -> dict[str, Any]:
        """Return the facts that this process may be the only one to know, for its last message to the others."""
        with self.changed:
            return {"expelled": sorted(self.expelled), "barred": bars_fields(self.barred)}

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


def in_background(task: Callable[[], None]) -> None:
    """Run `task` in a thread of its own."""
    threading.Thread(target=task, name="unisono-swarm-task", daemon=True).start()
