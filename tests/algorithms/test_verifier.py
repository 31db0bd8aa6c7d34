from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from support.plan_edits import changed, flat, flat_plans, groups_of, step_at, with_groups, with_step

from unisono.algorithms.catalogue.algorithm import Cost
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)
from unisono.algorithms.verifier.verify import verify, verify_algorithm, verify_plans
from unisono.errors import NoAlgorithmError, PlanError

RING = find("allreduce", "ring")


def pair(*lanes_of_each: Sequence[Sequence[Group]], blocks: int = 1) -> list[Plan]:
    """Return allreduce plans of two ranks with these lanes, and with SCRATCH like OUTPUT."""
    scratch = scratch_like(Buffer.OUTPUT, even(blocks))
    return [
        Plan("allreduce", "test", 2, rank, 0, even(blocks), even(blocks), scratch, tuple(tuple(lane) for lane in lanes))
        for rank, lanes in enumerate(lanes_of_each)
    ]


def exchange(peer: int) -> Group:
    return Group((Send(peer, input_block()), RecvReduce(peer, scratch_block(), input_block(), lower=True)))


KEEP = Group((Copy(output_block(), scratch_block()),))


# Right plans are proved.


def test_report_counts_messages_rounds_and_volume_of_the_plans() -> None:
    report = verify(RING.build, 4)
    assert (report.messages, report.rounds, report.sent, report.reduced) == (24, 6, Fraction(3, 2), Fraction(3, 4))
    assert (report.scratch_blocks, report.ports, report.mapped, report.same_bits) == (0, 1, False, True)
    report = verify(find("allreduce", "direct").build, 4)
    assert (report.messages, report.rounds, report.sent, report.reduced) == (12, 1, Fraction(3), Fraction(3))
    assert (report.scratch_blocks, report.ports, report.mapped, report.same_bits) == (3, 3, False, True)
    assert verify(find("broadcast", "binomial").build, 6, root=5).messages == 5


def test_block_permutation_must_be_the_same_on_all_ranks() -> None:
    permutation = (3, 0, 4, 1, 2)
    plans = [RING.build(5, rank) for rank in range(5)]
    permuted = [replace(plan, permutation=permutation) for plan in plans]
    assert verify_plans(permuted) == verify_plans(plans)
    with pytest.raises(PlanError, match="rank 2, lane 0, group 0, step 1: combines block 0 with block 1"):
        verify_plans(changed(plans, 2, lambda plan: replace(plan, permutation=permutation)))
    with pytest.raises(PlanError, match="rank 1: the permutation does not name every block once"):
        verify_plans(changed(plans, 1, lambda plan: replace(plan, permutation=(0, 0, 1, 2, 3))))


def test_same_bits_are_reported_only_for_equal_expressions_on_all_ranks() -> None:
    plans = flat_plans(find("allreduce", "direct"), 4)
    reduce = step_at(plans, 2, 1, 0)
    assert isinstance(reduce, Reduce)
    backwards = replace(reduce, sources=reduce.sources[::-1])
    assert not verify_plans(changed(plans, 2, lambda plan: with_step(plan, 1, 0, backwards))).same_bits


# Two lanes.


def on_half(step: Step, half: int, size: int) -> Step:
    """Return a step of the ring on the blocks of one half of a vector of 2·size blocks."""

    def moved(span: Span) -> Span:
        return replace(span, start=half * size + span.start % size)

    if isinstance(step, Send):
        return replace(step, src=moved(step.src))
    if isinstance(step, RecvReduce):
        return replace(step, src=moved(step.src), dst=moved(step.dst))
    assert isinstance(step, Recv)
    return replace(step, dst=moved(step.dst))


def two_rings(size: int, halves: tuple[int, int]) -> list[Plan]:
    def lane(plan: Plan, half: int) -> tuple[Group, ...]:
        return tuple(Group(tuple(on_half(step, half, size) for step in group.steps)) for group in groups_of(plan))

    return [
        replace(plan, input=even(2 * size), output=even(2 * size), lanes=tuple(lane(plan, half) for half in halves))
        for plan in flat_plans(RING, size)
    ]


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("segments", [1, 3])
def test_two_lanes_on_the_halves_of_the_vector_are_proved(size: int, segments: int) -> None:
    report = verify_plans(two_rings(size, (0, 1)), segments)
    assert report.rounds == 2 * (size - 1)
    assert report.sent == Fraction(2 * (size - 1), size)


def test_two_lanes_on_the_same_half_are_a_race() -> None:
    with pytest.raises(PlanError, match=r"rank 0, lane 0, group \d, step 1: hazard: writes .* while rank 0, lane 1"):
        verify_plans(two_rings(3, (0, 0)))


def test_lane_may_read_results_of_another_lane_only_after_it() -> None:
    lanes = [[[exchange(1 - rank)], [replace(KEEP, after=((0, 0),))]] for rank in range(2)]
    assert verify_plans(pair(*lanes), segments=2).rounds == 1
    racing = [[[exchange(1 - rank)], [KEEP]] for rank in range(2)]
    with pytest.raises(PlanError, match="hazard: writes block 0 of SCRATCH while rank 0, lane 1, group 0, step 0 read"):
        verify_plans(pair(*racing))


def test_lanes_in_opposite_orders_on_two_ranks_wait_in_a_cycle() -> None:
    def lanes(rank: int) -> list[list[Group]]:
        other = 1 - rank
        first = Group((Send(other, input_block()), Recv(other, scratch_block())))
        second = Group((Send(other, input_block()), RecvReduce(other, output_block(), input_block(), lower=True)))
        ordered = [first, replace(second, after=((0, 0),))] if rank else [replace(first, after=((1, 0),)), second]
        return [[group] for group in ordered]

    with pytest.raises(PlanError, match=r"waiting cycle:(.|\n)*rank 0, lane 0, group 0(.|\n)*rank 1, lane 1, group 0"):
        verify_plans(pair(lanes(0), lanes(1)))


def test_dependency_on_a_group_of_the_same_lane_is_refused() -> None:
    groups = [replace(exchange(1), after=((0, 0),)), KEEP]
    with pytest.raises(PlanError, match=r"rank 0, lane 0, group 0, step 0: .*which is not a group of another lane"):
        verify_plans(pair([groups], [[exchange(0), KEEP]]))


# Wrong plans are refused, and the error names the step.


def test_a_dropped_receive_is_named_at_its_sender() -> None:
    plans = changed(flat_plans(RING, 4), 2, lambda plan: with_step(plan, 3, 1))
    with pytest.raises(
        PlanError, match="rank 1, lane 0, group 3, step 0: rank 2 does not receive the message that this step sends"
    ):
        verify_plans(plans)


def test_a_dropped_send_is_named_at_its_receiver() -> None:
    plans = changed(flat_plans(RING, 4), 2, lambda plan: with_step(plan, 3, 0))
    with pytest.raises(
        PlanError, match="rank 3, lane 0, group 3, step 1: rank 2 does not send the message that this step receives"
    ):
        verify_plans(plans)


def test_verifier_names_missing_contribution() -> None:
    plans = flat_plans(find("allreduce", "direct"), 3)
    reduce = step_at(plans, 1, 1, 0)
    assert isinstance(reduce, Reduce)
    short = replace(reduce, sources=reduce.sources[:2])
    message = "rank 1, lane 0, group 1, step 0: block 0 of OUTPUT lacks the contribution of rank 2"
    with pytest.raises(PlanError, match=message):
        verify_plans(changed(plans, 1, lambda plan: with_step(plan, 1, 0, short)))


def test_verifier_names_contribution_combined_twice() -> None:
    plans = flat_plans(find("allreduce", "direct"), 3)
    doubled = Reduce(output_block(), (input_block(), scratch_block(0), scratch_block(0)), lower=True)
    with pytest.raises(PlanError, match="step 0: the contribution of rank 1 to block 0 is combined twice"):
        verify_plans(changed(plans, 0, lambda plan: with_step(plan, 1, 0, doubled)))


def test_swapped_groups_are_refused() -> None:
    def swap(plan: Plan) -> Plan:
        first, second, *rest = groups_of(plan)
        return with_groups(plan, (second, first, *rest))

    plans = changed(flat_plans(find("barrier", "dissemination"), 8), 5, swap)
    with pytest.raises(PlanError, match=r"rank 5, lane 0, group 0, step 0: .* by rank 7, lane 0, group 1, step 1"):
        verify_plans(plans)


def test_both_ends_of_a_message_must_have_the_same_group_number() -> None:
    plans = flat_plans(find("broadcast", "binomial"), 2)
    late = changed(plans, 1, lambda plan: with_groups(plan, (Group(()), *groups_of(plan))))
    with pytest.raises(PlanError, match=r"rank 0, lane 0, group 0, step 0: .*both ends must have the same group"):
        verify_plans(late)


def test_a_wrong_peer_is_refused() -> None:
    plans = flat_plans(find("broadcast", "binomial"), 4)
    with pytest.raises(
        PlanError, match="rank 1, lane 0, group 1, step 0: rank 0 does not send the message that this step receives"
    ):
        verify_plans(changed(plans, 0, lambda plan: with_step(plan, 1, 0, Send(3, input_block()))))
    with pytest.raises(PlanError, match="group 1, step 0: rank 0 cannot be the peer of rank 0 of 4"):
        verify_plans(changed(plans, 0, lambda plan: with_step(plan, 1, 0, Send(0, input_block()))))


def test_a_wrong_block_is_refused() -> None:
    plans = flat_plans(RING, 3)
    with pytest.raises(PlanError, match="rank 2, lane 0, group 0, step 1: combines block 1 with block 2"):
        verify_plans(changed(plans, 1, lambda plan: with_step(plan, 0, 0, Send(2, input_block(2)))))


def test_a_missing_lowering_is_refused() -> None:
    plans = flat_plans(find("allreduce", "direct"), 2)
    reduce = step_at(plans, 1, 1, 0)
    assert isinstance(reduce, Reduce)
    with pytest.raises(PlanError, match=r"rank 1, lane 0, group 1, step 0: .* is complete, but not lowered: add"):
        verify_plans(changed(plans, 1, lambda plan: with_step(plan, 1, 0, replace(reduce, lower=False))))


def test_lowering_twice_is_refused() -> None:
    lowered_again = Group((Copy(output_block(), scratch_block(), lower=True),))
    with pytest.raises(PlanError, match="rank 1, lane 0, group 1, step 0: lowers block 0 a second time"):
        verify_plans(pair([[exchange(1), KEEP]], [[exchange(0), lowered_again]]))


def test_combining_a_lowered_value_is_refused() -> None:
    plans = flat_plans(RING, 3)
    early = step_at(plans, 1, 0, 1)
    assert isinstance(early, RecvReduce)
    with pytest.raises(PlanError, match="combines a value of block 0 that is lowered already"):
        verify_plans(changed(plans, 1, lambda plan: with_step(plan, 0, 1, replace(early, lower=True))))


def test_writing_a_block_while_it_is_sent_is_a_hazard() -> None:
    def lane(peer: int) -> list[list[Group]]:
        seed = Group((Copy(output_block(), input_block()),))
        return [
            [seed, Group((Send(peer, output_block()), RecvReduce(peer, output_block(), input_block(), lower=True)))]
        ]

    message = "rank 0, lane 0, group 1, step 0: hazard: reads block 0 of OUTPUT while rank 0, lane 0, group 1, step 1"
    with pytest.raises(PlanError, match=message):
        verify_plans(pair(lane(1), lane(0)))


def test_in_place_hazard_is_reported_for_in_place_calls_only() -> None:
    def lane(peer: int) -> list[list[Group]]:
        return [[Group((Send(peer, input_block()), RecvReduce(peer, output_block(), input_block(), lower=True)))]]

    plans = pair(lane(1), lane(0))
    assert verify_plans(plans, in_place=False).same_bits
    with pytest.raises(PlanError, match="hazard: reads block 0 of INPUT while"):
        verify_plans(plans)


def test_reading_input_overwritten_in_place_is_refused() -> None:
    def lane(peer: int) -> list[list[Group]]:
        keep = Group((Reduce(output_block(), (input_block(), scratch_block()), lower=True),))
        clobber = Group((Send(peer, input_block()), Recv(peer, scratch_block())))
        return [[clobber, Group((Copy(output_block(), scratch_block()),)), keep]]

    plans = pair(lane(1), lane(0))
    assert verify_plans(plans, in_place=False).same_bits
    with pytest.raises(
        PlanError, match="step 0: reads block 0 of INPUT, which in place has been overwritten as block 0 of OUTPUT"
    ):
        verify_plans(plans)


def test_step_that_overwrites_its_unread_source_is_a_hazard() -> None:
    shift = Group((Copy(scratch_block(0, count=2), scratch_block(1, count=2)),))
    plans = pair([[shift]], [[shift]], blocks=3)
    with pytest.raises(PlanError, match="step 0: hazard: writes block 1 of SCRATCH before it has read it"):
        verify_plans(plans)


def test_buffers_have_blocks_of_the_collective_equal_on_all_ranks() -> None:
    alone = Plan("allreduce", "test", 1, 0, 0, even(2), even(1), lanes=((),))
    with pytest.raises(PlanError, match="rank 0: allreduce with an OUTPUT of 1 block, expected 2 blocks"):
        verify_plans([alone])
    plans = [RING.build(3, rank) for rank in range(3)]
    with pytest.raises(PlanError, match="rank 0: allreduce with an INPUT of 3 blocks, expected 4 blocks"):
        verify_plans(changed(plans, 2, lambda plan: replace(plan, input=even(4), output=even(4))))


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_ranks_that_both_send_before_they_receive_wait_in_a_cycle(segments: int) -> None:
    def lane(peer: int) -> list[list[Group]]:
        receive = RecvReduce(peer, scratch_block(), input_block(), lower=True)
        return [[Group((Send(peer, input_block()),)), Group((receive,)), KEEP]]

    cycle = (
        "waiting cycle:\n"
        "  ┌→ rank 0, lane 0, group 0, segment 0 waits for\n"
        "  │  rank 1, lane 0, group 1, segment 0 waits for\n"
        "  │  rank 1, lane 0, group 0, segment 0 waits for\n"
        "  └─ rank 0, lane 0, group 1, segment 0 waits for"
    )
    with pytest.raises(PlanError) as caught:
        verify_plans(pair(lane(1), lane(0)), segments)
    assert str(caught.value) == cycle


def test_reading_unwritten_scratch_is_refused() -> None:
    with pytest.raises(
        PlanError, match="rank 0, lane 0, group 0, step 0: reads block 0 of SCRATCH, to which nothing has been"
    ):
        verify_plans(pair([[KEEP, exchange(1)]], [[Group(()), exchange(0), KEEP]]))


def test_verifier_names_rank_with_unwritten_output() -> None:
    with pytest.raises(PlanError, match="rank 1: block 0 of OUTPUT is never written"):
        verify_plans(pair([[exchange(1), KEEP]], [[exchange(0)]]))


def test_writing_input_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0, lane 0, group 0, step 0: writes INPUT"):
        verify_plans(pair([[Group((Copy(input_block(), scratch_block()),))]], [[]]))


def test_two_messages_to_one_peer_in_a_group_are_refused() -> None:
    twice = Group((Send(1, input_block()), Send(1, input_block())))
    with pytest.raises(PlanError, match="the group sends to rank 1 twice; a group may do so only once"):
        verify_plans(pair([[twice]], [[]]))


def test_span_with_missing_or_repeated_blocks_is_refused() -> None:
    for span in (input_block(count=3), input_block(count=0), input_block(count=2, stride=2)):
        with pytest.raises(PlanError, match="does not name different blocks of the 2 of INPUT"):
            verify_plans(pair([[Group((Send(1, span),))]], [[]], blocks=2))


def test_operands_of_different_numbers_of_blocks_are_refused() -> None:
    uneven = Group((Copy(output_block(count=2), input_block()),))
    with pytest.raises(
        PlanError, match="rank 0, lane 0, group 0, step 0: operands have different numbers of blocks: 1 and 2"
    ):
        verify_plans(pair([[uneven]], [[]], blocks=2))


def test_reduce_without_sources_is_refused() -> None:
    with pytest.raises(PlanError, match="rank 0, lane 0, group 0, step 0: has no sources"):
        verify_plans(pair([[Group((Reduce(output_block(), ()),))]], [[]]))


def test_copy_between_blocks_of_different_lengths_is_refused() -> None:
    misplaced = Group((Copy(output_block(1), input_block(0)),))
    message = "rank 0, lane 0, group 0, step 0: writes block 0 of INPUT of rank 0 to block 1 of OUTPUT of rank 0"
    with pytest.raises(PlanError, match=message):
        verify_plans(pair([[misplaced]], [[]], blocks=2))


def test_plan_has_output_exactly_if_its_collective_has_one() -> None:
    nothing = Plan("allreduce", "test", 1, 0, 0, even(1), Partition(0))
    with pytest.raises(PlanError, match="rank 0: allreduce with an OUTPUT of 0 blocks"):
        verify_plans([nothing])
    with pytest.raises(PlanError, match="rank 0: barrier with an OUTPUT of 1 block, expected 0"):
        verify_plans([replace(nothing, collective="barrier", output=even(1))])


def test_receive_must_have_as_many_blocks_as_its_send() -> None:
    short = Group((Recv(0, scratch_block()),))
    with pytest.raises(PlanError, match="rank 1, lane 0, group 0, step 0: receives 1 blocks of the 2 that are sent"):
        verify_plans(pair([[Group((Send(1, input_block(count=2)),))]], [[short]], blocks=2))


def test_scratch_must_be_cut_like_another_buffer() -> None:
    plan = Plan("allreduce", "test", 1, 0, 0, even(1), even(1), even(1))
    with pytest.raises(PlanError, match="rank 0: SCRATCH has no counts of its own"):
        verify_plans([plan])


def test_a_barrier_that_ends_a_round_too_early_is_refused() -> None:
    plans = [with_groups(plan, groups_of(plan)[:-1]) for plan in flat_plans(find("barrier", "dissemination"), 5)]
    with pytest.raises(PlanError, match="rank 0: ends before it has heard from rank 1"):
        verify_plans(plans)


def test_a_broadcast_of_another_rank_than_the_root_is_refused() -> None:
    plans = [replace(plan, root=1) for plan in flat_plans(find("broadcast", "binomial"), 2)]
    with pytest.raises(PlanError, match="rank 0: broadcast with an INPUT of 1 block, expected 0 blocks"):
        verify_plans(plans)


def test_lowering_in_a_broadcast_is_refused() -> None:
    plans = changed(
        flat_plans(find("broadcast", "binomial"), 2),
        0,
        lambda plan: with_step(plan, 1, 0, Copy(output_block(), input_block(), lower=True)),
    )
    with pytest.raises(PlanError, match="rank 0, lane 0, group 1, step 0: block 0 of OUTPUT is lowered, but this"):
        verify_plans(plans, in_place=False)


def test_noncommutative_plan_must_combine_in_rank_order() -> None:
    plans = flat_plans(find("allreduce", "recursive_doubling"), 4)
    step = step_at(plans, 1, 0, 1)
    assert isinstance(step, RecvReduce)
    turned = changed(plans, 1, lambda plan: with_step(plan, 0, 1, replace(step, received_first=False)))
    assert verify_plans(turned).same_bits
    with pytest.raises(PlanError, match="rank 1, lane 0, group 0, step 1: rank 0 follows rank 1 in the combination"):
        verify_plans(turned, commutative=False)


def test_the_ring_needs_a_commutative_operation() -> None:
    with pytest.raises(PlanError, match="contributions must be combined in the order of ranks"):
        verify_algorithm(replace(RING, commutative_only=False), 3)


@pytest.mark.parametrize(
    ("cost", "term"),
    [
        (Cost(5, 1.5, 0.75), "rounds"),
        (Cost(6, 1.25, 0.75), "sent"),
        (Cost(6, 1.5, 1.0), "reduced"),
        (Cost(6, 1.5, 0.75, 12), "most_messages"),
        (Cost(6, 1.5, 0.75, stored=0.5), "stored"),
    ],
)
def test_declared_cost_that_differs_from_the_plan_is_refused(cost: Cost, term: str) -> None:
    with pytest.raises(PlanError, match=f"allreduce ring on 4 ranks: {term} is .*, declared"):
        verify_algorithm(replace(RING, cost=lambda size: cost), 4)


def test_verifier_checks_declared_same_bits_and_name() -> None:
    def uneven(size: int, rank: int, root: int = 0) -> Plan:
        plan = flat(find("allreduce", "direct").build(size, rank, root))
        reduce = groups_of(plan)[1].steps[0]
        assert isinstance(reduce, Reduce)
        return with_step(plan, 1, 0, replace(reduce, sources=reduce.sources[::-1])) if rank == 1 else plan

    algorithm = replace(find("allreduce", "direct"), build=uneven, commutative_only=True)
    assert not verify_algorithm(replace(algorithm, same_bits=False), 3).same_bits
    with pytest.raises(PlanError, match="allreduce direct on 3 ranks: the ranks do not all get the same bits"):
        verify_algorithm(algorithm, 3)
    with pytest.raises(
        PlanError, match=r"registered as \('allreduce', 'star'\), .* returns Plan\('allreduce', 'ring', …\)"
    ):
        verify_algorithm(replace(RING, name="star"), 3)


def test_verifier_refuses_unsupported_size_with_the_declared_reason() -> None:
    picky = replace(RING, supports=lambda size: "the number of ranks is odd" if size % 2 else None)
    assert verify_algorithm(picky, 4).same_bits
    with pytest.raises(NoAlgorithmError, match="allreduce 'ring' cannot run on 3 ranks: the number of ranks is odd"):
        verify_algorithm(picky, 3)


def test_inconsistent_set_of_plans_is_refused() -> None:
    plans = [RING.build(3, rank) for rank in range(3)]
    with pytest.raises(PlanError, match=r"rank 1: .* is \('allreduce', 'ring', 3, 0, 2\), expected"):
        verify_plans([plans[0], plans[2], plans[1]])
    with pytest.raises(PlanError, match="does not know the collective 'shuffle'"):
        verify_plans([replace(plan, collective="shuffle") for plan in plans])
    with pytest.raises(PlanError, match="the root 3 is out of range: there are 3 ranks"):
        verify_plans([replace(plan, root=3) for plan in plans])
    with pytest.raises(PlanError, match="there are no plans"):
        verify_plans([])
