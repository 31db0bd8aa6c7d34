"""Algorithms over mapped memory: proofs, adversarial schedules, and plans with a missing flag, which must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from support.handmade_plans import allreduce_one_shot, broadcast_by_writes
from support.harness import call_of
from support.plan_edits import changed, flat_plans, groups_of, with_groups, without_flag

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.plan import Counts, Plan, Signal, Wait
from unisono.algorithms.verifier.verify import verify_plans, verify_sizes
from unisono.errors import InternalError, MismatchError, NoAlgorithmError, PlanError, UnisonoError, UsageError
from unisono.transports.contracts.transport import Traffic
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.message.faulty import Faults, FaultyTransport
from unisono.transports.message.local import LocalNetwork
from unisono.tuning.decide.choice import Question, choose, explain

MAPPED = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values() if algorithm.mapped]
EVERY_ALGORITHM = [pytest.param(algorithm, id=f"{algorithm.collective}_{algorithm.name}") for algorithm in MAPPED]
# In these collectives, a rank may copy its own block at any time, before or after it waits for other ranks.
OWN_AT_ANY_TIME = ("gather", "scatter", "alltoall")
ALLREDUCES = ("one_shot", "two_shot")
SCHEDULES = 40
POLLS = 20_000


@dataclass(frozen=True)
class Schedule:
    """A run of all ranks in one thread.

    The seed decides which rank continues next, and which flags and accesses are late.
    """

    seed: int

    def run(self, plans: Sequence[Plan], calls: Sequence[tuple[Any, Any, Any]]) -> list[dict[int, Traffic]]:
        """Run `plans`, with (call, source, target) for each rank; return the traffic of each rank."""
        network, choice = LocalNetwork(len(plans)), Random(self.seed)
        faults = Faults(self.seed, delay=0.5)
        executors = [GenericExecutor(FaultyTransport(transport, faults)) for transport in network.transports]
        operations: dict[int, Any] = {}
        running = list(range(len(plans)))
        for _ in range(POLLS):
            if not running:
                return [dict(executor.traffic()) for executor in executors]
            rank = choice.choice(running)
            if rank not in operations:
                operations[rank] = executors[rank].start(*calls[rank])
            if operations[rank].poll():
                running.remove(rank)
        raise TimeoutError(f"ranks {running} were still running")

    def allreduce(self, plans: Sequence[Plan], count: int, segments: int = 1, *, in_place: bool) -> list[Any]:
        """Return OUTPUT of all ranks after an allreduce of ``contributions(size, count)``."""
        sources = [np.array(row) for row in contributions(len(plans), count)]
        targets = sources if in_place else [np.full(count, -1) for _ in plans]
        calls = [call_of(plan, "int64", (count, count), op="sum", segments=segments) for plan in plans]
        self.run(plans, list(zip(calls, sources, targets, strict=True)))
        return [target.tolist() for target in targets]


def contributions(size: int, count: int) -> Any:
    return np.arange(size * count, dtype=np.int64).reshape(size, count) ** 2


def plans_of(name: str, size: int, collective: str = "allreduce", **params: Any) -> list[Plan]:
    return [find(collective, name).build(size, rank, **params) for rank in range(size)]


def without_group(plans: Sequence[Plan], number: int) -> list[Plan]:
    """Return the plans without one group, on all ranks."""
    return [with_groups(plan, [g for at, g in enumerate(groups_of(plan)) if at != number]) for plan in plans]


# Proofs and refusals.


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_mapped_algorithm_is_proved_with_declared_cost_for_any_window(algorithm: Algorithm, window: int) -> None:
    assert len(verify_sizes(algorithm, range(1, 12), window=window)) == 11


@pytest.mark.parametrize("algorithm", EVERY_ALGORITHM)
def test_mapped_builder_refuses_window_below_one(algorithm: Algorithm) -> None:
    with pytest.raises(UsageError, match="window is 0, but must be at least 1"):
        algorithm.build(4, 0, window=0)


@pytest.mark.parametrize("name", ALLREDUCES)
def test_tuner_uses_mapped_algorithms_by_name_only_and_never_over_tcp(name: str) -> None:
    with pytest.raises(NoAlgorithmError, match=f"{name} needs memory that its peers can map"):
        choose(Question("allreduce", 64, 4, "tcp", algorithm=name))
    assert choose(Question("allreduce", 64, 4, "shm", algorithm=name)).algorithm == name
    refusals = {
        candidate.algorithm: candidate.refusal for candidate in explain(Question("allreduce", 64, 4, "shm")).candidates
    }
    assert refusals[name] == "runs only if it is named"


# Every flag is needed.


def drop_flag(plans: Sequence[Plan], choice: Random) -> list[Plan]:
    """Remove one flag: the `Signal` and the `Wait` for it."""
    rank, group, kind, peer = choice.choice(flags_of(plans))
    other = Wait if kind is Signal else Signal
    unheard = changed(plans, rank, lambda plan: without_flag(plan, group, kind, peer))
    return changed(unheard, peer, lambda plan: without_flag(plan, group, other, rank))


def drop_end(plans: Sequence[Plan], choice: Random) -> list[Plan]:
    """Remove the `Signal` or the `Wait` of one flag."""
    rank, group, kind, peer = choice.choice(flags_of(plans))
    return changed(plans, rank, lambda plan: without_flag(plan, group, kind, peer))


def swap_groups(plans: Sequence[Plan], choice: Random) -> list[Plan]:
    """Exchange two neighbouring groups, on all ranks."""
    first = choice.randrange(len(groups_of(plans[0])) - 1)

    def swapped(plan: Plan) -> Plan:
        groups = groups_of(plan)
        groups[first : first + 2] = reversed(groups[first : first + 2])
        return with_groups(plan, groups)

    return [swapped(plan) for plan in plans]


def swap_groups_of_one_rank(plans: Sequence[Plan], choice: Random) -> list[Plan]:
    rank = choice.randrange(len(plans))
    return changed(plans, rank, lambda plan: swap_groups([plan], choice)[0])


def flags_of(plans: Sequence[Plan]) -> list[tuple[int, int, type[Signal | Wait], int]]:
    """Return the (rank, group, kind, peer) of all flags."""
    return [
        (plan.rank, number, type(step), step.peer)
        for plan in plans
        for number, group in enumerate(groups_of(plan))
        for step in group.steps
        if isinstance(step, (Signal, Wait))
    ]


@settings(max_examples=80, deadline=None)
@given(
    algorithm=st.sampled_from([algorithm for algorithm in MAPPED if algorithm.collective != "barrier"]),
    mutation=st.sampled_from([drop_flag, drop_end, swap_groups, swap_groups_of_one_rank]),
    size=st.integers(2, 7),
    choice=st.randoms(use_true_random=False),
)
def test_verifier_refuses_plan_with_missing_or_late_flag(
    algorithm: Algorithm,
    mutation: Callable[[Sequence[Plan], Random], list[Plan]],
    size: int,
    choice: Random,
) -> None:
    is_swap = mutation in (swap_groups, swap_groups_of_one_rank)
    assume(not (is_swap and algorithm.collective in OWN_AT_ANY_TIME))
    plans = flat_plans(algorithm, size)
    with pytest.raises(PlanError):
        verify_plans(mutation(plans, choice), commutative=False)


@pytest.mark.parametrize(("name", "meeting"), [("one_shot", 0), ("one_shot", 2), *(("two_shot", g) for g in (0, 2, 4))])
def test_some_schedule_fails_without_one_synchronising_group(name: str, meeting: int) -> None:
    expected = [contributions(3, 6).sum(axis=0).tolist()] * 3

    def goes_wrong(seed: int) -> bool:
        try:
            return Schedule(seed).allreduce(without_group(plans_of(name, 3), meeting), 6, in_place=True) != expected
        except UnisonoError:
            return True

    assert any(goes_wrong(seed) for seed in range(SCHEDULES))


# Results.


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(ALLREDUCES),
    size=st.integers(1, 7),
    count=st.integers(0, 20),
    segments=st.integers(1, 3),
    in_place=st.booleans(),
    window=st.sampled_from([1, 2, 32]),
    seed=st.integers(0, 10_000),
)
def test_an_allreduce_equals_numpy_on_every_schedule(
    *, name: str, size: int, count: int, segments: int, in_place: bool, window: int, seed: int
) -> None:
    plans = plans_of(name, size, window=window)
    expected = contributions(size, count).sum(axis=0).tolist()
    assert Schedule(seed).allreduce(plans, count, segments, in_place=in_place) == [expected] * size


@pytest.mark.parametrize("name", ALLREDUCES)
def test_float16_sums_of_mapped_algorithms_are_rounded_once(name: str) -> None:
    plans, targets = plans_of(name, 3), [np.zeros(3, np.float16) for _ in range(3)]
    sources = [np.full(3, value, np.float16) for value in (2048, 1, 1)]
    calls = [call_of(plan, "float16", (3, 3), op="sum") for plan in plans]
    Schedule(0).run(plans, list(zip(calls, sources, targets, strict=True)))
    # with a rounding after each addition, the sum would stay 2048
    assert [target.tolist() for target in targets] == [[2050.0] * 3] * 3


@pytest.mark.parametrize("size", [1, 2, 5])
def test_write_steps_write_memory_of_peers(size: int) -> None:
    for seed in range(10):
        plans, targets = [broadcast_by_writes(size, rank) for rank in range(size)], np.zeros((size, 9), np.int32)
        calls = [call_of(plan, "int32", (9, 9), root=0, segments=2) for plan in plans]
        source = np.arange(9, dtype=np.int32)
        Schedule(seed).run(plans, [(call, source, target) for call, target in zip(calls, targets, strict=True)])
        assert targets.tolist() == [source.tolist()] * size


def test_reads_count_as_traffic_and_flags_do_not() -> None:
    plans = plans_of("one_shot", 3)
    calls = [(call_of(plan, "int64", (5, 5), op="sum"), np.ones(5, np.int64), np.ones(5, np.int64)) for plan in plans]
    moved = Traffic("local", sent_messages=1, sent_nbytes=40, received_messages=1, received_nbytes=40)
    traffic = Schedule(1).run(plans, calls)
    assert traffic == [{peer: moved for peer in range(3) if peer != rank} for rank in range(3)]


# Errors reach every rank.


def errors_of(plans: Sequence[Plan], calls: Sequence[tuple[Any, Any, Any]]) -> list[UnisonoError]:
    """Run `plans` on all ranks in turn; return the error of each rank."""
    executors = [GenericExecutor(transport) for transport in LocalNetwork(len(plans)).transports]
    errors = []
    operations = []
    for executor, call in zip(executors, calls, strict=True):
        try:
            operations.append(executor.start(*call))
        except UnisonoError as error:
            errors.append(error)
    for operation in operations:
        with pytest.raises(UnisonoError) as caught:
            operation.wait(1.0)
        errors.append(caught.value)
    return errors


def test_access_to_unpublished_memory_is_an_error_on_every_rank() -> None:
    plans = [allreduce_one_shot(2, rank) for rank in range(2)]
    calls = [(call_of(plan, "int64", (4, 4), op="sum"), np.ones(4, np.int64), np.ones(4, np.int64)) for plan in plans]
    errors = errors_of(plans, calls)
    assert {type(error) for error in errors} == {InternalError}
    assert all("of rank 1, which is not published" in error.message for error in errors)


def test_memory_of_another_length_is_a_mismatch_on_every_rank() -> None:
    plans = plans_of("read", 2, "allgather", varying=True)
    calls = []
    for plan, lengths in zip(plans, ([3, 4], [3, 5]), strict=True):
        call = call_of(plan, "int32", (lengths[plan.rank], sum(lengths)), counts={Counts.RANKS: lengths})
        calls.append((call, np.ones(lengths[plan.rank], np.int32), np.zeros(sum(lengths), np.int32)))
    errors = errors_of(plans, calls)
    assert {type(error) for error in errors} == {MismatchError}
    assert all("which has 20 bytes instead of 16" in error.message for error in errors)
