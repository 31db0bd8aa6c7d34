"""A rank's place in its job: the key, the roster, the listener, and the control links, shared by its communicators.

Theory of operation. Control links form a star: every other rank dials rank 0 when it joins. Channels are opened by
need: of two ranks that a collective connects, the higher one dials; point-to-point messages have a channel for each
direction, which the sender dials. Dialling needs only the other rank's listener, not its program, so nobody waits for a
rank that is busy. On one host a channel is shared memory: the dialling side makes the memory and a doorbell for each
side, and passes them over the authenticated Unix socket, which then stays open to show when the other side goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from unisono.errors import RendezvousError, TransportUnavailableError
from unisono.options import MOST_TCP_STREAMS, Options
from unisono.transports import _core
from unisono.transports.hello import Hello, Purpose
from unisono.transports.listener import Addresses, Listener, dial
from unisono.transports.rendezvous.roster import Member, Roster

_log = logging.getLogger("unisono")

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_DIAL_TIMEOUT_S = 10.0
_PASS_TIMEOUT_S = 5.0
_DESCRIPTORS = 3
# On the wire, lane 0 is that of point-to-point messages, and lane k + 1 is lane k of collectives.
_WIRE_POINT_TO_POINT = 0
# Above the lane, the hello of a channel over TCP says which of how many streams it opens.
_LANE_MASK = 0xFFFF
_STREAM_SHIFT = 16
_STREAM_MASK = 0xFF
_STREAMS_SHIFT = 24


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this rank is, and what it proves itself with."""

    key: bytes
    job: bytes
    epoch: int
    rank: int
    size: int


class Session:
    """Everything that the communicators of this process share. Closed by the last of them.

    Args:
        identity: who this rank is.
        bind_address: the address to listen on.
    """

    def __init__(self, identity: Identity, bind_address: str) -> None:
        self.identity = identity
        self._options = Options()
        self.control = _core.Control(identity.rank, identity.size)
        self._members: tuple[Member, ...] = ()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._endpoints: dict[int, _core.Endpoint] = {}
        self._early: list[tuple[Hello, socket.socket]] = []  # channels that came before their communicator
        self._streams: dict[tuple[int, int, int], dict[int, socket.socket]] = {}  # of channels that lack some yet
        self._opened: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lanes and peers, by communicator
        self._closed: set[int] = set()  # communicators, whose channels may still be dialled by ranks that have not
        self._linked: set[int] = set()  # the ranks whose control link has been there, even if they have left since
        self._listener = Listener(
            key=identity.key,
            job=identity.job,
            epoch=identity.epoch,
            rank=identity.rank,
            size=identity.size,
            bind_address=bind_address,
            deliver=self._deliver,
        )

    @property
    def addresses(self) -> Addresses:
        """Where this rank can be reached."""
        return self._listener.addresses

    def meet(self, roster: Roster, options: Options) -> None:
        """Open the control links to the members of `roster`.

        Args:
            roster: the ranks of the job.
            options: of their use here: `transport` and those of TCP, for every channel, and `rendezvous_timeout_s`, how
                long rank 0 waits for the others' links.

        Raises:
            RendezvousError: ranks that had arrived did not connect in that time.
        """
        self._members = roster.members
        self._options = options
        timeout_s = options.rendezvous_timeout_s
        if self.identity.rank != 0:
            sock = self._dial(0, Purpose.CONTROL, 0, 0)
            self._add_control_link(0, sock)
            return
        with self._changed:
            everyone = self._changed.wait_for(lambda: len(self._linked) == self.identity.size - 1, timeout_s)
        if not everyone:
            raise RendezvousError(f"not all ranks connected to rank 0 within {timeout_s:g} s of the rendezvous")

    def peers_of_host(self) -> int:
        """Return the number of ranks on this host, this one included."""
        return sum(self._is_local(member.rank) for member in self._members)

    def cores_of_host(self) -> int:
        """Return the number of cores that the ranks of this host may run on, all together."""
        mask = 0
        for member in self._members:
            if self._is_local(member.rank):
                mask |= int(member.cores, 16)
        return mask.bit_count()

    def add_communicator(self, communicator: int, endpoint: _core.Endpoint) -> None:
        """Let channels of `communicator` be opened by other ranks, and take those that have been."""
        with self._lock:
            self._endpoints[communicator] = endpoint
            early, self._early = self._early, []
        for hello, sock in early:
            try:
                self._deliver(hello, sock)
            except (OSError, RuntimeError):  # as in the listener: the other side sees the end of its connection
                _log.exception("channel from rank %d: it cannot be opened", hello.sender)
                sock.close()

    def remove_communicator(self, communicator: int) -> None:
        """Refuse channels of `communicator` from now on."""
        with self._lock:
            self._closed.add(communicator)
            self._endpoints.pop(communicator, None)
            unfinished = [place for place in self._streams if place[0] == communicator]
            waiting = [sock for place in unfinished for sock in self._streams.pop(place).values()]
            self._opened.pop(communicator, None)
        for sock in waiting:
            sock.close()

    def transport_to(self, peer: int) -> str:
        """Return the transport of channels to `peer`: "shm" or "tcp".

        Raises:
            TransportUnavailableError: shared memory was asked for, and the peer is on another host.
        """
        transport = self._options.transport
        if transport == "auto":
            return "shm" if self._is_local(peer) else "tcp"
        if transport == "shm" and not self._is_local(peer):
            raise TransportUnavailableError(
                f"rank {peer} is on another host, which shared memory does not reach; use UNISONO_TRANSPORT=auto",
                rank=self.identity.rank,
                peer=peer,
            )
        return transport

    def shares_memory(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks exchange messages through shared memory."""
        return all(self.transport_to(rank) == "shm" for rank in ranks)

    def open_channels(self, communicator: int, wanted: Iterable[tuple[int, int]]) -> None:
        """Dial the peers of those (lane, peer) pairs whose channel this rank must open and has not opened yet.

        Raises:
            PeerLostError, CollectiveTimeoutError, TransportUnavailableError: a peer cannot be reached.
        """
        opened = self._opened[communicator]
        for lane, peer in wanted:
            ours = lane == _core.SENDING_LANE or (lane >= 0 and peer < self.identity.rank)
            if ours and (lane, peer) not in opened:
                self._open_channel(communicator, lane, peer)
                opened.add((lane, peer))

    def close(self, farewell: str) -> None:
        """Leave the job: `farewell` says why, or is empty."""
        self._listener.close()
        self.control.leave(farewell)
        with self._lock:
            self._endpoints.clear()
            waiting = [sock for _, sock in self._early]
            waiting += [sock for streams in self._streams.values() for sock in streams.values()]
            self._early.clear()
            self._streams.clear()
        for sock in waiting:
            sock.close()

    def abandon(self) -> None:
        """In a forked child: let go of everything that belongs to the parent."""
        self.control.abandon()

    def _is_local(self, peer: int) -> bool:
        return self._members[peer].addresses.host_id == self.addresses.host_id

    def _dial(self, peer: int, purpose: Purpose, communicator: int, lane: int) -> socket.socket:
        me = self.identity
        sock, _ = dial(
            self._members[peer].addresses,
            key=me.key,
            job=me.job,
            epoch=me.epoch,
            rank=me.rank,
            peer=peer,
            purpose=purpose,
            communicator=communicator,
            lane=lane,
            use_unix=purpose is not Purpose.TCP and self._is_local(peer),
            timeout_s=_DIAL_TIMEOUT_S,
        )
        return sock

    def _open_channel(self, communicator: int, lane: int, peer: int) -> None:
        transport = self.transport_to(peer)
        wire_lane = _WIRE_POINT_TO_POINT if lane == _core.SENDING_LANE else lane + 1
        _log.info("channel %s to rank %d: %s", _lane_name(lane), peer, transport)
        if transport == "tcp":
            streams = self._options.tcp_streams
            with contextlib.ExitStack() as dialled:
                sockets = [
                    dialled.enter_context(self._dial(peer, Purpose.TCP, communicator, _stream(wire_lane, k, streams)))
                    for k in range(streams)
                ]
                self._add_tcp(self._endpoints[communicator], lane, peer, sockets)
            return
        sock = self._dial(peer, Purpose.SHM, communicator, wire_lane)
        try:
            memory, bell, peer_bell = _share_memory(sock)
            self._endpoints[communicator].add_shm(lane, peer, True, memory, bell, peer_bell, sock.detach())
        except (OSError, RuntimeError) as error:
            sock.close()
            raise TransportUnavailableError(
                f"shared memory with rank {peer} cannot be had ({error}); UNISONO_TRANSPORT=tcp does without it",
                rank=self.identity.rank,
                peer=peer,
            ) from error

    def _add_tcp(self, endpoint: _core.Endpoint, lane: int, peer: int, sockets: list[socket.socket]) -> None:
        descriptors = [sock.detach() for sock in sockets]
        endpoint.add_tcp(lane, peer, descriptors, self.identity.epoch, self._options.tcp_checksum)

    def _deliver(self, hello: Hello, sock: socket.socket) -> None:
        if hello.purpose is Purpose.CONTROL:
            self._add_control_link(hello.sender, sock)
            return
        with self._lock:
            if hello.communicator in self._closed:
                sock.close()  # which tells the other side that this one has gone
                return
            endpoint = self._endpoints.get(hello.communicator)
            if endpoint is None:
                self._early.append((hello, sock))
                return
        wire_lane = hello.lane & _LANE_MASK
        lane = _core.RECEIVING_LANE if wire_lane == _WIRE_POINT_TO_POINT else wire_lane - 1
        if hello.purpose is Purpose.TCP:
            sockets = self._gather_streams(hello, sock)
            if not sockets:
                return
            self._add_tcp(endpoint, lane, hello.sender, sockets)
        else:
            memory, peer_bell, bell = _take_shared_memory(sock)
            endpoint.add_shm(lane, hello.sender, False, memory, bell, peer_bell, sock.detach())
        _log.debug("channel %s from rank %d: %s", _lane_name(lane), hello.sender, hello.purpose.name.lower())

    def _gather_streams(self, hello: Hello, sock: socket.socket) -> list[socket.socket]:
        """Return the streams of the channel of `hello`, in their order, once the last one has come; before, nothing."""
        stream, streams = hello.lane >> _STREAM_SHIFT & _STREAM_MASK, hello.lane >> _STREAMS_SHIFT
        if not stream < streams <= MOST_TCP_STREAMS:
            raise OSError(f"stream {stream} of {streams} of a channel cannot be")
        with self._lock:
            place = (hello.communicator, hello.lane & _LANE_MASK, hello.sender)
            gathered = self._streams.setdefault(place, {})
            if stream in gathered:
                raise OSError(f"stream {stream} of a channel has come twice")
            gathered[stream] = sock
            if len(gathered) < streams:
                return []
            del self._streams[place]
        return [gathered[k] for k in sorted(gathered)]

    def _add_control_link(self, peer: int, sock: socket.socket) -> None:
        process = _process_descriptor(sock)
        with self._changed:
            self.control.add_link(peer, sock.detach(), process)
            self._linked.add(peer)
            self._changed.notify_all()


def _stream(wire_lane: int, stream: int, streams: int) -> int:
    """Return the lane that the hello of one of `streams` streams says."""
    return wire_lane | stream << _STREAM_SHIFT | streams << _STREAMS_SHIFT


def _lane_name(lane: int) -> str:
    return f"of lane {lane}" if lane >= 0 else "for messages"


def _share_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Make sealed memory for a channel, this side's doorbell and the other's; pass and return their descriptors."""
    flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
    made: list[int] = []
    try:
        made.append(os.memfd_create("unisono-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(made[0], _core.SHM_NBYTES)
        fcntl.fcntl(made[0], fcntl.F_ADD_SEALS, _SEALS)
        made.append(os.eventfd(0, flags))
        made.append(os.eventfd(0, flags))
        # A peer that has left the communicator has ended its calls, and the channel finds out if one needs it still.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(sock, [b"\0"], made)
    except OSError:  # such as the limit of descriptors
        for descriptor in made:
            os.close(descriptor)
        raise
    memory, bell, peer_bell = made
    return memory, bell, peer_bell


def _take_shared_memory(sock: socket.socket) -> tuple[int, int, int]:
    """Return the descriptors that the dialling side passes right after the hello, in its order."""
    sock.settimeout(_PASS_TIMEOUT_S)
    _, descriptors, _, _ = socket.recv_fds(sock, 1, _DESCRIPTORS)
    if len(descriptors) != _DESCRIPTORS:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError(f"{len(descriptors)} descriptors were passed for a channel, not {_DESCRIPTORS}")
    memory, peer_bell, bell = descriptors
    return memory, peer_bell, bell


def _process_descriptor(sock: socket.socket) -> int:
    """Return a pidfd of the process at the other end of a Unix socket, or -1 for a process of another host."""
    if sock.family != socket.AF_UNIX:
        return -1
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid = int.from_bytes(credentials[:4], "little")
    try:
        return os.pidfd_open(pid)
    except OSError:  # another pid namespace: the link's end will tell
        return -1
