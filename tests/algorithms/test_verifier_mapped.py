"""Mapped memory: accesses to the memory of other ranks must be ordered by flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial

import pytest
from support.handmade_plans import allreduce_one_shot, broadcast_by_writes
from support.plan_edits import changed, groups_of, with_groups, with_step, without_flag

from unisono.algorithms.builders.mapped import allreduce_one_shot as one_shot, allreduce_two_shot as two_shot
from unisono.algorithms.catalogue.on_devices import ONLY_ON_DEVICES
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Partition,
    Plan,
    Read,
    ReadReduce,
    Recv,
    Send,
    Signal,
    Step,
    Wait,
    Write,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)
from unisono.algorithms.verifier.verify import verify_algorithm, verify_plans
from unisono.errors import PlanError


def flags(size: int, rank: int) -> Group:
    """Return the group in which all ranks signal each other that they have come to this point."""
    others = [peer for peer in range(size) if peer != rank]
    steps: list[Step] = [Signal(peer) for peer in others]
    return Group((*steps, *[Wait(peer) for peer in others]))


def plans_of(builder: Callable[[int, int], Plan], size: int) -> list[Plan]:
    return [builder(size, rank) for rank in range(size)]


@pytest.mark.parametrize("builder", [one_shot, two_shot, broadcast_by_writes])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_mapped_plans_with_flags_before_and_after_are_proved(builder: Callable[[int, int], Plan], size: int) -> None:
    for segments in (1, 3):
        assert verify_plans(plans_of(builder, size), segments).same_bits


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_algorithms_that_only_gpus_run_are_proved_too(size: int) -> None:
    algorithms = [one for by_name in ONLY_ON_DEVICES.values() for one in by_name.values()]
    assert algorithms
    for algorithm in algorithms:
        assert verify_algorithm(algorithm, size).mapped


def test_access_to_peers_counts_as_sending_and_flags_as_rounds() -> None:
    report = verify_plans(plans_of(two_shot, 4))
    assert (report.rounds, report.sent, report.reduced) == (3, Fraction(6, 4), Fraction(3, 4))
    assert (report.messages, report.ports, report.mapped) == (0, 3, True)


def test_reading_memory_of_a_peer_before_its_first_flag_is_refused() -> None:
    message = "rank 1, lane 0, group 0, step 0: reads block 0 of INPUT of rank 0, which may not have begun"
    with pytest.raises(PlanError, match=message):
        verify_plans(plans_of(allreduce_one_shot, 2))


def test_plan_in_which_a_peer_may_end_while_it_is_read_is_refused() -> None:
    plans = [with_groups(plan, [*groups_of(plan)[:2], groups_of(plan)[3]]) for plan in plans_of(one_shot, 3)]
    message = "rank 1, lane 0, group 1, step 0: reads block 0 of INPUT of rank 0, which may have ended before"
    with pytest.raises(PlanError, match=message):
        verify_plans(plans, in_place=False)


def test_reading_memory_that_a_peer_may_still_write_is_a_race() -> None:
    plans = [
        with_groups(plan, [group for number, group in enumerate(groups_of(plan)) if number != 2])
        for plan in plans_of(two_shot, 3)
    ]
    with pytest.raises(PlanError, match=r"race: writes block 0 of OUTPUT of rank 0 while rank 1, .* reads it: no flag"):
        verify_plans(plans)


def test_overwriting_memory_that_a_peer_may_still_read_is_a_race() -> None:
    def early(size: int, rank: int) -> Plan:
        plan = one_shot(size, rank)
        read = groups_of(plan)[1].steps[0]
        assert isinstance(read, ReadReduce)
        return with_step(plan, 1, 0, replace(read, dst=output_block()))

    plans = [with_groups(plan, groups_of(plan)[:3]) for plan in plans_of(early, 3)]
    assert verify_plans(plans, in_place=False).same_bits
    with pytest.raises(PlanError, match=r"(race|hazard): "):
        verify_plans(plans)


def test_two_ranks_that_write_the_same_block_of_a_third_are_a_race() -> None:
    def doubly(size: int, rank: int) -> Plan:
        """Rank 0 and rank 1 both write the OUTPUT of rank 2, after all ranks have begun."""
        met = flags(size, rank)
        write = {0: (Write(2, output_block(), input_block()),), 1: (Write(2, output_block(), output_block()),), 2: ()}
        own = Group((Copy(output_block(), input_block()),) if rank == 0 else ())
        fill = Group((Read(0, output_block(), input_block()),) if rank == 1 else ())
        lane = (met, own, fill, Group(write[rank]), met)
        return Plan("broadcast", "doubly", 3, rank, 0, Partition(0) if rank else even(1), even(1), lanes=(lane,))

    with pytest.raises(
        PlanError, match="race: writes block 0 of OUTPUT of rank 2 while rank 1, lane 0, group 3, step 0"
    ):
        verify_plans(plans_of(doubly, 3))


def test_data_message_does_not_order_access_like_a_flag() -> None:
    def lane(rank: int) -> tuple[Group, ...]:
        groups = list(groups_of(two_shot(2, rank)))
        groups[0] = Group((Send(1 - rank, input_block()), Recv(1 - rank, scratch_block())))
        return tuple(groups)

    plans = [
        replace(two_shot(2, rank), scratch=scratch_like(Buffer.INPUT, even(2)), lanes=(lane(rank),))
        for rank in range(2)
    ]
    with pytest.raises(PlanError, match="which may not have begun: no flag comes from it before"):
        verify_plans(plans)


@pytest.mark.parametrize("builder", [one_shot, two_shot, broadcast_by_writes])
def test_verifier_refuses_plan_without_any_one_of_its_flags(builder: Callable[[int, int], Plan]) -> None:
    plans = plans_of(builder, 3)
    waits = [
        (plan.rank, step.peer, number)
        for plan in plans
        for number, group in enumerate(groups_of(plan))
        for step in group.steps
        if isinstance(step, Wait)
    ]
    for waiting, signalling, number in waits:
        unheard = changed(plans, waiting, partial(without_flag, group=number, kind=Wait, peer=signalling))
        with pytest.raises(PlanError, match=r"does not receive the flag that this step sends \(. flags sent"):
            verify_plans(unheard)
        with pytest.raises(PlanError, match=r"may not have begun|may have ended before|race"):
            verify_plans(changed(unheard, signalling, partial(without_flag, group=number, kind=Signal, peer=waiting)))


def test_ranks_that_wait_before_they_signal_wait_in_a_cycle() -> None:
    def late(size: int, rank: int) -> Plan:
        lane = (Group((Wait(1 - rank),)), Group((Signal(1 - rank),)))
        return Plan("barrier", "late", size, rank, 0, even(1), Partition(0), lanes=(lane,))

    with pytest.raises(PlanError, match=r"waiting cycle:\n  ┌→ rank 0, lane 0, group 0"):
        verify_plans(plans_of(late, 2))


def test_exchange_of_flags_is_proved_as_a_barrier() -> None:
    def barrier(size: int, rank: int) -> Plan:
        return Plan("barrier", "flags", size, rank, 0, even(1), Partition(0), lanes=((flags(size, rank),),))

    assert verify_plans(plans_of(barrier, 5)).rounds == 1


def test_reading_unwritten_scratch_of_a_peer_is_refused() -> None:
    def lane(rank: int) -> tuple[Group, ...]:
        met = flags(2, rank)
        fetch = Group((Read(0, output_block(), scratch_block()),) if rank else ())
        return (met, fetch, met)

    plans = [
        Plan("broadcast", "early", 2, rank, 0, even(1 - rank), even(1), scratch_like(Buffer.OUTPUT, even(1)))
        for rank in range(2)
    ]
    message = "rank 1, lane 0, group 1, step 0: reads block 0 of SCRATCH of rank 0, to which nothing has been written"
    with pytest.raises(PlanError, match=message):
        verify_plans([replace(plan, lanes=(lane(plan.rank),)) for plan in plans])


def test_an_algorithm_must_declare_that_it_needs_mapped_memory() -> None:
    algorithm = find("allreduce", "two_shot")
    assert verify_algorithm(algorithm, 3).mapped
    with pytest.raises(
        PlanError, match="allreduce two_shot on 3 ranks: the plans need mapped memory: declare mapped=True"
    ):
        verify_algorithm(replace(algorithm, mapped=False), 3)
