"""Tree algorithms: data flows from the root towards the leaves, and every rank sends on the data that it has received.

Ranks stand in a tree at *positions*, counted from the root. In a k-nomial tree, the position above q is q with its
lowest non-zero digit (to the base k) set to 0. Every rank that has the data sends it to k - 1 other ranks in each
round. All ranks have the data as early as possible, which suits short vectors. In a binary tree no rank sends more than
twice, which suits long vectors in many segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances, lane_from_steps, single_rank_lane
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    RecvReduce,
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


class Links(NamedTuple):
    """The positions linked with a position in a tree: the one above (or none), and those below."""

    above: tuple[int, ...]
    below: tuple[int, ...]


class Node(NamedTuple):
    """A position in a tree: its distance from the top in links, and the positions linked with it."""

    depth: int
    links: Links


def knomial_rounds(size: int, position: int, radix: int) -> Iterator[Links]:
    """Yield the links of a position in each round of a flow down a k-nomial tree, the longest links first."""
    for distance in reversed(list(distances(size, radix))):
        digit = position // distance % radix
        if position % distance:
            yield Links((), ())
        elif digit:
            yield Links((position - digit * distance,), ())
        else:
            yield Links((), tuple(range(position + distance, min(position + radix * distance, size), distance)))


def binary_node(size: int, position: int) -> Node:
    """Return the node of a position in the complete binary tree whose positions are numbered level by level."""
    above = ((position - 1) // 2,) if position else ()
    below = tuple(child for child in (2 * position + 1, 2 * position + 2) if child < size)
    return Node((position + 1).bit_length() - 1, Links(above, below))


def broadcast_knomial(size: int, rank: int, root: int = 0, radix: int = 4) -> Plan:
    """Return the plan of a broadcast down a k-nomial tree, where k is the radix, in ⌈log_radix size⌉ rounds.

    The data is the INPUT of the root, one block; the other ranks have no INPUT. Every rank ends with the data in
    OUTPUT. The root copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    source = source_of_broadcast(rank, root)
    rounds = knomial_rounds(size, (rank - root) % size, radix)
    lane: Lane = tuple(
        Group(
            (
                *(Recv((root + position) % size, output_block()) for position in links.above),
                *(Send((root + position) % size, source) for position in links.below),
            )
        )
        for links in rounds
    )
    if rank == root:
        lane = (*lane, Group((Copy(output_block(), source),)))
    return Plan("broadcast", "knomial", size, rank, root, at_root(rank, root, even(1)), even(1), lanes=(lane,))


def broadcast_binomial(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down a binomial tree, which is the k-nomial tree of radix 2."""
    return replace(broadcast_knomial(size, rank, root, radix=2), algorithm="binomial")


def broadcast_binary(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down a complete binary tree. Buffers are as in `broadcast_knomial`."""
    check_ranks(size, rank, root)
    source = source_of_broadcast(rank, root)
    node = binary_node(size, (rank - root) % size)
    lane = flow_down(node, lambda position: (root + position) % size, source, output_block())
    return Plan("broadcast", "binary", size, rank, root, at_root(rank, root, even(1)), even(1), lanes=(lane,))


def reduce_binomial(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce up a binomial tree, in ⌈log2 size⌉ rounds, for any root.

    The order of combination is the canonical one (`builders.balanced_tree`), for any root. INPUT and the root's OUTPUT
    are one block each, and may be the same memory. Inner ranks of the tree have one block of SCRATCH.
    """
    check_ranks(size, rank, root)
    into, current = output_block() if rank == root else scratch_block(), input_block()
    merges = list(_merges(size, rank, root, radix=2))
    groups: list[Group] = []
    for number, links in enumerate(merges, start=1):
        steps: list[Step] = [Send(above, current) for above in links.above]
        for below in links.below:
            lower = rank == root and number == len(merges)
            steps.append(RecvReduce(below, into, current, received_first=below < rank, lower=lower))
        current = into if links.below else current
        groups.append(Group(tuple(steps)))
    vector = even(1)
    return Plan(
        collective="reduce",
        algorithm="binomial",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=Partition(0) if current.buffer is not Buffer.SCRATCH else scratch_like(Buffer.INPUT, vector),
        lanes=(tuple(groups) if size > 1 else single_rank_lane(),),
    )


def reduce_knomial(size: int, rank: int, root: int = 0, radix: int = 4) -> Plan:
    """Return the plan of a reduce up a k-nomial tree, where k is the radix, in ⌈log_radix size⌉ rounds, for any root.

    Contributions are combined in ascending order; those that arrive in one round are combined in one step. INPUT and
    the root's OUTPUT are one block each, and may be the same memory. SCRATCH holds the messages of a round and, in
    inner ranks other than the root, the partial result.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    merges = list(_merges(size, rank, root, radix))
    stages = max((len(links.below) for links in merges), default=0)
    into, current = output_block() if rank == root else scratch_block(stages), input_block()
    groups: list[Group] = []
    for number, links in enumerate(merges, start=1):
        arriving = [(below, scratch_block(index)) for index, below in enumerate(links.below)]
        receives = [Recv(below, stage) for below, stage in arriving]
        groups.append(Group((*receives, *(Send(above, current) for above in links.above))))
        operands = sorted([*arriving, (rank, current)], key=lambda operand: operand[0])
        lower = rank == root and number == len(merges)
        combine = Reduce(into, tuple(span for _, span in operands), lower=lower)
        groups.append(Group((combine,) if arriving else ()))
        current = into if arriving else current
    vector = even(1)
    return Plan(
        collective="reduce",
        algorithm="knomial",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector, copies=stages + (current.buffer is Buffer.SCRATCH)),
        lanes=(tuple(groups) if size > 1 else single_rank_lane(),),
    )


def _merges(size: int, rank: int, root: int, radix: int) -> Iterator[Links]:
    """Yield the partners of `rank` in each round of a flow up the tree, until `rank` sends its partial result.

    In each round, `radix` neighbouring runs of ranks merge into one. The partial result of a run is at the root if the
    root is in the run, else at the first rank of the run. So contributions are combined in ascending order, for any
    root.
    """

    def holder(run: int, length: int) -> int:
        return root if root // length == run else run * length

    for length in distances(size, radix):
        merged = rank // (radix * length)
        above = holder(merged, radix * length)
        if above != rank:
            yield Links((above,), ())
            return
        runs = range(merged * radix, min((merged + 1) * radix, -(-size // length)))
        yield Links((), tuple(other for run in runs if (other := holder(run, length)) != rank))


def barrier_tree(size: int, rank: int, root: int = 0, radix: int = 2) -> Plan:
    """Return the plan of a barrier: tokens flow up a k-nomial tree when ranks have come, then down when all have come.

    INPUT is a token of one element. SCRATCH receives the tokens of other ranks. There is no OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("radix", radix, 2)
    rounds = list(knomial_rounds(size, (rank - root) % size, radix))

    def steps(sources: tuple[int, ...], targets: tuple[int, ...]) -> tuple[Step, ...]:
        receives = [Recv((root + source) % size, scratch_block(index)) for index, source in enumerate(sources)]
        return (*receives, *(Send((root + target) % size, input_block()) for target in targets))

    up = [Group(steps(links.below, links.above)) for links in reversed(rounds)]
    down = [Group(steps(links.above, links.below)) for links in rounds]
    token = even(1)
    scratch = scratch_like(Buffer.INPUT, token, copies=radix - 1)
    return Plan("barrier", "tree", size, rank, root, token, Partition(0), scratch, lanes=((*up, *down),))


def source_of_broadcast(rank: int, root: int, block: int = 0) -> Span:
    """Return the span in which a rank has a block of the broadcast data: INPUT on the root, else OUTPUT."""
    return input_block(block) if rank == root else output_block(block)


def at_root(rank: int, root: int, partition: Partition) -> Partition:
    """Return the partition of a buffer that only the root has."""
    return partition if rank == root else Partition(0)


def flow_down(node: Node, rank_at: Callable[[int], int], source: Span, target: Span) -> Lane:
    """Return the lane of a rank that receives `target` from above and sends `source` to the positions below.

    Links from depth d to depth d + 1 are used in group d. The top copies `source` to `target`.
    """
    keep = () if node.links.above else (Copy(target, source),)
    steps: dict[int, tuple[Step, ...]] = {}
    for position in node.links.above:
        steps[node.depth - 1] = (Recv(rank_at(position), target),)
    steps[node.depth] = (*(Send(rank_at(position), source) for position in node.links.below), *keep)
    return lane_from_steps(steps)
