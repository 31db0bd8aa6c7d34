"""Recursive doubling: in each round, pairs of ranks exchange all their data, and the distance of the pairs doubles.

After ⌊log2 size⌋ rounds every rank has everything, so this suits short vectors. If the number of ranks is not a power
of two, the first ranks are *folded* in pairs. Rank 2i sends its contribution to rank 2i + 1, stands aside, and receives
the result at the end.

Partial results alternate between SCRATCH and OUTPUT, because the source of a `Send` must not be written before its
group ends. The lower rank's operand always comes first. So both partners compute the same bits, and a partial result
always covers consecutive ranks. The operation therefore need not be commutative.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.builders.arguments import check_ranks, check_supported, needs_power_of_two
from unisono.algorithms.builders.folding import Folding, fold
from unisono.algorithms.builders.lane_pieces import empty_groups, with_own_block
from unisono.algorithms.ir.plan import (
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
    scratch_like,
    shares,
)


def allreduce_recursive_doubling(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce by recursive doubling, for any number of ranks.

    INPUT and OUTPUT are one block each, and may be the same memory. Ranks that do not stand aside have one block of
    SCRATCH. The order of combination is a tree over the ranks in ascending order, the same for all ranks.
    """
    check_ranks(size, rank, root)
    folding = fold(size)
    position, leads = folding.position(rank), folding.leads(rank)
    partners = [folding.leader(position ^ (1 << round_)) for round_ in range(folding.rounds)]
    vector = even(1)
    return Plan(
        collective="allreduce",
        algorithm="recursive_doubling",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.OUTPUT, vector) if leads and size > 1 else Partition(0),
        lanes=(exchanging_lane(rank, folding, partners),),
    )


def allgather_recursive_doubling(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather by recursive doubling, for a number of ranks that is a power of two.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.

    Raises:
        UsageError: `size` is not a power of two.
    """
    check_ranks(size, rank, root)
    check_supported(needs_power_of_two(size))
    lane = with_own_block(rank, allgather_lane(size, rank))
    return Plan("allgather", "recursive_doubling", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def allgather_lane(size: int, rank: int) -> Lane:
    """Return log2 size groups that carry block `rank` of every rank's OUTPUT to all other ranks."""
    lane: Lane = ()
    for round_ in range(size.bit_length() - 1):
        count = 1 << round_
        partner, held = rank ^ count, rank & -count
        lane += (Group((Send(partner, output_block(held, count)), Recv(partner, output_block(held ^ count, count)))),)
    return lane


def exchanging_lane(rank: int, folding: Folding, partners: Sequence[int], block: int = 0) -> Lane:
    """Return the lane of an allreduce of one block, in which ranks that lead exchange all of it with each partner."""
    if folding.leads(rank):
        return _leading_lane(rank, folding, partners, block)
    leader = folding.leader(folding.position(rank))
    give, take = Send(leader, input_block(block)), Recv(leader, output_block(block))
    return (Group((give,)), *empty_groups(folding.rounds), Group((take,)))


def _leading_lane(rank: int, folding: Folding, partners: Sequence[int], block: int) -> Lane:
    """Return the lane of a rank that takes part in the rounds: fold, exchange, send the result back."""
    folded = folding.folded_onto(rank)
    current, lane = input_block(block), list[Group]()
    if not folding.is_exact:
        steps = tuple(_combine(rank, other, current, lower=False) for other in folded)
        lane.append(Group(steps))
        current = steps[0].dst if steps else current
    for partner in partners:
        combine = _combine(rank, partner, current, lower=partner == partners[-1])
        lane.append(Group((Send(partner, current), combine)))
        current = combine.dst
    finish: list[Step] = [Send(other, current) for other in folded]
    if current.buffer is not Buffer.OUTPUT:
        # With a single rank no step combines, so the copy must lower.
        finish.append(Copy(output_block(block), current, lower=not partners))
    return (*lane, Group(tuple(finish))) if finish else tuple(lane)


def _combine(rank: int, partner: int, current: Span, *, lower: bool) -> RecvReduce:
    """Return the step that receives from `partner`, combines with `current`, and writes to the other buffer."""
    other = Buffer.OUTPUT if current.buffer is Buffer.SCRATCH else Buffer.SCRATCH
    return RecvReduce(partner, Span(other, current.start), current, received_first=partner < rank, lower=lower)
