"""Broadcast and reduce in n blocks on a circulant graph, in the least possible number of rounds: n - 1 + ⌈log2 p⌉.

`block_schedule` says which block each rank receives and sends in each round, in phases of q = ⌈log2 p⌉ rounds. The last
phase begins with the last block, n - 1, and would go on with blocks that do not exist. The last block is sent in their
place, so it reaches all ranks in q rounds. Some rounds of the first phase are left out if the number of rounds is no
multiple of q. Messages of blocks below 0 are left out, too. For example, 4 ranks receive 3 blocks from the root:

    round     1    2    3    4    5
    skip      2    3    1    2    3
    rank 1              2    1    0
    rank 2    0              2    1
    rank 3         1    0         2
    rank 4              1    0    2

The root sends block 2 in round 3 to rank 1, and in rounds 4 and 5, instead of blocks 3 and 4, to ranks 2 and 3.

The reduce is the broadcast backwards: a rank receives where it sent, combines the block with its own, and sends where
it received. Every rank but the root sends each block once, as a partial result.

The phases between the first and the last differ only in the numbers of their blocks. So a plan is a `Repeat` of one
phase, with some groups before and after it, at any number of blocks.

Open questions
--------------
Doubted: rounds of one message in each direction suit links that carry both directions at full bandwidth. Trees keep
more messages under way. The pages on measurements compare them (docs/measurements/contention.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unisono.algorithms.builders.arguments import check_parts, check_ranks
from unisono.algorithms.builders.block_schedule import receive_schedule, send_schedule, skips
from unisono.algorithms.builders.lane_pieces import single_rank_lane
from unisono.algorithms.builders.tree import at_root, source_of_broadcast
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
    Step,
    even,
    output_block,
    scratch_like,
)


def broadcast_circulant_blocks(size: int, rank: int, root: int = 0, blocks: int = 8) -> Plan:
    """Return the plan of a broadcast in `blocks` blocks, for any number of ranks and blocks.

    The data is the INPUT of the root; the other ranks have no INPUT. Every rank ends with the data in OUTPUT. The root
    copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)
    check_parts("blocks", blocks)
    part, source = _Part(size, (rank - root) % size, blocks), source_of_broadcast(rank, root).buffer
    own = (Copy(output_block(0, blocks), Span(source, 0, blocks)),) if rank == root else ()

    def group(number: int, advance: int) -> Group:
        steps: list[Step] = list(own) if number == part.first else []
        if (block := part.sent(number)) is not None:
            steps.append(Send((rank + part.skip(number)) % size, Span(source, block, advance=advance)))
        if (block := part.received(number)) is not None:
            steps.append(Recv((rank - part.skip(number)) % size, output_block(block, advance=advance)))
        return Group(tuple(steps))

    lane = part.lane(group) if size > 1 else (Group(own),)
    vector = even(blocks)
    return Plan("broadcast", "circulant_blocks", size, rank, root, at_root(rank, root, vector), vector, lanes=(lane,))


def reduce_circulant_blocks(size: int, rank: int, root: int = 0, blocks: int = 8) -> Plan:
    """Return the plan of a reduce in `blocks` blocks, for any number of ranks and blocks.

    INPUT and the root's OUTPUT may be the same memory. SCRATCH holds the partial results of the other ranks. Each block
    is combined along a tree of its own, so the order of combination depends on the block.
    """
    check_ranks(size, rank, root)
    check_parts("blocks", blocks)
    part, vector = _Part(size, (rank - root) % size, blocks), even(blocks)
    partial = Buffer.OUTPUT if rank == root else Buffer.SCRATCH

    def group(number: int, advance: int) -> Group:
        """Return the group that takes the place of a round of the broadcast."""
        steps: list[Step] = []
        if (block := part.received(number)) is not None:
            combined = Buffer.SCRATCH if part.rounds_of_sends(block, number) else Buffer.INPUT
            steps.append(Send((rank - part.skip(number)) % size, Span(combined, block, advance=-advance)))
        if (block := part.sent(number)) is not None:
            into, own = (Span(buffer, block, advance=-advance) for buffer in (partial, Buffer.INPUT))
            numbers = part.rounds_of_sends(block, number)
            source, is_result = own if number == numbers[-1] else into, rank == root and number == numbers[0]
            steps.append(RecvReduce((rank + part.skip(number)) % size, into, source, lower=is_result))
        return Group(tuple(steps))

    return Plan(
        collective="reduce",
        algorithm="circulant_blocks",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector) if rank != root else Partition(0),
        lanes=(part.lane(group, backwards=True) if size > 1 else single_rank_lane(blocks),),
    )


class _Part:
    """The part of one rank in a broadcast: the block that it sends and receives in each round. Blocks begin at 0.

    Rounds are numbered from the beginning of the first phase, in which `first` rounds are left out.
    """

    def __init__(self, size: int, rank: int, blocks: int) -> None:
        self._rank, self._size, self._blocks = rank, size, blocks
        self._skips = skips(size)
        self._phase = len(self._skips) - 1
        self._sent, self._received = send_schedule(size, rank), receive_schedule(size, rank)
        self.first = (1 - blocks) % self._phase if self._phase else 0
        self._end = self.first + blocks - 1 + self._phase

    def skip(self, number: int) -> int:
        """Return the distance of the messages of a round."""
        return self._skips[number % self._phase]

    def received(self, number: int) -> int | None:
        """Return the block that the rank receives in a round, or None."""
        return self._block(self._received, number) if self._rank else None

    def sent(self, number: int) -> int | None:
        """Return the block that the rank sends in a round, or None. The root needs none."""
        is_to_root = self._rank + self.skip(number) == self._size
        return None if is_to_root else self._block(self._sent, number)

    def rounds_of_sends(self, block: int, near: int) -> list[int]:
        """Return the rounds in which the rank sends a block, in order; it sends or receives the block in round `near`.

        A rank that receives a block in one phase has sent it everywhere before the same round of the phase after next.
        """
        span = range(max(self.first, near - 2 * self._phase), min(self._end, near + 2 * self._phase))
        return [number for number in span if self.sent(number) == block]

    def lane(self, group: Callable[[int, int], Group], *, backwards: bool = False) -> Lane:
        """Return the lane of all rounds. `group(number, advance)` returns the group of a round.

        In a `Repeat`, `advance` is the number of blocks from one phase to the next. It has all phases without blocks
        that do not exist: not the last one, nor the first one, nor the second one if rounds are left out.
        """
        last = self._end // self._phase - 1
        first = min(1 + (self.first > 0), last)
        before, repeated, after = (
            tuple(group(number, advance) for number in (reversed(numbers) if backwards else numbers))
            for numbers, advance in (
                (range(self.first, first * self._phase), 0),
                (self._phase_rounds(last - 1 if backwards else first), self._phase),
                (self._phase_rounds(last), 0),
            )
        )
        middle: Lane = (Repeat(last - first, repeated),) if last > first else ()
        return (*after, *middle, *before) if backwards else (*before, *middle, *after)

    def _phase_rounds(self, phase: int) -> range:
        return range(phase * self._phase, (phase + 1) * self._phase)

    def _block(self, schedule: Sequence[int], number: int) -> int | None:
        """Return the block of a round by a schedule, or None. The last block takes the place of later ones."""
        block = schedule[number % self._phase] + number // self._phase * self._phase - self.first
        return None if block < 0 else min(block, self._blocks - 1)
