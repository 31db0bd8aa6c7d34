"""Recursive multiplying: in each round, groups of k ranks exchange all their data, and their distance grows k-fold.

After log_k p rounds every rank has everything. There are fewer message latencies than in recursive doubling, but more
volume. This suits short vectors on links where several messages can be under way at once. If the number of ranks is not
a power of k, some ranks stand aside (`builders.folding`).

A rank combines the k operands of a round in one step, in the order of ranks. So they are rounded once, all ranks
compute the same bits, and the operation need not be commutative.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.folding import Folding, fold
from unisono.algorithms.builders.lane_pieces import empty_groups, single_rank_lane
from unisono.algorithms.ir.plan import (
    Buffer,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    Reduce,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)


def allreduce_recursive_multiplying(size: int, rank: int, root: int = 0, radix: int = 4) -> Plan:
    """Return the plan of an allreduce by recursive multiplying, for any number of ranks.

    INPUT and OUTPUT are one block each, and may be the same memory. SCRATCH holds the messages from the other ranks of
    a group. If there are fewer ranks than `radix`, all of them are one group.

    Raises:
        UsageError: `radix` is less than 2.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    folding = fold(size, max(2, min(radix, size)))
    vector, leads = even(1), folding.leads(rank)
    copies = max(folding.radix - 1, len(folding.folded_onto(rank))) if leads and size > 1 else 0
    lane = _leading_lane(folding, rank) if leads else _folded_lane(folding, rank)
    return Plan(
        collective="allreduce",
        algorithm="recursive_multiplying",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies) if copies else Partition(0),
        lanes=(lane if size > 1 else single_rank_lane(),),
    )


def _folded_lane(folding: Folding, rank: int) -> Lane:
    """Return the lane of a rank without a place in the rounds: another rank, its leader, takes part for both.

    The rank sends its contribution to its leader, waits for the rounds to end, and receives the result from the leader.
    """
    leader = folding.leader(folding.position(rank))
    return (
        Group((Send(leader, input_block()),)),
        *empty_groups(1 + 2 * folding.rounds),
        Group((Recv(leader, output_block()),)),
    )


def _leading_lane(folding: Folding, rank: int) -> Lane:
    """Return the lane of a rank that takes part in the rounds: fold, exchange, return the result to the ranks aside."""
    position, folded = folding.position(rank), folding.folded_onto(rank)
    current, lane = input_block(), list[Group]()
    if not folding.is_exact:
        lane += _gather(rank, folded, current) if folded else [Group(())] * 2
        current = output_block() if folded else current
    for round_ in range(folding.rounds):
        unit = folding.radix**round_
        first = position - position // unit % folding.radix * unit
        members = [folding.leader(first + digit * unit) for digit in range(folding.radix)]
        others = [member for member in members if member != rank]
        lane += _gather(rank, others, current, exchange=True, lower=round_ == folding.rounds - 1)
        current = output_block()
    return (*lane, Group(tuple(Send(other, current) for other in folded))) if folded else tuple(lane)


def _gather(
    rank: int, others: Sequence[int], current: Span, *, exchange: bool = False, lower: bool = False
) -> list[Group]:
    """Return the groups that receive from `others` and combine everything, with `current`, in OUTPUT.

    If `exchange`, the rank also sends `current` to them.
    """
    stages = [(other, scratch_block(index)) for index, other in enumerate(others)]
    messages: list[Step] = [Send(other, current) for other in others] if exchange else []
    messages += [Recv(other, stage) for other, stage in stages]
    operands = sorted([*stages, (rank, current)], key=lambda operand: operand[0])
    return [
        Group(tuple(messages)),
        Group((Reduce(output_block(), tuple(span for _, span in operands), lower=lower),)),
    ]
