"""Finds out which ranks are on one host, which means that they can share memory. The ranks try it before they meet.

Theory of operation. The first rank of a job in a network namespace, for one user, binds an abstract Unix socket, whose
name only ranks of the job can compute. Every later rank finds that the name is taken. It connects, runs the handshake,
and passes a sealed segment, as it will do for a channel. The first rank maps the segment and writes the id of the host
into it, which is a random number. So two ranks have the same id exactly if sockets, descriptors and mapped memory have
worked between them. The roster carries the id, so all ranks know the same hosts.

Host names, boot ids of the kernel (which cloned machines share) and inodes of namespaces decide nothing. They only
explain why two ranks are apart.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import mmap
import os
import socket
import time
from dataclasses import replace
from functools import partial

from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.records import record
from unisono.transports.host.sealed_memory import sealed_memory
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.links.event_loop import EventLoop
from unisono.transports.links.handshake import NO_RANK, Admission, DialerHandshake, HandshakeError, Hello, Purpose
from unisono.transports.links.handshake_io import BACKLOG, HandshakeServer, greet

_log = log.get("links")

_ID_NBYTES = 16
_PENDING_LIMIT = 1024
_PAUSE_S = 0.001
_MOST_REFUSALS = 3
_MOST_REASON = 200


@record
class Surroundings:
    """The machine, the user and the namespaces of a process, to explain why it shares no memory with another.

    Attributes:
        machine: the boot id of the kernel; empty if unknown.
        host: the host name, for people.
        network, users: the inodes of its network and user namespaces; 0 if unknown.
        user: the effective user id.
        alone: the reason why it can share memory with no process; empty if it can.
    """

    machine: str
    host: str
    network: int
    users: int
    user: int
    alone: str = ""

    @classmethod
    def here(cls) -> Surroundings:
        """Return the surroundings of this process. Facts that /proc hides (gVisor, a masked /proc) are empty or 0."""
        machine = ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            machine = file.read().strip()
        return cls(machine, os.uname().nodename, _namespace("net"), _namespace("user"), os.geteuid())

    def apart_from(self, peer: Surroundings) -> str:
        """Return in a few words why `peer`, which is on another host, cannot share memory with this process."""
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
    """Return whether two ids differ; False if one is unknown."""
    return bool(one and other) and one != other


def _namespace(kind: str) -> int:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return 0


class HostDiscovery:
    """Finds the host of one rank, in its constructor, and answers later ranks of the host, until `close`.

    Attributes:
        host_id: equal on two ranks exactly if they can share memory.
        surroundings: the surroundings of this process.

    Args:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks. A single rank asks no other.
        meeting: the number of earlier rendezvous of the ranks with this key. Only ranks with the same number find each
            other.
        timeout_s: seconds that the first rank of the host may take to answer, or a later rank to ask.
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
        self._asking: set[socket.socket] = set()  # ranks that have not passed their segment yet
        if size == 1:
            return
        facts = repr(("host", job, epoch, meeting, self.surroundings.user)).encode()
        name = f"\0unisono-host-{hmac.digest(key, facts, 'sha256')[:16].hex()}"
        try:
            self._find(name, Deadline(timeout_s))
        except (OSError, HandshakeError, AttributeError) as error:  # AttributeError: a Python without memfd
            if is_exhausted(error):  # TCP needs descriptors and threads too
                raise
            reason = getattr(error, "strerror", None) or str(error)
            self.surroundings = replace(self.surroundings, alone=reason[:_MOST_REASON])
            _log.warning("rank %d shares memory with no other rank, and uses TCP instead: %s", rank, reason)

    def close(self) -> None:
        """Stop answering, once all ranks have found their hosts. May be called twice."""
        if self._serving is not None:
            (loop, handshakes, listening), self._serving = self._serving, None
            loop.close(handshakes.close)
            listening.close()
            for sock in self._asking:
                sock.close()

    def _find(self, name: str, deadline: Deadline) -> None:
        """Bind the abstract socket `name` and answer the other ranks, or ask the rank that has bound it.

        Try again if that rank has gone or is too busy.
        """
        refusals = 0
        with open(_segment_like_a_channels(), "r+b", buffering=0) as segment:
            while not self._be_first(name):
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(deadline.checked_remaining_s())
                    try:
                        sock.connect(name)
                        self.host_id = self._ask(sock, segment.fileno(), deadline)
                        return
                    except (ConnectionResetError, BrokenPipeError):
                        refusals += 1
                        if refusals == _MOST_REFUSALS:
                            raise
                    except OSError as error:
                        # The first rank does not listen yet, or its queue is full.
                        if error.errno not in (errno.ECONNREFUSED, errno.EAGAIN):
                            raise
                time.sleep(_PAUSE_S)

    def _be_first(self, name: str) -> bool:
        """Bind `name` and answer other ranks in a thread; return False if another rank has bound it."""
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
        admission = Admission(job, epoch, NO_RANK, self._others, frozenset({Purpose.HOST}))
        loop = EventLoop("unisono-host", lambda _: listening.close())  # ranks that ask later are then refused
        handshakes = HandshakeServer(loop, self._key, admission, _PENDING_LIMIT, partial(self._admit, loop))
        handshakes.watch(listening)
        loop.start()
        self._serving = loop, handshakes, listening

    def _admit(self, loop: EventLoop, hello: Hello, sock: socket.socket) -> None:
        """Answer a rank once it has passed its segment. That may take long, and no other rank waits for it."""
        self._asking.add(sock)
        loop.watch(sock, partial(self._answer, loop, hello, sock))
        loop.call_after(self._timeout_s, partial(self._drop, loop, sock))

    def _drop(self, loop: EventLoop, sock: socket.socket) -> None:
        if sock in self._asking:
            self._asking.remove(sock)
            loop.unwatch(sock)
            sock.close()

    def _answer(self, loop: EventLoop, hello: Hello, sock: socket.socket) -> None:
        """Write the id of the host into the segment that a rank has passed."""
        with contextlib.ExitStack() as opened:
            opened.callback(self._drop, loop, sock)
            _, descriptors, flags, _ = socket.recv_fds(sock, 1, 1)
            if flags & socket.MSG_CTRUNC and not descriptors:  # this process is at its limit of open files
                raise OSError(errno.EMFILE, "the segment of another rank cannot be received: too many open files")
            segments = [opened.enter_context(open(number, "r+b", buffering=0)) for number in descriptors]
            if not segments:  # the rank has gone
                return
            with mmap.mmap(segments[0].fileno(), _ID_NBYTES) as mapped:
                mapped[:] = bytes.fromhex(self.host_id)
            sock.sendall(b"\1")
        _log.debug("rank %d is on the host of this one", hello.sender)

    def _ask(self, sock: socket.socket, segment: int, deadline: Deadline) -> str:
        """Return the id of the host, which the first rank writes into `segment`."""
        greet(sock, DialerHandshake(self._key, Hello(*self._hello)), deadline)
        socket.send_fds(sock, [b"\0"], [segment])
        sock.settimeout(deadline.checked_remaining_s())
        if not sock.recv(1):
            raise ConnectionResetError("the first rank of this host did not map the memory that was passed to it")
        with mmap.mmap(segment, _ID_NBYTES, access=mmap.ACCESS_READ) as mapped:
            return mapped[:].hex()


def _segment_like_a_channels() -> int:
    """Return the descriptor of sealed memory as large as that of a channel, so that limits of size show up here."""
    from unisono.transports import _core  # `unisono doctor` also describes surroundings where the core is missing

    return sealed_memory("unisono-host", _core.SHM_NBYTES)
