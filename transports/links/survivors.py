"""How ranks agree, after a loss, on who is left of them: the survivors.

Theory of operation. Every rank knows the roster, and its listener answers as long as its process lives and has not left
the job. A rank that wants to go on looks for a leader: it dials the members in their order, and the first that answers,
or itself, is the one. A leader looks who else is there, again and again, until all that answer have come to it; then it
says who they are. If it finds that a member before it answers, it sends its followers away and goes there itself, and
whoever loses its leader looks for one anew; so all that can reach each other end with the same one. A link ends when a
process does, and nobody waits for a rank without looking at its link, or longer than the caller allows.

What follows, a store that the leader serves and the usual rendezvous there, is watched by it too: if a rank dies before
all have met, the leader makes the store fail for all, and they begin again. Only where a network falls into parts can
two leaders find members, of its own part each; there the parts go on separately, as nobody in them can know.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from unisono import log
from unisono.deadlines import Deadline
from unisono.errors import RendezvousError, UnisonoError
from unisono.forks import closed_in_child
from unisono.transports.links.handshake import Hello

_log = log.get()

# What a survivor dials for, said in the hello as its lane.
_TO_FOLLOW, _TO_LOOK = 0, 1
# How long a member may take to answer the hello; one whose host is gone says nothing.
_ANSWER_S = 5.0
_GRACE_S = 2.0
_PROBES = 32
_PAUSE_S = (0.05, 1.0)
_MESSAGE_LIMIT = 1 << 20
_LENGTH = struct.Struct("!I")
_ARRIVED = b"!"
_WENT_ON = "the other survivors have gone on without this rank, which did not answer in time"

# Dials a member of a job: (rank, communicator, lane, timeout_s) → socket.
Dial = Callable[[int, int, int, float], socket.socket]


class Verdict(NamedTuple):
    """Who goes on, by their ranks in the job; in which epoch; and the URL of the store where they meet."""

    members: tuple[int, ...]
    epoch: int
    store: str


class Arrivals:
    """The ranks that have come to this one, as to their leader, and have not been received yet; by communicator."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: defaultdict[int, dict[int, socket.socket]] = defaultdict(dict)
        self._over: set[int] = set()

    def admit(self, hello: Hello, sock: socket.socket) -> None:
        """Take over the connection of a survivor; does not block."""
        if hello.lane == _TO_LOOK:
            sock.close()  # that it was answered is all it was to find out
            return
        with self._changed:
            if hello.communicator not in self._over:
                before = self._waiting[hello.communicator].pop(hello.sender, None)
                self._waiting[hello.communicator][hello.sender] = sock
                self._changed.notify_all()
            else:
                _say(sock, {"error": _WENT_ON})
                before = sock
        if before is not None:
            before.close()

    def take(self, communicator: int, timeout_s: float) -> dict[int, socket.socket]:
        """Return those that have come since the last time, waiting up to `timeout_s` seconds for one."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._waiting.get(communicator)), timeout_s)
            return self._waiting.pop(communicator, {})

    def end(self, communicator: int) -> None:
        """From now on, tell those that come that it is too late."""
        with self._changed:
            self._over.add(communicator)
            late = self._waiting.pop(communicator, {})
        for sock in late.values():
            _say(sock, {"error": _WENT_ON})
            sock.close()

    def close(self) -> None:
        """Send all away."""
        with self._changed:
            waiting = [sock for of_one in self._waiting.values() for sock in of_one.values()]
            self._waiting.clear()
        for sock in waiting:
            sock.close()


class Search:
    """One rank's search for the survivors of a communicator.

    Args:
        me: this rank, in the job, as are all ranks here.
        communicator: its id.
        members: all its ranks, in its order.
        epoch: the highest that this rank has been in.
        arrivals: who comes to this rank.
        dial: connects to a member.
        serve: starts a store and returns its URL; called by the leader.
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
        self._links: dict[int, socket.socket] = {}  # to the leader; or the leader's, to its followers

    def agree(self, deadline: Deadline) -> Verdict:
        """Return what the leader says, once all survivors have come to it.

        Raises:
            RendezvousError: members that live did not come until `deadline`.
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
        """While this is open, the leader calls `lost` with what to say if one of its followers dies."""
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
        """Go to `candidate`, and return what it says in the end; None if it is not there, or goes before that."""
        link = self._reach(candidate, _TO_FOLLOW)
        if link is None:
            return None
        with contextlib.ExitStack() as closing:
            closing.callback(link.close)
            try:
                _say(link, {"epoch": self._epoch})
                answer = _hear(link, Deadline(deadline.left_s() + _GRACE_S))  # a leader gives up before, and says why
            except TimeoutError:
                raise RendezvousError(f"rank {candidate} lives, but has not called shrink() in time") from None
            except (OSError, ValueError):
                return None
            if "error" in answer:
                raise RendezvousError(str(answer["error"]))
            verdict = Verdict(tuple(answer["members"]), int(answer["epoch"]), str(answer["store"]))
            closing.pop_all()
            self._links = {candidate: link}
            return verdict

    def _lead(self, deadline: Deadline) -> Verdict | None:
        """Wait until all that live have come, and tell them so; None if another is to lead."""
        epochs = {self._me: self._epoch}
        pause, longest = _PAUSE_S
        while True:
            self._receive(self._arrivals.take(self._communicator, pause), epochs)
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
                error = f"rank(s) {shown} of the job live, but have not called shrink() in time"
                self._tell({"error": error})
                self.close()
                raise RendezvousError(error)
        members = tuple(rank for rank in self._members if rank == self._me or rank in self._links)
        verdict = Verdict(members, max(epochs[rank] for rank in members) + 1, self._serve())
        self._tell(verdict._asdict())
        return verdict

    def _receive(self, arrived: dict[int, socket.socket], epochs: dict[int, int]) -> None:
        """Make those that have come followers, and let go of those that have gone."""
        for rank in self._ended():
            self._links.pop(rank).close()
        for rank, link in arrived.items():
            try:
                epochs[rank] = int(_hear(link, Deadline(_ANSWER_S))["epoch"])
            except (OSError, ValueError, KeyError):
                link.close()
                continue
            before, self._links[rank] = self._links.get(rank), link
            if before is not None:
                before.close()

    def _ended(self) -> list[int]:
        """Return the followers whose link has ended; they say nothing until they are told something."""
        poll = select.poll()
        ranks = {link.fileno(): rank for rank, link in self._links.items()}
        for descriptor in ranks:
            poll.register(descriptor, select.POLLIN)
        return [ranks[descriptor] for descriptor, _ in poll.poll(0)]

    def _alive(self, ranks: Sequence[int]) -> list[int]:
        """Return which of the ranks answer."""
        if not ranks:
            return []
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(_PROBES, len(ranks))) as threads:
            return [rank for rank, answers in zip(ranks, threads.map(self._answers, ranks), strict=True) if answers]

    def _answers(self, rank: int) -> bool:
        link = self._reach(rank, _TO_LOOK)
        if link is not None:
            link.close()
        return link is not None

    def _reach(self, rank: int, lane: int) -> socket.socket | None:
        try:
            return self._dial(rank, self._communicator, lane, _ANSWER_S)
        except UnisonoError as error:
            _log.debug("rank %d does not answer: %s", rank, error.message)
            return None

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            _say(link, message)

    def _watch(self, stop: socket.socket, lost: Callable[[str], None]) -> None:
        """Look at the links until all have said that they have arrived, or `stop` ends."""
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


def _say(link: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, unless the other side has gone, which its link shows in the end."""
    data = json.dumps(message).encode()
    with contextlib.suppress(OSError):
        link.settimeout(_ANSWER_S)
        link.sendall(_LENGTH.pack(len(data)) + data)


def _hear(link: socket.socket, deadline: Deadline) -> dict[str, Any]:
    """Return the next message.

    Raises:
        TimeoutError: there is none until `deadline`.
        OSError: the other side has gone.
        ValueError: it is no message.
    """
    (nbytes,) = _LENGTH.unpack(_exactly(link, _LENGTH.size, deadline))
    if nbytes > _MESSAGE_LIMIT:
        raise ValueError("a message is too long")
    message = json.loads(_exactly(link, nbytes, deadline))
    if not isinstance(message, dict):
        raise ValueError("a message has no fields")
    return message


def _exactly(link: socket.socket, nbytes: int, deadline: Deadline) -> bytes:
    received = b""
    while len(received) < nbytes:
        link.settimeout(deadline.left_s())
        data = link.recv(nbytes - len(received))
        if not data:
            raise ConnectionResetError("it closed the connection")
        received += data
    return received
