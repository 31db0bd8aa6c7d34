"""The agreement of the surviving ranks after a loss: which ranks go on, and where they meet. `shrink()` uses it.

Theory of operation
-------------------
Every rank knows the roster. The listener of a rank answers as long as its process lives and has not left the job. A
rank that calls `shrink()` looks for a leader of the survivors: it dials the members in their order, and the first one
that answers is its leader. The rank is then a follower of this leader. If the rank comes to itself first, it leads.

The leader probes the absent members again and again, until every member that answers has connected to it. Then it sends
the verdict to its followers. If a member before the leader answers, the leader closes the links to its followers and
follows that member. A follower that loses its leader starts again. So all ranks that can reach each other agree on one
leader. A link ends when the process of its other end does. No rank waits for another without watching its link, or
longer than the caller allows.

The survivors then meet at a store of the leader, in a usual rendezvous. The leader watches its followers meanwhile. If
one dies before all have met, the leader makes the store fail for all, and they start again. If the network falls into
parts, every part can find a leader of its own. Then the parts go on separately, because no rank can know of the others.

Open questions
--------------
Considered: a fixed leader. Rank 0 fails most often, because most programs do their extra work there (decision 4). So
the first member that answers leads.

Doubted: a member that does not answer for 5 s is excluded, although it may only be stopped, or slow on a crowded host.
If the network falls into parts, each part goes on with a leader of its own, and the program must compare `size` with
the number that it needs: otherwise two parts may both write a checkpoint. The members are dialled in their order, so
each lost host before the leader takes another 5 s.

This would change our mind: users who lose results to two parts. Then a part without a majority of the old members
should refuse to go on. A survivor of two ranks would then always end.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from unisono.errors import RendezvousError, UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.json_checks import checked
from unisono.transports.links.handshake import Hello
from unisono.transports.links.link_messages import receive, send

_log = log.get("links")

# Why a survivor dials; the HELLO carries it in its field `lane`.
_TO_FOLLOW, _TO_PROBE = 0, 1
# How long a member may take to complete the handshake; a member whose host is down never answers.
_ANSWER_S = 5.0
_GRACE_S = 2.0
_PROBES = 32
_PAUSE_S = (0.05, 1.0)
_ARRIVED = b"!"
_WENT_ON = "the other survivors have gone on without this rank, which did not answer in time"

# Dials a member of a job: (rank, communicator, lane, timeout_s) → socket.
Dial = Callable[[int, int, int, float], socket.socket]


class Verdict(NamedTuple):
    """The agreed ranks of the job that go on, the epoch of the new job, and the URL of its store."""

    members: tuple[int, ...]
    epoch: int
    store: str


class Arrivals:
    """The connections of ranks that want to follow this rank, by communicator, until `take` returns them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: defaultdict[int, dict[int, socket.socket]] = defaultdict(dict)
        self._over: set[int] = set()

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over the connection of a survivor, without blocking."""
        if hello.lane == _TO_PROBE:
            sock.close()  # the probe asked only whether this rank answers
            return
        with self._changed:
            if hello.communicator not in self._over:
                before = self._waiting[hello.communicator].pop(hello.sender, None)
                self._waiting[hello.communicator][hello.sender] = sock
                self._changed.notify_all()
            else:
                send(sock, {"error": _WENT_ON})
                before = sock
        if before is not None:
            before.close()

    def take(self, communicator: int, timeout_s: float) -> dict[int, socket.socket]:
        """Return the new connections, by rank; wait up to `timeout_s` seconds for the first one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting.get(communicator)), timeout_s)
            return self._waiting.pop(communicator, {})

    def end(self, communicator: int) -> None:
        """Refuse all connections of followers from now on, because they come too late."""
        with self._changed:
            self._over.add(communicator)
            late = self._waiting.pop(communicator, {})
        for sock in late.values():
            send(sock, {"error": _WENT_ON})
            sock.close()

    def close(self) -> None:
        """Close all connections."""
        with self._changed:
            waiting = [sock for followers in self._waiting.values() for sock in followers.values()]
            self._waiting.clear()
        for sock in waiting:
            sock.close()


class Search:
    """One rank's search for the survivors of a communicator.

    Args:
        me: the number of this rank in the job. All ranks here are numbers in the job.
        communicator: the id of the communicator.
        members: all its ranks, in its order.
        epoch: the highest epoch that this rank has been in.
        arrivals: the connections of followers to this rank.
        dial: connects to a member.
        serve: starts a store and returns its URL; only the leader calls it.
    """

    def __init__(
        self,
        me: int,
        communicator: int,
        members: Sequence[int],
        epoch: int,
        arrivals: Arrivals,
        dial: Dial,
        serve: Callable[[], str],
    ) -> None:
        self._me = me
        self._communicator = communicator
        self._members = tuple(members)
        self._epoch = epoch
        self._arrivals = arrivals
        self._dial = dial
        self._serve = serve
        self._links: dict[int, socket.socket] = {}  # to the leader, or from the leader to its followers

    def agree(self, deadline: Deadline) -> Verdict:
        """Return the verdict of the leader (the list of survivors), once all survivors are connected to it.

        Raises:
            RendezvousError: members that live did not connect before `deadline`.
        """
        while True:
            for candidate in self._members:
                verdict = self._lead(deadline) if candidate == self._me else self._follow(candidate, deadline)
                if verdict is not None:
                    return verdict
                if deadline.has_passed():
                    raise RendezvousError("the survivors did not agree in time")

    @contextlib.contextmanager
    def watch(self, lost: Callable[[str], None]) -> Iterator[None]:
        """Watch the followers during the block: if one dies, the leader calls `lost` with a message."""
        stop, wake = map(closed_in_child, socket.socketpair())
        watcher = threading.Thread(target=self._watch, args=(stop, lost), name="unisono-survivors", daemon=True)
        watcher.start()
        try:
            yield
            for sock in self._links.values():
                with contextlib.suppress(OSError):
                    sock.sendall(_ARRIVED)
        finally:
            wake.close()
            watcher.join()
            stop.close()
            self.close()

    def close(self) -> None:
        """Close all links."""
        for sock in self._links.values():
            sock.close()
        self._links.clear()

    def _follow(self, candidate: int, deadline: Deadline) -> Verdict | None:
        """Connect to the candidate for the leader, and return its verdict: the list of survivors.

        Return None if it does not answer, or closes the link before.
        """
        link = self._reach(candidate, _TO_FOLLOW)
        if link is None:
            return None
        with contextlib.ExitStack() as closing:
            closing.callback(link.close)
            try:
                send(link, {"epoch": self._epoch})
                # The leader gives up first, and says why.
                answer = receive(link, Deadline(deadline.remaining_s() + _GRACE_S))
            except TimeoutError:
                raise RendezvousError(f"rank {candidate} is alive, but did not call shrink() in time") from None
            except (OSError, ValueError):
                return None
            if "error" in answer:
                raise RendezvousError(str(answer["error"]))
            verdict = self._verdict_of(answer, candidate)
            closing.pop_all()
            self._links = {candidate: link}
            return verdict

    def _verdict_of(self, answer: dict[str, Any], leader: int) -> Verdict:
        try:
            checked(answer, {"members": [int], "epoch": int, "store": str})
            if not {self._me} <= set(answer["members"]) <= set(self._members):
                raise ValueError(f"the ranks {answer['members']} are not survivors with rank {self._me} among them")
        except ValueError as error:
            raise RendezvousError(
                f"rank {leader} sent no valid list of the ranks that continue: {error}", peer=leader
            ) from None
        return Verdict(tuple(answer["members"]), answer["epoch"], answer["store"])

    def _lead(self, deadline: Deadline) -> Verdict | None:
        """Wait until every live member follows this rank, and send them the verdict; None if another rank must lead."""
        epochs = {self._me: self._epoch}
        pause, longest = _PAUSE_S
        while True:
            self._add_followers(self._arrivals.take(self._communicator, pause), epochs)
            pause = min(2 * pause, longest)
            absent = [rank for rank in self._members if rank != self._me and rank not in self._links]
            alive = self._alive(absent)
            if any(self._members.index(rank) < self._members.index(self._me) for rank in alive):
                self.close()
                return None
            if not alive and not self._ended():
                break
            if deadline.has_passed():
                shown = ", ".join(str(rank) for rank in alive[:8])
                error = f"rank(s) {shown} of the job are alive, but did not call shrink() in time"
                self._send_all({"error": error})
                self.close()
                raise RendezvousError(error)
        members = tuple(rank for rank in self._members if rank == self._me or rank in self._links)
        verdict = Verdict(members, max(epochs[rank] for rank in members) + 1, self._serve())
        self._send_all(verdict._asdict())
        return verdict

    def _add_followers(self, connections: dict[int, socket.socket], epochs: dict[int, int]) -> None:
        """Add the ranks that have connected as followers, and remove the followers whose links have ended."""
        for rank in self._ended():
            self._links.pop(rank).close()
        for rank, link in connections.items():
            try:
                epochs[rank] = receive(link, Deadline(_ANSWER_S), {"epoch": int})["epoch"]
            except (OSError, ValueError):
                link.close()
                continue
            before, self._links[rank] = self._links.get(rank), link
            if before is not None:
                before.close()

    def _ended(self) -> list[int]:
        """Return the followers whose link has ended: a follower sends nothing until it has the verdict."""
        poll = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return [ranks[descriptor] for descriptor, _ in poll.poll(0)]

    def _alive(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks in `ranks` that answer a probe."""
        if not ranks:
            return []
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_PROBES, len(ranks))) as threads:
            return [rank for rank, answers in zip(ranks, threads.map(self._answers, ranks), strict=True) if answers]

    def _answers(self, rank: int) -> bool:
        link = self._reach(rank, _TO_PROBE)
        if link is not None:
            link.close()
        return link is not None

    def _reach(self, rank: int, lane: int) -> socket.socket | None:
        try:
            return self._dial(rank, self._communicator, lane, _ANSWER_S)
        except UnisonoError as error:
            _log.debug("rank %d does not answer: %s", rank, error.message)
            return None

    def _send_all(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            send(link, message)

    def _watch(self, stop: socket.socket, lost: Callable[[str], None]) -> None:
        """Watch the links until every follower has sent that it has met the other survivors, or `stop` ends."""
        watched = {link.fileno(): (rank, link) for rank, link in self._links.items()}
        while watched:
            poll = select.poll()
            for descriptor in (stop.fileno(), *watched):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == stop.fileno():
                    return
                rank, link = watched.pop(descriptor)
                if _byte(link) != _ARRIVED:
                    lost(f"rank {rank} of the job was lost while the survivors met")
                    return


def _byte(link: socket.socket) -> bytes:
    try:
        return link.recv(1)
    except OSError:
        return b""
