"""Jobs on several hosts, which are network namespaces with shaped links between them. Some links fail."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.hosts import Hosts, needs_namespaces
from support.ranks import Job, LastingJob, Prefixed, require

import unisono as un
from unisono.bench.namespaces import address, inside, ip, network
from unisono.bench.wide_area import NetworkWay, uniform, wide_area
from unisono.collectives.measurement import link_probes
from unisono.tuning.decide.choice import TunerState, explain
from unisono.tuning.machine.parameters import PRIORS, from_json, to_json

pytestmark = needs_namespaces
Say = Callable[[Any], None]

RATE = "1gbit"
COUNT = 12_000
NBYTES = 8 * COUNT
# Eight ranks that make many calls share the cores of one machine.
MANY_CALLS_S = 150.0
HEARTBEAT_S = 2.0
# For each transport between hosts, the option `transports` that selects it.
WAYS = {"tcp": "auto", "ucx": "shm,ucx,tcp"}
# The length of the longer messages that pairs of ranks exchange at once, and the least number of exchanges.
LARGE_PROBE, FEWEST_ROUNDS = 1 << 20, 5
# Headers, control links and acknowledgements may add this factor to the bytes of messages.
OVERHEAD = 1.25


@pytest.fixture(autouse=True)
def network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let UCX use TCP alone. Otherwise it finds shared memory, because these hosts run on one kernel."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with network(4, RATE) as namespaces:
        yield namespaces


def sent_by_this_host() -> int:
    with open("/sys/class/net/eth0/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def sent_to(world: un.Communicator) -> dict[int, tuple[str, int]]:
    return {peer: (traffic.transport, traffic.sent_nbytes) for peer, traffic in world.stats().items()}


def reduce_and_count(world: un.Communicator, say: Say, algorithm: str) -> None:
    """Report the bytes that an allreduce has sent to each peer, and the bytes that have left this host during it."""
    x = np.arange(COUNT, dtype=np.int64) * (world.rank + 1)
    expected = np.arange(COUNT) * (world.size * (world.size + 1) // 2)
    assert (world.allreduce(x, algorithm=algorithm) == expected).all()  # opens the links
    world.barrier()
    before, left_before = sent_to(world), sent_by_this_host()
    assert (world.allreduce(x, algorithm=algorithm) == expected).all()
    after = {peer: (way, nbytes - before.get(peer, (way, 0))[1]) for peer, (way, nbytes) in sent_to(world).items()}
    world.barrier()
    say((world.hosts, after, sent_by_this_host() - left_before))
    world.barrier()


@pytest.mark.parametrize("way", WAYS)
def test_ring_between_hosts_sends_only_to_its_neighbour(way: str, hosts: list[str], tmp_path: Path) -> None:
    require(way)
    with Job(reduce_and_count, Hosts(hosts, [1, 1, 1, 1]), tmp_path, "ring", transports=WAYS[way]) as job:
        for rank, (result, sent, left) in enumerate(job.hear_all()):
            assert result == ((0,), (1,), (2,), (3,))
            assert all(its_way == way for its_way, _ in sent.values())
            assert {peer: nbytes for peer, (_, nbytes) in sent.items() if nbytes} == {(rank + 1) % 4: NBYTES * 3 // 2}
            assert NBYTES * 3 // 2 <= left < OVERHEAD * NBYTES * 3 // 2


def test_only_host_leaders_send_between_hosts_in_hierarchical_allreduce(hosts: list[str], tmp_path: Path) -> None:
    groups, leaders = ((0,), (1, 2), (3, 4, 5)), {0, 1, 3}
    with Job(reduce_and_count, Hosts(hosts, [1, 2, 3]), tmp_path, "hierarchical") as job:
        for rank, (result, sent, _) in enumerate(job.hear_all()):
            assert result == groups
            here = next(group for group in groups if rank in group)
            assert {way for peer, (way, _) in sent.items() if peer in here} <= {"shm"}
            outside = {peer: nbytes for peer, (way, nbytes) in sent.items() if peer not in here and nbytes}
            assert bool(outside) == (rank in leaders)
            assert set(outside) <= leaders
            assert all(sent[peer][0] == "tcp" for peer in outside)


def calibrate_links(world: un.Communicator, say: Say) -> None:
    """Report the calibration of the links, and the number of 1 MiB messages of each set of pairs."""
    exchanged = []
    together = link_probes.PairProbes.together

    def watched(own: Any, nbytes: int, pairs: int) -> float:
        before, seconds = sent_to(own._pair), together(own, nbytes, pairs)
        sent = sum(after - before.get(peer, ("", 0))[1] for peer, (_, after) in sent_to(own._pair).items())
        exchanged.append((pairs, sent // LARGE_PROBE))
        return seconds

    link_probes.PairProbes.together = watched  # type: ignore[method-assign]
    link_probes.rounds_calibrated = lambda comm, known, short: known  # type: ignore[assignment]
    say((to_json(link_probes.calibrated(world, PRIORS, short=True)), exchanged))
    world.barrier()


@pytest.mark.night
@pytest.mark.parametrize("ranks", [[2, 2], [1, 2], [3, 1, 2], [1, 1]])
def test_calibration_measures_links_inside_hosts_and_between_pairs(
    ranks: list[int], hosts: list[str], tmp_path: Path
) -> None:
    with Job(calibrate_links, Hosts(hosts, ranks), tmp_path) as job:
        results, exchanged = zip(*job.hear_all(), strict=True)
    known = from_json(results[0])
    assert all(from_json(result) == known for result in results)
    measured = {name for name, link in known.links.items() if link.step.nbytes}
    assert measured == ({"shm", "tcp/network"} if ranks[0] > 1 else {"tcp/network"})
    last = sum(ranks) - max(ranks[1:])  # the last host has the most ranks of all hosts but the first
    both = min(ranks[0], max(ranks[1:])) > 1
    for rank, counts in enumerate(exchanged):
        place = rank - last if rank >= last else rank
        takes_part = both and place < 2 and (rank >= last or rank < ranks[0])
        assert {pairs for pairs, _ in counts} == ({1, 2} if takes_part else set()), rank
        assert all((count >= FEWEST_ROUNDS) == (pairs > place) for pairs, count in counts if count), rank
        assert not takes_part or any(count for pairs, count in counts if pairs == 2), rank
    assert both or known.links["tcp/network"].pairs == math.inf


def calibrate_calls(world: un.Communicator, say: Say) -> None:
    result = link_probes.rounds_calibrated(world, PRIORS, short=True, collectives=("allreduce", "barrier"))
    say((to_json(result), world.explain("allreduce", 8).question))
    world.barrier()


@pytest.mark.night
def test_short_calibration_measures_compositions_and_predicts_them(hosts: list[str], tmp_path: Path) -> None:
    with Job(calibrate_calls, Hosts(hosts, [2, 2]), tmp_path) as job:
        results, (asked, *_) = zip(*job.hear_all(), strict=True)
    known = from_json(results[0])
    assert all(from_json(result) == known for result in results)
    (rounds,) = known.rounds["tcp"]
    assert (rounds.ranks, rounds.ranks_per_host) == (4, 2)
    names = {collective: set(calls) for collective, calls in rounds.calls.items()}
    assert names == {"allreduce": {"hierarchical", "full_lane"}, "barrier": {"hierarchical"}}
    for candidate in explain(replace(asked, nbytes=32), TunerState(None, known)).candidates:
        if candidate.phases:
            assert candidate.predicted_s == pytest.approx(rounds.calls["allreduce"][candidate.algorithm].at(32))


def judge_collectives(world: un.Communicator, say: Say) -> None:
    summary = un.testing.check_collectives(world, cases=40, seed=5)
    for algorithm in ("hierarchical", "full_lane", "ring"):
        x = np.arange(1000, dtype=np.int32) + world.rank
        expected = np.arange(1000) * world.size + world.size * (world.size - 1) // 2
        assert (world.allreduce(x, algorithm=algorithm) == expected).all()
    say((summary.cases, world.hosts, {peer: traffic.transport for peer, traffic in world.stats().items()}))
    world.barrier()


@pytest.mark.parametrize(("way", "count"), [("tcp", 4), ("ucx", 2)])
def test_every_collective_is_right_between_hosts_of_two_ranks(
    way: str, count: int, hosts: list[str], tmp_path: Path
) -> None:
    require(way)
    groups = ((0, 1), (2, 3), (4, 5), (6, 7))[:count]
    with Job(judge_collectives, Hosts(hosts, [2] * count), tmp_path, transports=WAYS[way]) as job:
        for rank in range(job.size):
            cases, result, ways = job.hear(rank, MANY_CALLS_S)
            assert result == groups
            assert len(cases) > 12
            assert ways == {peer: "shm" if peer // 2 == rank // 2 else way for peer in ways}
            assert len(ways) == 2 * count - 1


# --- hosts that are lost -------------------------------------------------------------------------------------------


def reduce_until_an_error(world: un.Communicator, say: Say) -> None:
    x = np.ones(100_000)
    world.allreduce(x)  # opens the links
    world.barrier()
    say("ready")
    try:
        while True:
            world.allreduce(x, timeout_s=DEADLINE_S)
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


def test_killed_ranks_of_a_host_are_lost_to_all_other_hosts(hosts: list[str], tmp_path: Path) -> None:
    with Job(reduce_until_an_error, Hosts(hosts, [1, 1, 2]), tmp_path) as job:
        job.hear_all()
        for rank in (3, 2):
            job.signal(rank, signal.SIGKILL)
        for rank in (0, 1):
            kind, text = job.hear(rank)
            assert kind == "PeerLostError", text
            assert "rank 2" in text or "rank 3" in text


def wait_for_the_first(world: un.Communicator, say: Say) -> None:
    """Wait for rank 0 without any message in flight, so that only a heartbeat can report a loss."""
    world.allreduce(np.ones(8))
    say("ready")
    try:
        world.recv(np.ones(1), source=un.ANY_SOURCE, timeout_s=DEADLINE_S)
    except un.UnisonoError as error:
        say((type(error).__name__, str(error)))


@pytest.mark.parametrize("program", [reduce_until_an_error, wait_for_the_first])
def test_unreachable_host_is_a_lost_peer_on_both_sides(program: Callable[..., Any], tmp_path: Path) -> None:
    with network(3) as namespaces:
        job_of = Job(program, Hosts(namespaces, [2, 1, 1]), tmp_path, heartbeat_timeout_s=HEARTBEAT_S)
        with job_of as job:
            job.hear_all()
            ip("link", "set", "eth0", "down", namespace=namespaces[2])
            reports = job.hear_all()
    for kind, text in reports:
        assert kind == "PeerLostError", text
    assert all("rank 3 is out of reach" in text for _, text in reports[:3])
    # both judges of the job are on that host
    assert any(f"rank {judge} is out of reach" in reports[3][1] for judge in (0, 1))


# --- connections that break ------------------------------------------------------------------------------------------


def reduce_and_send(world: un.Communicator, say: Say, calls: int) -> None:
    """Exchange collectives and messages of several lengths, and compare every result."""
    say("ready")
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for call in range(calls):
        count = (1, 1000, 300_000)[call % 3]
        x = np.arange(count) + world.rank
        total = world.allreduce(x, timeout_s=DEADLINE_S)
        assert (total == np.arange(count) * world.size + sum(range(world.size))).all()
        received = world.sendrecv(x + call, after, np.empty_like(x), before, timeout_s=DEADLINE_S)
        assert (received == np.arange(count) + before + call).all()
    say("done")
    world.barrier()


@pytest.mark.parametrize(("tls", "calls"), [("off", 150), ("on", 60)])
def test_calls_go_on_when_connections_between_hosts_are_reset(tmp_path: Path, tls: str, calls: int) -> None:
    """`ss -K` resets every connection between the hosts, control links too, as a firewall that restarts does.

    It spares connections inside a host. No firewall resets them, so their ranks keep no bytes to send again.
    """
    resets = 0
    with (
        network(2) as hosts,
        Job(reduce_and_send, Hosts(hosts, [2, 1]), tmp_path, calls, transports="tcp", tcp_streams=2, tls=tls) as job,
    ):
        assert job.hear_all() == ["ready"] * 3
        for turn in range(calls // 25):
            here, other = turn % 2, 1 - turn % 2
            command = [*inside(hosts[here]), "ss", "-HK", "state", "established", "dst", address(other)]
            resets += len(subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines())
            time.sleep(0.4)
        assert job.hear_all() == ["done"] * 3
    if resets == 0:
        pytest.skip("the kernel cannot reset connections (CONFIG_INET_DIAG_DESTROY)")


def reduce_while_there_is_no_route(world: un.Communicator, say: Any) -> None:
    """Open the first channels between the hosts while the host of rank 2 has no network."""
    say("ready")
    time.sleep(0.5)
    say(int(world.allreduce(np.array(world.rank), timeout_s=DEADLINE_S)))


def test_channels_are_opened_when_the_network_works_again(tmp_path: Path) -> None:
    with network(2) as hosts, Job(reduce_while_there_is_no_route, Hosts(hosts, [2, 1]), tmp_path) as job:
        assert job.hear_all() == ["ready"] * 3
        ip("link", "set", "eth0", "down", namespace=hosts[1])
        time.sleep(1.5)  # less than heartbeat_timeout_s
        ip("link", "set", "eth0", "up", namespace=hosts[1])
        assert job.hear_all() == [3] * 3


# --- networks that are gone for a moment ------------------------------------------------------------------------------

# After this time a silent rank is lost. It is twice the default, so that a slow machine can end an outage in time.
SILENCE_S = 6.0
OUTAGES_S = (0.5, 1.5, 4.5)
MOST_OUTAGE_S = 5.0


def outage(host: str, seconds: float) -> None:
    """Cut a host off; skip the test if the machine was so slow that the host was away for too long."""
    began = time.monotonic()
    ip("link", "set", "eth0", "down", namespace=host)
    time.sleep(seconds)
    ip("link", "set", "eth0", "up", namespace=host)
    if time.monotonic() - began > MOST_OUTAGE_S:
        pytest.skip("this machine was too slow to end an outage in time")


def call_and_be_idle(world: un.Communicator, say: Say, marks: Path) -> None:
    """Make calls until the first mark, and wait for a message of rank 0, which comes after the second one."""
    x = np.arange(1000) + world.rank
    say("calls")
    is_over = np.zeros(1)
    while not is_over[0]:
        assert (world.allreduce(x, timeout_s=DEADLINE_S) == 3 * np.arange(1000) + 3).all()
        is_over = world.allreduce(np.array([(marks / "idle").exists()], float), op="max", timeout_s=DEADLINE_S)
    say("is idle")
    if world.rank == 0:
        while not (marks / "end").exists():
            time.sleep(0.01)
        for peer in (1, 2):
            world.send(np.arange(8), peer)
    else:
        assert (world.recv(np.empty(8, int), 0, timeout_s=DEADLINE_S) == np.arange(8)).all()
    say("done")
    world.barrier()


@pytest.mark.night
def test_outages_shorter_than_the_heartbeat_time_end_no_job(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network(2))
        on = Hosts(hosts, [2, 1])
        job = stack.enter_context(Job(call_and_be_idle, on, tmp_path, tmp_path, heartbeat_timeout_s=SILENCE_S))
        for state, mark in (("calls", "idle"), ("is idle", "end")):
            assert job.hear_all() == [state] * 3
            for seconds in OUTAGES_S:
                time.sleep(1.0)
                outage(hosts[1], seconds)
            (tmp_path / mark).touch()
        assert job.hear_all() == ["done"] * 3


def connections(host: str, peer: str) -> list[tuple[str, str]]:
    """Return the ports of the connections between two addresses, the own port first."""
    command = [*inside(host), "ss", "-Htn", "state", "established", "dst", peer]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return [(row[2].rpartition(":")[2], row[3].rpartition(":")[2]) for row in rows]


@pytest.mark.parametrize("cut", [0, 1])
def test_connections_that_lose_the_packets_of_one_direction_are_made_anew(tmp_path: Path, cut: int) -> None:
    with network(2) as hosts, Job(call_and_be_idle, Hosts(hosts, [2, 1]), tmp_path, tmp_path) as job:
        assert job.hear_all() == ["calls"] * 3
        for ours, theirs in connections(hosts[cut], address(1 - cut)):
            ports = ["ipproto", "tcp", "sport", ours, "dport", theirs]
            ip("rule", "add", "to", address(1 - cut), *ports, "blackhole", namespace=hosts[cut])
        time.sleep(2.0)
        for state, mark in (("is idle", "idle"), ("done", "end")):
            (tmp_path / mark).touch()
            assert job.hear_all() == [state] * 3


def reduce_many_times(world: un.Communicator, say: Any, times: int, counts: Sequence[int]) -> None:
    for call in range(times):
        x = np.arange(counts[call % len(counts)]) + call + world.rank
        total = world.allreduce(x, timeout_s=DEADLINE_S)
        assert (total == (x - world.rank) * world.size + sum(range(world.size))).all()
    say("done")
    world.barrier()


@pytest.mark.night
def test_slow_network_with_tiny_windows_raises_no_alarm(tmp_path: Path) -> None:
    with network(2, "10mbit") as hosts:
        for host in hosts:
            for limits in ("net.ipv4.tcp_rmem=4096 4096 4096", "net.ipv4.tcp_wmem=4096 4096 8192"):
                subprocess.run([*inside(host), "sysctl", "-qw", limits], check=True)
        with Job(reduce_many_times, Hosts(hosts, [2, 1]), tmp_path, 1000, [1, 7, 300]) as job:
            assert job.hear_all() == ["done"] * 3


@pytest.mark.night
def test_delay_and_loss_raise_no_alarm(tmp_path: Path) -> None:
    with (
        wide_area(uniform(2, way=NetworkWay(delay_ms=100, loss=0.02))) as net,
        Job(reduce_many_times, Hosts(net.namespaces, [2, 1]), tmp_path, 8, [1, 100_000], warn_after_s=30.0) as job,
    ):
        assert job.hear_all() == ["done"] * 3


# --- wrong input ---------------------------------------------------------------------------------------------------


def test_init_between_hosts_on_loopback_says_what_to_set(
    hosts: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Job(say_error_of_init, Prefixed([inside(host) for host in hosts[:2]]), tmp_path) as job:
        assert [job.exit_code(rank) for rank in range(2)] == [1, 1]
    lines = [line for line in capfd.readouterr().err.splitlines() if "RendezvousError" in line]
    assert len(lines) == 2
    for line in lines:
        assert (
            "ranks 0 and 1 are on different hosts (another network namespace), and rank 0 and 1 more can be reached"
            in line
        )
        assert "UNISONO_BIND_ADDRESS" in line


def errors_of_init(job: Job, capfd: pytest.CaptureFixture[str]) -> list[str]:
    """Return the last lines of all ranks, none of which meets the others."""
    assert [job.exit_code(rank) for rank in range(job.size)] == [1] * job.size
    text = capfd.readouterr().err
    lines = [line for line in text.splitlines() if "Error:" in line]
    assert len(lines) == job.size, text
    return lines


def refuse_connections(hosts: Sequence[str]) -> None:
    """Let host 1 reject what it would send to host 0, as a firewall does."""
    ip("rule", "add", "to", address(0), "prohibit", namespace=hosts[1])


def drop_connections(hosts: Sequence[str]) -> None:
    """Let what host 1 sends to host 0 arrive nowhere."""
    nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
    ip("neigh", "replace", address(0), *nobody, "dev", "eth0", namespace=hosts[1])


# For each way in which rank 2 cannot connect to rank 0, the part of the error that says so.
OBSTACLES = {refuse_connections: "Permission denied", drop_connections: "within 12 s"}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_ranks_that_a_firewall_separates_all_name_the_address_and_the_setting(
    obstacle: Callable[[Sequence[str]], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with network(2) as apart:
        obstacle(apart)
        job_of = Job(say_error_of_init, Hosts(apart, [2, 1]), tmp_path, rendezvous_timeout_s=12.0)
        with job_of as job:
            lines = errors_of_init(job, capfd)
    for line in lines:
        assert "RendezvousError: rank 2 " in line
        assert f"connect to rank 0 at {address(0)} port" in line
        assert OBSTACLES[obstacle] in line
        assert "set UNISONO_BIND_ADDRESS" in line


def test_hosts_that_share_an_address_say_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bridge = "10.214.0.1"
    with network(2) as twins:
        for host in twins:
            ip("link", "add", "docker0", "type", "veth", "peer", "name", "inside", namespace=host)
            ip("addr", "add", f"{bridge}/16", "dev", "docker0", namespace=host)
            ip("link", "set", "docker0", "up", namespace=host)
        with Job(say_error_of_init, Hosts(twins, [1, 1], address_of=lambda _: bridge), tmp_path) as job:
            lines = errors_of_init(job, capfd)
    for line in lines:
        assert f"RendezvousError: rank 1 cannot connect to rank 0 at {bridge} port" in line
        assert "the host of this rank has that address too" in line


def say_error_of_init(world: un.Communicator, say: Say) -> None:
    raise AssertionError("the ranks cannot have met")


# --- hosts that are replaced ---------------------------------------------------------------------------------------


def lose_rank_0_and_grow(world: un.Communicator, say: Say) -> None:
    world.allreduce(np.ones(COUNT))
    if world.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(un.PeerLostError):
        while True:
            world.allreduce(np.ones(COUNT))
    smaller = world.shrink()
    world.close()
    grown = smaller.grow(1, timeout_s=DEADLINE_S)
    smaller.close()
    sum_and_close(grown, say)


def sum_and_close(world: un.Communicator, say: Say) -> None:
    total = world.allreduce(np.full(COUNT, world.rank))
    say((world.rank, world.hosts, set(total.tolist())))
    world.barrier()
    world.close()


def join_from_a_host(say: Say) -> None:
    sum_and_close(un.join(timeout_s=DEADLINE_S), say)


def join_from_loopback(say: Say) -> None:
    os.environ["UNISONO_BIND_ADDRESS"] = "127.0.0.1"
    try:
        un.join(timeout_s=DEADLINE_S)
    except un.RendezvousError as error:
        say(error.message)


def test_process_on_a_third_host_joins_the_survivors_of_rank_0(hosts: list[str], tmp_path: Path) -> None:
    with LastingJob(lose_rank_0_and_grow, Hosts(hosts, [1, 1, 1], further=[3, 3]), tmp_path) as job:
        hidden = job.start(join_from_loopback)
        assert "on another host UNISONO_BIND_ADDRESS" in job.hear(hidden)
        joiner = job.start(join_from_a_host)
        heard = [job.hear(number) for number in (1, 2, joiner)]
        assert heard == [(rank, ((0,), (1,), (2,)), {3}) for rank in range(3)]
