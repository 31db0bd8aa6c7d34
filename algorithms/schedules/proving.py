"""Schedules of other programs as algorithms: their format, their proof and their registration."""

from __future__ import annotations

import re
from dataclasses import replace as with_fields

from unisono.algorithms.catalogue import registration
from unisono.algorithms.catalogue.algorithm import Cost
from unisono.algorithms.catalogue.flat import REGISTERED
from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.algorithms.composition.rank_order import build_in_order
from unisono.algorithms.ir.plan import Plan
from unisono.algorithms.schedules.lowering import plans_of
from unisono.algorithms.schedules.moves import Schedule
from unisono.algorithms.verifier.verify import Report, verify_plans
from unisono.errors import PlanError, UsageError
from unisono.foundation.records import record


@record
class Loaded:
    """A schedule that has been proved and registered.

    Attributes:
        collective: the name of its collective.
        name: its name, with which calls name it: ``algorithm=name``.
        size: the number of ranks.
        plans: the plan of each rank.
        report: the cost of the plans, as the verifier has measured it.
        in_place: whether the algorithm takes one array as input and output.
    """

    collective: str
    name: str
    size: int
    plans: tuple[Plan, ...]
    report: Report
    in_place: bool

    @property
    def cost(self) -> Cost:
        """The cost, for the tuner."""
        return _cost(self.report)


def schedule_of(text: bytes) -> Schedule:
    """Return the schedule in the contents of a file of any format.

    Raises:
        UsageError: the text has no known format, or is wrong.
        PlanError: messages have no partner.
    """
    first = text.lstrip()[:1]
    if first == b"<":
        from unisono.algorithms.schedules import msccl

        return msccl.schedule_of(text)
    if first == b"{":
        from unisono.algorithms.schedules import mscclpp

        return mscclpp.schedule_of(text)
    raise UsageError("this is neither the XML of MSCCL nor the JSON of MSCCL++")


def proved(schedule: Schedule, name: str | None = None) -> Loaded:
    """Return the plans of a schedule and their proof; raises as `un.algorithm.load`."""
    plans = plans_of(_named(schedule, name))
    report, in_place = _proof(plans)
    return Loaded(schedule.collective, plans[0].algorithm, schedule.size, tuple(plans), report, in_place)


def register(loaded: Loaded, *, reference: str, replace: bool = False) -> None:
    """Register a proved schedule; raises as `un.algorithm`."""

    def plan_of(size: int, rank: int, root: int = 0) -> Plan:
        return loaded.plans[rank]

    def build(size: int, rank: int, root: int = 0) -> Plan:
        if not root:
            return loaded.plans[rank]
        return build_in_order(plan_of, size, rank, root, order=[(at + root) % size for at in range(size)])

    registration.algorithm(
        loaded.collective,
        loaded.name,
        cost=lambda size: loaded.cost,
        reference=reference,
        sizes=[loaded.size],
        same_bits=loaded.report.same_bits,
        in_place=loaded.in_place,
        replace=replace,
    )(build)


def _named(schedule: Schedule, name: str | None) -> Schedule:
    """Return the schedule with `name`, or with a name like its own that an algorithm may have."""
    simple = re.sub(r"[^a-z0-9]+", "_", (name or schedule.name).lower()).strip("_")
    is_taken = simple in algorithms_of(schedule.collective) and simple not in REGISTERED.get(schedule.collective, {})
    if is_taken or not simple[:1].isalpha():
        simple = f"imported_{simple}".strip("_")
    return with_fields(schedule, name=name or simple)


def _proof(plans: list[Plan]) -> tuple[Report, bool]:
    """Return the proof of plans, and whether they stay right if INPUT and OUTPUT are the same memory."""
    try:
        return verify_plans(plans), True
    except PlanError:
        return verify_plans(plans, in_place=False), False


def _cost(report: Report) -> Cost:
    return Cost(report.rounds, float(report.sent), float(report.reduced), report.most_messages, float(report.stored))
