"""Mutation test of the verifier: it refuses plans with one mistake, unless they are right on every tested schedule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings, strategies as st
from support.builder_calls import ROOTED, assert_right, call_on_integers
from support.plan_edits import changed, flat_plans, groups_of, with_groups, with_step
from support.ranks import LocalRanks

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.plan import Copy, Group, MessageStep, Plan, Read, Recv, RecvReduce, Reduce, Send, Step, Wait
from unisono.algorithms.verifier.verify import verify_plans
from unisono.errors import PlanError
from unisono.transports.message.faulty import Faults

ALL = [algorithm for by_name in ALGORITHMS.values() for algorithm in by_name.values()]
SCHEDULES = 20


@dataclass(frozen=True)
class Site:
    """The place of a mistake in a plan."""

    plan: Plan
    lane: int
    group: int
    step: int

    @property
    def groups(self) -> list[Group]:
        return groups_of(self.plan, self.lane)

    @property
    def changing(self) -> Any:
        return self.groups[self.group].steps[self.step]

    def with_step(self, *steps: Step) -> Plan:
        return with_step(self.plan, self.group, self.step, *steps, lane=self.lane)

    def with_groups(self, groups: Sequence[Group]) -> Plan:
        return with_groups(self.plan, groups, self.lane)


# Each function makes one mistake at a site. It returns the plan, or None if the mistake is impossible there.


def drop_step(site: Site) -> Plan | None:
    return site.with_step()


def drop_wait(site: Site) -> Plan | None:
    """Drop a `Wait`, or the first dependency of a group on another lane."""
    if isinstance(site.changing, Wait):
        return site.with_step()
    groups = site.groups
    groups[site.group] = replace(groups[site.group], after=groups[site.group].after[1:])
    return site.with_groups(groups)


def change_peer(site: Site) -> Plan | None:
    if site.plan.size == 2 or not isinstance(site.changing, MessageStep):
        return None
    others = (rank for rank in range(site.plan.size) if rank not in (site.plan.rank, site.changing.peer))
    return site.with_step(replace(site.changing, peer=next(others)))


def shift_block(site: Site) -> Plan | None:
    """Read from the next block, or receive into it."""
    name = "dst" if isinstance(site.changing, Recv) else "src"
    if not isinstance(site.changing, (Send, Recv, RecvReduce, Copy, Read)):
        return None
    span = getattr(site.changing, name)
    blocks = site.plan.partition(span.buffer).blocks
    moved = replace(span, start=span.start + 1)
    return site.with_step(replace(site.changing, **{name: moved})) if blocks > 1 else None


def shift_target(site: Site) -> Plan | None:
    """Write to the next block, or combine into it."""
    if not isinstance(site.changing, (RecvReduce, Copy, Reduce)):
        return None
    span = site.changing.dst
    blocks = site.plan.partition(span.buffer).blocks
    moved = replace(span, start=span.start + 1)
    return site.with_step(replace(site.changing, dst=moved)) if blocks > 1 else None


def copy_for_combination(site: Site) -> Plan | None:
    match site.changing:
        case RecvReduce(peer, dst):
            return site.with_step(Recv(peer, dst))
        case Reduce(dst, sources, lower):
            return site.with_step(Copy(dst, sources[0], lower))
    return None


def combine_again(site: Site) -> Plan | None:
    match site.changing:
        case RecvReduce(_, dst, src):
            again = Reduce(dst, (dst, src))
        case Reduce(dst, sources):
            again = Reduce(dst, (dst, sources[-1]))
        case _:
            return None
    return site.with_groups([*site.groups[: site.group + 1], Group((again,)), *site.groups[site.group + 1 :]])


def change_order(site: Site) -> Plan | None:
    if not isinstance(site.changing, RecvReduce):
        return None
    return site.with_step(replace(site.changing, received_first=not site.changing.received_first))


def toggle_lowering(site: Site) -> Plan | None:
    if not isinstance(site.changing, (RecvReduce, Reduce, Copy)):
        return None
    return site.with_step(replace(site.changing, lower=not site.changing.lower))


def swap_groups(site: Site) -> Plan | None:
    groups = site.groups
    if site.group + 1 == len(groups):
        return None
    groups[site.group], groups[site.group + 1] = groups[site.group + 1], groups[site.group]
    return site.with_groups(groups)


def merge_groups(site: Site) -> Plan | None:
    """Merge a group with the next one, and put an empty group after it."""
    groups = site.groups
    if site.group + 1 == len(groups):
        return None
    both = Group(groups[site.group].steps + groups[site.group + 1].steps, groups[site.group].after)
    return site.with_groups([*groups[: site.group], both, Group(()), *groups[site.group + 2 :]])


def repeat_group(site: Site) -> Plan | None:
    return site.with_groups([*site.groups[: site.group + 1], *site.groups[site.group :]])


MISTAKES = (
    drop_step,
    drop_wait,
    change_peer,
    shift_block,
    shift_target,
    copy_for_combination,
    combine_again,
    change_order,
    toggle_lowering,
    swap_groups,
    merge_groups,
    repeat_group,
)


def mutants_of(plans: Sequence[Plan], mistake: Callable[[Site], Plan | None], choice: Random) -> list[Plan]:
    """Return the plans with the mistake in one of them, at a random site."""
    sites = [
        Site(plan, lane, group, step)
        for plan in plans
        for lane in range(len(plan.lanes))
        for group, of_group in enumerate(groups_of(plan, lane))
        for step in range(len(of_group.steps))
    ]
    choice.shuffle(sites)
    for site in sites:
        mutant = mistake(site)
        if mutant is not None and mutant != site.plan:
            return changed(plans, site.plan.rank, lambda plan, mutant=mutant: mutant)
    assume(False)
    raise AssertionError("not reached")


@dataclass(frozen=True)
class MutatedCall:
    """An algorithm, and the form of its call."""

    algorithm: Algorithm
    size: int
    root: int
    segments: int
    varying: bool

    def plans(self) -> list[Plan]:
        return flat_plans(self.algorithm, self.size, self.root, **({"varying": True} if self.varying else {}))

    def verify(self, plans: Sequence[Plan]) -> None:
        verify_plans(
            plans, self.segments, in_place=self.algorithm.in_place, commutative=self.algorithm.commutative_only
        )

    def run(self, plans: Sequence[Plan]) -> None:
        """Check the results of `plans` on many schedules.

        On some, a plan is wrong unless it waits for every message.
        """
        for seed in range(SCHEDULES):
            in_place = self.algorithm.in_place and seed % 2 == 1
            elements = (23, 2)[seed // 2 % 2]
            form: dict[str, Any] = {"varying": self.varying, "in_place": in_place, "op": "avg"}
            call = call_on_integers(self.algorithm, self.size, self.root, self.segments, elements, **form)
            ranks = LocalRanks(self.size, seed // 4 % 2 << 20, Faults(seed, delay=0.5))
            assert_right(ranks.run(lambda executor, call=call: call.run_plan(executor, plans[executor.rank])))


@st.composite
def settings_of_calls(draw: st.DrawFn) -> MutatedCall:
    algorithm = draw(st.sampled_from(ALL))
    size = draw(st.sampled_from([size for size in range(2, 10) if algorithm.supports(size) is None]))
    root = draw(st.integers(0, size - 1)) if algorithm.collective in ROOTED else 0
    return MutatedCall(algorithm, size, root, draw(st.integers(1, 3)), algorithm.varying and draw(st.booleans()))


mistakes, choices = st.sampled_from(MISTAKES), st.randoms(use_true_random=False)


@pytest.mark.parametrize(
    "examples", [50, pytest.param(400, marks=pytest.mark.night), pytest.param(4000, marks=pytest.mark.slow)]
)
def test_accepted_mutants_compute_right_results_on_every_schedule(
    capsys: pytest.CaptureFixture[str], examples: int
) -> None:
    tally: Counter[str] = Counter()

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(setting=settings_of_calls(), mistake=mistakes, choice=choices)
    def try_one(setting: MutatedCall, mistake: Callable[[Site], Plan | None], choice: Random) -> None:
        mutants = mutants_of(setting.plans(), mistake, choice)
        tally["tried"] += 1
        try:
            setting.verify(mutants)
        except PlanError:
            tally["refused"] += 1
            return
        setting.run(mutants)
        tally["accepted and equivalent"] += 1
        tally[f"of them by {mistake.__name__}"] += 1

    try_one()
    with capsys.disabled():
        print("\nmutants:", ", ".join(f"{what} {count}" for what, count in tally.items()))
    assert tally["refused"] + tally["accepted and equivalent"] == tally["tried"] >= examples
    assert tally["refused"] > 0.8 * tally["tried"]
