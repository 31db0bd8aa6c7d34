from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings, strategies as st
from plan_edits import changed, flat_plans, groups_of, with_groups, with_step

from unisono.algorithms.algorithm import Algorithm
from unisono.algorithms.plan import Copy, Group, MessageStep, Plan, Recv, RecvReduce, Reduce, Send
from unisono.algorithms.registry import ALGORITHMS
from unisono.algorithms.verify import verify_plans
from unisono.errors import PlanError

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]


def drop(plan: Plan, group: int, step: int) -> Plan:
    return with_step(plan, group, step)


def redirect(plan: Plan, group: int, step: int) -> Plan:
    changing = groups_of(plan)[group].steps[step]
    assume(plan.size > 2 and isinstance(changing, MessageStep))
    assert isinstance(changing, MessageStep)
    other = next(rank for rank in range(plan.size) if rank not in (plan.rank, changing.peer))
    return with_step(plan, group, step, replace(changing, peer=other))


def move_block(plan: Plan, group: int, step: int) -> Plan:
    changing = groups_of(plan)[group].steps[step]
    assume(not isinstance(changing, Reduce))
    assert isinstance(changing, (Send, Recv, RecvReduce, Copy))
    span = changing.dst if isinstance(changing, Recv) else changing.src
    assume(plan.partition(span.buffer).blocks > 1)
    moved = replace(span, start=span.start + 1)
    renamed = replace(changing, dst=moved) if isinstance(changing, Recv) else replace(changing, src=moved)
    return with_step(plan, group, step, renamed)


def toggle_lowering(plan: Plan, group: int, step: int) -> Plan:
    changing = groups_of(plan)[group].steps[step]
    assume(isinstance(changing, (RecvReduce, Reduce, Copy)))
    assert isinstance(changing, (RecvReduce, Reduce, Copy))
    return with_step(plan, group, step, replace(changing, lower=not changing.lower))


def reduce_again(plan: Plan, group: int, step: int) -> Plan:
    changing = groups_of(plan)[group].steps[step]
    assume(isinstance(changing, RecvReduce))
    assert isinstance(changing, RecvReduce)
    again = Group((Reduce(changing.dst, (changing.dst, changing.src)),))
    groups = groups_of(plan)
    return with_groups(plan, [*groups[: group + 1], again, *groups[group + 1 :]])


def swap_with_next(plan: Plan, group: int, step: int) -> Plan:
    groups = groups_of(plan)
    assume(group + 1 < len(groups))
    groups[group], groups[group + 1] = groups[group + 1], groups[group]
    return with_groups(plan, groups)


def repeat_group(plan: Plan, group: int, step: int) -> Plan:
    groups = groups_of(plan)
    assume(any(isinstance(repeated, MessageStep) for repeated in groups[group].steps))
    return with_groups(plan, [*groups[: group + 1], *groups[group:]])


MUTATIONS = (drop, redirect, move_block, toggle_lowering, reduce_again, swap_with_next, repeat_group)


@settings(max_examples=300, deadline=None)
@given(
    algorithm=st.sampled_from(ALL),
    mutation=st.sampled_from(MUTATIONS),
    size=st.integers(2, 9),
    segments=st.integers(1, 3),
    choice=st.randoms(use_true_random=False),
)
def test_every_mutant_is_refused(
    algorithm: Algorithm,
    mutation: Callable[[Plan, int, int], Plan],
    size: int,
    segments: int,
    choice: Random,
) -> None:
    assume(algorithm.supports(size) is None)
    plans = flat_plans(algorithm, size)
    places = [
        (plan.rank, number, index)
        for plan in plans
        for number, group in enumerate(groups_of(plan))
        for index in range(len(group.steps))
    ]
    rank, group, step = choice.choice(places)
    mutants = changed(plans, rank, lambda plan: mutation(plan, group, step))
    with pytest.raises(PlanError):
        verify_plans(mutants, segments)
