"""A rank's place in its job: the key, the roster, the listener, and the control links, shared by its communicators.

Theory of operation. Every rank has control links to the two judges of the job, ranks 0 and 1 at first. It dials rank 0
when it joins, and the stand-in in the background. When a judge leaves, the next rank takes its place, and all ranks
above it dial it.

Channels are opened by need: of two ranks that a collective connects, the higher one dials; point-to-point messages
have a channel for each direction, which the sender dials. The event loop of the listener dials, so a call never waits
for the other rank to answer: it waits for its channel as it waits for a message, with its deadline, and an abort or a
death ends it. channel_openers.py opens the channels of each transport over the sockets that were dialled. One socket of
each channel stays open to show when the other side goes. Which ranks are on one host is known before
(`transports.locality`), and equal on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Any

from unisono import log
from unisono.deadlines import LONGEST_WAIT_S, Deadline
from unisono.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
    TransportUnavailableError,
    UnisonoError,
)
from unisono.forks import closed_in_child
from unisono.options import Options
from unisono.records import record
from unisono.transports import _core
from unisono.transports.contracts.call import MemoryType
from unisono.transports.host.bind_address import interface_of
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.host.host_discovery import Locality, Surroundings
from unisono.transports.host.system_limits import is_exhausted, unavailable
from unisono.transports.links.channel_openers import OPENERS, Opener, OpenerContext, Place, lane_name, lane_of
from unisono.transports.links.dialer import Caller, Dialer, Target, dial
from unisono.transports.links.event_loop import Callback
from unisono.transports.links.failures import kind_of
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.listener import Addresses, Listener
from unisono.transports.links.preference import has_remote_memory_access
from unisono.transports.links.socket_passing import process_descriptor, watch
from unisono.transports.links.tagged_fabrics import FABRICS, FabricError, Fabrics
from unisono.transports.rendezvous.roster import Member, Roster

if TYPE_CHECKING:
    from unisono.transports.links.survivors import Arrivals

_log = log.get()

# The transports whose links carry only what the two ranks send that have proved that they hold the key.
AUTHENTICATED = ("shm", "tcp")
_DIAL_PAUSE_S = 0.01
# The descriptors of a judge: for each rank its link, its process, and those of a rendezvous; and all others.
_DESCRIPTORS_PER_RANK = 4
_OTHER_DESCRIPTORS = 256
_JUDGES = 2
# Closed communicators that are remembered: one that was closed before so many others is not dialled any more.
_MOST_CLOSED = 1024


@record
class Identity:
    """Who this rank is, and what it proves itself with.

    Attributes:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks.
        meeting: how often this rank has met others by the same key before. All ranks count alike, so that one which is
            at its second `init` does not take a rank that is still in the first for its peer.
    """

    key: bytes
    job: bytes
    epoch: int
    rank: int
    size: int
    meeting: int = 0


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
        self._openers: dict[str, Opener] = {}
        self.control = _core.Control(identity.rank, identity.size)
        self._members: tuple[Member, ...] = ()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._endpoints: dict[int, _core.Endpoint] = {}
        self._early: list[tuple[Hello, socket.socket]] = []  # channels that came before their communicator
        self._opened: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lanes and peers, by communicator
        self._authenticated: set[int] = set()  # communicators that use no library's links
        # Communicators of which ranks that have not closed them may still dial channels: the latest, in order.
        self._closed: dict[int, None] = {}
        self._arrivals: Arrivals | None = None
        self._given_up = ""  # why nobody is to be waited for
        self._linked: set[int] = set()  # the ranks whose control link has been there, even if they have left since
        self._dialled_judges: set[int] = set()
        self._departures: FileIO | None = None  # an eventfd that the control rings
        self._used: dict[int, str] = {}  # by peer, the transport of its latest channel
        with contextlib.ExitStack() as opened:
            opened.callback(self.control.leave, "")
            who = (identity.key, identity.job, identity.epoch, identity.rank, identity.size, identity.meeting)
            self._locality = Locality(*who, answer_timeout_s)
            opened.callback(self._locality.close)
            self._listener = Listener(
                key=identity.key,
                job=identity.job,
                epoch=identity.epoch,
                rank=identity.rank,
                size=identity.size,
                bind_address=bind_address,
                host_id=self._locality.host_id,
                use_unix=identity.size > 1 and not self.surroundings.alone,
                deliver=self._admit,
                on_failure=self._break_down,
            )
            opened.pop_all()
        self._caller = Caller(identity.key, identity.job, identity.epoch, identity.rank)
        self._dialer = Dialer(self._listener.loop, self._caller, self.control.failed)

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
        context = OpenerContext(self._listener.loop, self.identity.epoch, options, self._fabrics, self._why_no_memory)
        with self._lock:
            self._openers = {name: make(context) for name, make in OPENERS.items()}
        if self.identity.rank < _JUDGES:
            _allow_descriptors(self.identity.rank, self.identity.size)
        timeout_s = options.rendezvous_timeout_s
        if self.identity.rank == 0:
            self._await_links(timeout_s)
        else:
            self._dialled_judges.add(0)
            self._add_control_link(0, self._dial(0, Purpose.CONTROL, 0, 0, timeout_s))
        if self.identity.size > _JUDGES:
            departures = closed_in_child(FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+"))
            self._departures = departures
            self._listener.loop.submit(partial(self._watch_judges, departures))

    def _await_links(self, timeout_s: float) -> None:
        with self._changed:
            others, limit_s = self.identity.size - 1, min(timeout_s, LONGEST_WAIT_S)
            self._changed.wait_for(lambda: self._given_up or len(self._linked) == others, limit_s)
        if self._given_up:
            raise RendezvousError(self._given_up)
        if len(self._linked) < others:
            raise RendezvousError(f"not all ranks connected to rank 0 within {timeout_s:g} s of the rendezvous")

    def _watch_judges(self, departures: FileIO) -> None:
        """Link this rank to the judges, and to the ranks that take their places. In the loop's thread."""
        self.control.add_doorbell(departures.fileno())
        self._listener.loop.watch(departures.fileno(), self._link_to_judges)
        self._link_to_judges()

    def _link_to_judges(self) -> None:
        if self._departures is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._departures.fileno())
        for judge in self.control.judges():
            if judge < self.identity.rank and judge not in self._dialled_judges:
                self._dialled_judges.add(judge)
                self._dialer.dial(
                    self._target(judge, Purpose.CONTROL, 0, 0),
                    partial(self._add_control_link, judge),
                    partial(self._fail, judge),
                )

    def give_up(self, reason: str) -> None:
        """Let `meet` wait for nobody any more, and raise `RendezvousError` with `reason`."""
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def reach(self, peer: int, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Return a connection to another rank, as survivors want it; raises as `dial` does."""
        return self._dial(peer, Purpose.SURVIVOR, communicator, lane, timeout_s)

    def places(self) -> tuple[tuple[str, int], ...]:
        """Return the name of the host of each rank, and its process id there."""
        return tuple((member.surroundings.host, member.addresses.pid) for member in self._members)

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
            self._closed[communicator] = None
            if len(self._closed) > _MOST_CLOSED:
                del self._closed[next(iter(self._closed))]
            self._authenticated.discard(communicator)
            endpoint = self._endpoints.pop(communicator, None)
            self._opened.pop(communicator, None)
        if endpoint is not None:
            self._listener.loop.submit(partial(self._close_openers, endpoint))

    def _close_openers(self, endpoint: _core.Endpoint | None = None) -> None:
        for opener in self._openers.values():
            opener.close(endpoint)

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
        """Begin to open the channels of those (lane, peer) pairs that this rank must open and has not begun to.

        A channel that cannot be opened is a failure of the job.
        """
        opened = self._opened[communicator]
        for lane, peer in wanted:
            ours = lane == _core.SENDING_LANE or (lane >= 0 and peer < self.identity.rank)
            if ours and (lane, peer) not in opened:
                opened.add((lane, peer))
                transports = AUTHENTICATED if communicator in self._authenticated else self._options.preference
                opening = _Opening(communicator, lane, peer, list(transports))
                self._listener.loop.submit(partial(self._open_by_next, opening))

    def close(self, farewell: str) -> None:
        """Leave the job: `farewell` says why, or is empty."""
        self._locality.close()
        self._listener.close(self._close_in_loop)
        with self._lock:
            arrivals = self._arrivals
        if arrivals is not None:
            arrivals.close()
        self.control.leave(farewell)
        with self._lock:
            self._endpoints.clear()
            early, self._early = self._early, []
        for _, sock in early:
            sock.close()

    def _close_in_loop(self) -> None:
        self._dialer.close()
        self._close_openers()
        self._openers = {}
        if self._departures is not None:
            self._listener.loop.unwatch(self._departures.fileno())
            self.control.remove_doorbell(self._departures.fileno())
            self._departures.close()

    @property
    def survivors(self) -> Arrivals:
        """Those who have come to this rank after a loss, as to their leader."""
        from unisono.transports.links.survivors import Arrivals

        with self._lock:
            if self._arrivals is None:
                self._arrivals = Arrivals()
            return self._arrivals

    def abandon(self) -> None:
        """In a forked child, where all descriptors are closed already: forget the threads of the parent."""
        self.control.abandon()

    def call_soon(self, callback: Callback) -> None:
        """Call `callback` in the listener's thread, unless that has ended. It takes no lock: finalizers may call it."""
        self._listener.loop.submit(callback)

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
        machine = member.surroundings.machine
        is_same_host = member.addresses.host_id == self.addresses.host_id
        return is_same_host or (machine != "" and machine == self.surroundings.machine)

    def _why_apart(self, peer: int) -> str:
        return self.surroundings.apart_from(self._members[peer].surroundings)

    def _why_no_memory(self, peer: int) -> str:
        return "" if self._is_local(peer) else self._why_apart(peer)

    def _target(self, peer: int, purpose: Purpose, communicator: int, lane: int) -> Target:
        use_unix = purpose is not Purpose.TCP and self._is_local(peer)
        return Target(peer, self._members[peer].addresses, use_unix, purpose, communicator, lane)

    def _dial(self, peer: int, purpose: Purpose, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Connect to a rank, and wait for it; one that is so busy that it drops the connection is dialled again.

        A rank that has died refuses: that is not tried again, and nothing is after the job has failed.
        """
        target, deadline = self._target(peer, purpose, communicator, lane), Deadline(timeout_s)
        while True:
            try:
                return dial(self._caller, target, deadline.left_s())[0]
            except PeerLostError as error:
                is_over = deadline.has_passed() or self.control.failed()
                if isinstance(error.__cause__, ConnectionRefusedError) or is_over:
                    raise
            except CollectiveTimeoutError:
                message = f"rank {peer} did not answer within {timeout_s:g} s"
                raise CollectiveTimeoutError(message, rank=self.identity.rank, peer=peer) from None
            time.sleep(_DIAL_PAUSE_S)

    def _note_used(self, communicator: int, peer: int, transport: str) -> None:
        """Remember by what messages get to a peer; those of objects may take another way."""
        if communicator not in self._authenticated:
            self._used[peer] = transport

    def _fail(self, peer: int, error: Exception) -> None:
        """Let the job fail with an error that concerns a peer."""
        message = error.message if isinstance(error, UnisonoError) else str(error)
        if isinstance(error, PeerLostError):
            self.control.suspect(peer, message)
        else:
            self.control.fail(kind_of(error), peer, message)

    def _open_by_next(self, opening: _Opening) -> None:
        """Open a channel by the next of the option `transports` that may reach the peer. In the loop's thread."""
        while opening.transports:
            opening.transport = opening.transports.pop(0)
            opener = self._openers[opening.transport]
            obstacle = opener.obstacle(opening.peer)
            if not obstacle:
                self._dial_sockets(opening, opener)
                return
            self._note_obstacle(opening, obstacle)
        if "tcp" not in self._options.preference:
            opening.obstacles.append("tcp, if it is among the transports, reaches every rank")
        message = f"no transport of UNISONO_TRANSPORTS={self.preference} reaches rank {opening.peer}: "
        self._fail(opening.peer, TransportUnavailableError(message + "; ".join(opening.obstacles)))

    def _note_obstacle(self, opening: _Opening, obstacle: str) -> None:
        _log.info("channel %s to rank %d: not %s: %s", *opening.shown(), opening.transport, obstacle)
        opening.obstacles.append(obstacle)

    def _dial_sockets(self, opening: _Opening, opener: Opener) -> None:
        lanes = opener.wire_lanes(opening.lane)
        opening.sockets = dict.fromkeys(lanes)
        for lane in lanes:
            target = self._target(opening.peer, Purpose[opening.transport.upper()], opening.communicator, lane)
            self._dialer.dial(target, partial(self._on_dialled, opening, lane), partial(self._on_opened, opening))

    def _on_dialled(self, opening: _Opening, lane: int, sock: socket.socket) -> None:
        opening.sockets[lane] = sock
        sockets = [sock for sock in opening.sockets.values() if sock is not None]
        if len(sockets) < len(opening.sockets):
            return
        with self._lock:
            endpoint = self._endpoints.get(opening.communicator)
        if endpoint is None:  # closed meanwhile
            opening.close()
            return
        place = Place(endpoint, opening.lane, opening.peer)
        try:
            self._openers[opening.transport].dialled(place, sockets, partial(self._on_opened, opening))
        except (OSError, RuntimeError, UnisonoError) as error:
            self._on_opened(opening, error)

    def _on_opened(self, opening: _Opening, error: Exception | None) -> None:
        """Take note of a channel that has been opened, or could not be."""
        if error is None:
            self._note_used(opening.communicator, opening.peer, opening.transport)
            _log.info("channel %s to rank %d: %s", *opening.shown(), self.link_to(opening.peer))
            return
        opening.close()
        if isinstance(error, FabricError):
            self._note_obstacle(opening, error.message)
            self._open_by_next(opening)
        elif isinstance(error, ConnectionError):
            self._fail(opening.peer, PeerLostError(f"rank {opening.peer} is gone: {error}"))
        elif isinstance(error, UnisonoError):
            self._fail(opening.peer, error)
        elif is_exhausted(error):  # TCP would need as many descriptors
            self._fail(opening.peer, self._refused(f"a channel to rank {opening.peer}", error, opening.peer))
        else:
            message = f"a channel over {opening.transport} to rank {opening.peer} cannot be opened: {error}"
            advice = "; UNISONO_TRANSPORTS=tcp does without shared memory" if opening.transport == "shm" else ""
            self._fail(opening.peer, TransportUnavailableError(message + advice))

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        """Deliver what another rank has opened; if it cannot be had here, that rank sees its connection end."""
        try:
            self._deliver(hello, sock)
        except (OSError, RuntimeError) as error:
            self._on_accepted(hello, sock, error)

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
        opener = self._openers[hello.purpose.name.lower()]
        place = Place(endpoint, lane_of(hello), hello.sender)
        opener.accepted(place, hello, sock, partial(self._on_accepted, hello, sock))

    def _on_accepted(self, hello: Hello, sock: socket.socket, error: Exception | None) -> None:
        """Take note of a channel that another rank has opened, or could not be opened here."""
        if error is not None:
            if is_exhausted(error):  # which that rank could not know
                self._fail(hello.sender, self._refused(f"a channel from rank {hello.sender}", error, hello.sender))
            sock.close()
            _log.warning("channel from rank %d: it cannot be opened: %s", hello.sender, error)
            return
        transport = hello.purpose.name.lower()
        self._note_used(hello.communicator, hello.sender, transport)
        _log.debug("channel %s from rank %d: %s", lane_name(lane_of(hello)), hello.sender, transport)

    def _refused(self, what: str, error: Exception, peer: int) -> TransportUnavailableError:
        rank = self.identity.rank
        return unavailable(f"{what} cannot be opened on rank {rank}", error, rank, peer)

    def _break_down(self, error: Exception) -> None:
        """Fail on all ranks: none of them could open another channel to this one."""
        rank = self.identity.rank
        refused = unavailable(f"rank {rank} accepts no more connections", error, rank)
        self.control.fail(kind_of(refused), -1, refused.message)
        self.give_up(refused.message)

    def _add_control_link(self, peer: int, sock: socket.socket) -> None:
        process = process_descriptor(sock)
        if sock.family != socket.AF_UNIX:
            watch(sock, self._heartbeat_timeout_s)
        with self._changed:
            self.control.add_link(peer, sock.detach(), process)
            self._linked.add(peer)
            self._changed.notify_all()


class _Opening:
    """A channel that this rank is opening.

    Attributes:
        communicator, lane, peer: where it belongs.
        transports: those that have not been tried.
        transport: the one that is being tried.
        sockets: those that have been dialled, by their wire lanes.
        obstacles: why transports did not do.
    """

    def __init__(self, communicator: int, lane: int, peer: int, transports: list[str]) -> None:
        self.communicator, self.lane, self.peer, self.transports = communicator, lane, peer, transports
        self.transport = ""
        self.sockets: dict[int, socket.socket | None] = {}
        self.obstacles: list[str] = []

    def shown(self) -> tuple[str, int]:
        """Return what the log says of it: its lane and its peer."""
        return lane_name(self.lane), self.peer

    def close(self) -> None:
        """Close the sockets."""
        for sock in self.sockets.values():
            if sock is not None:
                sock.close()
        self.sockets = {}


def _allow_descriptors(rank: int, size: int) -> None:
    """Let a judge keep a link to each of `size` ranks, with a descriptor of its process.

    Raises:
        RendezvousError: the system does not allow so many.
    """
    needed = _DESCRIPTORS_PER_RANK * size + _OTHER_DESCRIPTORS
    most = lift_limit_of_files(needed)
    if most is not None:
        raise RendezvousError(
            f"rank {rank} of {size} ranks needs about {needed} open files, and {most} are allowed to it (`ulimit -Hn`)"
        )
