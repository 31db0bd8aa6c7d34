"""Functions that change single steps of plans."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.ir.plan import Group, Plan, Signal, Step, Wait


def flat(plan: Plan) -> Plan:
    """Return the plan with its repeats unrolled, so that single steps can be changed."""
    return replace(plan, lanes=tuple(tuple(plan.groups(lane)) for lane in range(len(plan.lanes))))


def flat_plans(algorithm: Algorithm, size: int, root: int = 0, **params: bool) -> list[Plan]:
    return [flat(algorithm.build(size, rank, root, **params)) for rank in range(size)]


def groups_of(plan: Plan, lane: int = 0) -> list[Group]:
    return list(plan.groups(lane))


def with_groups(plan: Plan, groups: Sequence[Group], lane: int = 0) -> Plan:
    """Return the plan with the groups of one lane replaced."""
    return replace(plan, lanes=(*plan.lanes[:lane], tuple(groups), *plan.lanes[lane + 1 :]))


def with_step(plan: Plan, group: int, step: int, *changed: Step, lane: int = 0) -> Plan:
    """Return the plan with one step of a lane replaced by the steps `changed`, which may be none."""
    groups = groups_of(plan, lane)
    steps = groups[group].steps
    groups[group] = replace(groups[group], steps=(*steps[:step], *changed, *steps[step + 1 :]))
    return with_groups(plan, groups, lane)


def without_flag(plan: Plan, group: int, kind: type[Signal | Wait], peer: int) -> Plan:
    """Return the plan without the `Signal` or `Wait` of a peer in a group of lane 0."""
    steps = enumerate(groups_of(plan)[group].steps)
    return with_step(plan, group, next(at for at, step in steps if isinstance(step, kind) and step.peer == peer))


def changed(plans: Sequence[Plan], rank: int, change: Callable[[Plan], Plan]) -> list[Plan]:
    return [change(plan) if plan.rank == rank else plan for plan in plans]


def step_at(plans: Sequence[Plan], rank: int, group: int, step: int) -> Step:
    return groups_of(plans[rank])[group].steps[step]
