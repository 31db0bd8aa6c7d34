"""Plans: frozen data that describes what one rank does in a collective.

Theory of operation
-------------------
A plan contains no numbers of bytes. Its operands are *blocks* of three buffers, INPUT, OUTPUT and SCRATCH. A
`Partition` cuts each buffer into blocks, whose lengths are known only when the collective is called (`ir.binding`). A
`Span` names some blocks of a buffer: start, start + stride, …, modulo the number of blocks.

A plan has one or more *lanes*, which run side by side. A lane runs its *groups* in order. The steps of a group are
posted together, and the group ends when all of them have ended. Therefore no step of a group may write memory that
another step of the group reads or writes. The source of a `Send`, for example, must stay unchanged until its group
ends. A group may also wait for groups of other lanes (`after`). A `Repeat` runs a few groups many times, and advances
peers and blocks each time. It keeps ring and pairwise plans a few rows long at any number of ranks.

*Segments.* A plan may run over S segments. Segment s of a block is the s-th of S nearly equal parts of it, so two
segments never share an element. Group g of segment s starts when three conditions hold: group g - 1 of segment s has
ended, group g of segment s - 1 has ended, and the groups in `after` have ended for segment s. The instances (g, s) are
posted in *canonical order*: by (g + s, s). For example, 2 groups and 3 segments give (0, 0), (1, 0), (0, 1), (1, 1),
(0, 2), (1, 2).

*Message identity.* Five numbers identify a message between two ranks: (communicator, sequence, lane, group, segment).
`group` counts groups as run, so a Repeat of 3 groups that runs 10 times counts as 30. Two rules follow. First, a group
sends at most one message to a peer and receives at most one from it. Second, both ends of a message have the same group
number; a rank that has nothing to do in between has empty groups. Both sides post the messages between two ranks on one
lane in canonical order, so a first-in-first-out channel carries them without looking at the numbers. A message of zero
bytes is not sent at all, unless its steps say `even_if_empty`: then a receiver that expects more detects it.

*Operations.* The elements of INPUT are contributions, and partial results are states. A step marked `lower` turns the
state that it writes into a result (`unisono.operations`). Each element of the result of a reduction is lowered exactly
once.

The plan of one rank is built without the plans of the others: `build(size, rank, root=0, **params) -> Plan` is pure and
deterministic.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import field, replace
from typing import TypeAlias

from unisono.foundation.records import record


class Buffer(enum.IntEnum):
    """The buffers of a plan. INPUT is never written; INPUT and OUTPUT may be the same memory."""

    INPUT = 0
    OUTPUT = 1
    SCRATCH = 2


class Counts(enum.IntEnum):
    """The element counts that a partition needs when the collective is called."""

    OWN = 0  # the number of elements of this rank's own buffer, on which all ranks agree
    SEND = 1  # one count per peer: the elements that this rank sends to it
    RECEIVE = 2  # one count per peer: the elements that this rank receives from it
    RANKS = 3  # one count per rank, which all ranks know


@record
class Partition:
    """How a buffer is cut into blocks.

    With `Counts.OWN`, the buffer has `blocks` nearly equal blocks; the first (elements mod blocks) are one element
    longer. With other `counts`, block i has the i-th count as its length.

    With `parts`, the rules above cut the buffer into blocks / parts shares, and each share is cut into `parts` nearly
    equal blocks. An algorithm needs this if the parts of a rank's share take different ways.

    A SCRATCH buffer may set `like`. It then consists of `copies` copies of the partition of another buffer, one after
    the other, and `blocks` is the number of blocks of all copies. If `block` is set too, SCRATCH consists of copies of
    that one block of the other buffer, named by its index in memory.
    """

    blocks: int
    counts: Counts = Counts.OWN
    like: Buffer | None = None
    copies: int = 1
    block: int | None = None
    parts: int = 1


def even(blocks: int) -> Partition:
    """Return the partition into `blocks` nearly equal parts."""
    return Partition(blocks)


def shares(size: int, varying: bool) -> Partition:
    """Return the partition into one block per rank: equal blocks or, if `varying`, by the counts of the ranks."""
    return Partition(size, Counts.RANKS) if varying else even(size)


def in_parts(shares: Partition, parts: int) -> Partition:
    """Return the partition in which each block of `shares` is cut into `parts` blocks."""
    return replace(shares, blocks=shares.blocks * parts, parts=parts)


def scratch_like(buffer: Buffer, partition: Partition, copies: int = 1) -> Partition:
    """Return a SCRATCH partition: `copies` copies of the `partition` of `buffer`. Block b of copy c is c·blocks + b."""
    return Partition(partition.blocks * copies, partition.counts, buffer, copies)


def scratch_like_block(buffer: Buffer, partition: Partition, block: int, copies: int) -> Partition:
    """Return a SCRATCH partition of `copies` blocks, each as long as one `block` of the `partition` of `buffer`."""
    return Partition(copies, partition.counts, buffer, copies, block)


@record
class Span:
    """`count` blocks of a buffer: (start + i·stride) modulo the number of its blocks, for i = 0 … count - 1.

    Inside a `Repeat`, each iteration after the first adds `advance` to `start`.
    """

    buffer: Buffer
    start: int = 0
    count: int = 1
    stride: int = 1
    advance: int = 0

    def at(self, iteration: int) -> Span:
        """Return the span in iteration `iteration` of the enclosing `Repeat`, counted from 0."""
        return replace(self, start=self.start + iteration * self.advance, advance=0) if self.advance else self

    def blocks(self, total: int) -> list[int]:
        """Return the logical indices of the blocks in a buffer that has `total` blocks."""
        return [(self.start + i * self.stride) % total for i in range(self.count)]


def input_block(start: int = 0, count: int = 1, stride: int = 1, advance: int = 0) -> Span:
    """Return a span of INPUT."""
    return Span(Buffer.INPUT, start, count, stride, advance)


def output_block(start: int = 0, count: int = 1, stride: int = 1, advance: int = 0) -> Span:
    """Return a span of OUTPUT."""
    return Span(Buffer.OUTPUT, start, count, stride, advance)


def scratch_block(start: int = 0, count: int = 1, stride: int = 1, advance: int = 0) -> Span:
    """Return a span of SCRATCH."""
    return Span(Buffer.SCRATCH, start, count, stride, advance)


@record
class Send:
    """Send the blocks of `src` to `peer`, as one message; a message without bytes only if `even_if_empty`."""

    peer: int
    src: Span
    peer_advance: int = 0
    even_if_empty: bool = False


@record
class Recv:
    """Receive a message from `peer` into the blocks of `dst`; one without bytes only if `even_if_empty`."""

    peer: int
    dst: Span
    peer_advance: int = 0
    even_if_empty: bool = False


@record
class RecvReduce:
    """Receive a message from `peer` and set dst = src ∘ received, or received ∘ src if `received_first`."""

    peer: int
    dst: Span
    src: Span
    received_first: bool = False
    lower: bool = False
    peer_advance: int = 0


@record
class Copy:
    """Copy the blocks of `src` to `dst`."""

    dst: Span
    src: Span
    lower: bool = False


@record
class Reduce:
    """Set dst = sources[0] ∘ sources[1] ∘ …, rounded once. `dst` may be one of the sources."""

    dst: Span
    sources: tuple[Span, ...]
    lower: bool = False


@record
class Read:
    """Copy blocks of `peer`'s mapped memory (`src`, in the peer's partition) to `dst`."""

    peer: int
    dst: Span
    src: Span
    peer_advance: int = 0


@record
class ReadReduce:
    """Set dst = sources[0] ∘ sources[1] ∘ …, rounded once. A source is (peer, span of the peer's mapped memory)."""

    dst: Span
    sources: tuple[tuple[int, Span], ...]
    lower: bool = False


@record
class Write:
    """Copy the blocks of `src` into `peer`'s mapped memory (`dst`, in the peer's partition)."""

    peer: int
    dst: Span
    src: Span
    peer_advance: int = 0


@record
class Signal:
    """Raise this rank's flag at `peer`, after all reads and writes of earlier groups."""

    peer: int
    peer_advance: int = 0


@record
class Wait:
    """Wait for the next flag from `peer`."""

    peer: int
    peer_advance: int = 0


MessageStep: TypeAlias = Send | Recv | RecvReduce
LocalStep: TypeAlias = Copy | Reduce
MappedStep: TypeAlias = Read | ReadReduce | Write | Signal | Wait
Step: TypeAlias = MessageStep | LocalStep | MappedStep


@record
class Group:
    """Steps that are posted together, after the groups (lane, group as run) in `after` of other lanes have ended."""

    steps: tuple[Step, ...]
    after: tuple[tuple[int, int], ...] = ()


@record
class Repeat:
    """Groups that run `times` times. Each iteration after the first moves peers and spans on by their own `advance`."""

    times: int
    groups: tuple[Group, ...]


Lane: TypeAlias = tuple[Group | Repeat, ...]


@record
class Plan:
    """The plan of rank `rank` among `size` ranks, for `collective` by `algorithm`.

    Attributes:
        input, output, scratch: the partitions; a buffer that the plan does not use has 0 blocks.
        lanes: see "Theory of operation" in this module.
        permutation: if not empty, block i of a span is block permutation[i] of memory. This applies to every buffer
            that has as many blocks as the permutation.
    """

    collective: str
    algorithm: str
    size: int
    rank: int
    root: int
    input: Partition
    output: Partition
    scratch: Partition = field(default=Partition(0))
    lanes: tuple[Lane, ...] = ()
    permutation: tuple[int, ...] = ()

    def partition(self, buffer: Buffer) -> Partition:
        """Return the partition of `buffer`."""
        return (self.input, self.output, self.scratch)[buffer]

    def physical_blocks(self, span: Span) -> list[int]:
        """Return the indices in memory of the blocks of `span`, in order."""
        total = self.partition(span.buffer).blocks
        blocks = span.blocks(total)
        return [self.permutation[block] for block in blocks] if len(self.permutation) == total else blocks

    def groups(self, lane: int) -> Iterator[Group]:
        """Yield the groups of a lane as run: repeats are unrolled, with peers (modulo size) and spans advanced."""
        for item in self.lanes[lane]:
            if isinstance(item, Group):
                yield item
                continue
            for iteration in range(item.times):
                for group in item.groups:
                    yield Group(tuple(self._at(step, iteration) for step in group.steps), group.after)

    def group_count(self, lane: int) -> int:
        """Return the number of groups of a lane as run."""
        return sum(times * len(groups) for times, groups in map(as_written, self.lanes[lane]))

    def _at(self, step: Step, iteration: int) -> Step:
        changes: dict[str, object] = {}
        if not isinstance(step, (Copy, Reduce, ReadReduce)):
            changes["peer"] = (step.peer + iteration * step.peer_advance) % self.size
            changes["peer_advance"] = 0
        if not isinstance(step, (Recv, Reduce, ReadReduce, Signal, Wait)):
            changes["src"] = step.src.at(iteration)
        if not isinstance(step, (Send, Signal, Wait)):
            changes["dst"] = step.dst.at(iteration)
        if isinstance(step, Reduce):
            changes["sources"] = tuple(source.at(iteration) for source in step.sources)
        if isinstance(step, ReadReduce):
            changes["sources"] = tuple((peer, source.at(iteration)) for peer, source in step.sources)
        return replace(step, **changes)  # type: ignore[arg-type]


def as_written(item: Group | Repeat) -> tuple[int, tuple[Group, ...]]:
    """Return how many times the groups of an item of a lane run, and these groups."""
    return (item.times, item.groups) if isinstance(item, Repeat) else (1, (item,))


def peers(plan: Plan) -> list[tuple[int, int]]:
    """Return the (lane, peer) pairs between which `plan` passes messages or flags, sorted, without duplicates."""
    pairs = {
        (lane, step.peer)
        for lane in range(len(plan.lanes))
        for group in plan.groups(lane)
        for step in group.steps
        if isinstance(step, (Send, Recv, RecvReduce, Signal, Wait))
    }
    return sorted(pairs)


def canonical_order(groups: int, segments: int) -> Iterator[tuple[int, int]]:
    """Yield the (group, segment) instances of a lane in the order of posting: by (group + segment, segment)."""
    for wave in range(groups + segments - 1):
        for segment in range(max(0, wave - groups + 1), min(segments, wave + 1)):
            yield wave - segment, segment
