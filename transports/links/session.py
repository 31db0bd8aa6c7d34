"""`Session`: the membership of this process in a job. It holds the key, the roster, the listener and the control links.

All communicators of the process share the session, and it opens their channels.

Theory of operation. Every rank has control links to the two judges of the job, at first ranks 0 and 1. It dials rank 0
when it joins, and the other judge in the background. When a judge leaves, the next rank takes its place, and all ranks
above that one dial it.

A channel is opened when a call first needs it. If a collective connects two ranks, the higher one dials. Point-to-point
messages have a channel for each direction, which the sender dials. The event loop of the listener dials, so no call
waits for the other rank to answer. The call waits for its channel as it waits for a message: until its deadline, an
abort, or the death of a rank.

channel_openers.py opens the channels of each transport over the dialled sockets. One socket of each channel stays open,
because its end shows that the other side has gone. host_discovery.py finds out before which ranks are on one host, with
the same result on all ranks.
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
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.host.host_discovery import HostDiscovery, Surroundings
from unisono.transports.host.system_limits import is_exhausted, unavailable
from unisono.transports.links.channel_openers import (
    AUTHENTICATED,
    CHANNELS,
    REACHING_ALL,
    SHARED_MEMORY,
    UNAUTHENTICATED,
    ChannelKey,
    Opener,
    OpenerContext,
    dials_tcp,
    lane_name,
    lane_of,
    purpose_of,
    transport_of,
)
from unisono.transports.links.dialer import Dialer, DialingRank, Target, dial
from unisono.transports.links.event_loop import Callback
from unisono.transports.links.failures import kind_of
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.listener import Addresses, Listener
from unisono.transports.links.preference import tcp_interface_of_ucx
from unisono.transports.links.socket_passing import process_descriptor, watch
from unisono.transports.links.tagged_fabrics import FabricError, Fabrics
from unisono.transports.rendezvous.roster import Member, Roster

if TYPE_CHECKING:
    from unisono.transports.links.survivors import Arrivals

_log = log.get(log.NAME)

_DIAL_PAUSE_S = 0.01
# The descriptors of a judge: for each rank its link, its pidfd and its connections of the rendezvous; and all others.
_DESCRIPTORS_PER_RANK = 4
_OTHER_DESCRIPTORS = 256
_JUDGES = 2
# The session remembers so many closed communicators. No rank dials a channel of an older one any more.
_MOST_CLOSED = 1024


@record
class RankIdentity:
    """The identity of this rank, and the key by which it proves it.

    Attributes:
        key: the job's key, 32 bytes.
        job: the job's id, 16 bytes.
        epoch: the generation of the job's membership.
        rank: this rank.
        size: the number of ranks.
        meeting: the number of earlier rendezvous of this rank with the same key, which is equal on all ranks. So a rank
            in its second `init` does not connect to a rank that is still in its first.
    """

    key: bytes
    job: bytes
    epoch: int
    rank: int
    size: int
    meeting: int = 0


class Session:
    """The membership of this process in a job, which its communicators share. The last communicator closes it.

    Args:
        identity: the identity of this rank.
        bind_address: the address to listen on.
        heartbeat_timeout_s: seconds of silence after which the other end of a control link to another host is lost.
        answer_timeout_s: seconds that another rank on this host may take to answer. It may have to wait for its core.
    """

    def __init__(
        self, identity: RankIdentity, bind_address: str, heartbeat_timeout_s: float, answer_timeout_s: float
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
        self._early: list[tuple[Hello, socket.socket]] = []  # their communicator does not exist here yet
        self._opened: defaultdict[int, set[tuple[int, int]]] = defaultdict(set)  # lanes and peers, by communicator
        self._authenticated: set[int] = set()  # communicators that must not use a message library
        # The latest closed communicators, in order. Ranks that have not closed them may still dial channels.
        self._closed: dict[int, None] = {}
        self._arrivals: Arrivals | None = None
        self._given_up = ""  # the reason why `meet` must not wait any longer
        self._linked: set[int] = set()  # the ranks that have connected a control link, even if they have left since
        self._dialled_judges: set[int] = set()
        self._departures: FileIO | None = None  # an eventfd that the native core signals when a rank leaves
        self._used: dict[int, str] = {}  # by peer, the transport of its latest channel
        with contextlib.ExitStack() as opened:
            opened.callback(self.control.leave, "")
            key, job, epoch = identity.key, identity.job, identity.epoch
            self._host_discovery = HostDiscovery(
                key, job, epoch, identity.rank, identity.size, identity.meeting, answer_timeout_s
            )
            opened.callback(self._host_discovery.close)
            self._listener = Listener(
                key=identity.key,
                job=identity.job,
                epoch=identity.epoch,
                rank=identity.rank,
                size=identity.size,
                bind_address=bind_address,
                host_id=self._host_discovery.host_id,
                use_unix=identity.size > 1 and not self.surroundings.alone,
                deliver=self._admit,
                on_failure=self._break_down,
            )
            opened.pop_all()
        self._caller = DialingRank(identity.key, identity.job, identity.epoch, identity.rank)
        self._dialer = Dialer(self._listener.loop, self._caller, self.control.failed)

    @property
    def surroundings(self) -> Surroundings:
        """The machine, the user and the namespaces of this process."""
        return self._host_discovery.surroundings

    @property
    def addresses(self) -> Addresses:
        """The addresses of this rank's listener."""
        return self._listener.addresses

    def meet(self, roster: Roster, options: Options, comm: Any = None) -> None:
        """Open the control links to the members of `roster`.

        Args:
            roster: the ranks of the job.
            options: `transports` and the options of TCP hold for every channel. `rendezvous_timeout_s` limits how long
                rank 0 waits for the control links of the others.
            comm: the communicator of mpi4py on which the ranks have met, or None.

        Raises:
            RendezvousError: some ranks did not connect to rank 0 in that time.
        """
        self._host_discovery.close()  # every rank has found its host by now
        self._members = roster.members
        self._options = options
        hosts = len({member.addresses.host_id for member in self._members})
        interface = tcp_interface_of_ucx(options.preference, hosts, self.addresses.tcp_host)
        self._fabrics = Fabrics(options.preference, self.identity.rank, comm, interface)
        context = OpenerContext(self._listener.loop, self.identity.epoch, options, self._fabrics, self._why_no_memory)
        with self._lock:
            self._openers = {name: kind.make_opener(context) for name, kind in CHANNELS.items()}
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
        """Connect to the judges, and later to the ranks that take their places. Called in the loop's thread."""
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
        """Make `meet` stop waiting and raise `RendezvousError` with `reason`."""
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def reach(self, peer: int, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Return a connection to another rank for the agreement of survivors; raises the errors of `dial`."""
        return self._dial(peer, Purpose.SURVIVOR, communicator, lane, timeout_s)

    def hosts_and_pids(self) -> tuple[tuple[str, int], ...]:
        """Return the host name and the process id of each rank."""
        return tuple((member.surroundings.host, member.addresses.pid) for member in self._members)

    def peers_of_host(self) -> int:
        """Return the number of ranks on this machine, including this rank."""
        return sum(self._shares_cores(member) for member in self._members)

    def cores_of_host(self) -> int:
        """Return the number of distinct cores that the ranks of this machine may run on."""
        mask = 0
        for member in self._members:
            if self._shares_cores(member):
                mask |= int(member.cores, 16)
        return mask.bit_count()

    def add_communicator(self, communicator: int, endpoint: _core.Endpoint, *, is_authenticated: bool = False) -> None:
        """Accept channels of `communicator` from other ranks, including channels that were dialled before.

        With `is_authenticated`, the communicator uses only transports on which nobody else can send.
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
        """Whether no transport of the job is a message library, as these do not check who sends."""
        return not any(name in UNAUTHENTICATED for name in self._options.preference)

    @property
    def preference(self) -> str:
        """The names of the transports, in order of preference."""
        return ",".join(self._options.preference)

    def link_to(self, peer: int) -> str:
        """Return the transport to `peer`, and why it is not shared memory, such as "tcp (another machine)".

        If the transport carries GPU memory, the result says so: "ucx with cuda (another machine)".
        """
        transport = self._transport_to(peer)
        if transport in SHARED_MEMORY:
            return transport
        with_cuda = " with cuda" if self._fabrics.carries(transport, MemoryType.CUDA) else ""
        return f"{transport}{with_cuda} ({'asked for' if self._is_local(peer) else self._why_apart(peer)})"

    def carries(self, memory: MemoryType, peer: int) -> bool:
        """Return whether the transport to `peer` carries `memory`."""
        return self._fabrics.carries(self._transport_to(peer), memory)

    def _transport_to(self, peer: int) -> str:
        """Return the transport of the latest channel to `peer`; before one is open, the first that may reach it."""
        possible = (name for name in self._options.preference if name not in SHARED_MEMORY or self._is_local(peer))
        return self._used.get(peer) or next(possible, "none")

    def shares_memory(self, ranks: Iterable[int]) -> bool:
        """Return whether these ranks exchange messages through shared memory."""
        return self._options.preference[0] in SHARED_MEMORY and all(self._is_local(rank) for rank in ranks)

    def open_channels(self, communicator: int, channels: Iterable[tuple[int, int]]) -> None:
        """Begin to open those of the (lane, peer) channels that this rank must dial and has not begun to open.

        The job fails if a channel cannot be opened.
        """
        opened = self._opened[communicator]
        for lane, peer in channels:
            must_dial = lane == _core.SENDING_LANE or (lane >= 0 and peer < self.identity.rank)
            if must_dial and (lane, peer) not in opened:
                opened.add((lane, peer))
                transports = AUTHENTICATED if communicator in self._authenticated else self._options.preference
                opening = _Opening(communicator, lane, peer, list(transports))
                self._listener.loop.submit(partial(self._open_by_next, opening))

    def close(self, farewell: str) -> None:
        """Leave the job. `farewell` is the reason, or empty."""
        self._host_discovery.close()
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
        """The ranks that want to follow this rank after a loss."""
        from unisono.transports.links.survivors import Arrivals

        with self._lock:
            if self._arrivals is None:
                self._arrivals = Arrivals()
            return self._arrivals

    def abandon(self) -> None:
        """In a forked child, whose copies of the descriptors are closed: drop the threads of the parent."""
        self.control.abandon()

    def call_soon(self, callback: Callback) -> None:
        """Call `callback` in the listener's thread, unless it has ended. Finalizers may call this: it takes no lock."""
        self._listener.loop.submit(callback)

    def _is_local(self, peer: int) -> bool:
        return self._members[peer].addresses.host_id == self.addresses.host_id

    def _shares_cores(self, member: Member) -> bool:
        machine = member.surroundings.machine
        is_same_host = member.addresses.host_id == self.addresses.host_id
        return is_same_host or (machine != "" and machine == self.surroundings.machine)

    def _why_apart(self, peer: int) -> str:
        return self.surroundings.apart_from(self._members[peer].surroundings)

    def _why_no_memory(self, peer: int) -> str:
        return "" if self._is_local(peer) else self._why_apart(peer)

    def _target(self, peer: int, purpose: Purpose, communicator: int, lane: int) -> Target:
        use_unix = self._is_local(peer) and not dials_tcp(purpose)
        return Target(peer, self._members[peer].addresses, use_unix, purpose, communicator, lane)

    def _dial(self, peer: int, purpose: Purpose, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Connect to a rank and wait for it. If a busy rank drops the connection, dial it again.

        A dead rank refuses the connection; then there is no other attempt, nor after the job has failed.
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
        """Remember the transport to a peer. Channels of pickled objects do not count: they may use another one."""
        if communicator not in self._authenticated:
            self._used[peer] = transport

    def _fail(self, peer: int, error: Exception) -> None:
        """Fail the job with an error that concerns a peer."""
        message = error.message if isinstance(error, UnisonoError) else str(error)
        if isinstance(error, PeerLostError):
            self.control.suspect(peer, message)
        else:
            self.control.fail(kind_of(error), peer, message)

    def _open_by_next(self, opening: _Opening) -> None:
        """Open a channel by the next transport that may reach the peer. Called in the loop's thread."""
        while opening.transports:
            opening.transport = opening.transports.pop(0)
            opener = self._openers[opening.transport]
            obstacle = opener.obstacle(opening.peer)
            if not obstacle:
                self._dial_sockets(opening, opener)
                return
            self._note_obstacle(opening, obstacle)
        if not set(REACHING_ALL) & set(self._options.preference):
            opening.obstacles.append(f"{' or '.join(REACHING_ALL)}, if it is among the transports, reaches every rank")
        message = f"no transport of UNISONO_TRANSPORTS={self.preference} reaches rank {opening.peer}: "
        self._fail(opening.peer, TransportUnavailableError(message + "; ".join(opening.obstacles)))

    def _note_obstacle(self, opening: _Opening, obstacle: str) -> None:
        _log.info("channel %s to rank %d: not %s: %s", *opening.shown(), opening.transport, obstacle)
        opening.obstacles.append(obstacle)

    def _dial_sockets(self, opening: _Opening, opener: Opener) -> None:
        lanes = opener.wire_lanes(opening.lane)
        opening.sockets = dict.fromkeys(lanes)
        for lane in lanes:
            target = self._target(opening.peer, purpose_of(opening.transport), opening.communicator, lane)
            self._dialer.dial(target, partial(self._on_dialled, opening, lane), partial(self._on_opened, opening))

    def _on_dialled(self, opening: _Opening, lane: int, sock: socket.socket) -> None:
        opening.sockets[lane] = sock
        sockets = [sock for sock in opening.sockets.values() if sock is not None]
        if len(sockets) < len(opening.sockets):
            return
        with self._lock:
            endpoint = self._endpoints.get(opening.communicator)
        if endpoint is None:  # the communicator was closed meanwhile
            opening.close()
            return
        channel = ChannelKey(endpoint, opening.lane, opening.peer)
        try:
            self._openers[opening.transport].dialled(channel, sockets, partial(self._on_opened, opening))
        except (OSError, RuntimeError, UnisonoError) as error:
            self._on_opened(opening, error)

    def _on_opened(self, opening: _Opening, error: Exception | None) -> None:
        """Record that a channel is open; on an error, try the next transport or fail the job."""
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
        elif is_exhausted(error):  # another transport would need as many descriptors
            self._fail(opening.peer, self._refused(f"a channel to rank {opening.peer}", error, opening.peer))
        else:
            message = f"a channel over {opening.transport} to rank {opening.peer} cannot be opened: {error}"
            self._fail(opening.peer, TransportUnavailableError(message + CHANNELS[opening.transport].advice))

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        """Accept a connection of another rank. If that fails, the other rank sees the connection end."""
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
                sock.close()  # the other rank sees that this one has left the communicator
                return
            endpoint = self._endpoints.get(hello.communicator)
            if endpoint is None:
                self._early.append((hello, sock))
                return
        opener = self._openers[transport_of(hello.purpose)]
        channel = ChannelKey(endpoint, lane_of(hello), hello.sender)
        opener.accepted(channel, hello, sock, partial(self._on_accepted, hello, sock))

    def _on_accepted(self, hello: Hello, sock: socket.socket, error: Exception | None) -> None:
        """Record that a channel that another rank has dialled is open, or has failed on this side."""
        if error is not None:
            if is_exhausted(error):  # the other rank cannot know that, so this rank reports it
                self._fail(hello.sender, self._refused(f"a channel from rank {hello.sender}", error, hello.sender))
            sock.close()
            _log.warning("channel from rank %d: it cannot be opened: %s", hello.sender, error)
            return
        transport = transport_of(hello.purpose)
        self._note_used(hello.communicator, hello.sender, transport)
        _log.debug("channel %s from rank %d: %s", lane_name(lane_of(hello)), hello.sender, transport)

    def _refused(self, channel: str, error: Exception, peer: int) -> TransportUnavailableError:
        rank = self.identity.rank
        return unavailable(f"{channel} cannot be opened on rank {rank}", error, rank, peer)

    def _break_down(self, error: Exception) -> None:
        """Fail the job on all ranks, because no rank could open another channel to this one."""
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
        communicator, lane, peer: the name of the channel.
        transports: the transports that have not been tried yet.
        transport: the transport that is being tried.
        sockets: the dialled sockets, by their lanes on the wire.
        obstacles: the reasons why other transports could not be used.
    """

    def __init__(self, communicator: int, lane: int, peer: int, transports: list[str]) -> None:
        self.communicator, self.lane, self.peer, self.transports = communicator, lane, peer, transports
        self.transport = ""
        self.sockets: dict[int, socket.socket | None] = {}
        self.obstacles: list[str] = []

    def shown(self) -> tuple[str, int]:
        """Return the lane in words and the peer, for the log."""
        return lane_name(self.lane), self.peer

    def close(self) -> None:
        """Close the sockets."""
        for sock in self.sockets.values():
            if sock is not None:
                sock.close()
        self.sockets = {}


def _allow_descriptors(rank: int, size: int) -> None:
    """Raise the limit of open files of a judge, which needs several descriptors for each of `size` ranks.

    Raises:
        RendezvousError: the system does not allow so many.
    """
    needed = _DESCRIPTORS_PER_RANK * size + _OTHER_DESCRIPTORS
    allowed = lift_limit_of_files(needed)
    if allowed is not None:
        raise RendezvousError(
            f"rank {rank} of {size} ranks needs about {needed} open files, but the hard limit is {allowed}: "
            "raise it (`ulimit -Hn`)"
        )
