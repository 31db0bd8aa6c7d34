"""Every algorithm is proved for all small numbers of ranks, and for a sample of large ones."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.plan import ReadReduce, Reduce, Step, as_written
from unisono.algorithms.verifier.verify import verify_algorithm, verify_sizes

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in ALL]


def supported(algorithm: Algorithm, sizes: Iterable[int]) -> list[int]:
    return [size for size in sizes if algorithm.supports(size) is None]


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_is_proved_for_every_small_number_of_ranks(algorithm: Algorithm) -> None:
    assert list(verify_sizes(algorithm, range(1, 18))) == supported(algorithm, range(1, 18))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_is_proved_for_every_number_of_ranks_up_to_64(algorithm: Algorithm) -> None:
    assert list(verify_sizes(algorithm, range(18, 65))) == supported(algorithm, range(18, 65))


# Powers of two, one less (255 = 3·5·17), one more, even numbers, and an odd power, in descending order.
SAMPLED = (512, 255, 129, 128, 100, 81, 48, 40)
# The largest work of the proof for 512 ranks, and of the proofs for all smaller sizes together. If every rank sends to
# every other rank, 512 ranks are too much work, but 40 ranks are not, or 100 ranks on request.
USUAL_WORK, WORK_ON_REQUEST = (120_000, 90_000), (450_000, 230_000)


def work(algorithm: Algorithm, size: int) -> float:
    """Estimate the work of a proof, from the steps in the plans, the steps as run, and their blocks."""
    of_rank_0, of_another = (
        sum(
            3 + times * (1 + blocks_of(step) / 2)
            for lane in algorithm.build(size, rank).lanes
            for times, groups in map(as_written, lane)
            for group in groups
            for step in group.steps
        )
        for rank in (0, 1)
    )
    return of_rank_0 + (size - 1) * of_another


def blocks_of(step: Step) -> int:
    match step:
        case Reduce(dst, sources) | ReadReduce(dst, sources):
            return (1 + len(sources)) * dst.count
    return sum(getattr(step, name).count for name in ("src", "dst") if hasattr(step, name))


def sampled(algorithm: Algorithm, most_work: tuple[int, int]) -> list[int]:
    """Return the sizes whose proofs fit the limits: the limit at 512, and the limit for all smaller sizes together."""
    at_512, below = most_work
    sizes: list[int] = []
    for size in supported(algorithm, SAMPLED):
        needed = work(algorithm, size)
        if size < 512 and needed <= below:
            below -= int(needed)
            sizes.append(size)
        elif size == 512 and needed <= at_512:
            sizes.append(size)
    return sizes


@pytest.mark.night
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_is_proved_for_sampled_sizes_up_to_512(algorithm: Algorithm) -> None:
    sizes = sampled(algorithm, USUAL_WORK)
    assert list(verify_sizes(algorithm, sizes)) == sizes


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_every_algorithm_is_proved_for_more_sizes_up_to_512(algorithm: Algorithm) -> None:
    sizes = sampled(algorithm, WORK_ON_REQUEST)
    assert list(verify_sizes(algorithm, sizes)) == sizes


@pytest.mark.parametrize(("most_work", "least", "share"), [(USUAL_WORK, 40, 0.4), (WORK_ON_REQUEST, 100, 0.5)])
def test_size_samples_reach_512_ranks_for_many_algorithms(most_work: tuple[int, int], least: int, share: float) -> None:
    at_most = [max(sampled(algorithm, most_work)) for algorithm in ALL]
    assert min(at_most) >= least
    assert at_most.count(512) > share * len(ALL)


@pytest.mark.slow
def test_the_ring_of_512_ranks_is_proved() -> None:
    assert verify_algorithm(find("allreduce", "ring"), 512).rounds == 1022
