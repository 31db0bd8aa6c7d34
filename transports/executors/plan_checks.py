"""Checks of a plan against the executor that is to run it, before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.ir.plan import (
    Copy,
    Group,
    Lane,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Signal,
    Step,
    Wait,
    Write,
)
from unisono.errors import PlanError

# The steps of executors that pass messages; that can also read the memory of peers; and that can also write it.
MESSAGES: tuple[type, ...] = (Send, Recv, RecvReduce, Copy, Reduce)
READS = (*MESSAGES, Read, ReadReduce, Signal, Wait)
WRITES = (*READS, Write)


def check_plan(plan: Plan, rank: int, size: int, transport: str, supported: tuple[type, ...]) -> None:
    """Raise `PlanError` unless `plan` is for `rank` of `size` and all its steps are `supported` by `transport`."""
    if (plan.rank, plan.size) != (rank, size):
        raise PlanError(f"the plan is for rank {plan.rank} of {plan.size}; this is rank {rank} of {size}", rank=rank)
    unsupported = next((step for lane in plan.lanes for step in _steps(lane) if not isinstance(step, supported)), None)
    if unsupported is not None:
        raise PlanError(
            f"{plan.collective} by {plan.algorithm} needs mapped memory, which transport {transport!r} does not offer "
            f"(for its step {type(unsupported).__name__})",
            rank=rank,
        )


def check_reads(plan: Plan) -> None:
    """Raise `PlanError` if a lane reads the memory of a peer before it has waited for a flag of that peer."""
    for lane in range(len(plan.lanes)):
        ready = {plan.rank}
        for group in plan.groups(lane):
            read = {peer for step in group.steps for peer in _read_by(step)}
            if not read <= ready:
                raise PlanError(
                    f"{plan.collective} by {plan.algorithm} reads memory of rank {min(read - ready)} in lane {lane} "
                    f"before it has waited for a flag of that rank there, which this executor needs",
                    rank=plan.rank,
                )
            ready |= {step.peer for step in group.steps if isinstance(step, Wait)}


def _read_by(step: Step) -> list[int]:
    if isinstance(step, Read):
        return [step.peer]
    return [peer for peer, _ in step.sources] if isinstance(step, ReadReduce) else []


def _steps(lane: Lane) -> Iterator[Step]:
    for item in lane:
        for group in (item,) if isinstance(item, Group) else item.groups:
            yield from group.steps
