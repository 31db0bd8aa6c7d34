"""Gather and scatter: the blocks of all ranks travel to the root, or from it.

Linear: the root exchanges a message with every rank, a window of them at a time. Binomial: the ranks form a binomial
tree. A rank at *position* q, counted from the root, heads the ranks from q up to q plus the lowest set bit of q. So the
blocks that it passes up or receives from above are one run, which wraps around the end of the vector.

A rank that heads other ranks holds the blocks of all of them in SCRATCH. With counts per rank, SCRATCH is cut like the
whole vector, and the rank uses only the blocks of the ranks that it heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import empty_groups, in_windows
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def gather_linear(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a gather in which the root receives from `window` ranks at a time.

    INPUT is one block. Only the root has an OUTPUT: `size` blocks, equal ones or, if `varying`, by the counts of the
    ranks. The root's INPUT may be the memory of its block of OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)

    def batch(first: int, number: int) -> Group:
        sources = range(root + 1 + first, root + 1 + first + number)
        return Group(tuple(Recv(source % size, output_block(source, advance=window), window) for source in sources))

    own = Group((Copy(output_block(root), input_block()),))
    lane = (*in_windows(size - 1, window, batch), own)
    if rank != root:
        lane = _in_turn(size, rank, root, window, Send(root, input_block()))
    return Plan("gather", "linear", size, rank, root, even(1), _at_root(size, rank, root, varying), lanes=(lane,))


def scatter_linear(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a scatter in which the root sends to `window` ranks at a time.

    Only the root has an INPUT: `size` blocks, equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one
    block. The root's OUTPUT may be the memory of its block of INPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)

    def batch(first: int, number: int) -> Group:
        targets = range(root + 1 + first, root + 1 + first + number)
        return Group(tuple(Send(target % size, input_block(target, advance=window), window) for target in targets))

    own = Group((Copy(output_block(), input_block(root)),))
    lane = (*in_windows(size - 1, window, batch), own)
    if rank != root:
        lane = _in_turn(size, rank, root, window, Recv(root, output_block()))
    return Plan("scatter", "linear", size, rank, root, _at_root(size, rank, root, varying), even(1), lanes=(lane,))


def _in_turn(size: int, rank: int, root: int, window: int, step: Step) -> Lane:
    """Return the lane of a rank whose only step is a message with the root, in the group of the root's window."""
    return (*empty_groups(((rank - root) % size - 1) // window), Group((step,)))


def _at_root(size: int, rank: int, root: int, varying: bool) -> Partition:
    """Return the partition of the buffer that only the root has."""
    if rank != root:
        return Partition(0)
    return shares(size, varying)


def gather_binomial(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a gather up a binomial tree in ⌈log2 size⌉ rounds. Buffers are as in `gather_linear`."""
    check_ranks(size, rank, root)
    own = _own_block(size, rank, root, varying, at_root=Buffer.OUTPUT, at_leaf=Buffer.INPUT)
    keep = Group(() if own == input_block() else (Copy(own, input_block()),))
    return Plan(
        collective="gather",
        algorithm="binomial",
        size=size,
        rank=rank,
        root=root,
        input=even(1),
        output=_at_root(size, rank, root, varying),
        scratch=_scratch(size, rank, root, varying, own=own, share=Buffer.INPUT),
        lanes=((keep, *gather_lane(size, rank, root, own)),),
    )


def scatter_binomial(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a scatter down a binomial tree in ⌈log2 size⌉ rounds. Buffers are as in `scatter_linear`."""
    check_ranks(size, rank, root)
    own = _own_block(size, rank, root, varying, at_root=Buffer.INPUT, at_leaf=Buffer.OUTPUT)
    keep = Group(() if own == output_block() else (Copy(output_block(), own),))
    return Plan(
        collective="scatter",
        algorithm="binomial",
        size=size,
        rank=rank,
        root=root,
        input=_at_root(size, rank, root, varying),
        output=even(1),
        scratch=_scratch(size, rank, root, varying, own=own, share=Buffer.OUTPUT),
        lanes=((*scatter_lane(size, rank, root, own), keep),),
    )


def gather_lane(size: int, rank: int, root: int, own: Span) -> Lane:
    """Return ⌈log2 size⌉ groups that carry the blocks of all ranks up a binomial tree to the root.

    `own` is the rank's own block. The rank collects the blocks of the ranks that it heads after it.
    """
    lane: Lane = ()
    for peer, first, count in _links(size, rank, root):
        blocks = replace(own, start=own.start + first, count=count)
        lane += (Group((Recv(peer, blocks) if first else Send(peer, blocks),) if count else ()),)
    return lane


def scatter_lane(size: int, rank: int, root: int, own: Span) -> Lane:
    """Return ⌈log2 size⌉ groups that carry the blocks of all ranks down a binomial tree; `own` as in `gather_lane`."""
    lane: Lane = ()
    for peer, first, count in reversed(list(_links(size, rank, root))):
        blocks = replace(own, start=own.start + first, count=count)
        lane += (Group((Send(peer, blocks) if first else Recv(peer, blocks),) if count else ()),)
    return lane


def _links(size: int, rank: int, root: int) -> Iterator[tuple[int, int, int]]:
    """Yield (peer, first, count) for each round of a gather: the peer, and the blocks that the two ranks exchange.

    `first` is the distance of the blocks from the rank's own block. It is 0 for the peer above, which receives all
    blocks that the rank has. `count` is 0 in a round in which the rank has nothing to do.
    """
    position = (rank - root) % size
    for bit in range((size - 1).bit_length()):
        distance = 1 << bit
        if position % (2 * distance) == distance:
            yield (rank - distance) % size, 0, min(distance, size - position)
        else:
            below = size - position - distance if position % (2 * distance) == 0 else 0
            yield (rank + distance) % size, distance, max(0, min(distance, below))


def _headed(size: int, rank: int, root: int) -> int:
    """Return how many ranks, including itself, a rank heads in the binomial tree."""
    position = (rank - root) % size
    return min(position & -position or size, size - position)


def _own_block(size: int, rank: int, root: int, varying: bool, *, at_root: Buffer, at_leaf: Buffer) -> Span:
    """Return the span of a rank's own block. After this block lie the blocks of the ranks below it in the tree."""
    if rank == root:
        return Span(at_root, rank)
    if _headed(size, rank, root) == 1:
        return Span(at_leaf)
    return scratch_block(rank if varying else 0)


def _scratch(size: int, rank: int, root: int, varying: bool, *, own: Span, share: Buffer) -> Partition:
    """Return the partition of SCRATCH: empty unless the span `own` lies in it. `share` is a buffer of one block."""
    if own.buffer is not Buffer.SCRATCH:
        return Partition(0)
    if varying:
        return Partition(size, Counts.RANKS)
    return scratch_like(share, even(1), copies=_headed(size, rank, root))
