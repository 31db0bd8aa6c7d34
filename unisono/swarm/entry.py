"""`Entry`: the time of a process in a swarm, from its registration until it leaves or is left behind.

A process that enters again begins another entry, with an id, a port and ways of its own. So the others never take it
for the member that it was.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from unisono.errors import RendezvousError, UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.swarm.answers import Answers
from unisono.swarm.attempts import Attempts
from unisono.swarm.links import NOTHING, Caller, Service
from unisono.swarm.meeting_place import Places
from unisono.swarm.membership import Membership
from unisono.swarm.proposer import Proposer
from unisono.swarm.routes import Routes
from unisono.swarm.settings import Settings
from unisono.swarm.sharing import Sharing
from unisono.swarm.views import Bars, Member, View, new_id
from unisono.transports.links.listener import listen_tcp
from unisono.transports.tcp.tls import TlsPolicy

_log = log.get("rendezvous")

# A process that has not been admitted after so many heartbeats says in the log why.
_LATE = 3.0
# A member that leaves waits for the others for so many heartbeats.
_LEAVING = 4.0


class Entry:
    """A process that waits to enter, is a member, or is one no more. It registers in a thread until `close`.

    Args:
        settings: the arguments of the swarm.
        caller: makes the requests, over the ways of this entry.
        places: the meeting places.
        found_with: how many processes found a swarm, if there is none.
        barred: the processes that may not enter, as far as this one knows from its entry before.

    Attributes:
        membership: the part of this process in the views.
        routes: the ways to other processes.
        attempts: makes the calls of the program.
        sharing: the calls of `Swarm.state`.
    """

    def __init__(self, settings: Settings, caller: Caller, places: Places, found_with: int, barred: Bars) -> None:
        tls = TlsPolicy.of(settings.options)
        listening = listen_tcp(settings.options.bind_address)
        host, port = listening.getsockname()[:2]
        me = Member(new_id(), settings.name, host, port, tls.certificate)
        self._settings, self._places, self._found_with = settings, places, found_with
        self._least = settings.min_size or 1  # how many members there are when `await_admission` returns
        self._problem: UnisonoError | None = None
        self._is_refused = False  # by a meeting place, so that waiting is in vain
        self._waiting = 0  # how many processes wait at the meeting places if no member is there
        self._has_told = False  # the meeting places that this process is a member
        self.routes = Routes(me, settings.key, settings.job, caller, settings.heartbeat_s)
        self.membership = Membership(me, caller, self.routes, settings, barred)
        self.attempts = Attempts(self.membership)
        self._answers = Answers(self.membership)
        self.sharing = Sharing(self.membership, caller)
        self._service = Service(
            listening, settings.key, settings.job, tls, self._answer, self.routes.admit, self.membership
        )
        self.routes.listen(port, self._service.take)
        self._proposer = Proposer(self.membership, self._answers)
        self._stop = threading.Event()
        self._registering = threading.Thread(target=self._register, name="unisono-swarm-register", daemon=True)
        self._registering.start()

    @property
    def view(self) -> View | None:
        """The present view; None before this process is a member."""
        return self.membership.view

    def await_admission(self) -> None:
        """Wait until this process is a member; raises RendezvousError if it is not in time, or refused."""
        state, deadline = self.membership, Deadline(self._settings.options.rendezvous_timeout_s)
        is_late: Deadline | None = Deadline(_LATE * self._settings.heartbeat_s)
        with state.changed:
            while state.view is None or len(state.view.members) < self._least:
                if is_late is not None and is_late.has_passed():
                    _log.warning("this process waits to enter the swarm: %s", self._obstacle())
                    is_late = None
                if self._problem is not None and self._is_refused:
                    raise self._problem
                if deadline.has_passed() or state.gone:
                    raise self._problem or RendezvousError(self._why_not())
                state.changed.wait(min(0.1, deadline.remaining_s()))
            # Otherwise the members that admitted this process could leave, and a new one would found another swarm.
            state.changed.wait_for(lambda: self._has_told, self._settings.heartbeat_s)

    def leave(self) -> None:
        """Let the others go on without this process, and wait until they know."""
        state, heartbeat_s = self.membership, self._settings.heartbeat_s
        if state.is_out:
            return
        view = state.view
        if view is None or len(view.members) == 1:
            self._places.leave(state.me, heartbeat_s)
            return
        self.announce({"do": "leave", "member": state.me.id, **state.will()})
        deadline = Deadline(_LEAVING * heartbeat_s)
        with state.changed:
            # If all leave, nobody is there to choose a view without them.
            while not state.is_out and not deadline.has_passed() and set(view.ids) - state.peers.lost() - state.leaving:
                state.changed.wait(heartbeat_s / 4)
                view = state.view or view
        if not state.is_out:
            self._places.leave(state.me, heartbeat_s)

    def announce(self, request: dict[str, Any]) -> None:
        """Make a request to all members, this one included, without waiting for the others."""
        self._answers.answer(dict(request))
        if (view := self.view) is not None:
            self.membership.tell(view.members, request)

    def withdraw(self) -> None:
        """Stop being a member, or waiting, and let the meeting places forget this process."""
        self.close()
        self._registering.join(self._settings.heartbeat_s)
        self._places.leave(self.membership.me, self._settings.heartbeat_s)

    def close(self) -> None:
        """Stop being a member, or waiting."""
        self._stop.set()
        self._proposer.close()
        self.membership.close()
        self._service.close()
        self.routes.close()

    def _answer(self, request: dict[str, Any], _: bytes) -> tuple[dict[str, Any], bytes]:
        if request.get("do") == "state":
            return self.sharing.exchange.answer(request)
        return self._answers.answer(request), NOTHING

    def _why_not(self) -> str:
        state, limit_s = self.membership, self._settings.options.rendezvous_timeout_s
        return state.gone or f"{self._obstacle()}; it has waited for {limit_s:g} s"

    def _obstacle(self) -> str:
        """Return why this process has not been admitted yet."""
        state, view = self.membership, self.membership.view
        if self._problem is not None:
            return self._problem.message
        if view is not None:
            return f"{len(view.members)} of {self._least} members are there"
        urls = ", ".join(self._places.urls)
        if self._waiting:
            return f"at {urls} is no member, and too few processes wait to found a swarm: {self._waiting}"
        why = f": {state.obstacle}" if state.obstacle else ""
        return f"the members of the swarm at {urls} have not admitted this process{why}"

    def _register(self) -> None:
        """Register at the meeting places again and again, and found the swarm if they say so."""
        state, heartbeat_s = self.membership, self._settings.heartbeat_s
        while not self._stop.is_set():
            began = time.monotonic()
            self._places.try_to_serve()
            view = state.view
            try:
                news = self._places.register(
                    state.me, 0 if view is None else view.number, heartbeat_s, self._found_with
                )
                self._problem = RendezvousError(f"no meeting place answers: {news.problem}") if news.problem else None
            except UnisonoError as error:
                self._problem, self._is_refused = error, True
            else:
                self._waiting = 0 if news.has_members else len(news.waiting)
                self.routes.greet(news.waiting if view is not None else news.members)
                if view is not None:
                    self._proposer.offer(news.waiting)
                elif news.found_with and not self._stop.is_set():
                    self._found(news.found_with)
            self._pause(view, heartbeat_s / 4 - (time.monotonic() - began))

    def _pause(self, view: View | None, pause_s: float) -> None:
        """Wait until this process registers again: after some time, or once it is in another view than `view`."""
        state = self.membership
        with state.changed:
            self._has_told = view is not None
            state.changed.notify_all()
            state.changed.wait_for(lambda: self._stop.is_set() or state.view is not view, max(0.01, pause_s))

    def _found(self, found_with: int) -> None:
        self._least = found_with  # so that the newest state of all of them counts
        try:
            self.membership.found()
        except UnisonoError as error:
            self._problem = error
