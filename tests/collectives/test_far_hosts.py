"""Ranks on far hosts measure their network when they meet, and follow it; ranks on near hosts do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.hosts import HostsJob, needs_namespaces, needs_wide_area

import unisono as un
from unisono.bench.namespaces import network
from unisono.bench.wide_area import AccessLine, Area, NetworkWay, WideAreaNetwork

Say = Callable[[object], None]
DELAY_MS = {(0, 1): 50, (0, 2): 20, (1, 2): 30}
MBIT_S = {0: 60.0, 1: 160.0, 2: 160.0}
FAR = Area(
    tuple(AccessLine(up_mbit_s=rate) for rate in MBIT_S.values()),
    {way: NetworkWay(delay_ms=ms) for (i, j), ms in DELAY_MS.items() for way in ((i, j), (j, i))},
)


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
    with HostsJob(reduce_and_tell, hosts, [1, 2, 1], tmp_path) as job:
        first, *others = job.hear_all()
    assert others == [first] * 3
    found: Any
    found, streams = first
    assert streams == found.streams()
    for (i, j), ms in DELAY_MS.items():
        assert found.delay_s[i][j] == found.delay_s[j][i] >= ms / 1e3
        for source, target in ((i, j), (j, i)):
            # The queue holds some bytes when a measurement begins, and a loaded machine makes it take longer.
            assert found.per_byte_s[source][target] > 0.8 * 8e-6 / MBIT_S[source]


@needs_namespaces
def test_ranks_on_near_hosts_keep_what_is_known_about_their_link(tmp_path: Path) -> None:
    with network(2) as hosts, HostsJob(reduce_and_tell, hosts, [2, 1], tmp_path) as job:
        results = job.hear_all()
    assert results == [(None, 1)] * 3
