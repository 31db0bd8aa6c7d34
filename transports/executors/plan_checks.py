"""Checks of a plan against the executor that is to run it, before anything is sent."""

from __future__ import annotations

from unisono.algorithms.ir.plan import (
    Copy,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Signal,
    Wait,
    Write,
)
from unisono.algorithms.ir.walk import reads, walk
from unisono.errors import PlanError

# The steps of executors that pass messages; that can also read the memory of peers; and that can also write it.
MESSAGES: tuple[type, ...] = (Send, Recv, RecvReduce, Copy, Reduce)
READS = (*MESSAGES, Read, ReadReduce, Signal, Wait)
WRITES = (*READS, Write)


def check_plan(plan: Plan, rank: int, size: int, transport: str, supported: tuple[type, ...]) -> None:
    """Raise `PlanError` unless `plan` is for `rank` of `size` and all its steps are `supported` by `transport`."""
    if (plan.rank, plan.size) != (rank, size):
        raise PlanError(f"the plan is for rank {plan.rank} of {plan.size}; this is rank {rank} of {size}", rank=rank)
    steps = (step for written in walk(plan) for step in written.group.steps)
    unsupported = next((step for step in steps if not isinstance(step, supported)), None)
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
            read = {owner for step in group.steps for owner, _ in reads(step, plan.rank)}
            if not read <= ready:
                raise PlanError(
                    f"{plan.collective} by {plan.algorithm} reads memory of rank {min(read - ready)} in lane {lane} "
                    f"before it has waited for a flag of that rank there, which this executor needs",
                    rank=plan.rank,
                )
            ready |= {step.peer for step in group.steps if isinstance(step, Wait)}
