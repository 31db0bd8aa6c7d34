"""How the ranks of a roster connect to rank 0, and how all of them learn whether all have.

Theory of operation. Every rank dials rank 0, which holds the links that arrive. Once all are there, rank 0 sends
``{"begin": true}`` over each of them. If a rank cannot connect, it writes why into the store, which rank 0 reads from
time to time. Rank 0 then sends ``{"error": …}`` over the links that it holds. So every rank raises the same error soon.

If rank 0 decides that the hosts measure their network, it sends ``{"measure": …}`` before, and the network follows in
``{"begin": true, "network": …}`` unless the measuring failed (network_probes.py).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unisono.errors import CollectiveTimeoutError, PeerLostError, RendezvousError, UnisonoError
from unisono.foundation.deadlines import LONGEST_WAIT_S, Deadline
from unisono.transports.host.bind_address import HOW_TO_REACH
from unisono.transports.host.system_limits import is_exhausted
from unisono.transports.links.dialer import DialingRank, Target, dial, shown
from unisono.transports.links.link_messages import readable, receive, send
from unisono.transports.links.listener import Addresses
from unisono.transports.links.network_probes import Appointment, Network
from unisono.transports.tcp.tcp_info import least_round_trip_s

Failure = Callable[[], str]
"""Returns why a rank cannot connect, as it is in the store; empty as long as no rank has failed."""

# How often rank 0 looks whether a rank has failed.
_LOOK_S = 0.2
# How long one attempt may take to be answered, before the dialing rank looks too.
_ATTEMPT_S = 5.0
_PAUSE_S = 0.01
# Rank 0 notices the end of the time at the same moment as the others, and knows more about the reason.
_GRACE_S = 1.0
_MOST_SHOWN = 8


class Gathering:
    """The links to rank 0, until all have arrived. Only rank 0 uses it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: dict[int, socket.socket] = {}
        self._given_up = ""
        self._is_over = False
        self._refusal = ""  # why the ranks cannot begin, once that is certain

    def admit(self, peer: int, link: socket.socket) -> bool:
        """Hold the link of a rank, or refuse it if the ranks cannot begin; return False, and do nothing, if all began.

        A rank may connect after the failure of another one. Nobody else would answer it: in `grow`, rank 0 closes the
        session only when all ranks have told each other whether they have met.
        """
        with self._changed:
            refusal = self._refusal
            if self._is_over and not refusal:
                return False
            former = self._arrived.pop(peer, None)
            if not refusal:
                self._arrived[peer] = link
            self._changed.notify_all()
        if refusal:
            send(link, {"error": refusal})
            link.close()
        if former is not None:
            former.close()
        return True

    def give_up(self, reason: str) -> None:
        """Make `complete` raise `RendezvousError` with `reason`."""
        with self._changed:
            self._given_up = reason
            self._changed.notify_all()

    def complete(self, addresses: Sequence[Addresses], deadline: Deadline, timeout_s: float, failure: Failure) -> None:
        """Wait until the ranks of all `addresses` but the first have connected.

        Raises:
            RendezvousError: one of them cannot, has ended, or did not before `deadline`, whose time was `timeout_s`. Or
                this rank has given up.
        """
        others = range(1, len(addresses))
        while True:
            with self._changed:
                period_s = min(_LOOK_S, deadline.remaining_s())
                self._changed.wait_for(lambda: self._given_up or len(self._arrived) == len(others), period_s)
                arrived, reason = dict(self._arrived), self._given_up
            missing = [rank for rank in others if rank not in arrived]
            reason = reason or (missing and (_ended(arrived) or failure())) or ""
            if not reason and missing and deadline.has_passed():
                reason = _missing(missing, addresses, timeout_s)
            if reason:
                raise RendezvousError(reason, rank=0)
            if not missing:
                return

    def round_trips_s(self) -> list[float]:
        """Return the least round trip of each link, as the kernel has measured it."""
        with self._changed:
            return [least_round_trip_s(link) for link in self._arrived.values()]

    def arrange(self, terms: Appointment) -> None:
        """Tell all ranks that the hosts begin to measure their network."""
        with self._changed:
            arrived = list(self._arrived.values())
        for link in arrived:
            send(link, {"measure": terms._asdict()})

    def begin(self, add: Callable[[int, socket.socket], None], network: Network | None) -> None:
        """Tell all ranks that they may begin, and the network; pass each link to `add`. Later links are not held."""
        message = {"begin": True, **({} if network is None else {"network": network._asdict()})}
        with self._changed:
            self._is_over = True
            arrived, self._arrived = self._arrived, {}
        for peer, link in arrived.items():
            send(link, message)
            link.settimeout(None)
            add(peer, link)

    def close(self, reason: str) -> None:
        """Tell the ranks whose links this object holds why they cannot begin."""
        with self._changed:
            self._is_over, self._refusal = True, reason
            arrived, self._arrived = self._arrived, {}
        for link in arrived.values():
            send(link, {"error": reason})
            link.close()


def link_to_first(
    caller: DialingRank,
    target: Target,
    own: Addresses,
    deadline: Deadline,
    timeout_s: float,
    failure: Failure,
    measure: Callable[[Appointment], object],
) -> tuple[socket.socket, Network | None]:
    """Connect to rank 0, and wait until all other ranks have too; return the link, and the network if it is measured.

    Args:
        caller: this rank.
        target: rank 0.
        own: the addresses of this rank.
        deadline: the end of the time.
        timeout_s: the seconds of that time, for errors.
        failure: returns why another rank cannot connect.
        measure: called if the hosts measure their network; it keeps the time limit.

    Raises:
        RendezvousError: this rank or another one cannot connect to rank 0, or did not before `deadline`.
        TransportUnavailableError: this process has no descriptor for the connection.
    """
    facts: dict[str, Any] = {"rank": caller.rank, "peer": 0}
    link = _dialled(caller, target, own, deadline, timeout_s, failure)
    try:
        message = receive(link, Deadline(min(deadline.remaining_s() + _GRACE_S, LONGEST_WAIT_S)))
        if "measure" in message:
            terms = Appointment.of(message["measure"])
            limit = Deadline(min(max(terms.limit_s, deadline.remaining_s()) + _ATTEMPT_S, LONGEST_WAIT_S))
            measure(terms)
            message = receive(link, limit)
        network = Network.of(message["network"]) if "network" in message else None
    except TimeoutError:
        link.close()
        raise RendezvousError(f"{shown(target)} does not say that all ranks have connected to it", **facts) from None
    except (OSError, ValueError) as error:
        link.close()
        raise RendezvousError(
            f"{shown(target)} ended its link while the ranks connected to it: {error}", **facts
        ) from None
    if "begin" not in message:
        link.close()
        raise RendezvousError(str(message.get("error", "rank 0 has refused this rank")), **facts)
    link.settimeout(None)
    return link, network


def _dialled(
    caller: DialingRank, target: Target, own: Addresses, deadline: Deadline, timeout_s: float, failure: Failure
) -> socket.socket:
    while True:
        try:
            return dial(caller, target, deadline.remaining_s(), answer_s=_ATTEMPT_S)[0]
        except UnisonoError as error:
            if error.__cause__ is not None and is_exhausted(error.__cause__):
                raise
            if reason := failure():
                raise RendezvousError(reason, rank=caller.rank) from None
            if deadline.has_passed() or not _may_pass(error):
                raise RendezvousError(
                    _refused(caller, target, own, error, timeout_s), rank=caller.rank, peer=0
                ) from None
        time.sleep(_PAUSE_S)


def _may_pass(error: UnisonoError) -> bool:
    """Return whether rank 0 may answer another attempt: a busy rank drops connections, and a dead one refuses them."""
    is_dropped = isinstance(error, PeerLostError) and not isinstance(error.__cause__, ConnectionRefusedError)
    return is_dropped or isinstance(error, CollectiveTimeoutError)


def _refused(caller: DialingRank, target: Target, own: Addresses, error: UnisonoError, timeout_s: float) -> str:
    cause = error.__cause__
    why = f": {getattr(cause, 'strerror', None) or cause}" if cause is not None else f" within {timeout_s:g} s"
    text = f"rank {caller.rank} cannot connect to {shown(target)}{why}"
    if target.use_unix:
        return text
    if own.tcp_host == target.addresses.tcp_host and own.host_id != target.addresses.host_id:
        text += " (the host of this rank has that address too)"
    return f"{text}: {HOW_TO_REACH}"


def _ended(links: Mapping[int, socket.socket]) -> str:
    """Return a text that names a rank that has ended. Until all have connected, only the end of a link is readable."""
    readable_links = readable(list(links.values()))
    peer = next((peer for peer, link in links.items() if link in readable_links), None)
    return "" if peer is None else f"rank {peer} ended while the ranks connected to rank 0"


def _missing(missing: Sequence[int], addresses: Sequence[Addresses], timeout_s: float) -> str:
    names = ", ".join(map(str, missing[:_MOST_SHOWN])) + (", …" if len(missing) > _MOST_SHOWN else "")
    first = addresses[0]
    text = (
        f"rank{'s' if len(missing) > 1 else ''} {names} of {len(addresses)} did not connect to rank 0 at "
        f"{first.tcp_host} port {first.tcp_port} within {timeout_s:g} s"
    )
    is_apart = any(addresses[rank].host_id != first.host_id for rank in missing)
    return f"{text}: {HOW_TO_REACH}" if is_apart else text
