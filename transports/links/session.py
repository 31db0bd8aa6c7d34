"""`Session`: the membership of this process in a job. It holds the key, the roster, the listener and the control links.

All communicators of the process share the session. Its `Channels` open their channels (channels.py).

Theory of operation. Every rank has control links to the two judges of the job, at first ranks 0 and 1. It dials rank 0
when it joins, and the other judge in the background. When a judge leaves, the next rank takes its place, and all ranks
above that one dial it.

host_discovery.py finds out before which ranks are on one host, with
the same result on all ranks.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Any

from unisono.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    RendezvousError,
    UnisonoError,
)
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.forks import closed_in_child
from unisono.foundation.records import record
from unisono.options import MOST_RECORDED, Options
from unisono.transports import _core
from unisono.transports.host.fd_limit import lift_limit_of_files
from unisono.transports.host.host_discovery import HostDiscovery, Surroundings
from unisono.transports.host.system_limits import unavailable
from unisono.transports.links.channel_kinds import dials_tcp
from unisono.transports.links.channels import ChannelHooks, Channels
from unisono.transports.links.dialer import Dialer, DialingRank, Target, Ways, dial
from unisono.transports.links.event_loop import Callback
from unisono.transports.links.failures import ERRORS, kind_of
from unisono.transports.links.handshake import Hello, Purpose
from unisono.transports.links.listener import Addresses, Listener
from unisono.transports.links.liveness import exchange_heartbeats, process_descriptor
from unisono.transports.links.meeting import Failure, Gathering, link_to_first
from unisono.transports.links.network_probes import (
    Appointment,
    Network,
    OnConnected,
    OnError,
    ProbeConnections,
    appointment,
    measure,
)
from unisono.transports.links.preference import tcp_interface_of_ucx
from unisono.transports.recorder.recorder import Directories, Recorder
from unisono.transports.recorder.stacks import offer_stacks
from unisono.transports.rendezvous.roster import Roster, RosterMember
from unisono.transports.tagged.fabrics import Fabrics
from unisono.transports.tcp.resumption import Resumption, Stream, Streams
from unisono.transports.tcp.tls import TlsPolicy, connection_of

if TYPE_CHECKING:
    from unisono.transports.links.survivors import Arrivals

_log = log.get("links")

_DIAL_PAUSE_S = 0.01
# The descriptors of a rank: for each other rank its link, its pidfd and its connections of the rendezvous, or channels;
# and all others.
_DESCRIPTORS_PER_RANK = 4
_OTHER_DESCRIPTORS = 256
_JUDGES = 2
# How long a rank that leaves waits for its links to the judges, and how often it looks whether it needs them still.
_LINKING_S, _LOOK_S = 1.0, 0.01


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
        launch_rank: the number of this rank when it was launched, which people know it by.
        lasting_store: the URL of the job's store, if it outlives ranks and so processes can ask there to join; or None.
    """

    key: bytes
    job: bytes
    epoch: int
    rank: int
    size: int
    meeting: int = 0
    launch_rank: int = 0
    lasting_store: str | None = None


class Session:
    """The membership of this process in a job, which its communicators share. The last communicator closes it.

    Args:
        identity: the identity of this rank.
        options: the settings of this rank. Another rank on this host may take `rendezvous_timeout_s` to answer, because
            it may have to wait for its core.
        ways: the ways to ranks that this one cannot dial; None if it dials all.
        certificates: as of `TlsPolicy`.

    Attributes:
        recorder: the flight recorder of this rank.
        latest_epoch: the highest epoch of the job that this rank knows. Each attempt to change the membership takes a
            higher one, so that connections of an earlier attempt are refused.
        network: the delays and rates between the hosts, if `meet` has measured them.
    """

    def __init__(
        self, identity: RankIdentity, options: Options, ways: Ways | None = None, certificates: Sequence[str] = ()
    ) -> None:
        self.identity = identity
        self.latest_epoch = identity.epoch
        self._heartbeat_timeout_s = options.heartbeat_timeout_s
        recorded_calls = MOST_RECORDED if options.trace else options.recorded_calls
        self.control = _core.Control(
            identity.rank, identity.size, recorded_calls, options.warn_after_s, options.heartbeat_timeout_s
        )
        if options.trace_groups:
            from unisono.transports.recorder.groups import traced_groups

            self._groups = traced_groups(self.control)
        self._members: tuple[RosterMember, ...] = ()
        self._lock = threading.Lock()
        self._arrivals: Arrivals | None = None
        self._gathering = Gathering()
        self._probes = ProbeConnections()
        self.network: Network | None = None
        self._dialled_judges: set[int] = set()
        self._half_linked: set[int] = set()  # the judges that the dialler connects to now
        self._linked = threading.Condition()
        self._news: FileIO | None = None  # an eventfd that the native core signals when a rank or a connection is lost
        allowed = lift_limit_of_files(_descriptors_of(identity.size))
        if allowed is not None and identity.rank < _JUDGES:
            raise _too_few_descriptors(identity, allowed)
        with contextlib.ExitStack() as opened:
            opened.callback(self.control.leave, "")
            key, job, epoch = identity.key, identity.job, identity.epoch
            self._host_discovery = HostDiscovery(
                key, job, epoch, identity.rank, identity.size, identity.meeting, options.rendezvous_timeout_s
            )
            opened.callback(self._host_discovery.close)
            tls = TlsPolicy.of(options, certificates)
            self._listener = Listener(
                key=identity.key,
                job=identity.job,
                epoch=identity.epoch,
                rank=identity.rank,
                size=identity.size,
                bind_address=options.bind_address,
                host_id=self._host_discovery.host_id,
                use_unix=identity.size > 1 and not self.surroundings.alone,
                deliver=self._admit,
                on_failure=self._break_down,
                tls=tls,
            )
            opened.callback(self._listener.close, lambda: None)
            directories = Directories(options.dump, options.trace, options.source_of("dump"))
            name = f"{job.hex()[:8]}-{epoch}"
            self.recorder = Recorder(self.control, self._listener.loop, directories, name, _error_name)
            self.recorder.start()
            if recorded_calls:
                offer_stacks()
            opened.pop_all()
        self._caller = DialingRank(identity.key, identity.job, identity.epoch, identity.rank, tls, ways)
        self._dialer = Dialer(self._listener.loop, self._caller, self.control.failed)
        hooks = ChannelHooks(self._is_local, self._why_apart, self._target, self._fail)
        self.channels = Channels(identity.rank, identity.epoch, self._listener.loop, self._dialer, hooks)
        self._resumption = Resumption(
            identity.rank, self._listener.loop, self._dialer, self._target, self._streams, self._on_refused
        )

    @property
    def surroundings(self) -> Surroundings:
        """The machine, the user and the namespaces of this process."""
        return self._host_discovery.surroundings

    @property
    def addresses(self) -> Addresses:
        """The addresses of this rank's listener."""
        return self._listener.addresses

    def take(self, sock: socket.socket) -> None:
        """Take over a nonblocking connection to this rank's listener, which another process has made."""
        self._listener.take(sock)

    def meet(
        self,
        roster: Roster,
        options: Options,
        comm: Any = None,
        *,
        deadline: Deadline | None = None,
        failure: Failure = lambda: "",
        measures_network: bool = False,
    ) -> None:
        """Open the control links to the members of `roster`.

        Args:
            roster: the ranks of the job.
            options: `transports` and the options of TCP hold for every channel. `rendezvous_timeout_s` limits how long
                the ranks may take to connect to rank 0.
            comm: the communicator of mpi4py on which the ranks have met, or None.
            deadline: the end of that time, if it has begun.
            failure: returns why another rank cannot connect; empty as long as none has said so.
            measures_network: whether hosts that are far apart measure their network before. Only rank 0's counts.

        Raises:
            RendezvousError: not all ranks could connect to rank 0 in that time, which the error explains.
        """
        self._host_discovery.close()  # every rank has found its host by now
        self._members = roster.members
        hosts = len({member.addresses.host_id for member in self._members})
        self._describe(hosts)
        interface = tcp_interface_of_ucx(options.preference, hosts, self.addresses.tcp_host)
        self.channels.start(options, Fabrics(options.preference, self.identity.rank, comm, interface))
        timeout_s = options.rendezvous_timeout_s
        try:
            self._link_all(deadline or Deadline(timeout_s), timeout_s, failure, measures_network)
        finally:
            self._probes.close()
        if not self._is_local(0):
            self.recorder.compare_clocks()
        if self.identity.size > 1:
            news = closed_in_child(FileIO(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), "r+"))
            self._news = news
            self._listener.loop.submit(partial(self._watch_news, news))

    def _describe(self, hosts: int) -> None:
        """Write the id, the epoch and the hosts of the job into the flight recorder, for readers outside."""
        identity, surroundings = self.identity, self.surroundings
        facts = {"job": identity.job.hex(), "epoch": identity.epoch, "host": surroundings.host, "hosts": hosts}
        self.recorder.describe({**facts, "launch_rank": identity.launch_rank})

    def _link_all(self, deadline: Deadline, timeout_s: float, failure: Failure, measures_network: bool) -> None:
        """Connect to rank 0, and wait until all ranks have."""
        addresses = [member.addresses for member in self._members]
        if self.identity.rank != 0:
            self._dialled_judges.add(0)
            target = self._target(0, Purpose.CONTROL, 0, 0)
            link, self.network = link_to_first(
                self._caller, target, self.addresses, deadline, timeout_s, failure, self._measure
            )
            self._add_control_link(0, link)
            return
        try:
            self._gathering.complete(addresses, deadline, timeout_s, failure)
        except RendezvousError as error:
            self._gathering.close(error.message)
            raise
        if measures_network:
            self.network = self._measured(deadline)
        self._gathering.begin(self._add_control_link, self.network)

    def _measured(self, deadline: Deadline) -> Network | None:
        """Let the hosts measure their network if they seem far apart; return it if they are. Only rank 0 calls it."""
        terms = appointment(self._gathering.round_trips_s(), len(self._leaders()), deadline.remaining_s())
        if terms is None:
            return None
        self._gathering.arrange(terms)
        network = self._measure(terms)
        return network if network is not None and network.is_far else None

    def _measure(self, terms: Appointment) -> Network | None:
        """Take part in the measuring if this rank is the first one of its host; return the network on rank 0."""
        leaders = self._leaders()
        if self.identity.rank not in leaders:
            return None
        dialer = Dialer(self._listener.loop, self._caller, self.control.failed)

        def dial_to_measure(peer: int, lane: int, connected: OnConnected, failed: OnError) -> None:
            dialer.dial(self._target(peer, Purpose.PROBE, 0, lane), connected, failed)

        try:
            return measure(self.identity.rank, leaders, self._probes, dial_to_measure, terms)
        finally:
            self._listener.loop.submit(dialer.close)  # a host that did not answer is not dialled any more

    @contextlib.contextmanager
    def probing(self) -> Iterator[Callable[[Appointment], Network | None]]:
        """Accept the connections by which hosts measure their network, and yield the function that measures.

        All ranks must be here before one of them calls it. It returns the network on rank 0, and None elsewhere or if a
        host fails or is late.
        """
        self._probes = ProbeConnections()
        try:
            yield self._measure
        finally:
            self._probes.close()

    def _leaders(self) -> list[int]:
        """Return the first rank of each host."""
        first: dict[str, int] = {}
        for member in self._members:
            first.setdefault(member.addresses.host_id, member.rank)
        return list(first.values())

    def _watch_news(self, news: FileIO) -> None:
        """Call `_on_news` now, and whenever the control links ring the eventfd `news`; in the loop's thread.

        `_on_news` connects this rank to the judges and to their successors, and resumes broken connections.
        """
        self.control.add_doorbell(news.fileno())
        self._listener.loop.watch(news.fileno(), self._on_news)
        self._on_news()

    def _on_news(self) -> None:
        if self._news is not None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._news.fileno())
        for *stream, resumptions in self.control.take_lost_connections():
            self._resumption.begin(Stream(*stream), resumptions)
        for judge in self.control.judges():
            if judge < self.identity.rank and judge not in self._dialled_judges:
                self._dialled_judges.add(judge)
                with self._linked:
                    self._half_linked.add(judge)
                self._dialer.dial(
                    self._target(judge, Purpose.CONTROL, 0, 0),
                    partial(self._end_linking, judge, self._add_control_link),
                    partial(self._end_linking, judge, partial(self._fail, needed=False)),
                )

    def _end_linking(self, judge: int, end: Callable[[int, Any], None], result: Any) -> None:
        """Add the finished link to a judge, or fail the job if it could not be made."""
        end(judge, result)
        with self._linked:
            self._half_linked.discard(judge)
            self._linked.notify_all()

    def _await_links(self) -> None:
        """Wait until this rank has a control link to each judge.

        A judge may have its end of a link before this rank has the other end. If this rank left then, the judge would
        see an end without a farewell, which means a death.
        """
        if self._listener.loop.is_current():
            return
        deadline = Deadline(_LINKING_S)
        with self._linked:
            while any(not self.control.departed(judge) for judge in self._half_linked):
                if self.control.failed() or deadline.has_passed():
                    return
                self._linked.wait(_LOOK_S)

    def give_up(self, reason: str) -> None:
        """Make `meet` of rank 0 stop waiting and raise `RendezvousError` with `reason`."""
        self._gathering.give_up(reason)

    def reach(self, peer: int, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Return a connection to another rank for the agreement of survivors; raises the errors of `dial`."""
        return self._dial(peer, Purpose.SURVIVOR, communicator, lane, timeout_s)

    @property
    def members(self) -> tuple[RosterMember, ...]:
        """The ranks of the job, in their order."""
        return self._members

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

    def close(self, farewell: str) -> None:
        """Leave the job. `farewell` is the reason that the other ranks learn; empty without one."""
        self._await_links()
        self._host_discovery.close()
        self._listener.close(self._close_in_loop)
        with self._lock:
            arrivals = self._arrivals
        if arrivals is not None:
            arrivals.close()
        self._probes.close()
        self._gathering.close(farewell or "rank 0 has left")
        self.control.leave(farewell)
        self.channels.close()

    def _close_in_loop(self) -> None:
        self.recorder.close()
        self._dialer.close()
        self.channels.close_openers()
        self._resumption.close()
        if self._news is not None:
            self._listener.loop.unwatch(self._news.fileno())
            self.control.remove_doorbell(self._news.fileno())
            self._news.close()

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
        """Call `callback` in the listener's thread, unless this thread has ended. It takes no lock, for finalizers."""
        self._listener.loop.submit(callback)

    def _is_local(self, peer: int) -> bool:
        return self._members[peer].addresses.host_id == self.addresses.host_id

    def _shares_cores(self, member: RosterMember) -> bool:
        machine = member.surroundings.machine
        is_same_host = member.addresses.host_id == self.addresses.host_id
        return is_same_host or (machine != "" and machine == self.surroundings.machine)

    def _why_apart(self, peer: int) -> str:
        why = self.surroundings.apart_from(self._members[peer].surroundings)
        way = "" if self._caller.ways is None else self._caller.ways.shown(peer)
        return f"{why}, {way}" if way else why

    def _target(self, peer: int, purpose: Purpose, communicator: int, lane: int) -> Target:
        use_unix = self._is_local(peer) and not dials_tcp(purpose)
        return Target(peer, self._members[peer].addresses, use_unix, purpose, communicator, lane)

    def _dial(self, peer: int, purpose: Purpose, communicator: int, lane: int, timeout_s: float) -> socket.socket:
        """Connect to a rank, and wait until it has accepted. If a busy rank drops the connection, dial it again.

        A dead rank refuses the connection; then there is no other attempt, nor after the job has failed.
        """
        target, deadline = self._target(peer, purpose, communicator, lane), Deadline(timeout_s)
        while True:
            try:
                return dial(self._caller, target, deadline.remaining_s())[0]
            except PeerLostError as error:
                is_over = deadline.has_passed() or self.control.failed()
                if isinstance(error.__cause__, ConnectionRefusedError) or is_over:
                    raise
            except CollectiveTimeoutError:
                message = f"rank {peer} did not answer within {timeout_s:g} s"
                raise CollectiveTimeoutError(message, rank=self.identity.rank, peer=peer) from None
            time.sleep(_DIAL_PAUSE_S)

    def _fail(self, peer: int, error: Exception, needed: bool = True) -> None:
        """Fail the job with an error that concerns a peer. A peer that is not `needed` may leave without an error."""
        message = error.message if isinstance(error, UnisonoError) else str(error)
        if isinstance(error, PeerLostError):
            self.control.suspect(peer, message, needed)
        else:
            self.control.fail(kind_of(error), peer, message)

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        """Accept a connection of another rank. If that fails, the other rank sees the connection end."""
        try:
            if hello.purpose is Purpose.CONTROL:
                if self.identity.rank != 0 or not self._gathering.admit(hello.sender, sock):
                    self._add_control_link(hello.sender, sock)
            elif hello.purpose is Purpose.PROBE:
                self._probes.admit(hello, sock)
            elif hello.purpose is Purpose.SURVIVOR:
                self.survivors.admit(hello, sock)
            elif hello.purpose in (Purpose.TCP_RESUME, Purpose.TCP_REDIAL):
                self._resumption.admit(hello, sock)
            else:
                self.channels.admit(hello, sock)
        except (OSError, RuntimeError) as error:
            self.channels.refuse(hello, sock, error)

    def _break_down(self, error: Exception) -> None:
        """Fail the job on all ranks, because no rank could open another channel to this one."""
        rank = self.identity.rank
        refused = unavailable(f"rank {rank} accepts no more connections", error, rank)
        self.control.fail(kind_of(refused), -1, refused.message)
        self.give_up(refused.message)

    def _streams(self, communicator: int) -> Streams | None:
        if communicator == _core.CONTROL_LINKS:
            return _ControlStreams(self.control, self._heartbeat_timeout_s)
        return self.channels.endpoint(communicator)

    def _on_refused(self, stream: Stream) -> None:
        if stream.communicator == _core.CONTROL_LINKS:
            self.control.end_link(stream.peer)

    def _add_control_link(self, peer: int, sock: socket.socket) -> None:
        process = process_descriptor(sock)
        if sock.family != socket.AF_UNIX:
            exchange_heartbeats(sock, self._heartbeat_timeout_s)
        self.control.add_link(peer, connection_of(sock), process)


class _ControlStreams:
    """The control links in the form in which `Resumption` continues them: each is one stream."""

    def __init__(self, control: _core.Control, heartbeat_timeout_s: float) -> None:
        self._control = control
        self._heartbeat_timeout_s = heartbeat_timeout_s

    def retire_stream(self, lane: int, peer: int, stream: int, resumptions: int) -> tuple[int, int] | None:
        return self._control.retire_link(peer, resumptions)

    def resume_stream(
        self, lane: int, peer: int, stream: int, connection: _core.Connection, resumptions: int, received: int
    ) -> bool:
        sock = socket.socket(fileno=connection.fileno())
        exchange_heartbeats(sock, self._heartbeat_timeout_s)
        sock.detach()
        return self._control.resume_link(peer, connection, resumptions, received)


def _descriptors_of(size: int) -> int:
    return _DESCRIPTORS_PER_RANK * size + _OTHER_DESCRIPTORS


def _too_few_descriptors(identity: RankIdentity, allowed: int) -> RendezvousError:
    """Return the error of a judge, which has a link to each rank; other ranks may need fewer channels."""
    needed = _descriptors_of(identity.size)
    return RendezvousError(
        f"rank {identity.rank} of {identity.size} ranks needs about {needed} open files, but the hard limit is "
        f"{allowed}: raise it (`ulimit -Hn`)"
    )


def _error_name(kind: int) -> str:
    return ERRORS[kind].__name__
