"""How hosts measure their network while their ranks meet: turns, terms, and hosts that fail."""

from __future__ import annotations

import itertools
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
from unisono.transports.links.probe_turns import Sample, per_byte_s

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


# Samples of ways of 60 Mbit/s between namespaces, as differences in ms and in kB. On the first way, acknowledgements
# came steadily. On the second one, they waited behind data of the other direction, and came in bursts.
STEADY = """
0:0 11:0 11:0 10:0 10:13 11:78 10:74 11:78 14:65 10:76 12:81 12:91 13:96 15:107 10:75 11:75 14:102 14:104 11:78 12:87
15:104 14:107 16:115 12:85 13:93 10:74 12:87 15:111 19:133 10:80 15:101 13:97 10:74 15:107 12:86 10:72 17:126 12:80
16:123 10:71 14:98 15:115 13:88 18:130 13:96 11:80 12:85 10:77 11:74
"""
IN_BURSTS = """
0:0 10:0 10:0 10:0 10:0 14:107 11:80 10:65 11:23 10:0 10:32 10:33 10:31 10:34 11:41 10:226 10:38 10:23 10:8 10:58
10:25 11:62 10:32 10:45 10:53 10:95 11:224 10:10 10:58 10:112 11:26 10:84 10:111 10:57 10:128 11:53 10:69 10:145
11:106 10:82 10:68 10:29 10:25 10:23 11:27 10:24 10:23 10:26 10:26 10:29 10:32 10:42 11:63 10:47 11:81 10:145 10:126
10:39 10:114 10:64 11:40 10:97 10:129 10:99 10:117 10:84 11:93 10:113 10:120 10:65 10:96
"""
PAYLOAD_PER_BYTE_S = 8e-6 / (60 * 1448 / 1500)


def samples(text: str) -> list[Sample]:
    pairs = [tuple(map(int, pair.split(":"))) for pair in text.split()]
    times, sizes = (list(itertools.accumulate(column)) for column in zip(*pairs, strict=True))
    return [(1e-3 * ms, 1000 * kilobytes) for ms, kilobytes in zip(times, sizes, strict=True)]


def beside_other_traffic(own: list[Sample], begin: float, length: float) -> list[Sample]:
    """Return the samples if other traffic takes half of the line from `begin` on, both in parts of the turn."""
    turn_s = own[-1][0]
    slower, nbytes = [own[0]], float(own[0][1])
    for (before_s, before), (time_s, after) in itertools.pairwise(own):
        both_s = min(time_s, (begin + length) * turn_s) - max(before_s, begin * turn_s)
        nbytes += (after - before) * (1 - 0.5 * max(0.0, both_s) / (time_s - before_s))
        slower.append((time_s, round(nbytes)))
    return slower


@pytest.mark.parametrize("text", [STEADY, IN_BURSTS])
def test_a_rate_is_that_of_the_line_also_if_acknowledgements_come_in_bursts(text: str) -> None:
    assert per_byte_s(samples(text)) == pytest.approx(PAYLOAD_PER_BYTE_S, rel=0.03)


@pytest.mark.parametrize("begin", [0.0, 0.1, 0.15, 0.2, 0.7, 0.75, 0.8, 0.9])
def test_a_burst_of_other_traffic_that_leaves_a_window_does_not_move_the_rate(begin: float) -> None:
    own = samples(STEADY)
    assert per_byte_s(beside_other_traffic(own, begin, 0.15)) == pytest.approx(per_byte_s(own), rel=0.05)


@pytest.mark.parametrize("begin", [number / 20 for number in range(18)])
def test_no_short_burst_of_other_traffic_moves_the_rate_by_more_than_its_share_of_a_window(begin: float) -> None:
    own = samples(STEADY)
    length = 0.15
    ratio = per_byte_s(beside_other_traffic(own, begin, length)) / per_byte_s(own)
    assert 0.95 < ratio < 1 / (1 - 0.5 * length / 0.375)
