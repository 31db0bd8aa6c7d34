"""The option `verify_results`: no false alarms, and `CorruptionError` on every rank for a damaged result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from support.collective_calls import cases, check_refusals, run_case
from support.deadlines import DEADLINE_S
from support.ranks import Job

import unisono as un
from unisono.algorithms.catalogue.registry import candidates_of
from unisono.collectives.calls.verification import SAME_EVERYWHERE, verdict
from unisono.launchers.launch import Pool
from unisono.testing import Case

SIZE = 3


@pytest.fixture(scope="module", params=["shm", "tcp"])
def verifying_ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with Pool(SIZE, options=un.Options(transports=request.param, verify_results=True)) as pool:
        yield pool


@settings(max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(case=st.sampled_from([*sorted(SAME_EVERYWHERE), "reduce_scatter"]).flatmap(cases))
def test_results_stay_right(verifying_ranks: Pool, case: Case) -> None:
    errors = verifying_ranks.run(run_case, case, timeout_s=DEADLINE_S)
    check_refusals(case, errors, SIZE, "tcp")


def reduce_special_values(world: un.Communicator) -> None:
    """Reduce zeros of both signs, infinities and different NaNs: algorithms combine them in different orders."""
    bits = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC00002, 0x7FC0DEAD, 0x3F800000], np.uint32)
    x = np.roll(np.repeat(bits, 40), 3 * world.rank).view(np.float32)
    for algorithm in candidates_of("allreduce"):
        for op in ("sum", "max", "min", "prod"):
            try:
                world.allreduce(x, op, algorithm=algorithm)
            except un.NoAlgorithmError:
                continue


def test_special_values_raise_no_alarm(verifying_ranks: Pool) -> None:
    verifying_ranks.run(reduce_special_values, timeout_s=DEADLINE_S)


def wait_in_another_order_on_each_rank(world: un.Communicator) -> None:
    works: list[un.Work[Any]] = []
    for index in range(12):
        x = np.full(1000 * index + 1, world.rank + index, np.float64)
        works.append(world.allreduce(x, wait=False))
        works.append(world.reduce_scatter(np.ones(SIZE), wait=False))
    order = np.random.default_rng(world.rank).permutation(len(works))
    for place in order:
        works[place].wait()
    assert [works[2 * index].wait()[-1] for index in range(12)] == [3 * index + 3 for index in range(12)]


def test_ranks_may_wait_in_any_order(verifying_ranks: Pool) -> None:
    verifying_ranks.run(wait_in_another_order_on_each_rank, timeout_s=DEADLINE_S)


# --- damaged results --------------------------------------------------------------------------------------------------


def by_method(world: un.Communicator, x: Any) -> None:
    world.allreduce(x)


def in_background(world: un.Communicator, x: Any) -> None:
    work = world.allreduce(x, wait=False)
    work.wait()


def in_place(world: un.Communicator, x: Any) -> None:
    world.broadcast(x, 0, out=x)


def by_plan(world: un.Communicator, x: Any) -> None:
    world.plan("allgather", x)()


def by_plan_in_background(world: un.Communicator, x: Any) -> None:
    world.plan("allgather", x)(wait=False).wait()


def in_group(world: un.Communicator, x: Any) -> None:
    with world.group():
        world.allreduce(x)
        world.allreduce(x, "max")


def by_list(world: un.Communicator, x: Any) -> None:
    world.allreduce([x[:3], x])


def by_function(world: un.Communicator, x: Any) -> None:
    world.allreduce(x, un.Op.from_function(np.hypot))


def by_rows(world: un.Communicator, x: Any) -> None:
    world.allgatherv(x, [x.size] * world.size)


def on_another_communicator(world: un.Communicator, x: Any) -> None:
    world.dup().allreduce(x)


def damage_a_result(world: un.Communicator, say: Any, odd: int, call: Callable[[un.Communicator, Any], None]) -> None:
    """Make a call that is right on all ranks, and then one after which a bit of the result flips on rank `odd`."""
    from unisono.collectives.calls import verification

    x = np.arange(10.0)
    call(world, x)
    checksum = verification._checksum

    def flipped(arrays: Any) -> int:
        target = arrays[-1].target
        if world.rank == odd and target is not None:
            target.view(np.uint8)[-1] ^= 1
        return checksum(arrays)

    verification._checksum = flipped
    try:
        call(world, x)
        say(("no error", "", None, None))
    except un.UnisonoError as error:
        say((type(error).__name__, error.message, error.peer, error.operation))
    with pytest.raises(un.AbortedError):
        call(world, x)


CALLS = (
    by_method,
    in_background,
    in_place,
    by_plan,
    by_plan_in_background,
    in_group,
    by_list,
    by_function,
    by_rows,
    on_another_communicator,
)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_damaged_result_is_an_error_on_every_rank(tmp_path: Path, call: Callable[..., None]) -> None:
    with Job(damage_a_result, 3, tmp_path, 2, call, verify_results=True) as job:
        for kind, text, peer, operation in job.hear_all():
            assert (kind, peer) == ("CorruptionError", 2), text
            assert text.startswith("rank 2 has another result of ")
            assert operation in text


def test_two_ranks_do_not_know_whose_result_is_damaged(tmp_path: Path) -> None:
    with Job(damage_a_result, 2, tmp_path, 1, by_method, verify_results=True) as job:
        for kind, text, peer, _ in job.hear_all():
            assert (kind, peer) == ("CorruptionError", None), text
            assert "no majority of the ranks 0, 1 has the same one" in text


def meet(options: un.Options, store: str, rank: int) -> str:
    with pytest.raises(un.UsageError) as refused:
        un.init(options, store=store, rank=rank, size=2)
    return refused.value.message


def test_transports_that_one_thread_must_use_are_refused_on_every_rank(tmp_path: Path) -> None:
    options = un.Options(transports="ucx_core", verify_results=True)
    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(partial(meet, options, f"file://{tmp_path}/store"), range(2)))
    assert all("verify_results is not possible with transports='ucx_core'" in text for text in texts)


@pytest.mark.parametrize(
    ("checksums", "peer"),
    [
        ((1, 1), None),
        ((1, 2), None),
        ((1, 2, 2), 0),
        ((2, 2, 1), 2),
        ((1, 2, 3), None),
        ((1, 1, 2, 2), None),
        ((5, 1, 1, 1, 4), 0),
    ],
)
def test_majority_is_right(checksums: tuple[int, ...], peer: int | None) -> None:
    error = verdict(checksums, range(len(checksums)), "allreduce")
    assert (error is None) == (len(set(checksums)) == 1)
    if error is not None:
        assert error.peer == peer
