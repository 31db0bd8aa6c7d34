"""A rank's place in its job: the key, the roster, the listener, and the control links, shared by its communicators.

Theory of operation. Control links form a star: every other rank dials rank 0 when it joins. Channels are opened by
need: of two ranks that a collective connects, the higher one dials; point-to-point messages have a channel for each
direction, which the sender dials. Dialling needs only the other rank's listener, not its program, so nobody waits for a
rank that is busy. A channel of shared memory, on one host, is memory and a doorbell for each side, which the dialling
side makes and passes over the authenticated Unix socket; for one of UCX or MPI, the two sides agree over the socket
(fabrics.py). The socket then stays open to show when the other side goes. Which ranks are on
one host is known before (`transports.locality`), and equal on all ranks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from unisono import log
from unisono.errors import CollectiveTimeoutError, PeerLostError, RendezvousError, TransportUnavailableError
from unisono.options import MOST_TCP_STREAMS, Options
from unisono.records import record
from unisono.transports import _core
from unisono.transports.base import MemoryType
from unisono.transports.fabrics import FABRICS, Agreed, FabricError, Fabrics
from unisono.transports.hello import Hello, Purpose
from unisono.transports.interfaces import interface_of
from unisono.transports.joined_sockets import process_descriptor, share_memory, take_shared_memory, watch
from unisono.transports.listener import Addresses, Listener, dial
from unisono.transports.locality import Locality, Surroundings
from unisono.transports.open_files import lift_limit_of_files
from unisono.transports.preference import has_remote_memory_access
from unisono.transports.rendezvous.roster import Member, Roster

if TYPE_CHECKING:
    from unisono.transports.survivors import Arrivals

_log = log.get(log.NAME)

# The transports whose links carry only what the two ranks send that have proved that they hold the key.
AUTHENTICATED = ("shm", "tcp")
_DIAL_PAUSE_S = 0.01
# How long a rank that is dialled may be silent before it is looked whether the job has failed; doubled each time.
_DIAL_PATIENCE_S = 5.0
# What rank 0 holds open: of each rank its link, its process, and what a rendezvous needs for a while; and all the rest.
_DESCRIPTORS_PER_RANK = 4
_OTHER_DESCRIPTORS = 256
# On the wire, lane 0 is that of point-to-point messages, and lane k + 1 is lane k of collectives.
_WIRE_POINT_TO_POINT = 0
# Above the lane, the hello of a channel over TCP says which of how many streams it opens.
_LANE_MASK = 0xFFFF
_STREAM_SHIFT = 16
_STREAM_MASK = 0xFF
_STREAMS_SHIFT = 24


class _OutOfReachError(TransportUnavailableError):
    """A transport does not reach a peer; another may."""


@record
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
        heartbeat_timeout_s: how long the other end of a control link to another host may be silent until it is lost.
        answer_timeout_s: how long another rank may take to answer, which may have to wait for its core.
    """

    def __init__(
        self, identity: Identity, bind_address: str, heartbeat_timeout_s: float, answer_timeout_s: float
    ) -> None:
        self.identity = identity
        self._answer_timeout_s = answer_timeout_s
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._options = Options()
        self._fabrics = Fabrics((), identity.rank, None)
        self.control = _core.Control(identity.rank, identity.size)
        self._members: tuple[Member, ...] = ()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._endpoints: dict[int, _core.Endpoint] = {}
        self._early: list[tuple[Hello, socket.socket]] = []  # channels that came before their communicator
        self._streams: dict[tuple[int, int, int], dict[int, socket.socket]] = {}  # of channels that lack some yet
        self._opened: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lanes and peers, by communicator
        self._authenticated: set[int] = set()  # communicators that use no library's links
        self._closed: set[int] = set()  # communicators, whose channels may still be dialled by ranks that have not
        self._arrivals: Arrivals | None = None
        self._given_up = ""  # why nobody is to be waited for
        self._linked: set[int] = set()  # the ranks whose control link has been there, even if they have left since
        self._used: dict[int, str] = {}  # by peer, the transport of its latest channel
        self._locality = Locality(
            identity.key, identity.job, identity.epoch, identity.rank, identity.size, answer_timeout_s
        )
        try:
            self._listener = Listener(
                key=identity.key,
                job=identity.job,
                epoch=identity.epoch,
                rank=identity.rank,
                size=identity.size,
                bind_address=bind_address,
                host_id=self._locality.host_id,
                deliver=self._admit,
            )
        except BaseException:
            self._locality.close()
            raise

    @property
    def surroundings(self) -> Surroundings:
        """Where this rank is."""
        return self._locality.surroundings

    @property
    def addresses(self) -> Addresses:
        """Where this rank can be reached."""
        return self._listener.addresses

    def meet(self, roster: Roster, options: Options, comm: Any = None) -> None:
        """Open the control links to the members of `roster`.

        Args:
            roster: the ranks of the job.
            options: of their use here: `transports` and those of TCP, for every channel, and `rendezvous_timeout_s`,
                how long rank 0 waits for the others' links.
            comm: the communicator of mpi4py by which the ranks have met, or None.

        Raises:
            RendezvousError: ranks that had arrived did not connect in that time.
        """
        self._locality.close()  # all ranks have asked
        self._members = roster.members
        self._options = options
        self._fabrics = Fabrics(options.preference, self.identity.rank, comm, self._interface_of_ucx())
        timeout_s = options.rendezvous_timeout_s
        if self.identity.rank != 0:
            self._add_control_link(0, self._dial(0, Purpose.CONTROL, 0, 0, timeout_s))
            return
        _allow_descriptors(self.identity.size)
        with self._changed:
            others = self.identity.size - 1
            self._changed.wait_for(lambda: self._given_up or len(self._linked) == others, timeout_s)
        if self._given_up:
            raise RendezvousError(self._given_up)
        if len(self._linked) < others:
            raise RendezvousError(f"not all ranks connected to rank 0 within {timeout_s:g} s of the rendezvous")

    def give_up(self, reason: str) -> None:
        """Let `meet` wait for nobody any more, and raise `RendezvousError` with `reason`."""
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def reach(self, peer: int, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Return a connection to another rank, as survivors want it; raises as `dial` does."""
        return self._dial(peer, Purpose.SURVIVOR, communicator, lane, timeout_s)

    def peers_of_host(self) -> int:
        """Return the number of ranks on this machine, this one included."""
        return sum(self._shares_cores(member) for member in self._members)

    def cores_of_host(self) -> int:
        """Return the number of cores that the ranks of this machine may run on, all together."""
        mask = 0
        for member in self._members:
            if self._shares_cores(member):
                mask |= int(member.cores, 16)
        return mask.bit_count()

    def add_communicator(self, communicator: int, endpoint: _core.Endpoint, *, is_authenticated: bool = False) -> None:
        """Let channels of `communicator` be opened by other ranks, and take those that have been.

        Its channels are authenticated as a whole, and not only when they are opened, if it `is_authenticated`.
        """
        with self._lock:
            self._endpoints[communicator] = endpoint
            if is_authenticated:
                self._authenticated.add(communicator)
            early, self._early = self._early, []
        for hello, sock in early:
            self._admit(hello, sock)

    def remove_communicator(self, communicator: int) -> None:
        """Refuse channels of `communicator` from now on."""
        with self._lock:
            self._closed.add(communicator)
            self._authenticated.discard(communicator)
            self._endpoints.pop(communicator, None)
            unfinished = [place for place in self._streams if place[0] == communicator]
            waiting = [sock for place in unfinished for sock in self._streams.pop(place).values()]
            self._opened.pop(communicator, None)
        for sock in waiting:
            sock.close()

    @property
    def is_authenticated(self) -> bool:
        """Whether every channel is authenticated: none goes over a library, which does not ask who sends."""
        return not any(name in FABRICS for name in self._options.preference)

    @property
    def preference(self) -> str:
        """The names of the transports, in order of preference."""
        return ",".join(self._options.preference)

    def link_to(self, peer: int) -> str:
        """Return by which transport messages get to `peer`, and why not by shared memory: "tcp (another machine)".

        One that carries memory of GPUs as it is says so: "ucx with cuda (another machine)".
        """
        transport = self._transport_to(peer)
        if transport == "shm":
            return transport
        with_cuda = " with cuda" if self._fabrics.knows(transport, MemoryType.CUDA) else ""
        return f"{transport}{with_cuda} ({'asked for' if self._is_local(peer) else self._why_apart(peer)})"

    def knows(self, memory: MemoryType, peer: int) -> bool:
        """Return whether the transport by which messages get to `peer` carries such memory."""
        return self._fabrics.knows(self._transport_to(peer), memory)

    def _transport_to(self, peer: int) -> str:
        """Return the transport of the latest channel to `peer`, or before there is one, the first that may reach it."""
        hoped = (name for name in self._options.preference if name != "shm" or self._is_local(peer))
        return self._used.get(peer) or next(hoped, "none")

    def shares_memory(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks exchange messages through shared memory."""
        return self._options.preference[0] == "shm" and all(self._is_local(rank) for rank in ranks)

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
        self._locality.close()
        self._listener.close()
        with self._lock:
            arrivals = self._arrivals
        if arrivals is not None:
            arrivals.close()
        self.control.leave(farewell)
        with self._lock:
            self._endpoints.clear()
            waiting = [sock for _, sock in self._early]
            waiting += [sock for streams in self._streams.values() for sock in streams.values()]
            self._early.clear()
            self._streams.clear()
        for sock in waiting:
            sock.close()

    @property
    def survivors(self) -> Arrivals:
        """Those who have come to this rank after a loss, as to their leader."""
        from unisono.transports.survivors import Arrivals

        with self._lock:
            if self._arrivals is None:
                self._arrivals = Arrivals()
            return self._arrivals

    def abandon(self) -> None:
        """In a forked child: let go of everything that belongs to the parent."""
        self.control.abandon()

    def _is_local(self, peer: int) -> bool:
        return self._members[peer].addresses.host_id == self.addresses.host_id

    def _interface_of_ucx(self) -> str:
        """Return the network interface on which UCX may listen for TCP; empty where it need not.

        UCX's TCP does not ask who connects. So UCX uses it only to reach other hosts, where nothing else can: devices
        for remote memory access do not need it, our own TCP is as good, and no other host reaches loopback.
        """
        hosts, names = {member.addresses.host_id for member in self._members}, self._options.preference
        if len(hosts) == 1 or "ucx" not in names or "tcp" in names or has_remote_memory_access():
            return ""
        return interface_of(self.addresses.tcp_host)

    def _shares_cores(self, member: Member) -> bool:
        return member.surroundings.machine == self.surroundings.machine

    def _why_apart(self, peer: int) -> str:
        return self.surroundings.apart_from(self._members[peer].surroundings)

    def _dial(
        self, peer: int, purpose: Purpose, communicator: int, lane: int, timeout_s: float | None = None
    ) -> socket.socket:
        """Connect to a rank; one that is so busy that it drops the connection unheard is dialled again, for as long.

        A rank that has died refuses: that is not tried again, and nothing is after the job has failed.
        """
        me = self.identity
        timeout_s = self._answer_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        patience_s = _DIAL_PATIENCE_S
        while True:
            try:
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
                    timeout_s=max(_DIAL_PAUSE_S, min(patience_s, deadline - time.monotonic())),
                )
                return sock
            except PeerLostError as error:
                if isinstance(error.__cause__, ConnectionRefusedError) or self._is_over(deadline):
                    raise
            except CollectiveTimeoutError:
                if self._is_over(deadline):
                    message = f"rank {peer} did not answer within {timeout_s:g} s"
                    raise CollectiveTimeoutError(message, rank=me.rank, peer=peer) from None
                patience_s *= 2
            time.sleep(_DIAL_PAUSE_S)

    def _is_over(self, deadline: float) -> bool:
        return time.monotonic() >= deadline or self.control.failed()

    def _open_channel(self, communicator: int, lane: int, peer: int) -> None:
        """Open a channel by the first of the option `transports` that reaches the peer."""
        reasons = []
        is_authenticated = communicator in self._authenticated
        for transport in AUTHENTICATED if is_authenticated else self._options.preference:
            try:
                self._open_by(transport, communicator, lane, peer)
                self._note_used(communicator, peer, transport)
                _log.info("channel %s to rank %d: %s", _lane_name(lane), peer, self.link_to(peer))
                return
            except _OutOfReachError as error:
                _log.info("channel %s to rank %d: not %s: %s", _lane_name(lane), peer, transport, error.message)
                reasons.append(error.message)
        if "tcp" not in self._options.preference:
            reasons.append("tcp, if it is among the transports, reaches every rank")
        raise TransportUnavailableError(
            f"no transport of UNISONO_TRANSPORTS={self.preference} reaches rank {peer}: {'; '.join(reasons)}",
            rank=self.identity.rank,
            peer=peer,
        )

    def _note_used(self, communicator: int, peer: int, transport: str) -> None:
        """Remember by what messages get to a peer; those of objects may take another way."""
        if communicator not in self._authenticated:
            self._used[peer] = transport

    def _open_by(self, transport: str, communicator: int, lane: int, peer: int) -> None:
        if transport in FABRICS:
            self._open_fabric(transport, communicator, lane, peer)
        elif transport == "tcp":
            self._open_tcp(communicator, lane, peer)
        else:
            self._open_shm(communicator, lane, peer)

    def _open_tcp(self, communicator: int, lane: int, peer: int) -> None:
        streams = self._options.tcp_streams
        wire_lanes = [_stream(_wire_lane(lane), stream, streams) for stream in range(streams)]
        with contextlib.ExitStack() as dialled:
            sockets = [
                dialled.enter_context(self._dial(peer, Purpose.TCP, communicator, wire_lane))
                for wire_lane in wire_lanes
            ]
            self._add_tcp(self._endpoints[communicator], lane, peer, sockets)

    def _open_fabric(self, name: str, communicator: int, lane: int, peer: int) -> None:
        try:
            messenger = self._fabrics.messenger(name)
            sock = self._dial(peer, Purpose[name.upper()], communicator, _wire_lane(lane))
            with contextlib.closing(sock):
                agreed = self._fabrics.propose(name, sock)
                self._add_tagged(self._endpoints[communicator], lane, peer, messenger, agreed, sock)
        except FabricError as error:
            raise _OutOfReachError(error.message) from None
        except ConnectionError as error:
            raise PeerLostError(f"rank {peer} is gone: {error}", rank=self.identity.rank, peer=peer) from error
        except (OSError, RuntimeError) as error:
            raise TransportUnavailableError(
                f"a channel over {name} to rank {peer} cannot be had: {error}", rank=self.identity.rank, peer=peer
            ) from error

    def _open_shm(self, communicator: int, lane: int, peer: int) -> None:
        if not self._is_local(peer):
            raise _OutOfReachError(f"shared memory does not ({self._why_apart(peer)})")
        sock = self._dial(peer, Purpose.SHM, communicator, _wire_lane(lane))
        try:
            memory, bell, peer_bell = share_memory(sock)
            self._endpoints[communicator].add_shm(lane, peer, True, memory, bell, peer_bell, sock.detach())
        except (OSError, RuntimeError) as error:
            sock.close()
            raise TransportUnavailableError(
                f"shared memory with rank {peer} cannot be had ({error}); UNISONO_TRANSPORTS=tcp does without it",
                rank=self.identity.rank,
                peer=peer,
            ) from error

    def _add_tcp(self, endpoint: _core.Endpoint, lane: int, peer: int, sockets: list[socket.socket]) -> None:
        descriptors = [sock.detach() for sock in sockets]
        endpoint.add_tcp(lane, peer, descriptors, self.identity.epoch, self._options.tcp_checksum)

    @staticmethod
    def _add_tagged(
        endpoint: _core.Endpoint,
        lane: int,
        peer: int,
        messenger: _core.Messenger,
        agreed: Agreed,
        sock: socket.socket,
    ) -> None:
        endpoint.add_tagged(lane, peer, messenger, *agreed, sock.detach())

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        """Deliver what another rank has opened; if it cannot be had here, that rank sees its connection end."""
        try:
            self._deliver(hello, sock)
        except (OSError, RuntimeError) as error:
            _log.warning("channel from rank %d: it cannot be opened: %s", hello.sender, error)
            sock.close()

    def _deliver(self, hello: Hello, sock: socket.socket) -> None:
        if hello.purpose is Purpose.CONTROL:
            self._add_control_link(hello.sender, sock)
            return
        if hello.purpose is Purpose.SURVIVOR:
            self.survivors.admit(hello, sock)
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
        elif (name := hello.purpose.name.lower()) in FABRICS:
            agreed = self._fabrics.accept(name, sock)
            if agreed is None:
                sock.close()
                return
            self._add_tagged(endpoint, lane, hello.sender, self._fabrics.messenger(name), agreed, sock)
        else:
            memory, peer_bell, bell = take_shared_memory(sock)
            endpoint.add_shm(lane, hello.sender, False, memory, bell, peer_bell, sock.detach())
        transport = hello.purpose.name.lower()
        self._note_used(hello.communicator, hello.sender, transport)
        _log.debug("channel %s from rank %d: %s", _lane_name(lane), hello.sender, transport)

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
        process = process_descriptor(sock)
        if sock.family != socket.AF_UNIX:
            watch(sock, self._heartbeat_timeout_s)
        with self._changed:
            self.control.add_link(peer, sock.detach(), process)
            self._linked.add(peer)
            self._changed.notify_all()


def _wire_lane(lane: int) -> int:
    return _WIRE_POINT_TO_POINT if lane == _core.SENDING_LANE else lane + 1


def _allow_descriptors(size: int) -> None:
    """Let rank 0 keep a link to each of `size` ranks, with a descriptor of its process.

    Raises:
        RendezvousError: the system does not allow so many.
    """
    needed = _DESCRIPTORS_PER_RANK * size + _OTHER_DESCRIPTORS
    most = lift_limit_of_files(needed)
    if most is not None:
        raise RendezvousError(
            f"rank 0 of {size} ranks needs about {needed} open files, and {most} are allowed to it (`ulimit -Hn`)"
        )


def _stream(wire_lane: int, stream: int, streams: int) -> int:
    """Return the lane that the hello of one of `streams` streams says."""
    return wire_lane | stream << _STREAM_SHIFT | streams << _STREAMS_SHIFT


def _lane_name(lane: int) -> str:
    return f"of lane {lane}" if lane >= 0 else "for messages"
