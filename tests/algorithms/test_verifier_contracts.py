"""The contracts of collectives, and the verifier's errors for plans that break them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from support.handmade_plans import allgather_both_ways
from support.plan_edits import changed, flat_plans, groups_of, step_at, with_groups, with_step

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Step,
    even,
    in_parts,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    scratch_like_block,
    shares,
)
from unisono.algorithms.verifier.block_meaning import (
    PROMISES,
    BlockOrigin,
    BlockPromise,
    Length,
    PlanSet,
    are_proved_by,
)
from unisono.algorithms.verifier.lower_bounds import BOUNDS, least_rounds
from unisono.algorithms.verifier.verify import verify, verify_plans, verify_sizes
from unisono.errors import PlanError

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


def plans_of(
    collective: str,
    groups_of_each: Sequence[Sequence[Sequence[Step]]],
    input_: Partition,
    output: Partition,
    scratch: Partition | None = None,
) -> list[Plan]:
    """Return plans of one lane, from the steps of each group of each rank."""
    size = len(groups_of_each)
    lanes = [(tuple(Group(tuple(steps)) for steps in groups),) for groups in groups_of_each]
    scratch = scratch or Partition(0)
    return [Plan(collective, "test", size, rank, 0, input_, output, scratch, lanes[rank]) for rank in range(size)]


# The table of contracts.


def test_every_collective_has_a_contract_a_promise_and_lower_bounds() -> None:
    assert BOUNDS.keys() == CONTRACTS.keys() == PROMISES.keys() >= ALGORITHMS.keys()


@pytest.mark.parametrize(
    ("collective", "promise"),
    [
        ("allreduce", BlockPromise(BlockOrigin(-1, 1), 0b111)),
        ("reduce", BlockPromise(BlockOrigin(-1, 1), 0b111)),
        ("reduce_scatter", BlockPromise(BlockOrigin(-1, 2), 0b111)),
        ("scan", BlockPromise(BlockOrigin(-1, 1), 0b111)),
        ("exscan", BlockPromise(BlockOrigin(-1, 1), 0b011)),
        ("broadcast", BlockPromise(BlockOrigin(0, 1), 0b001)),
        ("scatter", BlockPromise(BlockOrigin(0, 2), 0b001)),
        ("gather", BlockPromise(BlockOrigin(1, 0), 0b010)),
        ("allgather", BlockPromise(BlockOrigin(1, 0), 0b010)),
        ("alltoall", BlockPromise(BlockOrigin(1, 2), 0b010)),
    ],
)
def test_promise_of_block_1_on_rank_2_of_3_matches_the_collective(collective: str, promise: BlockPromise) -> None:
    assert PROMISES[collective](3, 2, 0, 1) == promise


# Partitions and lengths.


def test_gather_with_output_on_a_nonroot_rank_is_refused() -> None:
    plans = flat_plans(find("gather", "linear"), 3)
    with pytest.raises(PlanError, match="rank 2: gather with an OUTPUT of 3 blocks, expected 0 blocks"):
        verify_plans(changed(plans, 2, lambda plan: replace(plan, output=even(3))))


def test_counts_that_vary_on_one_rank_only_are_refused() -> None:
    plans = flat_plans(find("allgather", "ring"), 3)
    with pytest.raises(PlanError, match=r"rank 0: .* OUTPUT of 3 blocks, expected 3 blocks by Counts.RANKS"):
        verify_plans(changed(plans, 1, lambda plan: replace(plan, output=Partition(3, Counts.RANKS))))


def test_share_lengths_are_per_rank_or_pair_only_if_counts_vary() -> None:
    def lengths(collective: str, name: str, **params: bool) -> list[Length]:
        plans = [find(collective, name).build(2, rank, **params) for rank in range(2)]
        return PlanSet(plans).lengths(1)[: plans[1].input.blocks + plans[1].output.blocks]

    share, count = Length("share"), "count of rank"
    assert lengths("allgather", "ring") == [share] * 3
    assert lengths("allgather", "ring", varying=True) == [Length(count, 1), Length(count, 0), Length(count, 1)]
    assert lengths("alltoall", "pairwise") == [share] * 4
    pairs = [Length("count of pair", *pair) for pair in ((1, 0), (1, 1), (0, 1), (1, 1))]
    assert lengths("alltoall", "pairwise", varying=True) == pairs
    parts = [Length("part", 2, 0), Length("part", 2, 1)]
    assert lengths("reduce_scatter", "ring") == [*parts, parts[1]]
    assert lengths("allreduce", "ring") == parts * 2


@pytest.mark.parametrize("varying", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_of_shares_may_take_different_ways(size: int, varying: bool) -> None:
    plans = [allgather_both_ways(size, rank, varying) for rank in range(size)]
    report = verify_plans(plans, segments=2)
    assert report.sent == Fraction(size - 1, size)
    if size == 1:
        return
    swapped = Group((Copy(output_block(0, 2), input_block(1, 2, stride=-1)),))
    lanes = (swapped, *plans[0].lanes[0][1:]), plans[0].lanes[1]
    with pytest.raises(PlanError, match=r"rank 0, .* writes block 1 of INPUT of rank 0 to block 0 of OUTPUT"):
        verify_plans(changed(plans, 0, lambda plan: replace(plan, lanes=lanes)), in_place=False)


def test_parts_of_shares_are_alike_on_all_ranks_and_in_shares_only() -> None:
    plans = [allgather_both_ways(3, rank) for rank in range(3)]
    with pytest.raises(
        PlanError, match="rank 1: allgather with an OUTPUT of 6 blocks, expected 6 blocks in shares of 2"
    ):
        verify_plans(changed(plans, 1, lambda plan: replace(plan, output=even(6))))
    with pytest.raises(PlanError, match="rank 2: SCRATCH is cut into parts"):
        verify_plans(changed(plans, 2, lambda plan: replace(plan, scratch=in_parts(shares(3, varying=True), 2))))
    vector = Plan("allreduce", "test", 1, 0, 0, even(2), in_parts(even(1), 2))
    with pytest.raises(PlanError, match="OUTPUT of 2 blocks in shares of 2, expected 2 blocks"):
        verify_plans([vector])


def test_share_in_block_of_another_rank_is_refused_if_counts_vary() -> None:
    def swapped(counts: Counts) -> list[Plan]:
        """Rank 0 receives the share of rank 1 into block 0 of SCRATCH, which is as long as rank 0's own share."""
        groups: list[list[list[Step]]] = [
            [
                [Send(1 - rank, input_block()), Recv(1 - rank, scratch_block())],
                [Copy(output_block(rank), input_block()), Copy(output_block(1 - rank), scratch_block())],
            ]
            for rank in range(2)
        ]
        return plans_of("allgather", groups, even(1), Partition(2, counts), scratch_like(Buffer.INPUT, even(1)))

    assert verify_plans(swapped(Counts.OWN)).messages == 2
    with pytest.raises(PlanError, match="writes block 0 of INPUT of rank 0 to block 0 of SCRATCH of rank 1, which"):
        verify_plans(swapped(Counts.RANKS))


def test_scratch_length_must_be_copies_times_blocks_of_its_model() -> None:
    plan = Plan("allreduce", "test", 1, 0, 0, even(2), even(2), Partition(3, Counts.OWN, Buffer.INPUT, 2))
    with pytest.raises(PlanError, match="rank 0: SCRATCH of 3 blocks, expected 2 times 2"):
        verify_plans([plan])


def test_scratch_may_be_copies_of_one_existing_block() -> None:
    scratch = scratch_like_block(Buffer.INPUT, even(2), block=1, copies=3)
    plan = Plan("allreduce", "test", 1, 0, 0, even(2), even(2), scratch)
    assert PlanSet([plan]).lengths(0)[4:] == [Length("part", 2, 1)] * 3
    with pytest.raises(PlanError, match="rank 0: SCRATCH is like block 2, which does not exist"):
        verify_plans([replace(plan, scratch=replace(scratch, block=2))])


# Results.


def test_the_right_data_in_the_wrong_block_is_named() -> None:
    plans = flat_plans(find("alltoall", "direct"), 3)
    group, index = next(
        (number, index)
        for number, group in enumerate(groups_of(plans[2]))
        for index, step in enumerate(group.steps)
        if isinstance(step, Send) and step.peer == 0
    )
    wrong = changed(plans, 2, lambda plan: with_step(plan, group, index, Send(0, input_block(1))))
    with pytest.raises(PlanError, match="block 2 of OUTPUT holds block 1 of rank 2, not block 0 of rank 2"):
        verify_plans(wrong, in_place=False)


def test_exscan_leaves_the_output_of_rank_0_untouched() -> None:
    groups: list[list[list[Step]]] = [
        [[Send(1, input_block())], [Copy(output_block(), input_block(), lower=True)]],
        [[Recv(0, scratch_block())], [Copy(output_block(), scratch_block(), lower=True)]],
    ]
    plans = plans_of("exscan", groups, even(1), even(1), scratch_like(Buffer.INPUT, even(1)))
    with pytest.raises(PlanError, match="rank 0, lane 0, group 1, step 0: block 0 of OUTPUT is written, but no step"):
        verify_plans(plans)
    assert verify_plans(changed(plans, 0, lambda plan: with_groups(plan, groups_of(plan)[:1]))).rounds == 1


def test_contribution_of_a_later_rank_to_a_scan_is_refused() -> None:
    exchange: list[list[list[Step]]] = [
        [
            [Send(1 - rank, input_block()), Recv(1 - rank, scratch_block())],
            [Reduce(output_block(), (input_block(), scratch_block()), lower=True)],
        ]
        for rank in range(2)
    ]
    plans = plans_of("scan", exchange, even(1), even(1), scratch_like(Buffer.INPUT, even(1)))
    with pytest.raises(PlanError) as caught:
        verify_plans(plans)
    assert str(caught.value) == (
        "rank 0, lane 0, group 1, step 0: "
        "block 0 of OUTPUT has the contribution of rank 1, which does not belong there\n"
        "  contributions to block 0 of OUTPUT, by rank\n"
        "    rank 0  +!"
    )


def test_error_draws_contribution_combined_twice() -> None:
    plans = flat_plans(find("allreduce", "direct"), 3)
    finish = step_at(plans, 0, 1, 0)
    assert isinstance(finish, Reduce)
    doubled = replace(finish, sources=(*finish.sources[:2], finish.sources[1]))
    with pytest.raises(PlanError) as caught:
        verify_plans(changed(plans, 0, lambda plan: with_step(plan, 1, 0, doubled)))
    assert str(caught.value) == (
        "rank 0, lane 0, group 1, step 0: the contribution of rank 1 to block 0 is combined twice\n"
        "  contributions, by rank\n"
        "    so far         +!.\n"
        "    combined with  .!."
    )


# In place.


def test_reading_allgather_input_after_its_output_block_changed_is_refused() -> None:
    def groups(rank: int) -> list[list[Step]]:
        return [
            [Send(1 - rank, input_block()), Recv(1 - rank, scratch_block())],
            [Copy(output_block(rank), scratch_block())],
            [Copy(output_block(1 - rank), output_block(rank))],
            [Copy(output_block(rank), input_block())],
        ]

    scratch = scratch_like(Buffer.INPUT, even(1))
    plans = plans_of("allgather", [groups(0), groups(1)], even(1), even(2), scratch)
    assert verify_plans(plans, in_place=False).messages == 2
    message = "rank 0, lane 0, group 3, step 0: reads block 0 of INPUT, which in place has been overwritten as block 0"
    with pytest.raises(PlanError, match=message):
        verify_plans(plans)


def test_in_place_reduce_scatter_writes_share_only_after_the_last_read() -> None:
    def groups(rank: int, *, early: bool) -> list[list[Step]]:
        peer = 1 - rank
        give = Send(peer, input_block(peer))
        take = RecvReduce(peer, output_block(), input_block(rank), received_first=rank == 1, lower=True)
        again: list[Step] = [Send(peer, input_block(rank)), Recv(peer, scratch_block(peer))]
        return [[give, take], again] if early else [[give, take]]

    scratch = scratch_like(Buffer.INPUT, even(2))
    late = plans_of("reduce_scatter", [groups(rank, early=False) for rank in range(2)], even(2), even(1), scratch)
    assert verify_plans(late, commutative=False).messages == 2
    early = plans_of("reduce_scatter", [groups(rank, early=True) for rank in range(2)], even(2), even(1), scratch)
    assert verify_plans(early, in_place=False).messages == 4
    with pytest.raises(
        PlanError, match="group 1, step 0: reads block 0 of INPUT, which in place has been overwritten as block 0"
    ):
        verify_plans(early)


def test_receiving_into_own_allgather_share_is_a_hazard_in_place_only() -> None:
    """In an allgather in place, block r of OUTPUT is the INPUT of rank r. So only that block is a hazard for rank r."""

    def groups(rank: int, into: int) -> list[list[Step]]:
        move = [Copy(output_block(1 - rank), output_block(into))] if into == rank else []
        own: list[Step] = [Copy(output_block(rank), input_block())]
        return [[Send(1 - rank, input_block()), Recv(1 - rank, output_block(into))], [*move], own]

    right = plans_of("allgather", [groups(0, into=1), groups(1, into=0)], even(1), even(2))
    assert verify_plans(right).messages == 2
    wrong = plans_of("allgather", [groups(0, into=0), groups(1, into=0)], even(1), even(2))
    assert verify_plans(wrong, in_place=False).messages == 2
    message = (
        "rank 0, lane 0, group 0, step 0: hazard: reads block 0 of INPUT while rank 0, lane 0, group 0, step 1 write"
    )
    with pytest.raises(PlanError, match=message):
        verify_plans(wrong)


def test_hazard_in_any_iteration_of_a_repeated_group_is_reported() -> None:
    """The verifier may check the first iteration of a repeated group alone only if all its spans advance equally."""
    finish = Group((Copy(output_block(0, 4), input_block(0, 4), lower=True),))

    def alone(*steps: Step) -> list[Plan]:
        scratch = scratch_like(Buffer.INPUT, even(4))
        plan = Plan("allreduce", "test", 1, 0, 0, even(4), even(4), scratch)
        return [replace(plan, lanes=((Repeat(4, (Group(steps),)), finish),))]

    # One span stays, and the other one reaches it in the third iteration.
    stays, comes = Copy(scratch_block(2), input_block(2)), Copy(scratch_block(0, advance=1), input_block(0, advance=1))
    with pytest.raises(PlanError, match="rank 0, lane 0, group 2, step 1: hazard: writes block 2 of SCRATCH while"):
        verify_plans(alone(stays, comes))
    # Both spans advance. Either they never meet, or they overlap from the first iteration on.
    apart = Copy(scratch_block(2, advance=1), input_block(2, advance=1))
    assert verify_plans(alone(comes, apart)).scratch_blocks == 4
    with pytest.raises(PlanError, match="rank 0, lane 0, group 0, step 1: hazard: writes block 0 of SCRATCH while"):
        verify_plans(alone(comes, comes))


# Properties.


def test_plan_that_costs_less_than_the_lower_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = BOUNDS["allreduce"]
    monkeypatch.setitem(BOUNDS, "allreduce", bound._replace(sent=lambda size: bound.sent(size) + 1))
    with pytest.raises(PlanError, match="allreduce on 4 ranks: sent is 3/2, below the least possible 5/2"):
        verify(find("allreduce", "ring").build, 4)
    monkeypatch.setitem(BOUNDS, "allreduce", bound._replace(reduced=lambda size: bound.reduced(size) + 1))
    with pytest.raises(PlanError, match="allreduce on 4 ranks: reduced is 3/4, below the least possible 7/4"):
        verify(find("allreduce", "ring").build, 4)


def test_report_counts_how_many_messages_a_link_may_hold() -> None:
    assert verify(find("broadcast", "chain").build, 4).queue == 1
    assert verify(find("allreduce", "ring").build, 4).queue == 3
    assert verify(find("allreduce", "ring").build, 33).queue is None
    twice: list[list[list[Step]]] = [
        [[Send(1, input_block(0))], [Send(1, input_block(1))], [Copy(output_block(0, 2), input_block(0, 2))]],
        [[Recv(0, output_block(0))], [Recv(0, output_block(1))]],
    ]
    plans = plans_of("broadcast", twice, even(2), even(2))
    plans = changed(plans, 1, lambda plan: replace(plan, input=Partition(0)))
    assert verify_plans(plans).queue == 2


def test_least_rounds_is_the_logarithm_to_base_ports_plus_one() -> None:
    assert [least_rounds(size, ports=1) for size in (1, 2, 3, 4, 5, 64)] == [0, 1, 2, 2, 3, 6]
    assert [least_rounds(size, ports=3) for size in (1, 4, 5, 16, 17)] == [0, 1, 2, 2, 3]


@pytest.mark.parametrize("algorithm", [pytest.param(one, id=f"{one.collective}_{one.name}") for one in ALL])
def test_no_algorithm_declares_less_than_the_lower_bound(algorithm: Algorithm) -> None:
    for size in (one for one in range(1, 65) if algorithm.supports(one) is None):
        cost, bound = algorithm.cost(size), BOUNDS[algorithm.collective]
        # The sum of fractional costs may have a rounding error.
        assert cost.sent >= float(bound.sent(size)) * (1 - 1e-12)
        assert cost.reduced >= float(bound.reduced(size)) * (1 - 1e-12)


# All sizes.


def test_verify_sizes_omits_unsupported_sizes() -> None:
    picky = replace(find("allreduce", "ring"), supports=lambda size: "odd" if size % 2 else None)
    assert list(verify_sizes(picky, range(1, 7))) == [2, 4, 6]


def test_wrong_plans_for_equal_counts_alone_are_refused() -> None:
    """Such plans are right for other counts, so the verifier must also try equal ones."""
    ring = find("allgather", "ring")

    def short_if_equal(size: int, rank: int, root: int = 0, *, varying: bool = False) -> Plan:
        plan = ring.build(size, rank, root, varying=varying)
        return plan if varying else with_groups(plan, groups_of(plan)[:-1])

    def uneven_if_equal(size: int, rank: int, root: int = 0, *, varying: bool = False) -> Plan:
        plan = ring.build(size, rank, root, varying=varying)
        return plan if varying else replace(plan, output=Partition(size, Counts.RANKS), input=even(2))

    for wrong in (short_if_equal, uneven_if_equal):
        with pytest.raises(PlanError):
            verify_sizes(replace(ring, build=wrong), [4])


def test_proof_transfers_only_to_plans_with_matching_lengths() -> None:
    ring = find("reduce_scatter", "ring")
    varying, equal = ([ring.build(3, rank, varying=form) for rank in range(3)] for form in (True, False))
    assert are_proved_by(equal, varying)
    # In an allgather with equal shares, fewer lengths are known to be equal than with the counts of all ranks.
    gather = find("allgather", "ring")
    varying, equal = ([gather.build(4, rank, varying=form) for rank in range(4)] for form in (True, False))
    assert are_proved_by(equal, varying)
    assert not are_proved_by(varying, equal)
    assert not are_proved_by(flat_plans(gather, 4), varying)
