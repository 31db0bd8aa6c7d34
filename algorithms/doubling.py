"""Recursive doubling: in each round, pairs of ranks exchange all they have, and the distance of the pairs doubles.

After ⌊log2 size⌋ rounds every rank has everything, so this is for short vectors. Of a number of ranks that is not a
power of two, the first ranks are *folded*: rank 2i hands its contribution to rank 2i + 1, stands aside, and gets the
result back at the end.

Partial results alternate between SCRATCH and OUTPUT, because the source of a `Send` must not be written before its
group ends. The lower rank's operand always comes first: both partners then compute the same bits, and the ranks behind
a partial result are always consecutive, so that the operation need not be commutative.
"""

from __future__ import annotations

from unisono.algorithms.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)


def allreduce_recursive_doubling(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce by recursive doubling, for any number of ranks.

    INPUT, OUTPUT and (in the ranks that are not folded) SCRATCH are one block each; INPUT and OUTPUT may be the same
    memory. The order of combination is a tree over the ranks in ascending order, the same for all ranks.
    """
    rounds = size.bit_length() - 1
    folded = size - (1 << rounds)
    stands_aside = rank < 2 * folded and rank % 2 == 0
    vector = even(1)
    return Plan(
        collective="allreduce",
        algorithm="recursive_doubling",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=Partition(0) if stands_aside or size == 1 else scratch_like(Buffer.OUTPUT, vector),
        lanes=(_folded_lane(rank, rounds) if stands_aside else _core_lane(rank, rounds, folded),),
    )


def _folded_lane(rank: int, rounds: int) -> Lane:
    """Return the lane of a rank that stands aside: its empty groups keep the numbers of the groups in step."""
    give, take = Send(rank + 1, input_block()), Recv(rank + 1, output_block())
    return (Group((give,)), *[Group(())] * rounds, Group((take,)))


def _core_lane(rank: int, rounds: int, folded: int) -> Lane:
    """Return the lane of a rank that takes part in the rounds: fold, exchange, hand the result back."""
    has_folded = rank < 2 * folded
    position = rank // 2 if has_folded else rank - folded
    partners = [_rank_at(position ^ (1 << round_), folded) for round_ in range(rounds)]
    current, lane = input_block(), list[Group]()
    if folded:
        lane.append(Group((_combine(rank, rank - 1, current, lower=False),) if has_folded else ()))
        current = scratch_block() if has_folded else current
    for partner in partners:
        combine = _combine(rank, partner, current, lower=partner == partners[-1])
        lane.append(Group((Send(partner, current), combine)))
        current = combine.dst
    finish: list[Step] = [Send(rank - 1, current)] if has_folded else []
    if current.buffer is not Buffer.OUTPUT:
        # A single rank has combined nothing, so the copy is its only chance to lower.
        finish.append(Copy(output_block(), current, lower=not partners))
    return (*lane, Group(tuple(finish))) if finish else tuple(lane)


def _combine(rank: int, partner: int, current: Span, *, lower: bool) -> RecvReduce:
    """Return the step that combines `current` with what `partner` sends, into the buffer that `current` is not in."""
    target = output_block() if current.buffer is Buffer.SCRATCH else scratch_block()
    return RecvReduce(partner, target, current, received_first=partner < rank, lower=lower)


def _rank_at(position: int, folded: int) -> int:
    """Return the rank at a position among those that take part in the rounds."""
    return 2 * position + 1 if position < folded else position + folded
