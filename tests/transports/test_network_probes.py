"""How hosts measure their network while their ranks meet: turns, terms, and hosts that fail."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.deadlines import DEADLINE_S

from unisono.errors import PeerLostError
from unisono.transports.links.network_probes import (
    Appointment,
    Network,
    OnConnected,
    OnError,
    ProbeConnections,
    appointment,
    measure,
    turns,
)

LEADERS = [0, 2, 5]
# A turn ends when enough bytes have arrived. Its limit is long, because the machine may stop a host.
SOON = Appointment(turn_s=5.0, limit_s=DEADLINE_S)
FAR_S = 0.1


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialled = socket.create_connection(server.getsockname())
        return dialled, server.accept()[0]


class ProbingHosts:
    """The first ranks of hosts, as threads. `refusing` cannot be dialled."""

    def __init__(self, refusing: int | None = None) -> None:
        self.probes = {rank: ProbeConnections() for rank in LEADERS}
        self._refusing = refusing

    def dial(self, rank: int) -> Callable[[int, int, OnConnected, OnError], None]:
        def dial(peer: int, lane: int, on_connected: OnConnected, on_error: OnError) -> None:
            if peer == self._refusing:
                on_error(PeerLostError(f"rank {peer} is gone"))
                return
            dialled, accepted = connected()
            self.probes[peer].add(lane, rank, accepted)
            on_connected(dialled)

        return dial

    def measure(self, terms: Appointment, ranks: list[int] = LEADERS) -> list[Network | None]:
        with ThreadPoolExecutor(len(LEADERS)) as threads:
            return list(
                threads.map(lambda rank: measure(rank, LEADERS, self.probes[rank], self.dial(rank), terms), ranks)
            )


@pytest.mark.parametrize("hosts", range(2, 17))
def test_every_way_has_one_turn_in_which_hosts_send_and_receive_once_and_never_back(hosts: int) -> None:
    schedule = turns(hosts)
    ways = [way for turn in schedule for way in turn]
    assert sorted(ways) == [(i, j) for i in range(hosts) for j in range(hosts) if i != j]
    assert len(schedule) == hosts - hosts % 2
    for turn in schedule:
        sources, targets = zip(*turn, strict=True)
        assert len(set(sources)) == len(set(targets)) == len(turn)
        assert not {(target, source) for source, target in turn} & set(turn)


def test_hosts_measure_for_some_round_trips_and_for_few_seconds_in_all() -> None:
    terms = appointment([0.02, FAR_S, 0.0], 4, 60)
    assert terms is not None
    assert 6 * FAR_S <= terms.turn_s <= 1.4
    assert terms.limit_s < 15
    longest = appointment([3.0], 16, 1000)
    assert longest is not None
    assert longest.turn_s <= 2


@pytest.mark.parametrize(
    ("round_trips_s", "hosts", "remaining_s"),
    [
        pytest.param([0.0, 0.0049], 2, 60, id="near"),
        pytest.param([], 1, 60, id="alone"),
        pytest.param([FAR_S] * 16, 17, 60, id="too many"),
        pytest.param([FAR_S], 2, 5, id="too late"),
    ],
)
def test_hosts_do_not_measure_when(round_trips_s: list[float], hosts: int, remaining_s: float) -> None:
    assert appointment(round_trips_s, hosts, remaining_s) is None


def test_rank_0_has_the_round_trips_and_rates_of_all_pairs() -> None:
    network, *others = ProbingHosts().measure(SOON)
    assert others == [None, None]
    assert network is not None
    assert Network.of(json.loads(json.dumps(network._asdict()))) == network
    assert not network.is_far  # by the many packets of a turn, on however busy a machine
    far = network._replace(round_trip_s=((0.0, FAR_S, 0.001), (FAR_S, 0.0, 0.001), (0.001, 0.001, 0.0)))
    assert far.is_far
    for i in range(3):
        for j in range(3):
            assert (network.per_byte_s[i][j] > 0) == (i != j)
            assert network.round_trip_s[i][j] == network.round_trip_s[j][i]


@pytest.mark.parametrize(
    ("hosts", "terms", "ranks"),
    [
        pytest.param(ProbingHosts(refusing=2), SOON._replace(limit_s=2.0), LEADERS, id="a host cannot be dialled"),
        pytest.param(ProbingHosts(), SOON._replace(limit_s=0.5), LEADERS[:-1], id="a host does not come"),
        pytest.param(ProbingHosts(), SOON._replace(limit_s=0.5), LEADERS[1:], id="rank 0 does not come"),
    ],
)
def test_no_host_waits_and_none_has_a_network_when_one_fails(
    hosts: ProbingHosts, terms: Appointment, ranks: list[int]
) -> None:
    assert hosts.measure(terms, ranks) == [None] * len(ranks)
    for probes in hosts.probes.values():
        probes.close()


@pytest.mark.parametrize(
    "message",
    [
        {"round_trip_s": [[0.0, 1.0], [1.0]], "per_byte_s": [[0.0, 1.0], [1.0, 0.0]]},
        {"round_trip_s": [[0.0, 1.0], [1.0, 0.0]], "per_byte_s": [[0.0]]},
        {"round_trip_s": [[0.0, 1.0], [1.0, 0.0]], "per_byte_s": [[0.0, -1.0], [1.0, 0.0]]},
        {"round_trip_s": [[0.0, 1.0], [1.0, 0.0]], "per_byte_s": [[0.0, 0.0], [1.0, 0.0]]},
        {"round_trip_s": 3.0, "per_byte_s": [[0.0]]},
        [],
    ],
)
def test_message_without_positive_square_matrices_is_no_network(message: object) -> None:
    with pytest.raises(ValueError, match=r"it cannot be|not square|not positive|cannot be a value"):
        Network.of(message)
