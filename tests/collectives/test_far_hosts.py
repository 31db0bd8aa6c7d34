"""Ranks on far hosts measure their network when they meet, and follow it; ranks on near hosts do not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.hosts import Hosts, needs_namespaces, needs_wide_area
from support.ranks import Job

import unisono as un
from unisono.algorithms.catalogue.variants import parsed
from unisono.bench.namespaces import network
from unisono.bench.wide_area import AccessLine, Area, NetworkWay, WideAreaNetwork
from unisono.foundation.deadlines import Deadline
from unisono.transports.links import network_probes

Say = Callable[[object], None]
DELAY_MS = {(0, 1): 50, (0, 2): 20, (1, 2): 30}
MBIT_S = {0: 60.0, 1: 160.0, 2: 160.0}
FAR = Area(
    tuple(AccessLine(up_mbit_s=rate) for rate in MBIT_S.values()),
    {way: NetworkWay(delay_ms=ms) for (i, j), ms in DELAY_MS.items() for way in ((i, j), (j, i))},
)


def measure_in_vain(world: un.Communicator, say: Say) -> None:
    """Measure hosts that are near each other, also if they answer late on a busy machine."""
    reduce_and_tell(world, say)
    network_probes._FAR_S = math.inf
    say(world.measure_network())
    world.barrier()


def reduce_and_tell(world: un.Communicator, say: Say) -> None:
    """Report the measured network, and the number of streams of a channel; the measuring counts nothing."""
    stats = world.stats()
    assert (dict(stats), list(stats.calls)) == ({}, [])
    ones = np.ones(300_000, np.float32)
    assert (world.allreduce(ones) == world.size).all()
    executor: Any = world._executor
    say((world.tuner_state.network, len(executor._session.channels.tcp.wire_lanes(0))))
    world.barrier()


@needs_wide_area
def test_ranks_on_far_hosts_have_the_same_map_of_the_network(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path
) -> None:
    hosts = wide_area_of(FAR).namespaces
    with Job(reduce_and_tell, Hosts(hosts, [1, 2, 1]), tmp_path) as job:
        first, *others = job.hear_all()
    assert others == [first] * 3
    found: Any
    found, streams = first
    assert streams == found.streams()
    for (i, j), ms in DELAY_MS.items():
        assert found.delay_s[i][j] == found.delay_s[j][i] >= ms / 1e3
        for source, target in ((i, j), (j, i)):
            # Acknowledgements come in bursts where they share a line with data. A loaded machine makes it take longer.
            assert found.per_byte_s[source][target] > 0.6 * 8e-6 / MBIT_S[source]


# Rank 0 follows on rank 1, and rank 2 on rank 3, over slow ways only.
SLOW_PAIRS = ({0, 1}, {2, 3})
WITH_SLOW_WAYS = Area(
    (AccessLine(),) * 4,
    {
        (i, j): NetworkWay(mbit_s=8 if {i, j} in SLOW_PAIRS else 100, delay_ms=10)
        for i in range(4)
        for j in range(4)
        if i != j
    },
)


def call_in_order(world: un.Communicator, say: Say) -> None:
    """Report the variant of a ring, after calls whose results do not depend on the order; and that of a half."""
    x = np.arange(1 << 18, dtype=np.float32) + world.rank
    ring = world.allreduce(x, algorithm="ring")
    assert (ring == world.size * np.arange(1 << 18) + 6).all()
    assert world.allgather(np.array([world.rank]), algorithm="ring").tolist() == [0, 1, 2, 3]
    for root in (0, 2):
        assert world.broadcast(np.array(world.rank), root=root, algorithm="binomial") == root
    same = world.allreduce(x / 3, reproducible=True)
    assert (same == world.allreduce(x / 3, algorithm="balanced_tree")).all()
    half = world.subgroup([1, 3] if world.rank % 2 else [2, 0])
    assert half.allreduce(np.array(world.rank)) == (4 if world.rank % 2 else 2)
    (variant,) = {
        row.algorithm for row in world.stats().calls if row.collective == "allreduce" and "ring" in row.algorithm
    }
    say((variant, half.tuner_state.network == world.tuner_state.network.among(half.world_ranks)))
    world.barrier()


@needs_wide_area
def test_calls_of_ranks_take_the_order_of_hosts_that_avoids_slow_ways(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path
) -> None:
    hosts = wide_area_of(WITH_SLOW_WAYS).namespaces
    with Job(call_in_order, Hosts(hosts, [1] * 4), tmp_path) as job:
        results = job.hear_all()
    assert results == [results[0]] * 4
    variant, has_map = results[0]
    assert has_map
    order = parsed(variant).params[0][1]
    assert not any(way in SLOW_PAIRS for way in ways_of(order))


def ways_of(order: Sequence[int]) -> list[set[int]]:
    return [{order[at - 1], order[at]} for at in range(len(order))]


def every_second(order: Sequence[int]) -> list[set[int]]:
    return ways_of(order)[::2]


def measure_until_the_order_changes(world: un.Communicator, say: Say) -> None:
    """Report the order of a ring before and after the slow ways have moved, and whether results are right."""
    x = np.full(1 << 18, world.rank, np.float32)

    def order() -> tuple[int, ...]:
        assert (world.allreduce(x, algorithm="ring") == 6).all()
        rows = [row.algorithm for row in world.stats().calls if row.algorithm.startswith("ring")]
        choice = world.explain("allreduce", x.nbytes, algorithm="ring").choice
        assert choice.variant in rows
        return tuple(dict(choice.params).get("order", range(world.size)))

    first = last = order()
    say(first)
    deadline = Deadline(DEADLINE_S)
    # The ways change after the ranks have said the first order, of which every second way becomes slow.
    while any(way in every_second(first) for way in ways_of(last)) and not deadline.has_passed():
        before = world.network
        found = world.measure_network()
        assert found is world.network
        assert before is not None
        last = order()
    with pytest.raises(un.UsageError, match="only the communicator of all ranks"):
        world.subgroup([world.rank]).measure_network()
    say(last)
    world.barrier()


@needs_wide_area
def test_ranks_measure_again_when_links_have_changed(
    wide_area_of: Callable[[Area], WideAreaNetwork], tmp_path: Path
) -> None:
    running = wide_area_of(WITH_SLOW_WAYS)
    with Job(measure_until_the_order_changes, Hosts(running.namespaces, [1] * 4), tmp_path) as job:
        before = job.hear_all()
        slow = every_second(before[0])
        for i, j in running.area.ways:
            running.set_way(i, j, NetworkWay(mbit_s=8 if {i, j} in slow else 100, delay_ms=10))
        after = job.hear_all()
    assert before == [before[0]] * 4
    assert after == [after[0]] * 4
    assert not any(way in slow for way in ways_of(after[0]))


@needs_namespaces
def test_ranks_on_near_hosts_keep_what_is_known_about_their_link(tmp_path: Path) -> None:
    with network(2) as hosts, Job(measure_in_vain, Hosts(hosts, [2, 1]), tmp_path) as job:
        results = [job.hear_all() for _ in range(2)]
    assert results == [[(None, 1)] * 3, [None] * 3]
