"""Ranks that ``mpirun`` starts on several hosts, which are network namespaces with shaped links between them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from support.hosts import needs_namespaces
from support.mpi_ranks import LIBRARIES, MpiRanks, between_hosts

import unisono as un
from unisono.bench.namespaces import network

pytestmark = [pytest.mark.timeout(120), needs_namespaces]

RATE = "1gbit"
COUNT = 12_000
NBYTES = 8 * COUNT
# Headers, control links and acknowledgements may add this factor to the bytes of messages.
OVERHEAD = 1.3


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with network(4, RATE) as namespaces:
        yield namespaces


@pytest.fixture(scope="module", params=[(library, ranks) for library in LIBRARIES for ranks in (1, 2)], ids=str)
def ranks(
    request: pytest.FixtureRequest, hosts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MpiRanks]:
    library, per_host = request.param
    with between_hosts(library, hosts, [per_host] * 4, tmp_path_factory.mktemp("agent"), "shm,mpi") as started:
        yield started


def sent_by_this_host() -> int:
    with open("/sys/class/net/eth0/statistics/tx_bytes", encoding="ascii") as file:
        return int(file.read())


def reduce_and_count(world: un.Communicator, algorithm: str) -> tuple[int, int, set[str]]:
    """Run an allreduce; return the bytes sent to other hosts, all bytes that left this host, and the transports."""

    def away() -> int:
        return sum(traffic.sent_nbytes for peer, traffic in world.stats().items() if peer not in here)

    here = next(host for host in world.hosts if world.rank in host)
    x = np.arange(COUNT, dtype=np.int64) * (world.rank + 1)
    expected = np.arange(COUNT) * (world.size * (world.size + 1) // 2)
    assert (world.allreduce(x, algorithm=algorithm) == expected).all()  # opens the links
    world.barrier()
    before, left_before = away(), sent_by_this_host()
    assert (world.allreduce(x, algorithm=algorithm) == expected).all()
    sent = away() - before
    world.barrier()
    left = sent_by_this_host() - left_before
    world.barrier()
    return sent, left, {way.transport for peer, way in world.stats().items() if peer not in here}


@pytest.mark.parametrize("algorithm", ["ring", "hierarchical", "full_lane"])
def test_allreduce_between_hosts_sends_its_bytes_by_mpi(ranks: MpiRanks, algorithm: str) -> None:
    results = ranks.run_calls(reduce_and_count, algorithm)
    per_host = ranks.size // 4
    for host in range(4):
        of_host = results[host * per_host : (host + 1) * per_host]
        sent = sum(nbytes for nbytes, _, _ in of_host)
        assert sent >= NBYTES * 3 // 2
        assert sent <= max(left for _, left, _ in of_host) < OVERHEAD * sent
        assert all(ways == {"mpi"} for _, _, ways in of_host if ways)


def judge_collectives(world: un.Communicator) -> tuple[tuple[tuple[int, ...], ...], dict[int, str]]:
    un.testing.check_collectives(world, cases=30, seed=7)
    return world.hosts, {peer: traffic.transport for peer, traffic in world.stats().items()}


def test_every_collective_is_right_between_hosts_by_mpi(ranks: MpiRanks) -> None:
    per_host = ranks.size // 4
    groups = tuple(tuple(range(first, first + per_host)) for first in range(0, ranks.size, per_host))
    for rank, (result, ways) in enumerate(ranks.run_calls(judge_collectives)):
        assert result == groups
        assert ways == {peer: "shm" if peer // per_host == rank // per_host else "mpi" for peer in ways}
        assert len(ways) == ranks.size - 1


def reduce_by_mpi_itself(world: un.Communicator) -> list[int]:
    return world.allreduce(np.full(COUNT, world.rank), algorithm="mpi.native")[:1].tolist()


def test_mpi_native_collectives_work_between_hosts(ranks: MpiRanks) -> None:
    expected = ranks.size * (ranks.size - 1) // 2
    assert ranks.run_calls(reduce_by_mpi_itself) == [[expected]] * ranks.size
