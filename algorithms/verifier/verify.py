"""The verifier: proves, before anything runs, that the plans of all ranks carry out their collective.

What is proved, in this order, each by its own module:
- the buffers are cut as the collective demands, alike on all ranks (`algorithms.contracts`);
- every step makes sense on its own (`algorithms.program`);
- the ranks make progress to the end with rendezvous messages, hence at every capacity (`algorithms.progress`);
- no two steps of a rank that may run at the same time conflict (`algorithms.hazards`), nor do those of different ranks
  on mapped memory (`algorithms.sharing`);
- every element of the result has every contribution exactly once and is lowered exactly once (`algorithms.symbolic`);
- a barrier holds every rank until all have come; the cost is the declared one, and possible (`algorithms.bounds`).

Hazards and results are proved for INPUT and OUTPUT apart and, where that is declared, for both as the same memory. The
proof is for blocks of any length. `verify_sizes` is for algorithms, `verify` for a builder alone, `verify_plans` for
plans from anywhere.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from math import isclose
from typing import Any, NamedTuple

from unisono.algorithms.catalogue.algorithm import Algorithm, Build
from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.algorithms.ir.plan import Buffer, Copy, Plan, Read, ReadReduce, Recv, RecvReduce, Reduce, Send, Write
from unisono.algorithms.verifier.block_meaning import PlanSet, are_proved_by
from unisono.algorithms.verifier.hazards import check_hazards
from unisono.algorithms.verifier.liveness import scratch_high_water
from unisono.algorithms.verifier.lower_bounds import BOUNDS, least_rounds
from unisono.algorithms.verifier.mapped_hazards import check_sharing
from unisono.algorithms.verifier.progress import Event, run
from unisono.algorithms.verifier.symbolic import Execution
from unisono.algorithms.verifier.unrolled import RECEIVING, SENDING, UnrolledPlan, as_written, is_mapped, unroll
from unisono.algorithms.verifier.vector_clocks import Clocks, count_rounds, queue_depth
from unisono.errors import PlanError

# Up to so many ranks, all roots and 1, 2 and 3 segments are run too, and the depth of queues is found out.
_FEW = 8
_MANY = 32


@dataclass(frozen=True, slots=True)
class Report:
    """What the verifier found out about plans that are right.

    Attributes:
        messages: number of messages of all ranks together, in one segment.
        rounds: latencies on the longest chain of messages and flags that wait for each other, in one segment.
        sent: what the rank that sends most sends, as a multiple of the vector, exactly; reading or writing a peer's
            memory counts as sending.
        reduced: what the rank that combines most combines, as a multiple of the vector, exactly.
        most_messages: of the rank that sends most of them, in one segment.
        stored: what the rank that writes most to SCRATCH writes there, as a multiple of the vector, exactly.
        scratch_blocks: blocks of SCRATCH in the rank that has most, as declared.
        scratch_live: most blocks of SCRATCH of a rank that hold a value still to be read at a time, when the plans run
            as `algorithms.liveness` says.
        same_bits: whether all ranks that are to get the same compute it by the same expression, up to the order of the
            two operands of a pairwise combination.
        ports: messages and flags that a rank has under way at most at a time, in either direction, in one segment.
        queue: messages that a link may have to hold at most, in one segment; None for more than 32 ranks.
        mapped: whether mapped memory is needed.
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
    """Prove `algorithm` for those of `sizes` that it supports; return a report for each.

    A few ranks are tried with every root and with 1, 2 and 3 segments, more with two roots and one segment: progress
    with one is progress with any number (`algorithms.progress`). A builder with the parameter `varying` is tried with
    counts that vary, which proves it for equal ones if the ranks do the same.

    Raises:
        PlanError: as `verify_algorithm`.
    """
    reports: dict[int, Report] = {}
    for size in sizes:
        if algorithm.supports(size) is None:
            with _paused_collector():
                found = _prove_size(algorithm, size, params)
            _check_cost(algorithm, size, params, found, exactly=algorithm.is_cost_exact)
            reports[size] = found[0]
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
    """Yield a report for each form of an algorithm that has to be proved by itself."""
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
    """Prove that `algorithm` does what it declares with `size` ranks: its plans, its cost, its bits.

    Raises:
        NoAlgorithmError: the algorithm declares that it cannot run with so many ranks.
        PlanError: as `verify_plans`, or a declaration is wrong.
    """
    algorithm.check_supports(size)
    plans = [algorithm.build(size, rank, root, **params) for rank in range(size)]
    return _verify_built(algorithm, plans, segments, params)


def _verify_built(algorithm: Algorithm, plans: Sequence[Plan], segments: int, params: Mapping[str, Any]) -> Report:
    """Prove that `plans`, which an algorithm has built with `params`, do what it declares."""
    size = len(plans)
    names = (algorithm.collective, algorithm.name)
    if (plans[0].collective, plans[0].algorithm) != names:
        registered, built = (f"({name!r}, {of!r})" for name, of in (names, (plans[0].collective, plans[0].algorithm)))
        raise PlanError(f"registered as {registered}, the builder returns Plan{built[:-1]}, …): use one name for both")
    report = verify_plans(plans, segments, in_place=algorithm.in_place, commutative=algorithm.commutative_only)
    _check_cost(algorithm, size, params, [report], exactly=algorithm.is_cost_exact and not _is_rooted(algorithm))
    if algorithm.same_bits and not report.same_bits:
        raise PlanError(f"{' '.join(names)} on {size} ranks: the ranks do not all get the same bits, as declared")
    if report.mapped and not algorithm.mapped:
        raise PlanError(f"{' '.join(names)} on {size} ranks: mapped memory is needed, which is not declared")
    return report


def _is_rooted(algorithm: Algorithm) -> bool:
    contract = CONTRACTS.get(algorithm.collective)
    return contract is not None and (contract.input_at_root or contract.output_at_root)


def _check_cost(
    algorithm: Algorithm, size: int, params: Mapping[str, Any], reports: Sequence[Report], *, exactly: bool
) -> None:
    """Check the declared cost, if there is one, which is that of the most expensive root.

    No report may cost more or, all told, less.

    The declared fractions are floats, sums of rounded ones where an algorithm has phases.
    """
    cost = algorithm.cost_of(size, params)
    if cost is None:
        return
    said = {"most_messages": cost.most_messages != 0, "stored": cost.stored is not None}
    for term in ("rounds", "sent", "reduced", *(name for name, is_said in said.items() if is_said)):
        value, declared = float(max(getattr(report, term) for report in reports)), getattr(cost, term)
        if not isclose(value, declared) and (exactly or value > declared):
            name = f"{algorithm.collective} {algorithm.name} on {size} ranks"
            raise PlanError(f"{name}: {term} is {value:g}, declared {declared:g}")


def verify_plans(
    plans: Sequence[Plan], segments: int = 1, *, in_place: bool = True, commutative: bool = True
) -> Report:
    """Prove that `plans`, one per rank in order, carry out their collective when run over `segments` segments.

    `in_place`: also with INPUT and OUTPUT as the same memory. `commutative`: the operation is; otherwise contributions
    must be combined in the order of ranks.

    Raises:
        PlanError: they do not; names the first rank, lane, group and step and the contribution at fault, or the ranks
            that wait for each other.
    """
    with _paused_collector():
        report = _prove(plans, segments, in_place=in_place, commutative=commutative)
    _check_bounds(plans[0], report)
    return report


def _prove(plans: Sequence[Plan], segments: int, *, in_place: bool, commutative: bool) -> Report:
    """Prove all but the bounds; what it makes on the way is gone when it returns, before a collector could walk it."""
    family = PlanSet(plans)
    programs = unroll(plans, family.length_numbers())
    events = run(programs, segments)
    check_hazards(family, programs, events, in_place=in_place)
    check_sharing(family, programs, events, in_place=in_place)
    same_bits = Execution(family, programs, events, in_place=in_place, commutative=commutative).check()
    _check_synchronization(family, programs, events)
    return _report(family, programs, events, same_bits=same_bits)


@contextmanager
def _paused_collector() -> Iterator[None]:
    """Pause the cyclic garbage collector: a proof makes millions of tuples, none in a cycle, for it to walk in vain."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _report(family: PlanSet, programs: Sequence[UnrolledPlan], events: Sequence[Event], *, same_bits: bool) -> Report:
    loads = [_load(plan) for plan in family.plans]
    return Report(
        messages=sum(load.messages for load in loads),
        rounds=count_rounds(programs, events),
        sent=Fraction(max(load.sent for load in loads), family.parts()),
        reduced=Fraction(max(load.reduced for load in loads), family.parts()),
        most_messages=max(load.messages for load in loads),
        stored=Fraction(max(load.stored for load in loads), family.parts()),
        scratch_blocks=max(plan.scratch.blocks for plan in family.plans),
        scratch_live=scratch_high_water(programs, events),
        same_bits=same_bits,
        ports=max(load.ports for load in loads),
        queue=queue_depth(programs, events) if family.size <= _MANY else None,
        mapped=any(map(is_mapped, family.plans)),
    )


def _check_synchronization(family: PlanSet, programs: Sequence[UnrolledPlan], events: Sequence[Event]) -> None:
    """Check that every rank has heard of all others before it ends, if the collective promises that."""
    if not family.contract.synchronizes:
        return
    clocks = Clocks(programs, events, flags_only=False)
    for rank, clock in enumerate(clocks.final):
        for other in range(family.size):
            if other != rank and not clocks.has_heard(clock, other):
                raise PlanError(f"rank {rank}: ends without having heard of rank {other}")


def _check_bounds(plan: Plan, report: Report) -> None:
    """Check that the cost is possible: if it is not, something is not counted."""
    bound = BOUNDS[plan.collective]
    # A flag is raised without waiting for anyone, so those of many groups may be under way at the same time.
    ports = plan.size - 1 if report.mapped else report.ports
    least = {
        "rounds": least_rounds(plan.size, ports),
        "sent": bound.sent(plan.size),
        "reduced": bound.reduced(plan.size),
    }
    for term, value in least.items():
        if getattr(report, term) < value:
            raise PlanError(f"{plan.collective} on {plan.size} ranks: {term} is {getattr(report, term)}, below {value}")


class _Load(NamedTuple):
    """What one rank does: messages, blocks sent, combined and stored, most messages and flags at a time in one way."""

    messages: int
    sent: int
    reduced: int
    stored: int
    ports: int


def _load(plan: Plan) -> _Load:
    """Return what the rank of a plan does; what is repeated does as much each time."""
    messages = sent = reduced = stored = 0
    ports: Counter[bool] = Counter()
    for lane in plan.lanes:
        most = {True: 0, False: 0}
        for times, groups in map(as_written, lane):
            for group in groups if times else ():
                kinds = [type(step) for step in group.steps]
                messages += times * kinds.count(Send)
                for kind, step in zip(kinds, group.steps, strict=True):
                    if kind in _SENT:
                        sent += times * _SENT[kind](step, plan.rank)
                    if kind in _REDUCED:
                        reduced += times * _REDUCED[kind](step)
                    if isinstance(step, _STORING) and step.dst.buffer == Buffer.SCRATCH:
                        stored += times * step.dst.count
                for sends, of_direction in ((True, SENDING), (False, RECEIVING)):
                    most[sends] = max(most[sends], sum([kind in of_direction for kind in kinds]))
        ports.update(most)
    return _Load(messages, sent, reduced, stored, max(ports.values(), default=0))


# How many blocks a step of each kind moves between a rank and a peer, other than by receiving them.
_SENT: dict[type, Callable[[Any, int], int]] = {
    Send: lambda step, rank: step.src.count,
    Read: lambda step, rank: step.src.count,
    Write: lambda step, rank: step.src.count,
    ReadReduce: lambda step, rank: sum(span.count for owner, span in step.sources if owner != rank),
}

# Steps that write to the memory of their rank.
_STORING = (Recv, RecvReduce, Copy, Reduce, Read, ReadReduce)

# How many blocks a step of each kind combines with others.
_REDUCED: dict[type, Callable[[Any], int]] = {
    RecvReduce: lambda step: step.dst.count,
    Reduce: lambda step: (len(step.sources) - 1) * step.dst.count,
    ReadReduce: lambda step: (len(step.sources) - 1) * step.dst.count,
}
