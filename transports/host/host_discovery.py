"""Which ranks are on one host, which means that they can hand each other memory: found by doing it, before they meet.

Theory of operation. The first rank of a job that comes by in a network namespace, as one user, binds an abstract Unix
socket whose name only ranks of the job can compute. Every later one finds the name taken, connects, says the hello,
and passes a sealed segment, as it will for a channel; the first maps it and writes the host's id into it, a random
number. So two ranks have the same id exactly if the sockets, the descriptors and the mapped memory between them have
worked, and the id, which the roster carries, is the same knowledge on all ranks. Names of hosts, ids of the kernel's
boot (machines that were cloned share theirs) and inodes of namespaces decide nothing: they serve to say why two ranks
are apart.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hmac
import mmap
import os
import socket
import time
from dataclasses import replace
from functools import partial

from unisono import log
from unisono.deadlines import Deadline
from unisono.forks import closed_in_child
from unisono.records import record
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import NO_RANK, DialerHandshake, Endpoint, HandshakeError, Hello, Purpose
from unisono.transports.links.handshake_io import BACKLOG, HandshakeServer, greet

_log = log.get()

_ID_NBYTES = 16
_PENDING_LIMIT = 1024
_PAUSE_S = 0.001
_MOST_REFUSALS = 3
_MOST_REASON = 200
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@record
class Surroundings:
    """Where a process is, to say why it shares no memory with another.

    Attributes:
        machine: the id of the kernel's boot; empty if it is not known.
        host: the name of its host, for people.
        network, users: the inodes of its network and user namespaces; 0 if they are not known.
        user: the id of its effective user.
        alone: why it shares memory with nobody; empty if it may.
    """

    machine: str
    host: str
    network: int
    users: int
    user: int
    alone: str = ""

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this process; what its /proc does not show (gVisor, a masked /proc) is empty or 0."""
        machine = ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            machine = file.read().strip()
        return cls(machine, os.uname().nodename, _namespace("net"), _namespace("user"), os.geteuid())

    def apart_from(self, peer: Surroundings) -> str:
        """Return in a few words why a process there, which is on another host than this one, is so."""
        reasons = (
            (_differ(peer.machine, self.machine), "another machine"),
            (_differ(peer.network, self.network), "another network namespace"),
            (peer.user != self.user, f"another user: {peer.user}, here {self.user}"),
            (bool(peer.alone), f"no shared memory there: {peer.alone}"),
            (bool(self.alone), f"no shared memory here: {self.alone}"),
            (_differ(peer.users, self.users), "another user namespace"),
        )
        return next((reason for applies, reason in reasons if applies), "its sockets cannot be reached")


def _differ(one: str | int, other: str | int) -> bool:
    """Return whether two ids are known to differ."""
    return bool(one and other) and one != other


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


class Locality:
    """Finds the host of one rank, in its constructor, and tells it to ranks that come later, until `close`.

    Attributes:
        host_id: equal on two ranks exactly if they can share memory.
        surroundings: those of this process.

    Args:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks. One rank alone asks nobody.
        meeting: how often the ranks of this job have met by this key before; only ranks of one meeting find each other.
        timeout_s: seconds that the first rank of the host may take to answer, or another one to ask.
    """

    def __init__(
        self, key: bytes, job: bytes, epoch: int, rank: int, size: int, meeting: int, timeout_s: float
    ) -> None:
        self.surroundings = Surroundings.here()
        self.host_id = os.urandom(_ID_NBYTES).hex()
        self._key = key
        self._hello = (job, epoch, rank, NO_RANK, Purpose.HOST)
        self._others = frozenset(range(size)) - {rank}
        self._timeout_s = timeout_s
        self._serving: tuple[EventLoop, HandshakeServer, socket.socket] | None = None
        self._asking: set[socket.socket] = set()  # those that have said the hello, and have passed nothing yet
        if size == 1:
            return
        facts = repr(("host", job, epoch, meeting, self.surroundings.user)).encode()
        name = f"\0unisono-host-{hmac.digest(key, facts, 'sha256')[:16].hex()}"
        try:
            self._find(name, Deadline(timeout_s))
        except (OSError, HandshakeError, AttributeError) as error:  # of Python without memfd
            if is_exhausted(error):  # TCP needs as much
                raise
            reason = getattr(error, "strerror", None) or str(error)
            self.surroundings = replace(self.surroundings, alone=reason[:_MOST_REASON])
            _log.warning("rank %d shares memory with no other rank, and uses TCP instead: %s", rank, reason)

    def close(self) -> None:
        """Answer no more, when all ranks have found their hosts. May be called twice."""
        if self._serving is not None:
            (loop, doorkeeper, listening), self._serving = self._serving, None
            loop.close(doorkeeper.close)
            listening.close()
            for sock in self._asking:
                sock.close()

    def _find(self, name: str, deadline: Deadline) -> None:
        """Be the first under `name`, or ask the one that is, again if it has gone or was too busy to listen."""
        refusals = 0
        with open(_sealed_segment(), "r+b", buffering=0) as segment:
            while not self._be_first(name):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(deadline.remaining_s())
                    try:
                        sock.connect(name)
                        self.host_id = self._ask(sock, segment.fileno(), deadline)
                        return
                    except (ConnectionResetError, BrokenPipeError):
                        refusals += 1
                        if refusals == _MOST_REFUSALS:
                            raise
                    except OSError as error:
                        # It does not listen yet, or has too many before us.
                        if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN):
                            raise
                time.sleep(_PAUSE_S)

    def _be_first(self, name: str) -> bool:
        """Bind `name` and answer those who ask, in a thread; return False if another rank has it."""
        listening = closed_in_child(socket.socket(socket.AF_UNIX))
        try:
            listening.bind(name)
        except OSError as error:
            listening.close()
            if error.errno == errno.EADDRINUSE:
                return False
            raise
        try:
            self._serve(listening)
        except BaseException:
            listening.close()
            raise
        return True

    def _serve(self, listening: socket.socket) -> None:
        listening.listen(BACKLOG)
        listening.setblocking(False)
        job, epoch, *_ = self._hello
        endpoint = Endpoint(job, epoch, NO_RANK, self._others, frozenset({Purpose.HOST}))
        loop = EventLoop("unisono-host", lambda _: listening.close())  # which refuses those who ask later
        doorkeeper = HandshakeServer(loop, self._key, endpoint, _PENDING_LIMIT, partial(self._admit, loop))
        doorkeeper.watch(listening)
        loop.start()
        self._serving = loop, doorkeeper, listening

    def _admit(self, loop: EventLoop, hello: Hello, sock: socket.socket) -> None:
        """Answer a rank once it has passed its segment, which may take it long: nobody else waits for that."""
        self._asking.add(sock)
        loop.watch(sock, partial(self._answer, loop, hello, sock))
        loop.call_after(self._timeout_s, partial(self._let_go, loop, sock))

    def _let_go(self, loop: EventLoop, sock: socket.socket) -> None:
        if sock in self._asking:
            self._asking.remove(sock)
            loop.unwatch(sock)
            sock.close()

    def _answer(self, loop: EventLoop, hello: Hello, sock: socket.socket) -> None:
        """Write the host's id into the segment that a rank has passed."""
        with contextlib.ExitStack() as opened:
            opened.callback(self._let_go, loop, sock)
            _, descriptors, flags, _ = socket.recv_fds(sock, 1, 1)
            if flags & socket.MSG_CTRUNC and not descriptors:  # this process has no room for it
                raise OSError(errno.EMFILE, "the segment of another rank cannot be taken: too many open files")
            segments = [opened.enter_context(open(each, "r+b", buffering=0)) for each in descriptors]
            if not segments:  # it has gone
                return
            with mmap.mmap(segments[0].fileno(), _ID_NBYTES) as mapped:
                mapped[:] = bytes.fromhex(self.host_id)
            sock.sendall(b"\1")
        _log.debug("rank %d is on the host of this one", hello.sender)

    def _ask(self, sock: socket.socket, segment: int, deadline: Deadline) -> str:
        """Return the host's id, as the first rank here writes it into `segment`."""
        greet(sock, DialerHandshake(self._key, Hello(*self._hello)), deadline)
        socket.send_fds(sock, [b"\0"], [segment])
        sock.settimeout(deadline.remaining_s())
        if not sock.recv(1):
            raise ConnectionResetError("the first rank of this host did not map the memory that was passed to it")
        with mmap.mmap(segment, _ID_NBYTES, access=mmap.ACCESS_READ) as mapped:
            return mapped[:].hex()


def _sealed_segment() -> int:
    """Return the descriptor of a segment like those of channels, also in its size, of which a page is used."""
    from unisono.transports import _core  # `unisono doctor` looks at surroundings where there is no core, too

    segment = os.memfd_create("unisono-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(segment, _core.SHM_NBYTES)
        fcntl.fcntl(segment, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(segment)
        raise
    return segment
