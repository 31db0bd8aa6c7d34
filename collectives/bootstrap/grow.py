"""`grow`: the members of a world admit processes that wait to join, meet them, and get a new communicator.

Theory of operation. All members call `grow` on their world, which has not failed. They first compare their arguments.
Then rank 0, the leader, looks in rounds for joiners (transports/links/joiners.py), and broadcasts after each round what
the members do: wait for another round, stay as they are, or meet the joiners. So no member is in a call for long, and
the death of each one ends the calls of the others. To meet, the members and the joiners have a usual rendezvous of a
later epoch at a store of the leader. The leader watches the joiners and the members meanwhile. If one is lost, it makes
the store fail for all. At last the members agree by an allgather on the old world whether all of them have met. Only if
they have, the leader lets the joiners begin. Otherwise the members close what they have opened and try again.

Used by: `init.py`, which hands it to every world.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from unisono.collectives.bootstrap.rendezvous import Rendezvous, StoreRendezvous
from unisono.errors import MismatchError, RendezvousError, UnisonoError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.wire import json_of
from unisono.options import Options
from unisono.transports.links.joiners import Invitation, Joiners
from unisono.transports.links.link_messages import readable, receive, send
from unisono.transports.links.session import RankIdentity, Session
from unisono.transports.rendezvous import host_and_port, open_waiting_place
from unisono.transports.rendezvous.tcp_store import StoreServer, TcpStore
from unisono.transports.tcp.tls import TlsPolicy

if TYPE_CHECKING:
    import socket

    from unisono.collectives.communicator import Communicator

JoinWorld: TypeAlias = "Callable[[Session, Rendezvous, Options, StoreServer | None, Deadline], Communicator]"

_log = log.get("rendezvous")

# How long the leader looks for joiners before it tells the members that they wait another round.
_ROUND_S = 0.5
_PAUSE_S = 0.01
# How long a call that waits for no process looks for the answers of those that have asked.
_PATIENCE_S = 1.0
_ANSWER_S = 5.0
# The bytes of a decision, which has the same size on all members, and of an error in it.
_DECISION_NBYTES = 4096
_MOST_REASON = 512
# The least time for a meeting, however short the caller wants to wait for joiners.
_MEETING_S = 2.0
# How long after the end of the caller's time the members may still tell each other how it has ended.
_AGREEING_S = 2.0
# Set in the store of a meeting when all joiners have met the members.
_MET = "met"
_NO_COUNT = -1  # stands for the count None
# The errors because of which a member cannot do its part; the system may refuse descriptors or threads.
_FAILURES = (UnisonoError, OSError, RuntimeError)
_FAREWELL = "the members begin again"
_NO_PLACE = (
    "no process can join this job, because it has no key or no store that outlives ranks: start the job with `unisono "
    "run`, or set UNISONO_KEY_FILE and UNISONO_STORE=file:///folder on all ranks"
)


class GrowDecision(NamedTuple):
    """The outcome of a round, which all members carry out.

    Attributes:
        do: "wait" for another round, "stay" as they are, "meet" the joiners, or "fail".
        joiners, store: how many processes join, and the URL of the store where all meet.
        error: the reason to fail.
    """

    do: str
    joiners: int = 0
    store: str = ""
    error: str = ""


class Growth:
    """The means of one rank to admit joiners to its world.

    Args:
        session: the session of the world.
        options: the agreed options of the world.
        join_world: the function of `init.py`. It is a parameter because `init.py` imports this file.

    Raises:
        UsageError: the job has no store that outlives ranks, or no key.
    """

    def __init__(self, session: Session, options: Options, join_world: JoinWorld) -> None:
        if session.identity.lasting_store is None:
            raise UsageError(_NO_PLACE)
        self._session = session
        self._options = options
        self._join_world = join_world
        self._joiners: Joiners | None = None  # of the leader, from its first look on
        self._has_tried = False  # whether a meeting has failed in this call of `grow`

    def grow(self, world: Communicator, count: int | None, timeout_s: float) -> Communicator:
        """Return a communicator of the members and of joiners, as `Communicator.grow` documents."""
        self._has_tried = False
        self._session.latest_epoch = _compare(world, count, self._session.latest_epoch, None)
        deadline = Deadline(timeout_s)  # all members have called `grow` now
        while True:
            decision, party = self._decide(world, count, deadline)
            with contextlib.closing(party):
                if decision.do == "stay":
                    return world
                if decision.do == "fail":
                    raise RendezvousError(decision.error, rank=world.rank)
                grown = self._meet_and_agree(world, decision, party, deadline)
            if grown is not None:
                return grown
            self._session.latest_epoch = _compare(
                world, count, self._session.latest_epoch, _limit_s(self._options, deadline)
            )
            self._has_tried = True

    def close(self) -> None:
        """Close the connections to joiners that still wait."""
        self._forget_joiners()

    def _decide(self, world: Communicator, count: int | None, deadline: Deadline) -> tuple[GrowDecision, _Party]:
        """Return the decision of the leader for all members.

        The leader also returns the joiners that it invites. Members wait in short rounds, which end early.
        """
        while True:
            decision, party = (
                self._look(world, count, deadline) if world.rank == 0 else (GrowDecision("wait"), _Party())
            )
            try:
                decision = _broadcast(world, decision, _limit_s(self._options, deadline))
            except BaseException:
                party.close()
                raise
            if decision.do != "wait":
                return decision, party

    def _look(self, world: Communicator, count: int | None, deadline: Deadline) -> tuple[GrowDecision, _Party]:
        """Look for joiners during one round. Only the leader does so."""
        try:
            joiners = self._joiners = self._joiners or self._open()
            waiting = joiners.look(_PATIENCE_S) if count is None else _await_joiners(joiners, count, deadline)
            may_meet = waiting >= (count or 1) and not (self._has_tried and deadline.has_passed())
            links = joiners.ready(waiting if count is None else count) if may_meet else []
            if len(links) < (count or 1):
                joiners.wait_again(links)
                if count is None:
                    return GrowDecision("stay"), _Party()
                if not deadline.has_passed():
                    return GrowDecision("wait"), _Party()
                return GrowDecision("fail", error=f"{waiting} of {count} processes came to join in time"), _Party()
            party = _Party(links, self._serve(joiners, links))
        except _FAILURES as error:
            self._forget_joiners()
            return GrowDecision("fail", error=_text(error)[:_MOST_REASON]), _Party()
        return GrowDecision("meet", len(links), party.url), party

    def _serve(self, joiners: Joiners, links: list[socket.socket]) -> StoreServer:
        """Serve the store by which members and joiners find each other.

        If that fails, the joiners wait for the next round.
        """
        me = self._session.identity
        try:
            return StoreServer(self._session.addresses.tcp_host, 0, key=me.key, job=me.job)
        except _FAILURES:
            joiners.wait_again(links)
            raise

    def _forget_joiners(self) -> None:
        """Close the store in which joiners wait, and the connections to them. The next `grow` opens new ones."""
        if self._joiners is not None:
            self._joiners.close()
            self._joiners = None

    def _open(self) -> Joiners:
        me = self._session.identity
        store = open_waiting_place(me.lasting_store or "", me.key, me.job, _ANSWER_S, TlsPolicy(self._options.tls))
        return Joiners(store, me.key, me.job, self._options.heartbeat_timeout_s, TlsPolicy.of(self._options))

    def _meet_and_agree(
        self, world: Communicator, decision: GrowDecision, party: _Party, deadline: Deadline
    ) -> Communicator | None:
        """Return the new communicator if all members and joiners have met; otherwise close it and return None."""
        self._session.latest_epoch += 1  # as on all members, because they have compared it
        grown, failure = None, ""
        with contextlib.ExitStack() as opened:
            try:
                grown = self._meet(world, decision, party, deadline, opened)
            except _FAILURES as error:
                failure = _text(error)
                party.fail(failure)
            if world.allgather(np.array([grown is not None]), timeout_s=_limit_s(self._options, deadline)).all():
                party.begin()
                opened.pop_all()
                return grown
            failure = failure or "a member of the job could not meet the others"
            if world.rank == 0:
                _log.warning("%d process(es) could not be admitted to the job: %s", decision.joiners, failure)
            party.refuse(failure)
        return None

    def _meet(
        self,
        world: Communicator,
        decision: GrowDecision,
        party: _Party,
        deadline: Deadline,
        opened: contextlib.ExitStack,
    ) -> Communicator:
        """Meet the other members and the joiners; return the new communicator.

        Raises:
            UnisonoError: a member or a joiner was lost, or cannot take part.
        """
        size = world.size + decision.joiners
        me = replace(self._session.identity, epoch=self._session.latest_epoch, rank=world.rank, size=size)
        party.invite(Invitation(world.size, size, me.epoch, me.meeting, decision.store))
        session = Session(me, self._options)
        opened.callback(session.close, _FAREWELL)
        limit = Deadline(max(_MEETING_S, deadline.remaining_s()))
        with contextlib.closing(store_of_leader(decision.store, me, limit, self._options)) as store:
            with party.watched(session, self._session, limit):
                rendezvous = StoreRendezvous(store, me.rank, me.size, me.key, limit.remaining_s())
                grown = self._join_world(session, rendezvous, self._options, None, limit)
                opened.callback(grown.close)
            # The other members wait here for the joiners, and not in a call, which would be logged as one that waits.
            if world.rank == 0:
                store.set(_MET, b"")
            else:
                store.get(_MET, limit.remaining_s())
        return grown


class _Party:
    """The joiners that the leader has invited, and the store where all meet. It is empty on the other members."""

    def __init__(self, links: Sequence[socket.socket] = (), server: StoreServer | None = None) -> None:
        self._links = list(links)
        self._server = server
        self._is_lost = False  # whether a joiner was lost, so that the others ask again
        self._failure = ""  # of the meeting
        self._is_over = threading.Event()  # the meeting has failed, or all joiners have met the rest

    @property
    def url(self) -> str:
        """The URL of the store."""
        return "" if self._server is None else self._server.url

    def invite(self, first: Invitation) -> None:
        """Send each joiner its invitation; `first` is that of the first one."""
        for index, link in enumerate(self._links):
            send(link, first._replace(rank=first.rank + index)._asdict())

    def begin(self) -> None:
        """Let the joiners begin."""
        for link in self._links:
            send(link, {"begin": True})

    def fail(self, reason: str) -> None:
        """Tell all members and joiners that still connect to each other that they must give up, for this reason."""
        if self._server is not None:
            self._server.fail(reason)

    def refuse(self, reason: str) -> None:
        """Refuse the joiners, unless the attempt has failed because one of them was lost."""
        for link in () if self._is_lost else self._links:
            send(link, {"error": f"the job has not admitted this process: {reason}"})

    @contextlib.contextmanager
    def watched(self, session: Session, members: Session, deadline: Deadline) -> Iterator[None]:
        """Watch joiners and members during the block, and afterwards until all joiners have met all members.

        If one is lost or late, the meeting fails for all.

        Args:
            session: the session of the meeting, of this rank.
            members: the session of the old world, which knows if a member is lost.
            deadline: the end of the meeting.

        Raises:
            RendezvousError: the meeting has failed after the block.
        """
        if self._server is None:
            yield
            return
        left = threading.Event()
        watcher = threading.Thread(target=self._watch, args=(left, session, members, deadline), daemon=True)
        watcher.start()
        try:
            yield
            self._is_over.wait()
            if self._failure:
                raise RendezvousError(self._failure)
        finally:
            left.set()
            watcher.join()

    def close(self) -> None:
        """Close the connections and the store."""
        for link in self._links:
            link.close()
        if self._server is not None:
            self._server.close()

    def _watch(self, left: threading.Event, session: Session, members: Session, deadline: Deadline) -> None:
        """Watch until the leader has `left` the meeting. It ends when joiners have met members, or failed."""
        meeting = list(self._links)
        while not left.wait(_PAUSE_S) and not self._failure:
            for link in readable(meeting):
                meeting.remove(link)
                try:
                    receive(link, deadline)
                except (OSError, ValueError):
                    self._is_lost = True
            failures = (
                ("a process was lost while it joined", self._is_lost),
                ("a member of the job was lost while others joined", members.control.failed()),
                ("not all processes met in time", deadline.has_passed()),
            )
            self._failure = next((text for text, applies in failures if applies), "")
            if self._failure:
                session.give_up(self._failure)
                self.fail(self._failure)
            if self._failure or not meeting:
                self._is_over.set()


def store_of_leader(url: str, me: RankIdentity, deadline: Deadline, options: Options) -> TcpStore:
    """Open the store where members and joiners meet. The leader has served it since before it sent its URL.

    Raises:
        RendezvousError: the leader is gone.
    """
    host, port = host_and_port(url)
    limit_s, tls = min(deadline.remaining_s(), _ANSWER_S), TlsPolicy(options.tls)
    return TcpStore(host, port, key=me.key, job=me.job, timeout_s=limit_s, is_served=True, tls=tls)


def _await_joiners(joiners: Joiners, count: int, deadline: Deadline) -> int:
    """Return the number of joiners that wait; for at most a round, wait until they are `count`."""
    end = min(time.monotonic() + _ROUND_S, deadline.when)
    while (waiting := joiners.look()) < count and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return waiting


def _limit_s(options: Options, deadline: Deadline) -> float:
    """Return the time limit of a call by which the members agree: no later than soon after `deadline`."""
    return min(options.timeout_s, deadline.remaining_s() + _AGREEING_S)


def _compare(world: Communicator, count: int | None, epoch: int, limit_s: float | None) -> int:
    """Check that all members pass the same count; return the highest epoch that one of them knows.

    Raises:
        MismatchError: the counts differ. The world goes on.
    """
    rows = world.allgather(np.array([[_NO_COUNT if count is None else count, epoch]], np.int64), timeout_s=limit_s)
    counts = rows[:, 0].tolist()
    odd = next((rank for rank, other in enumerate(counts) if other != counts[0]), None)
    if odd is not None:
        calls = [f"rank {rank} called grow({_shown(counts[rank])})" for rank in (odd, 0)]
        raise MismatchError(f"ranks disagree on grow: {calls[0]}, where {calls[1]}", rank=world.rank, peer=odd)
    return int(rows[:, 1].max())


def _text(error: BaseException) -> str:
    return error.message if isinstance(error, UnisonoError) else str(error)


def _shown(count: int) -> str:
    return "" if count == _NO_COUNT else f"count={count}"


def _broadcast(world: Communicator, decision: GrowDecision, limit_s: float) -> GrowDecision:
    """Return the decision of the leader on all members."""
    text = json.dumps(decision._asdict()).encode()
    frame = np.zeros(_DECISION_NBYTES, np.uint8)
    frame[: len(text)] = np.frombuffer(text, np.uint8)
    message = world.broadcast(frame, timeout_s=limit_s).tobytes().rstrip(b"\0")
    return GrowDecision(**json_of(message, {"do": str, "joiners": int, "store": str, "error": str}, "it"))
