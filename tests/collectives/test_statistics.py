"""The statistics of communicators count every call, whichever way it is made."""

from __future__ import annotations

import numpy as np
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.collectives.calls.statistics import CallStatistics


def calls_of(world: un.Communicator) -> tuple[list[CallStatistics], float]:
    x, out = np.ones(100, np.float32), np.ones(100, np.float32)
    for _ in range(200):
        world.allreduce(x, out=out, algorithm="ring")
    world.allreduce(x, out=out, algorithm="ring", wait=False).wait()
    again = world.plan("allreduce", x, out=out, algorithm="ring")
    for _ in range(50):
        again()
    world.allreduce([x, x], algorithm="ring")
    world.broadcast(np.ones(1000), algorithm="knomial(radix=3)")
    world.barrier()
    with world.dup() as other:
        other.barrier()
    return list(world.stats().calls), sum(call.seconds for call in world.stats().calls)


def test_every_call_is_counted_by_algorithm_and_size() -> None:
    for calls, seconds in un.launch(calls_of, 3, timeout_s=DEADLINE_S):
        results = {(call.collective, call.algorithm, call.most_nbytes): (call.calls, call.nbytes) for call in calls}
        barriers = [key for key in results if key[0] == "barrier"]
        assert results.pop(barriers[0])[0] == 1
        assert results == {
            ("allreduce", "ring", 1024): (252, 251 * 400 + 800),
            ("broadcast", "knomial(radix=3)", 16384): (1, 8000),
        }
        assert 0 < seconds < 60
        assert [call.seconds for call in calls] == sorted((call.seconds for call in calls), reverse=True)


def test_stats_of_a_single_rank_count_calls_without_traffic() -> None:
    with un.init() as world:
        world.allreduce(np.ones(4))
        stats = world.stats()
        assert stats == {}
        assert [(call.collective, call.calls) for call in stats.calls] == [("allreduce", 1)]
