"""Ring algorithms: every rank talks to its two neighbours only, and every link carries the same load in every round.

The vector is cut into one block for each rank. In the reduce-scatter, partial results travel once around the ring, and
each rank adds its contribution as they pass. In the allgather, the results travel once more around the ring. Both
phases move the least possible volume for any number of ranks. The price is one latency per rank and phase.
"""

from __future__ import annotations

from typing import NamedTuple

from unisono.algorithms.builders.arguments import check_parts, check_ranks
from unisono.algorithms.builders.lane_pieces import with_own_block
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    RecvReduce,
    Repeat,
    Send,
    Span,
    even,
    output_block,
    scratch_like,
    shares,
)


class _Track(NamedTuple):
    """One of `tracks` rings side by side, in a direction (1 or -1), on every `tracks`-th block of the vector."""

    number: int = 0
    tracks: int = 1
    direction: int = 1

    def span(self, buffer: Buffer, position: int, advance: int = 0) -> Span:
        """Return block `position` of this ring, as a span of the whole vector; `advance` counts blocks of this ring."""
        return Span(buffer, self.tracks * position + self.number, advance=self.tracks * advance)


_ONLY = _Track()


def allreduce_ring(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as ring reduce-scatter and ring allgather.

    INPUT and OUTPUT are cut into `size` blocks and may be the same memory. There is no SCRATCH. The contributions to
    block b are combined once, in the order b, b + 1, …, modulo `size`, so all ranks get the same bits.
    """
    check_ranks(size, rank, root)
    return _allreduce("ring", size, rank, root, (_ONLY,))


def allreduce_bidirectional_ring(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce on two rings, one in each direction, so that links are used both ways.

    INPUT and OUTPUT are cut into 2·`size` blocks: even ones for one ring, odd ones for the other. In all else it is
    like `allreduce_ring`.
    """
    check_ranks(size, rank, root)
    return _allreduce("bidirectional_ring", size, rank, root, (_Track(0, 2, 1), _Track(1, 2, -1)))


def allreduce_multi_lane_ring(size: int, rank: int, root: int = 0, lanes: int = 2) -> Plan:
    """Return the plan of an allreduce on `lanes` equal rings side by side, for links that one stream does not fill.

    INPUT and OUTPUT are cut into `lanes`·`size` blocks, which the rings take in turn. In all else it is like
    `allreduce_ring`.
    """
    check_ranks(size, rank, root)
    check_parts("lanes", lanes)
    return _allreduce("multi_lane_ring", size, rank, root, tuple(_Track(number, lanes) for number in range(lanes)))


def reduce_scatter_ring(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of a reduce-scatter around the ring.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH is like INPUT.
    """
    check_ranks(size, rank, root)
    vector = shares(size, varying)
    return Plan(
        collective="reduce_scatter",
        algorithm="ring",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=even(1),
        scratch=scratch_like(Buffer.INPUT, vector) if size > 2 else Partition(0),
        lanes=(_reduce_scatter(size, rank, rank - 1, Buffer.SCRATCH, output_block()),),
    )


def allgather_ring(size: int, rank: int, root: int = 0, varying: bool = False) -> Plan:
    """Return the plan of an allgather around the ring.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    lane = (*_pass_around(1, size, rank, rank), *_pass_around(size - 2, size, rank, rank - 1)) if size > 1 else ()
    return Plan(
        "allgather", "ring", size, rank, root, even(1), shares(size, varying), lanes=(with_own_block(rank, lane),)
    )


def _allreduce(algorithm: str, size: int, rank: int, root: int, tracks: tuple[_Track, ...]) -> Plan:
    """Return the plan on several rings, one lane each.

    On each ring, a rank ends the reduce-scatter with the result of the block after its own, in the ring's direction.
    """
    lanes = []
    for track in tracks:
        own = rank + track.direction
        combine = _reduce_scatter(size, rank, rank, Buffer.OUTPUT, track.span(Buffer.OUTPUT, own), track=track)
        lanes.append((*combine, *allgather_lane(size, rank, own, track)))
    vector = even(size * len(tracks))
    return Plan(
        algorithm=algorithm,
        collective="allreduce",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        lanes=tuple(lanes),
    )


def _reduce_scatter(size: int, rank: int, first: int, partial: Buffer, result: Span, *, track: _Track = _ONLY) -> Lane:
    """Return size - 1 groups that start by sending block `first`, and end with the block before it in `result`.

    "Before" is against the direction of the ring. The first group sends the rank's contribution directly from INPUT,
    and the last group lowers the result.
    """
    if size == 1:
        return (Group((Copy(result, track.span(Buffer.INPUT, 0), lower=True),)),)
    step, last = -track.direction, size - 2
    after, before = (rank + track.direction) % size, (rank - track.direction) % size

    def pass_on(number: int, advance: int = 0) -> Group:
        """Return group `number`, which sends one partial result and adds to the next one, which it receives."""
        leaving, arriving = first + number * step, first + (number + 1) * step
        source = Buffer.INPUT if number == 0 else partial
        target = result if number == last else track.span(partial, arriving, advance)
        own = track.span(Buffer.INPUT, arriving, advance)
        combine = RecvReduce(before, target, own, received_first=True, lower=number == last)
        return Group((Send(after, track.span(source, leaving, advance)), combine))

    lane: Lane = (pass_on(0),)
    lane += (Repeat(last - 1, (pass_on(1, advance=step),)),) if last > 1 else ()
    return (*lane, pass_on(last)) if last > 0 else lane


def allgather_lane(size: int, rank: int, first: int, track: _Track = _ONLY) -> Lane:
    """Return size - 1 groups that carry one block of every rank's OUTPUT to all other ranks.

    The block of a rank is `first`, which differs from the rank by a constant.
    """
    return _pass_around(size - 1, size, rank, first, track)


def _pass_around(times: int, size: int, rank: int, first: int, track: _Track = _ONLY) -> Lane:
    """Return `times` groups, in each of which a rank sends a block of OUTPUT on: `first`, then the blocks before it."""
    step = track.direction
    send = Send((rank + step) % size, track.span(Buffer.OUTPUT, first, -step))
    receive = Recv((rank - step) % size, track.span(Buffer.OUTPUT, first - step, -step))
    group = Group((send, receive))
    return (group,) if times == 1 else (Repeat(times, (group,)),) if times > 1 else ()
