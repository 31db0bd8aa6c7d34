"""Rabenseifner's algorithms: recursive halving to combine, and the same exchanges backwards to collect the result.

In each round of recursive halving, pairs of ranks split the blocks of which both have partial results. Each sends one
half to its partner and combines the other half. After log2 p rounds every rank has its part of the result, and has sent
less than one vector. The same exchanges in the opposite order carry the parts to all ranks, or to the root. If the
number of ranks is not a power of two, some ranks take no part in the rounds (`builders.folding`), which costs up to two
more vectors.

Allreduce and reduce pair neighbours first. A partial result then always covers consecutive ranks, so the operation need
not be commutative. Reduce-scatter pairs the most distant ranks first. The blocks of a rank are then always consecutive
in memory, and a rank ends with the block of its own number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.builders.butterfly import Blocks, PairExchange, allgather_lane, halves, reduce_scatter_lane
from unisono.algorithms.builders.folding import Folding, fold
from unisono.algorithms.builders.lane_pieces import empty_groups, single_rank_lane
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
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def allreduce_rabenseifner(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce by recursive halving and recursive doubling, for any number of ranks.

    INPUT and OUTPUT are cut into one block for each rank that takes part, and may be the same memory. There is no
    SCRATCH. The order of combination is a tree over the ranks in ascending order, the same for all blocks.
    """
    check_ranks(size, rank, root)
    folding = fold(size)
    vector = even(folding.positions)
    return Plan(
        collective="allreduce",
        algorithm="rabenseifner",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        lanes=(single_rank_lane() if size == 1 else allreduce_lane(folding, rank, _all_exchanges(folding, rank)),),
    )


def reduce_rabenseifner(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce by recursive halving, and a gather to the root through the same pairs, for any size.

    If `size` is not a power of two, folding leaves some ranks out of the rounds. INPUT and the root's OUTPUT have one
    block for each rank in the rounds, and may be the same memory. Each rank in the rounds except the root has SCRATCH
    like INPUT. The order of combination is a tree over the ranks in ascending order.
    """
    check_ranks(size, rank, root)
    folding = fold(size, root=root)
    vector = even(folding.positions)
    return Plan(
        collective="reduce",
        algorithm="rabenseifner",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector if rank == root else Partition(0),
        scratch=scratch_like(Buffer.INPUT, vector) if rank != root and folding.leads(rank) else Partition(0),
        lanes=(single_rank_lane() if size == 1 else _reduce(folding, rank, root),),
    )


def reduce_scatter_recursive_halving(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter by recursive halving, for any number of ranks.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. The ranks that take part have SCRATCH like INPUT.
    """
    check_ranks(size, rank, root)
    folding = fold(size)
    vector = shares(size, varying)
    return Plan(
        collective="reduce_scatter",
        algorithm="recursive_halving",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=even(1),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 1 and folding.leads(rank) else Partition(0),
        lanes=(single_rank_lane() if size == 1 else _reduce_scatter(folding, rank),),
    )


def allreduce_lane(folding: Folding, rank: int, exchanges: Sequence[PairExchange], first: int = 0) -> Lane:
    """Return the lane of an allreduce on a part of the vector that starts with block `first`.

    The part has a block for each position. If the rank takes no part in the rounds, `exchanges` may be empty.
    """
    whole, blocks = range(folding.positions), from_block(first)
    if not folding.leads(rank):
        take = Recv(_leader(folding, rank), blocks(Buffer.OUTPUT, whole))
        return (_hand_over(folding, rank, blocks), *empty_groups(2 * folding.rounds), Group((take,)))
    send_back = [Group((Send(other, blocks(Buffer.OUTPUT, whole)),)) for other in folding.folded_onto(rank)]
    combine = _combine(folding, rank, exchanges, Buffer.OUTPUT, blocks)
    return (*combine, *allgather_lane(exchanges, blocks), *send_back)


def _reduce(folding: Folding, rank: int, root: int) -> Lane:
    """Return the lane of a reduce. In its gather, the partner on the root's side receives, and the other one sends."""
    if not folding.leads(rank):
        return (_hand_over(folding, rank, _by_position),)
    partial = Buffer.OUTPUT if rank == root else Buffer.SCRATCH
    exchanges = _all_exchanges(folding, rank)
    lane = _combine(folding, rank, exchanges, partial, _by_position)
    apart = folding.position(rank) ^ folding.position(root)
    for bit, (partner, kept, sent) in reversed(list(enumerate(exchanges))):
        if apart >> bit & 1:
            return (*lane, Group((Send(partner, _by_position(partial, kept)),)))
        lane = (*lane, Group((Recv(partner, _by_position(partial, sent)),)))
    return lane


def _reduce_scatter(folding: Folding, rank: int) -> Lane:
    def by_rank(buffer: Buffer, positions: range) -> Span:
        first, last = folding.run(positions[0])[0], folding.run(positions[-1])[-1]
        return Span(buffer, first, last - first + 1)

    if not folding.leads(rank):
        take = Recv(_leader(folding, rank), output_block())
        return (_hand_over(folding, rank, by_rank), *empty_groups(folding.rounds), Group((take,)))
    exchanges = _exchanges(folding, rank, reversed(range(folding.rounds)))
    finish: list[Step] = [Send(other, scratch_block(other)) for other in folding.folded_onto(rank)]
    finish.append(Copy(output_block(), scratch_block(rank)))
    return (*_combine(folding, rank, exchanges, Buffer.SCRATCH, by_rank), Group(tuple(finish)))


def _all_exchanges(folding: Folding, rank: int) -> list[PairExchange]:
    return _exchanges(folding, rank, range(folding.rounds))


def _exchanges(folding: Folding, rank: int, bits: Iterable[int]) -> list[PairExchange]:
    """Return the rounds of recursive halving of a rank, one for each number of a bit in `bits`.

    In a round, the rank exchanges with the position whose number differs from its own in this bit only.
    """
    position, held, exchanges = folding.position(rank), range(folding.positions), list[PairExchange]()
    for bit in bits:
        kept, sent = halves(held, keeps_upper=bool(position >> bit & 1))
        exchanges.append(PairExchange(folding.leader(position ^ (1 << bit)), kept, sent))
        held = kept
    return exchanges


def _combine(folding: Folding, rank: int, exchanges: Sequence[PairExchange], partial: Buffer, blocks: Blocks) -> Lane:
    """Return the groups that combine contributions by folding and recursive halving, with partial results in `partial`.

    The last group lowers the result.
    """
    current, whole = Buffer.INPUT, range(folding.positions)
    lane: Lane = ()
    if not folding.is_exact:
        folded = folding.folded_onto(rank)
        into, own = blocks(partial, whole), blocks(current, whole)
        lane = (Group(tuple(RecvReduce(other, into, own, received_first=other < rank) for other in folded)),)
        current = partial if folded else current
    return (*lane, *reduce_scatter_lane(rank, exchanges, blocks, current, partial))


def _hand_over(folding: Folding, rank: int, blocks: Blocks) -> Group:
    """Return the group in which a rank without a place in the rounds sends its contribution to its leader."""
    return Group((Send(_leader(folding, rank), blocks(Buffer.INPUT, range(folding.positions))),))


def _leader(folding: Folding, rank: int) -> int:
    return folding.leader(folding.position(rank))


def from_block(first: int) -> Blocks:
    """Return the function from positions to blocks for a part of the vector that starts with block `first`."""
    return lambda buffer, positions: Span(buffer, first + positions.start, len(positions))


_by_position = from_block(0)
