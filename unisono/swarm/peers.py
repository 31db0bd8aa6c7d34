"""The knowledge of a member about the other members: whether each of them answers, and which call it is in.

A thread for each other member asks it four times in a heartbeat timeout. A member is *lost* if it has not answered for
that time, or at once if its host says that nobody listens there any more. So a process that is stopped is lost too,
other than in a communicator. A lost member that answers again is not lost any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from unisono.errors import UnisonoError
from unisono.swarm.links import Caller, RefusedError
from unisono.swarm.views import Member

_ASKED = 4
# A process that has just been started may not listen yet, and one that is killed refuses connections a moment later.
_REFUSALS = 2


class _Peer:
    def __init__(self, member: Member) -> None:
        self.member = member
        self.heard = time.monotonic()
        self.is_lost = False
        self.reply: dict[str, Any] = {}
        self.wake = threading.Event()
        self.is_followed = True


class Peers:
    """The other members of the present view.

    Args:
        caller: makes the requests.
        timeout_s: the seconds without an answer after which a member is lost.
        question: returns the request, which is equal for all.
        on_reply: called with each member and its reply.
        on_change: called when a member is lost, or answers again.
    """

    def __init__(
        self,
        caller: Caller,
        timeout_s: float,
        question: Callable[[], dict[str, Any]],
        on_reply: Callable[[Member, dict[str, Any]], None],
        on_change: Callable[[], None],
    ) -> None:
        self._caller = caller
        self._timeout_s = timeout_s
        self._question = question
        self._on_reply = on_reply
        self._on_change = on_change
        self._lock = threading.Lock()
        self._peers: dict[str, _Peer] = {}

    def follow(self, members: Iterable[Member]) -> None:
        """Ask these members from now on, and no others."""
        wanted = {member.id: member for member in members}
        with self._lock:
            for id_ in [id_ for id_ in self._peers if id_ not in wanted]:
                peer = self._peers.pop(id_)
                peer.is_followed = False
                peer.wake.set()
            new = [_Peer(member) for id_, member in wanted.items() if id_ not in self._peers]
            self._peers.update({peer.member.id: peer for peer in new})
        for peer in new:
            threading.Thread(target=self._ask, args=(peer,), name="unisono-swarm-peer", daemon=True).start()

    def lost(self) -> frozenset[str]:
        """Return the ids of the members that are lost."""
        with self._lock:
            return frozenset(id_ for id_, peer in self._peers.items() if peer.is_lost)

    def replies(self) -> dict[str, dict[str, Any]]:
        """Return the latest reply of each member, by id."""
        with self._lock:
            return {id_: peer.reply for id_, peer in self._peers.items()}

    def look(self) -> None:
        """Ask all members now."""
        with self._lock:
            for peer in self._peers.values():
                peer.wake.set()

    def _ask(self, peer: _Peer) -> None:
        refusals = 0
        member = peer.member
        while peer.is_followed:
            try:
                limit_s = max(self._timeout_s / _ASKED, peer.heard + self._timeout_s - time.monotonic())
                reply, _ = self._caller.ask(member, self._question(), limit_s)
            except (OSError, RefusedError, UnisonoError) as error:
                refusals = refusals + 1 if isinstance(error, ConnectionRefusedError) else 0
                is_silent = time.monotonic() - peer.heard >= self._timeout_s
                self._note(peer, is_lost=peer.is_lost or is_silent or refusals >= _REFUSALS)
            else:
                refusals = 0
                peer.heard, peer.reply = time.monotonic(), reply
                self._note(peer, is_lost=False)
                if peer.is_followed:
                    self._on_reply(member, reply)
            pause_s = self._timeout_s / _ASKED if not refusals or peer.is_lost else 0.01
            peer.wake.wait(pause_s)
            peer.wake.clear()

    def _note(self, peer: _Peer, *, is_lost: bool) -> None:
        if peer.is_lost != is_lost and peer.is_followed:
            peer.is_lost = is_lost
            self._on_change()
