"""The verifier: proves, before anything runs, that the plans of all ranks carry out their collective.

The proof has these parts, in this order, each in its own module:

- the buffers are cut as the collective demands, and alike on all ranks (`verifier.block_meaning`);
- every step is valid on its own (`verifier.unrolled`);
- the plans end without a deadlock if each send ends only after its receive has been posted (a synchronous send).
  Buffers only make sends end earlier, so the plans also end with any amount of buffering (`verifier.progress`);
- no two steps of a rank that may run at the same time conflict (`verifier.hazards`), and no two steps of different
  ranks conflict on mapped memory (`verifier.mapped_hazards`);
- every element of the result has every contribution exactly once, and is *lowered* (turned from the state of the
  operation into the result, see `unisono/operations.py`) exactly once (`verifier.symbolic`);
- in a barrier, no rank ends before all ranks have entered it (`verifier.vector_clocks`);
- the cost is the declared one, and is not below what is possible (`verifier.lower_bounds`).

Hazards and results are proved for separate INPUT and OUTPUT and, if `in_place` is declared, also for INPUT and OUTPUT
as the same memory. The proof holds for blocks of any length. Use `verify_sizes` for an algorithm, `verify` for a
builder alone, and `verify_plans` for any plans.

Open questions
--------------
Not needed: a search through all orders of events. Messages between two ranks are matched first in, first out, and no
step waits for "any" peer. So the order of independent events changes nothing, and one maximal run decides.

Doubted: a proof is for one size. The catalogue is proved for every size to 32, and nobody has shown that a builder that
passes there is right at 1,000. Two lanes that are ordered by messages to and fro, rather than by `after`, are reported
as a hazard although they are safe. The verifier proves plans, and not that an executor follows them.

This would change our mind: an algorithm whose faults begin above 32 ranks, or one that needs an order by messages. The
first asks for a proof by induction over the builder, the second for happens-before on messages as on flags.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from math import isclose
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm, Build
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Write,
)
from unisono.algorithms.ir.walk import walk
from unisono.algorithms.verifier.block_meaning import PlanSet, are_proved_by
from unisono.algorithms.verifier.hazards import check_hazards
from unisono.algorithms.verifier.liveness import scratch_high_water
from unisono.algorithms.verifier.lower_bounds import BOUNDS, least_rounds
from unisono.algorithms.verifier.mapped_hazards import check_mapped_hazards
from unisono.algorithms.verifier.progress import Event, run
from unisono.algorithms.verifier.symbolic import Execution
from unisono.algorithms.verifier.unrolled import RECEIVING, SENDING, UnrolledPlan, is_mapped, unroll
from unisono.algorithms.verifier.vector_clocks import Clocks, count_rounds, queue_depth
from unisono.errors import PlanError

_FEW = 8  # up to this number of ranks, every root is tried, with 1, 2 and 3 segments
_MANY = 32  # up to this number of ranks, the report has the depth of queues


@dataclass(frozen=True, slots=True)
class Report:
    """The quantities that the verifier measured in plans that it has proved.

    A multiple of the vector is exact, as a fraction.

    Attributes:
        messages: number of messages of all ranks together, in one segment.
        rounds: latencies on the longest chain of messages and flags that depend on each other, in one segment.
        sent: elements that the busiest sender sends, as a multiple of the vector; reading or writing a peer's memory
            counts as sending.
        reduced: elements that the busiest rank combines, as a multiple of the vector.
        most_messages: messages of the rank that sends the most messages, in one segment.
        stored: elements that the rank with the most writes to SCRATCH writes there, as a multiple of the vector.
        scratch_blocks: blocks of SCRATCH that the plans declare, on the rank with the most.
        scratch_live: the most blocks of SCRATCH of one rank that hold, at the same time, a value that is read later, if
            the plans run as `verifier.liveness` says.
        same_bits: whether all ranks that must get the same result compute it by the same expression. Swapping the two
            operands of a pairwise combination does not count as a difference.
        ports: the most messages and flags of one rank that are under way at the same time, in either direction, in one
            segment.
        queue: the most messages that a link may have to hold, in one segment; None for more than 32 ranks.
        mapped: whether the plans need mapped memory.
    """

    messages: int
    rounds: int
    sent: Fraction
    reduced: Fraction
    most_messages: int
    stored: Fraction
    scratch_blocks: int
    scratch_live: int
    same_bits: bool
    ports: int
    queue: int | None
    mapped: bool


def verify(build: Build, size: int, root: int = 0, segments: int = 1, **params: Any) -> Report:
    """Prove the plans that `build` returns for `size` ranks, for a commutative operation, in place and not.

    Raises:
        PlanError: as `verify_plans`.
    """
    return verify_plans([build(size, rank, root, **params) for rank in range(size)], segments)


def verify_sizes(algorithm: Algorithm, sizes: Iterable[int], **params: Any) -> dict[int, Report]:
    """Prove `algorithm` for those of `sizes` that it supports, and return a report for each.

    Up to 8 ranks, every root is tried, each with 1, 2 and 3 segments. For more ranks, two roots and one segment are
    tried, because progress with one segment implies progress with any number (`verifier.progress`). If the builder has
    the parameter `varying`, the plans with varying counts are proved first. This also proves the plans for equal shares
    if their steps are the same.

    Raises:
        PlanError: as `verify_algorithm`.
    """
    reports: dict[int, Report] = {}
    for size in sizes:
        if algorithm.supports(size) is None:
            with _paused_collector():
                reports_of_size = _prove_size(algorithm, size, params)
            _check_cost(algorithm, size, params, reports_of_size, exactly=algorithm.is_cost_exact)
            reports[size] = reports_of_size[0]
    return reports


def _prove_size(algorithm: Algorithm, size: int, params: Mapping[str, Any]) -> list[Report]:
    return [
        report
        for root in _roots(algorithm, size)
        for segments in ((1, 2, 3) if size <= _FEW else (1,))
        for report in _prove_forms(algorithm, size, root, segments, params)
    ]


def _prove_forms(
    algorithm: Algorithm, size: int, root: int, segments: int, params: Mapping[str, Any]
) -> Iterator[Report]:
    """Yield a report for each form of an algorithm, with varying counts or equal ones, that needs its own proof."""
    proved: list[Plan] = []
    for form in ({"varying": True}, {}) if "varying" in signature(algorithm.build).parameters else ({},):
        plans = [algorithm.build(size, rank, root, **form, **params) for rank in range(size)]
        if not proved or not are_proved_by(plans, proved):
            yield _verify_built(algorithm, plans, segments, {**form, **params})
        proved = plans


def _roots(algorithm: Algorithm, size: int) -> Iterable[int]:
    if not _is_rooted(algorithm):
        return (0,)
    return range(size) if size <= _FEW else (0, size // 2)


def verify_algorithm(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, **params: Any) -> Report:
    """Prove that `algorithm` does what it declares on `size` ranks: its plans, its cost, the same bits.

    Raises:
        NoAlgorithmError: the algorithm declares that it does not support `size` ranks.
        PlanError: as `verify_plans`, or a declaration is wrong.
    """
    algorithm.check_supports(size)
    plans = [algorithm.build(size, rank, root, **params) for rank in range(size)]
    return _verify_built(algorithm, plans, segments, params)


def _verify_built(algorithm: Algorithm, plans: Sequence[Plan], segments: int, params: Mapping[str, Any]) -> Report:
    """Prove that `plans`, which the algorithm has built with `params`, do what the algorithm declares."""
    size = len(plans)
    names = (algorithm.collective, algorithm.name)
    if (plans[0].collective, plans[0].algorithm) != names:
        registered, built = (f"({name!r}, {of!r})" for name, of in (names, (plans[0].collective, plans[0].algorithm)))
        raise PlanError(f"registered as {registered}, the builder returns Plan{built[:-1]}, …): use one name for both")
    report = verify_plans(plans, segments, in_place=algorithm.in_place, commutative=algorithm.commutative_only)
    _check_cost(algorithm, size, params, [report], exactly=algorithm.is_cost_exact and not _is_rooted(algorithm))
    if algorithm.same_bits and not report.same_bits:
        raise PlanError(
            f"{' '.join(names)} on {size} ranks: the ranks do not all get the same bits, and same_bits=False is not "
            "declared"
        )
    if report.mapped and not algorithm.mapped:
        raise PlanError(f"{' '.join(names)} on {size} ranks: the plans need mapped memory: declare mapped=True")
    return report


def _is_rooted(algorithm: Algorithm) -> bool:
    contract = CONTRACTS.get(algorithm.collective)
    return contract is not None and contract.has_root


def _check_cost(
    algorithm: Algorithm, size: int, params: Mapping[str, Any], reports: Sequence[Report], *, exactly: bool
) -> None:
    """Check the declared cost, if there is one. It is the cost of the most expensive root.

    No report may have a higher cost. If `exactly`, the highest cost of the reports must be the declared one. The
    comparison allows rounding, because declared costs are floats, and the cost of a composition is a sum of rounded
    floats.
    """
    cost = algorithm.cost_of(size, params)
    if cost is None:
        return
    optional = {"most_messages": cost.most_messages != 0, "stored": cost.stored is not None}
    for term in ("rounds", "sent", "reduced", *(name for name, is_declared in optional.items() if is_declared)):
        value, declared = float(max(getattr(report, term) for report in reports)), getattr(cost, term)
        if not isclose(value, declared) and (exactly or value > declared):
            name = f"{algorithm.collective} {algorithm.name} on {size} ranks"
            raise PlanError(f"{name}: {term} is {value:g}, declared {declared:g}")


def verify_plans(
    plans: Sequence[Plan], segments: int = 1, *, in_place: bool = True, commutative: bool = True
) -> Report:
    """Prove that `plans`, one for each rank in order, carry out their collective when run over `segments` segments.

    `in_place`: also prove it for INPUT and OUTPUT as the same memory. `commutative`: the operation is commutative. If
    not, contributions must be combined in the order of ranks.

    Raises:
        PlanError: the plans are wrong. The message names the first rank, lane, group and step and the contribution at
            fault, or the ranks that wait for each other.
    """
    with _paused_collector():
        report = prove(PlanSet(plans), segments, in_place=in_place, commutative=commutative)
    _check_bounds(plans[0], report)
    return report


def prove(plan_set: PlanSet, segments: int, *, in_place: bool, commutative: bool) -> Report:
    """Prove all but the bounds; raises as `verify_plans`.

    The intermediate data is freed when this returns, before the garbage collector resumes and would walk it.
    """
    unrolled_plans = unroll(plan_set.plans, plan_set.length_numbers())
    events = run(unrolled_plans, segments)
    check_hazards(plan_set, unrolled_plans, events, in_place=in_place)
    check_mapped_hazards(plan_set, unrolled_plans, events, in_place=in_place)
    same_bits = Execution(plan_set, unrolled_plans, events, in_place=in_place, commutative=commutative).check()
    _check_synchronization(plan_set, unrolled_plans, events)
    return _report(plan_set, unrolled_plans, events, same_bits=same_bits)


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector. A proof makes millions of tuples without a cycle; walking them is slow."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _report(
    plan_set: PlanSet, unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event], *, same_bits: bool
) -> Report:
    loads = [_load(plan) for plan in plan_set.plans]
    return Report(
        messages=sum(load.messages for load in loads),
        rounds=count_rounds(unrolled_plans, events),
        sent=Fraction(max(load.sent for load in loads), plan_set.parts()),
        reduced=Fraction(max(load.reduced for load in loads), plan_set.parts()),
        most_messages=max(load.messages for load in loads),
        stored=Fraction(max(load.stored for load in loads), plan_set.parts()),
        scratch_blocks=max(plan.scratch.blocks for plan in plan_set.plans),
        scratch_live=scratch_high_water(unrolled_plans, events),
        same_bits=same_bits,
        ports=max(load.ports for load in loads),
        queue=queue_depth(unrolled_plans, events) if plan_set.size <= _MANY else None,
        mapped=any(map(is_mapped, plan_set.plans)),
    )


def _check_synchronization(plan_set: PlanSet, unrolled_plans: Sequence[UnrolledPlan], events: Sequence[Event]) -> None:
    """Check that no rank ends before it has heard from all other ranks, if the collective promises this."""
    if not plan_set.contract.synchronizes:
        return
    clocks = Clocks(unrolled_plans, events, flags_only=False)
    for rank, clock in enumerate(clocks.final):
        for other in range(plan_set.size):
            if other != rank and not clocks.has_heard(clock, other):
                raise PlanError(f"rank {rank}: ends before it has heard from rank {other}")


def _check_bounds(plan: Plan, report: Report) -> None:
    """Check that the cost is not below the least cost that the collective allows.

    If it is, the verifier has failed to count something.
    """
    bound = BOUNDS[plan.collective]
    # A flag is raised without waiting, so the flags of many groups may be under way at the same time.
    ports = plan.size - 1 if report.mapped else report.ports
    least = {
        "rounds": least_rounds(plan.size, ports),
        "sent": bound.sent(plan.size),
        "reduced": bound.reduced(plan.size),
    }
    for term, value in least.items():
        if getattr(report, term) < value:
            raise PlanError(
                f"{plan.collective} on {plan.size} ranks: {term} is {getattr(report, term)}, below the least possible "
                f"{value}"
            )


class _Load(NamedTuple):
    """The load of one rank: messages, blocks sent, combined and stored, and the most messages and flags under way.

    `ports` counts the messages and flags that are under way at the same time in the busier of the two directions.
    """

    messages: int
    sent: int
    reduced: int
    stored: int
    ports: int


def _load(plan: Plan) -> _Load:
    """Return the load of the rank of a plan. Every iteration of a `Repeat` has the same load."""
    messages = sent = reduced = stored = 0
    sends, receives = [0] * len(plan.lanes), [0] * len(plan.lanes)
    for lane, _, _, times, group in walk(plan):
        if not times:  # a group of an empty `Repeat`
            continue
        kinds = [type(step) for step in group.steps]
        messages += times * kinds.count(Send)
        for kind, step in zip(kinds, group.steps, strict=True):
            if kind in _SENT:
                sent += times * _SENT[kind](step, plan.rank)
            if kind in _REDUCED:
                reduced += times * _REDUCED[kind](step)
            if isinstance(step, _STORING) and step.dst.buffer == Buffer.SCRATCH:
                stored += times * step.dst.count
        sends[lane] = max(sends[lane], sum([kind in SENDING for kind in kinds]))
        receives[lane] = max(receives[lane], sum([kind in RECEIVING for kind in kinds]))
    return _Load(messages, sent, reduced, stored, max(sum(sends), sum(receives)))


# Kind of step → function of (step, rank) that returns the blocks that the step sends, reads or writes at a peer.
_SENT: dict[type, Callable[[Any, int], int]] = {
    Send: lambda step, rank: step.src.count,
    Read: lambda step, rank: step.src.count,
    Write: lambda step, rank: step.src.count,
    ReadReduce: lambda step, rank: sum(span.count for owner, span in step.sources if owner != rank),
}

# The kinds of steps that write to the memory of their own rank.
_STORING = (Recv, RecvReduce, Copy, Reduce, Read, ReadReduce)

# Kind of step → function that returns the number of pairwise combinations of blocks.
_REDUCED: dict[type, Callable[[Any], int]] = {
    RecvReduce: lambda step: step.dst.count,
    Reduce: lambda step: (len(step.sources) - 1) * step.dst.count,
    ReadReduce: lambda step: (len(step.sources) - 1) * step.dst.count,
}
