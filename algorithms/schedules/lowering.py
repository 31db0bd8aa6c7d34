"""From a schedule to the plans of its ranks.

Theory of operation
-------------------
The schedule runs once (`schedules.running`): every move of one chunk becomes an atom. Atoms of one move are joined into
a *transfer* (`schedules.joining`): one message, or one copy or reduction on one rank. Transfers that conflict run one
after the other. The *level* of a transfer is one more than the highest level of the transfers before it. The level is
the number of its group, on both ranks. A rank sends at most one message to a peer in a group, so further messages of a
level go to groups of the same number in other lanes. A group waits for the groups of other lanes whose transfers come
before its own.

A schedule can need what a plan cannot do: two ranks swap blocks in place, so that each message must leave before the
other one arrives. The transfers then wait for each other. The messages of such a circle arrive in SCRATCH, and a copy
or a reduction of their own takes them from there.

Source: the execution model of MSCCL (Cowan et al., "MSCCLang", ASPLOS 2023), of which only the order that data needs is
kept.

Example: a ring allreduce of MSCCL for 2 ranks has a threadblock of 4 steps on each. Its plan has 2 groups: each rank
sends one block and combines the other one; then it sends its result and receives that of the peer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from unisono.algorithms.builders.lane_pieces import lane_from_groups
from unisono.algorithms.ir.plan import Copy, Group, Plan, Recv, RecvReduce, Reduce, Send, Span, Step
from unisono.algorithms.schedules.happening import MOST_EVENTS, sorted_behind
from unisono.algorithms.schedules.joining import Transfer, transfers_of
from unisono.algorithms.schedules.memory import Content, RankMemory, ScheduleBlock
from unisono.algorithms.schedules.moves import Schedule
from unisono.algorithms.schedules.running import ScheduleRun
from unisono.errors import PlanError

# Chunks "t" with these numbers and higher ones hold messages that arrive in SCRATCH; schedules use lower ones.
_FIRST_STAGED = 1 << 40
# How many messages a rank may send to a peer at the same time.
_MOST_LANES = 16


def plans_of(schedule: Schedule) -> list[Plan]:
    """Return the plans of all ranks. They are not proved: a schedule with wrong results gives plans with wrong results.

    Raises:
        PlanError: steps wait for each other, use a chunk at the same time, read a chunk that nobody has written, or
            write an input that must not change; the message names them.
    """
    if len(schedule.events) > MOST_EVENTS:
        raise PlanError(f"the schedule has {len(schedule.events)} steps, and at most {MOST_EVENTS} can be checked")
    run = ScheduleRun(schedule)
    transfers = transfers_of(run.atoms, run.ends)
    levels = _levels(transfers)
    if len(levels) < len(transfers):
        transfers = _through_scratch(transfers, set(range(len(transfers))) - levels.keys(), run.memories)
        levels = _levels(transfers)
    lanes = _lanes(transfers, levels, schedule.size)
    return [
        _plan(schedule, memory, rank, of_rank)
        for rank, (memory, of_rank) in enumerate(zip(run.memories, lanes, strict=True))
    ]


def _before(transfers: Sequence[Transfer], number: int) -> list[int]:
    """Return the numbers of the transfers that come directly before another one."""
    transfer = transfers[number]
    return sorted({other for other, _ in transfer.reads_after | transfer.writes_after} - {number})


def _levels(transfers: Sequence[Transfer]) -> dict[int, tuple[int, int]]:
    """Return lane and level of each transfer by its number; those that wait for each other are missing."""
    before = [_before(transfers, number) for number in range(len(transfers))]
    levels: dict[int, tuple[int, int]] = {}
    messages: Counter[tuple[tuple[int, int], int]] = Counter()
    for number in sorted_behind(before):
        transfer = transfers[number]
        level = 1 + max((levels[other][1] for other in before[number]), default=-1)
        if transfer.is_local:
            levels[number] = 0, level
            continue
        while messages[transfer.ranks, level] == _MOST_LANES:
            level += 1
        levels[number] = messages[transfer.ranks, level], level
        messages[transfer.ranks, level] += 1
    return levels


def _lanes(
    transfers: Sequence[Transfer], levels: Mapping[int, tuple[int, int]], size: int
) -> list[list[dict[int, Group]]]:
    """Return the groups of each lane of each rank, by their numbers."""
    lanes = 1 + max((lane for lane, _ in levels.values()), default=0)
    result: list[list[dict[int, Group]]] = [[{} for _ in range(lanes)] for _ in range(size)]
    for number, (lane, level) in sorted(levels.items()):
        before = _before(transfers, number)
        for rank, step in _steps(transfers[number]):
            of_lane = result[rank][lane]
            group = of_lane.get(level, Group(()))
            after = {levels[other] for other in before if rank in transfers[other].ranks and levels[other][0] != lane}
            of_lane[level] = Group((*group.steps, step), tuple(sorted({*group.after, *after})))
    return result


def _through_scratch(
    transfers: Sequence[Transfer], waiting: set[int], memories: Sequence[RankMemory]
) -> list[Transfer]:
    """Return transfers of which the messages in `waiting` arrive in SCRATCH, from where other transfers take them."""
    result: list[Transfer] = []
    read_by: list[int] = []
    written_by: list[int] = []
    numbers = count(_FIRST_STAGED)
    for number, transfer in enumerate(transfers):
        is_split = number in waiting and not transfer.is_local
        parts = _two_parts(transfer, memories[transfer.ranks[1]], numbers) if is_split else (transfer,)
        read_by.append(len(result))
        result += parts
        written_by.append(len(result) - 1)
    for transfer in result:
        for name in ("reads_after", "writes_after"):
            after = {((written_by if wrote else read_by)[other], wrote) for other, wrote in getattr(transfer, name)}
            setattr(transfer, name, after)
    for message, part in zip(read_by, written_by, strict=True):
        if message != part:
            result[part].reads_after = {(message, True)}
    return result


def _two_parts(transfer: Transfer, memory: RankMemory, numbers: Iterator[int]) -> tuple[Transfer, Transfer]:
    """Return a message to SCRATCH, and the transfer from there."""
    atoms = transfer.atoms
    staged = memory.write([("t", next(numbers)) for _ in atoms], [Content(atom.kind, 0) for atom in atoms])
    message = [replace(atom, target=block, own=None, lower=False) for atom, block in zip(atoms, staged, strict=True)]
    rank = transfer.ranks[1]
    part = [replace(atom, ranks=(rank, rank), source=block) for atom, block in zip(atoms, staged, strict=True)]
    return Transfer(message, [], transfer.reads_after), Transfer(part, [], set(), transfer.writes_after)


def _steps(transfer: Transfer) -> list[tuple[int, Step]]:
    """Return the steps of a transfer, each with its rank."""
    atoms, (source_rank, target_rank) = transfer.atoms, transfer.ranks
    source, target = _span([atom.source for atom in atoms]), _span([atom.target for atom in atoms])
    own = _span([atom.own for atom in atoms if atom.own is not None]) if atoms[0].own is not None else None
    lower = atoms[0].lower
    if not transfer.is_local:
        receive = Recv(source_rank, target) if own is None else RecvReduce(source_rank, target, own, lower=lower)
        return [(source_rank, Send(target_rank, source)), (target_rank, receive)]
    if own is None:
        return [(target_rank, Copy(target, source, lower))]
    return [(target_rank, Reduce(target, (own, source, *map(_span, transfer.more)), lower))]


def _span(blocks: Sequence[ScheduleBlock]) -> Span:
    stride = blocks[1].number - blocks[0].number if len(blocks) > 1 else 1
    return Span(blocks[0].buffer, blocks[0].number, len(blocks), stride)


def _plan(schedule: Schedule, memory: RankMemory, rank: int, lanes: Sequence[Mapping[int, Group]]) -> Plan:
    return Plan(
        schedule.collective,
        schedule.name,
        schedule.size,
        rank,
        0,
        memory.input,
        memory.output,
        memory.scratch(),
        lanes=tuple(map(lane_from_groups, lanes)),
    )
