"""Circulant graphs: every rank talks to ranks at a few distances, each about half of the one before.

In the reduce-scatter, a rank holds partial results of the blocks of its own rank and of the ranks after it: p blocks at
first, then half of them, rounded up, and so on. In each round it sends the far half of them. The receiver is the rank
with the number of the first block of that half. The rank combines the blocks that it receives with the near half. Of 7
ranks, for example, a rank holds 7, 4, 2 and 1 blocks, and sends to the ranks 4, 2 and 1 after it. After ⌈log2 p⌉ rounds
it has the result of its own block.

The allgather is the same exchanges backwards. Both work for any number of ranks with all ranks active, and move the
least possible volume.
"""

from __future__ import annotations

from collections.abc import Iterator

from unisono.algorithms.builders.arguments import check_ranks
from unisono.algorithms.builders.lane_pieces import single_rank_lane, with_own_block
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


def allreduce_circulant(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as reduce-scatter and allgather on a circulant graph, for any number of ranks.

    INPUT and OUTPUT are cut into `size` blocks and may be the same memory. There is no SCRATCH. Each block is combined
    by one rank, in an order that depends on the block, so all ranks get the same bits.
    """
    check_ranks(size, rank, root)
    combine = _reduce_scatter(size, rank, Buffer.OUTPUT, output_block(rank))
    return Plan(
        collective="allreduce",
        algorithm="circulant",
        size=size,
        rank=rank,
        root=root,
        input=even(size),
        output=even(size),
        lanes=((*combine, *_allgather(size, rank)),),
    )


def reduce_scatter_circulant(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter on a circulant graph, for any number of ranks.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH is like INPUT.
    """
    check_ranks(size, rank, root)
    vector = shares(size, varying)
    return Plan(
        collective="reduce_scatter",
        algorithm="circulant",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=even(1),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 2 else Partition(0),
        lanes=(_reduce_scatter(size, rank, Buffer.SCRATCH, output_block()),),
    )


def allgather_circulant(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather on a circulant graph, for any number of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    lane = with_own_block(rank, _allgather(size, rank))
    return Plan("allgather", "circulant", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def _halvings(size: int) -> Iterator[tuple[int, int]]:
    """Yield, for each round of the reduce-scatter, the number of blocks that a rank holds before it and after it."""
    held = size
    while held > 1:
        kept = (held + 1) // 2
        yield held, kept
        held = kept


def _reduce_scatter(size: int, rank: int, partial: Buffer, result: Span) -> Lane:
    """Return the rounds that leave the result of block `rank` in `result`, with partial results in `partial`."""
    lane: Lane = () if size > 1 else single_rank_lane()
    current = Buffer.INPUT
    for held, kept in _halvings(size):
        moved = held - kept
        send = Send((rank + kept) % size, Span(current, rank + kept, moved))
        into = Span(partial, rank, moved) if kept > 1 else result
        steps: list[Step] = [send, RecvReduce((rank - kept) % size, into, Span(current, rank, moved), lower=kept == 1)]
        if current is Buffer.INPUT and moved < kept:
            # Nothing arrives for the last block that is kept. Copy it to the others, so that one span names them all.
            steps.append(Copy(Span(partial, rank + moved), input_block(rank + moved)))
        lane = (*lane, Group(tuple(steps)))
        current = partial
    return lane


def _allgather(size: int, rank: int) -> Lane:
    """Return the rounds that carry block `rank` of every rank's OUTPUT to all other ranks."""
    return tuple(
        Group(
            (
                Send((rank - kept) % size, output_block(rank, count=held - kept)),
                Recv((rank + kept) % size, output_block(rank + kept, count=held - kept)),
            )
        )
        for held, kept in reversed(list(_halvings(size)))
    )
