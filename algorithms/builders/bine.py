"""Bine trees (binomial negabinary): trees of logarithmic depth over short distances, to both sides of the root.

A binomial tree grows to one side, over the distances 1, 2, 4, 8, … A Bine tree grows to both sides in turn: it has the
distances 1, -1, 3, -5, 11, … of `builders.swing`, which are about a third shorter. Fewer messages therefore leave the
group of hosts in which they begin. The farthest link is used first on the way down. Ranks have *places*, counted from
the root around the ring, and links lead from even places to odd ones and back.

A place and the places below it are one run around the ring. Of 2^k places that begin at an even place q, `_reach(k)`
places lie below q and the others above; at an odd place, it is the other way round. So a gather, a scatter, an
allgather and a reduce-scatter send one run of blocks in each message.

If the number of ranks is not a power of two, ranks are folded, relative to the root (`builders.folding`): a message
more goes from a place to the second rank of that place, its neighbour. This takes as many rounds as a binomial tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_ranks, check_supported, needs_power_of_two
from unisono.algorithms.builders.folding import Folding, fold
from unisono.algorithms.builders.lane_pieces import single_rank_lane, with_own_block
from unisono.algorithms.builders.swing import allreduce_swing, swing_partner
from unisono.algorithms.builders.tree import at_root, source_of_broadcast
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Counts,
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
    shares,
)


class _Run(NamedTuple):
    """A run of ranks around the ring: the first one, and their number."""

    first: int
    number: int


class _BineLink(NamedTuple):
    """A link of a rank in the tree.

    Attributes:
        peer: the rank at the other end.
        is_above: whether the peer is the rank above this one.
        below: the lower end of the link and all ranks below it.
    """

    peer: int
    is_above: bool
    below: _Run


def broadcast_bine(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down a Bine tree in ⌈log2 size⌉ rounds, for any number of ranks.

    The data is the INPUT of the root, one block; the other ranks have no INPUT. Every rank ends with the data in
    OUTPUT. The root copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)
    source = source_of_broadcast(rank, root)
    lane = _flow(
        _links(size, rank, root),
        with_above=lambda link: Recv(link.peer, output_block()),
        with_below=lambda link: Send(link.peer, source),
    )
    if rank == root:
        lane = (*lane, Group((Copy(output_block(), source),)))
    return Plan("broadcast", "bine", size, rank, root, at_root(rank, root, even(1)), even(1), lanes=(lane,))


def reduce_bine(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce up a Bine tree in ⌈log2 size⌉ rounds, for any number of ranks.

    INPUT and the root's OUTPUT are one block each, and may be the same memory. Inner ranks of the tree have one block
    of SCRATCH. The order of combination is the order in which partial results arrive.
    """
    check_ranks(size, rank, root)
    links = _links(size, rank, root)[::-1]
    into, current, lane = output_block() if rank == root else scratch_block(), input_block(), list[Group]()
    for number, link in enumerate(links, start=1):
        steps: tuple[Step, ...] = ()
        if link is not None and link.is_above:
            steps = (Send(link.peer, current),)
        elif link is not None:
            steps = (RecvReduce(link.peer, into, current, lower=rank == root and number == len(links)),)
            current = into
        lane.append(Group(steps))
    return Plan(
        collective="reduce",
        algorithm="bine",
        size=size,
        rank=rank,
        root=root,
        input=even(1),
        output=at_root(rank, root, even(1)),
        scratch=scratch_like(Buffer.INPUT, even(1)) if current == scratch_block() else Partition(0),
        lanes=(tuple(lane) if size > 1 else single_rank_lane(),),
    )


def gather_bine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a gather up a Bine tree in ⌈log2 size⌉ rounds, for any number of ranks.

    INPUT is one block. Only the root has an OUTPUT: `size` blocks, equal ones or, if `varying`, by the counts of the
    ranks. The root's INPUT may be the memory of its block of OUTPUT. Inner ranks of the tree have SCRATCH for the
    blocks of the ranks below them.
    """
    check_ranks(size, rank, root)
    holding = _holding(size, rank, root, varying, at_root=Buffer.OUTPUT, at_leaf=Buffer.INPUT)
    own = holding.blocks(_Run(rank, 1))
    lane = _flow(
        _links(size, rank, root)[::-1],
        with_above=lambda link: Send(link.peer, holding.blocks(link.below)),
        with_below=lambda link: Recv(link.peer, holding.blocks(link.below)),
    )
    keep = Group(() if own == input_block() else (Copy(own, input_block()),))
    output = at_root(rank, root, shares(size, varying))
    return Plan("gather", "bine", size, rank, root, even(1), output, holding.scratch, lanes=((keep, *lane),))


def scatter_bine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a scatter down a Bine tree in ⌈log2 size⌉ rounds, for any number of ranks.

    Only the root has an INPUT: `size` blocks, equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one
    block. The root's OUTPUT may be the memory of its block of INPUT. SCRATCH is as in `gather_bine`.
    """
    check_ranks(size, rank, root)
    holding = _holding(size, rank, root, varying, at_root=Buffer.INPUT, at_leaf=Buffer.OUTPUT)
    own = holding.blocks(_Run(rank, 1))
    lane = _flow(
        _links(size, rank, root),
        with_above=lambda link: Recv(link.peer, holding.blocks(link.below)),
        with_below=lambda link: Send(link.peer, holding.blocks(link.below)),
    )
    keep = Group(() if own == output_block() else (Copy(output_block(), own),))
    cut = at_root(rank, root, shares(size, varying))
    return Plan("scatter", "bine", size, rank, root, cut, even(1), holding.scratch, lanes=((*lane, keep),))


def allreduce_bine(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce over the distances of Bine trees, which is `allreduce_swing` on a ring."""
    return replace(allreduce_swing(size, rank, root), algorithm="bine")


def allgather_bine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather over the distances of Bine trees, nearest first, for a power of two of ranks.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.

    Raises:
        UsageError: `size` is not a power of two.
    """
    check_ranks(size, rank, root)
    check_supported(needs_power_of_two(size))
    lane: Lane = ()
    for level in range(size.bit_length() - 1):
        partner = swing_partner(size, rank, level)
        own, others = (_span(Buffer.OUTPUT, _places(each, level)) for each in (rank, partner))
        lane = (*lane, Group((Send(partner, own), Recv(partner, others))))
    return Plan(
        "allgather", "bine", size, rank, root, even(1), shares(size, varying), lanes=(with_own_block(rank, lane),)
    )


def reduce_scatter_bine(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter over the distances of Bine trees, for a power of two of ranks.

    The farthest partner comes first. INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks.
    OUTPUT is one block, and may be the memory of block `rank` of INPUT. SCRATCH is like INPUT.

    Raises:
        UsageError: `size` is not a power of two.
    """
    check_ranks(size, rank, root)
    check_supported(needs_power_of_two(size))
    lane, current = tuple[Group, ...](), Buffer.INPUT
    for level in reversed(range(size.bit_length() - 1)):
        partner = swing_partner(size, rank, level)
        kept, sent = (_span(current, _places(each, level)) for each in (rank, partner))
        into = replace(kept, buffer=Buffer.SCRATCH) if level else output_block()
        lane = (*lane, Group((Send(partner, sent), RecvReduce(partner, into, kept, partner < rank, lower=level == 0))))
        current = Buffer.SCRATCH
    vector = shares(size, varying)
    return Plan(
        collective="reduce_scatter",
        algorithm="bine",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=even(1),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 2 else Partition(0),
        lanes=(lane or single_rank_lane(),),
    )


def _reach(level: int) -> int:
    """Return how many of the 2^level places that an even place heads lie below it: the sum of the odd powers of 2."""
    return sum(1 << bit for bit in range(1, level, 2))


def _places(place: int, level: int) -> _Run:
    """Return the run of 2^level places that a place heads; they may exceed the number of places, and wrap."""
    below = _reach(level)
    return _Run(place - (below if place % 2 == 0 else (1 << level) - 1 - below), 1 << level)


def _span(buffer: Buffer, run: _Run) -> Span:
    return Span(buffer, run.first, run.number)


def _flow(
    links: Sequence[_BineLink | None],
    *,
    with_above: Callable[[_BineLink], Step],
    with_below: Callable[[_BineLink], Step],
) -> Lane:
    """Return a group for each round: the message with the rank above or with one below, or nothing."""
    return tuple(
        Group(() if link is None else ((with_above if link.is_above else with_below)(link),)) for link in links
    )


def _links(size: int, rank: int, root: int) -> list[_BineLink | None]:
    """Return the link of `rank` in each of the ⌈log2 size⌉ rounds of a flow down the tree; None if it has none."""
    folding, rank = fold(size, root=0), (rank - root) % size
    none: list[_BineLink | None] = [None] * folding.rounds
    links = _links_of_leader(folding, rank) if folding.leads(rank) else none
    if not folding.is_exact:
        links.append(_link_of_fold(folding, rank))
    return [link and _moved(link, size, root) for link in links]


def _moved(link: _BineLink, size: int, root: int) -> _BineLink:
    """Return a link between ranks that are counted from the root as a link between ranks."""
    first, number = link.below
    return _BineLink((link.peer + root) % size, link.is_above, _Run((first + root) % size, number))


def _links_of_leader(folding: Folding, rank: int) -> list[_BineLink | None]:
    """Return the links between places, the farthest first. Ranks are counted from the root."""
    place, head, links = folding.position(rank), 0, list[_BineLink | None]()
    for level in reversed(range(folding.rounds)):
        other = swing_partner(folding.positions, head, level)
        below = _places(other, level)
        is_above = place == other
        if place in (head, other):
            peer = folding.leader(head if is_above else other)
            links.append(_BineLink(peer, is_above, _ranks_at(folding, below)))
        else:
            links.append(None)
        head = other if (place - below.first) % folding.positions < below.number else head
    return links


def _link_of_fold(folding: Folding, rank: int) -> _BineLink | None:
    """Return the link from the leader of a place to the second rank there. Ranks are counted from the root."""
    leader = folding.leader(folding.position(rank))
    for other in folding.folded_onto(leader):
        return _BineLink(leader if rank == other else other, rank == other, _Run(other, 1))
    return None


def _ranks_at(folding: Folding, places: _Run) -> _Run:
    """Return the ranks at a run of places."""
    positions = folding.positions
    first = folding.run(places.first % positions)[0]
    last = folding.run((places.first + places.number - 1) % positions)[-1]
    return _Run(first, (last - first) % folding.size + 1)


class _Holding(NamedTuple):
    """The memory in which a rank of a gather or scatter holds the blocks of the ranks that it heads.

    Attributes:
        buffer: the buffer.
        first: the rank whose block is block 0 of the buffer.
        size: the number of ranks.
        scratch: the partition of SCRATCH.
    """

    buffer: Buffer
    first: int
    size: int
    scratch: Partition

    def blocks(self, run: _Run) -> Span:
        """Return the blocks of a run of ranks."""
        return Span(self.buffer, (run.first - self.first) % self.size, run.number)


def _holding(size: int, rank: int, root: int, varying: bool, *, at_root: Buffer, at_leaf: Buffer) -> _Holding:
    """Return where a rank holds blocks: the root in its buffer of all shares, a leaf in its own share."""
    headed = _headed(size, rank, root)
    if rank == root:
        return _Holding(at_root, 0, size, Partition(0))
    if headed.number == 1:
        return _Holding(at_leaf, rank, size, Partition(0))
    if varying:
        return _Holding(Buffer.SCRATCH, 0, size, Partition(size, Counts.RANKS))
    return _Holding(Buffer.SCRATCH, headed.first, size, scratch_like(at_leaf, even(1), copies=headed.number))


def _headed(size: int, rank: int, root: int) -> _Run:
    """Return the ranks that a rank heads in the tree, including itself; of the root, the rank alone."""
    return next((link.below for link in _links(size, rank, root) if link and link.is_above), _Run(rank, 1))
