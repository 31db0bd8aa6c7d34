"""Every builder on the native executor, over processes, with results on integers that numpy computes too."""

from __future__ import annotations

import pytest
from support.builder_calls import calls_in_every_form, check_all
from support.ranks import Ranks, ranks_fixture

from unisono.algorithms.catalogue.registry import ALGORITHMS

# (elements, segments) of short, very short and long arrays. A message in shared memory is cut into slots of 64 KiB.
SHORT, FEWER_THAN_SEGMENTS, SLOTS_AND_MORE = (23, 1), (3, 5), (50_003, 3)


ranks = ranks_fixture((1, "shm"), (2, "shm"), (3, "shm"), (4, "shm"), (5, "shm"), (8, "shm"))


distant_ranks = ranks_fixture((2, "tcp"), (5, "tcp"))


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_builder_runs_over_shared_memory_in_every_form(ranks: Ranks, collective: str) -> None:
    forms = [SHORT, FEWER_THAN_SEGMENTS, SLOTS_AND_MORE]
    for algorithm in ALGORITHMS[collective].values():
        check_all(ranks, calls_in_every_form(algorithm, ranks.size, forms))


@pytest.mark.parametrize("collective", ALGORITHMS)
def test_every_builder_of_messages_runs_over_tcp(distant_ranks: Ranks, collective: str) -> None:
    for algorithm in ALGORITHMS[collective].values():
        if not algorithm.mapped:
            check_all(distant_ranks, calls_in_every_form(algorithm, distant_ranks.size, [(1000, 2)]))
