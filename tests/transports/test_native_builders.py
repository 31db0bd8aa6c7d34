"""Every builder on the native executor, over processes: all ranks have what numpy computes from integers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.builder_calls import ROOTED, assert_right, call_on_integers
from support.native_ranks import NativeRanks

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL]
OF_MESSAGES = [param for param, algorithm in zip(EVERY_ALGORITHM, ALL, strict=True) if not algorithm.mapped]
SLOTS_AND_MORE = 50_003


@pytest.fixture(scope="module", params=[1, 2, 3, 4, 5, 8], ids=lambda size: f"{size} ranks")
def ranks(request: pytest.FixtureRequest) -> Iterator[NativeRanks]:
    with NativeRanks(request.param, "shm") as started:
        yield started


@pytest.fixture(scope="module", params=[2, 5], ids=lambda size: f"{size} ranks")
def distant_ranks(request: pytest.FixtureRequest) -> Iterator[NativeRanks]:
    with NativeRanks(request.param, "tcp") as started:
        yield started


def check_every_form(ranks: NativeRanks, algorithm: Algorithm, root: int, elements: int, segments: int) -> None:
    """Run `algorithm` in place and not, with equal shares and, where it takes them, with those that differ."""
    if algorithm.supports(ranks.size) is not None:
        pytest.skip("it does not run on so many ranks")
    for varying in (False, True) if algorithm.varying else (False,):
        for in_place in (False, True) if algorithm.in_place else (False,):
            form = {"varying": varying, "in_place": in_place}
            call = call_on_integers(algorithm, ranks.size, root, segments, elements, **form)
            assert_right(ranks.run(call.run))


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_builder_runs_over_shared_memory_for_every_root(ranks: NativeRanks, algorithm: Algorithm) -> None:
    for root in range(ranks.size) if algorithm.collective in ROOTED else (0,):
        check_every_form(ranks, algorithm, root, elements=23, segments=1)


@pytest.mark.parametrize(("elements", "segments"), [(3, 5), (SLOTS_AND_MORE, 3)])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_builder_runs_over_shared_memory_in_segments(
    ranks: NativeRanks, algorithm: Algorithm, elements: int, segments: int
) -> None:
    check_every_form(ranks, algorithm, ranks.size // 2, elements, segments)


@pytest.mark.parametrize("algorithm", OF_MESSAGES)
def test_every_builder_of_messages_runs_over_tcp(distant_ranks: NativeRanks, algorithm: Algorithm) -> None:
    check_every_form(distant_ranks, algorithm, distant_ranks.size - 1, elements=1000, segments=2)
