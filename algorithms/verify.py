"""The verifier: proves, before anything runs, that the plans of all ranks carry out their collective.

What is proved, in this order, each by its own module:
- every step makes sense on its own (`algorithms.program`);
- the ranks make progress to the end with rendezvous messages, hence at every capacity (`algorithms.progress`);
- no two steps that may run at the same time conflict (`algorithms.hazards`);
- every element of the result has every contribution exactly once and is lowered exactly once (`algorithms.symbolic`);
- a barrier holds every rank until all have come; the cost is the declared one.

Hazards and results are proved for INPUT and OUTPUT apart and, where that is declared, for both as the same memory. The
proof is for blocks of any length. `verify_algorithm` is for what is registered, `verify` for a builder alone,
`verify_plans` for plans from anywhere. Plans that use mapped memory are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from unisono.algorithms.algorithm import Algorithm, Build
from unisono.algorithms.contracts import CONTRACTS, Family
from unisono.algorithms.hazards import check_hazards
from unisono.algorithms.plan import Plan, RecvReduce, Reduce, Send
from unisono.algorithms.program import Program, unroll
from unisono.algorithms.progress import Event, Posted, check_pairs, run
from unisono.algorithms.symbolic import Execution
from unisono.errors import NoAlgorithmError, PlanError


@dataclass(frozen=True, slots=True)
class Report:
    """What the verifier found out about plans that are right.

    Attributes:
        messages: number of messages of all ranks together, in one segment.
        rounds: message latencies on the longest chain of messages that wait for each other, in one segment.
        sent: what the rank that sends most sends, as a multiple of the vector, exactly.
        reduced: what the rank that combines most combines, as a multiple of the vector, exactly.
        scratch_blocks: blocks of SCRATCH in the rank that has most.
        same_bits: whether all ranks compute every block of OUTPUT by the same expression, up to the order of the two
            operands of a pairwise combination.
    """

    messages: int
    rounds: int
    sent: Fraction
    reduced: Fraction
    scratch_blocks: int
    same_bits: bool


def verify(build: Build, size: int, root: int = 0, segments: int = 1, **params: Any) -> Report:
    """Prove the plans that `build` returns for `size` ranks, for a commutative operation, in place and not.

    Raises:
        PlanError: as `verify_plans`.
    """
    return verify_plans([build(size, rank, root, **params) for rank in range(size)], segments)


def verify_algorithm(algorithm: Algorithm, size: int, root: int = 0, segments: int = 1, **params: Any) -> Report:
    """Prove that `algorithm` does what it declares with `size` ranks: its plans, its cost, its bits.

    Raises:
        NoAlgorithmError: the algorithm declares that it cannot run with so many ranks.
        PlanError: as `verify_plans`, or a declaration is wrong.
    """
    if reason := algorithm.supports(size):
        raise NoAlgorithmError(f"{algorithm.collective} {algorithm.name!r} cannot run on {size} ranks: {reason}")
    plans = [algorithm.build(size, rank, root, **params) for rank in range(size)]
    names = (algorithm.collective, algorithm.name)
    if (plans[0].collective, plans[0].algorithm) != names:
        raise PlanError(f"{' '.join(names)} builds plans of {plans[0].collective} {plans[0].algorithm}")
    report = verify_plans(plans, segments, in_place=algorithm.in_place, commutative=algorithm.commutative_only)
    cost = algorithm.cost(size)
    # The declared fractions are floats; the exact ones are rounded in the same way before they are compared.
    found = {"rounds": report.rounds, "sent": float(report.sent), "reduced": float(report.reduced)}
    for term, value in found.items():
        if value != getattr(cost, term):
            raise PlanError(f"{' '.join(names)} on {size} ranks: {term} is {value}, declared {getattr(cost, term)}")
    if algorithm.same_bits and not report.same_bits:
        raise PlanError(f"{' '.join(names)} on {size} ranks: the ranks do not all get the same bits, as declared")
    return report


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
    family = Family(plans)
    programs = [unroll(plan) for plan in plans]
    messages = check_pairs(programs)
    events = run(programs, segments)
    aliasings = (False, True) if in_place else (False,)
    for aliased in aliasings:
        _check_all_hazards(family, programs, events, aliased=aliased)
    executions = [
        Execution(family, programs, events, aliased=aliased, commutative=commutative) for aliased in aliasings
    ]
    for execution in executions:
        execution.check()
    rounds, heard = _causality(programs, events)
    _check_synchronization(plans[0], heard)
    return Report(
        messages=messages,
        rounds=rounds,
        sent=max(_sent(program, family.parts()) for program in programs),
        reduced=max(_reduced(program, family.parts()) for program in programs),
        scratch_blocks=max(plan.scratch.blocks for plan in plans),
        same_bits=executions[0].same_bits(),
    )


def _check_all_hazards(family: Family, programs: Sequence[Program], events: Sequence[Event], *, aliased: bool) -> None:
    posted: list[list[tuple[int, int]]] = [[] for _ in programs]
    for event in events:
        if isinstance(event, Posted):
            posted[event.rank].append((event.lane, event.group))
    for program, of_rank in zip(programs, posted, strict=True):
        check_hazards(family, program, of_rank, aliased=aliased)


def _causality(programs: Sequence[Program], events: Sequence[Event]) -> tuple[int, list[int]]:
    """Return the number of rounds, and for each rank the ranks (as bits) that it has heard of when it ends.

    A rank hears of what the sender of a message had heard of when it posted the message; a message takes a round.
    """
    started: dict[tuple[int, ...], tuple[int, int]] = {}  # group → (rounds before, ranks heard of)
    ended: dict[tuple[int, ...], tuple[int, int]] = {}
    for event in events:
        if isinstance(event, Posted):
            rank, lane, number = event
            started[event] = (0, 1 << rank)
            for other_lane, other in programs[rank].predecessors(lane, number):
                started[event] = _later(started[event], ended[rank, other_lane, other])
            ended[event] = started[event]
        else:
            sender, receiver = event.sending[:3], event.receiving[:3]
            moment, heard = _later(started[sender], started[receiver])
            ended[sender] = _later(ended[sender], (moment + 1, 0))
            ended[receiver] = _later(ended[receiver], (moment + 1, heard))
    all_heard = [1 << rank for rank in range(len(programs))]
    for (rank, *_), (_, heard) in ended.items():
        all_heard[rank] |= heard
    return max((moment for moment, _ in ended.values()), default=0), all_heard


def _later(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), one[1] | other[1]


def _check_synchronization(plan: Plan, heard: Sequence[int]) -> None:
    """Check that every rank has heard of all others before it ends, if the collective promises that."""
    if not CONTRACTS[plan.collective].synchronizes:
        return
    for rank, ranks in enumerate(heard):
        for other in range(plan.size):
            if not ranks >> other & 1:
                raise PlanError(f"rank {rank}: ends without having heard of rank {other}")


def _sent(program: Program, parts: int) -> Fraction:
    return Fraction(sum(step.src.count for _, step in program.steps() if isinstance(step, Send)), parts)


def _reduced(program: Program, parts: int) -> Fraction:
    total = 0
    for _, step in program.steps():
        if isinstance(step, (RecvReduce, Reduce)):
            total += step.dst.count * (len(step.sources) - 1 if isinstance(step, Reduce) else 1)
    return Fraction(total, parts)
