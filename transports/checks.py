"""What executors refuse before anything is sent."""

from __future__ import annotations

from unisono.algorithms.plan import Copy, Group, Lane, Plan, Recv, RecvReduce, Reduce, Send
from unisono.errors import PlanError

_MESSAGE_OR_LOCAL = (Send, Recv, RecvReduce, Copy, Reduce)


def check_plan(plan: Plan, rank: int, size: int, transport: str, *, mapped: bool = False) -> None:
    """Raise `PlanError` unless `plan` is for `rank` of `size` and needs no mapped memory, unless `transport` has it."""
    if (plan.rank, plan.size) != (rank, size):
        raise PlanError(f"the plan is for rank {plan.rank} of {plan.size}; this is rank {rank} of {size}", rank=rank)
    if mapped:
        return
    groups = (group for lane in plan.lanes for group in _groups(lane))
    if not all(isinstance(step, _MESSAGE_OR_LOCAL) for group in groups for step in group.steps):
        raise PlanError(
            f"{plan.collective} by {plan.algorithm} needs mapped memory, which transport {transport!r} does not offer",
            rank=rank,
        )


def _groups(lane: Lane) -> list[Group]:
    return [group for item in lane for group in ((item,) if isinstance(item, Group) else item.groups)]
