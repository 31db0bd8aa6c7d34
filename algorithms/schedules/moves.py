"""A schedule as data: moves of chunks between ranks, ordered by events.

Theory of operation. Formats of schedules differ in who acts: MSCCL has a sender and a receiver, MSCCL++ writes or reads
the memory of a peer. Here both are *moves*: chunks of one rank are copied to chunks of a rank, or combined with them. A
move reads its source at one *event* and writes its target at another one, which may be the same. Each event names the
events that directly precede it: the step before it in its threadblock, the steps that it waits for, the message or the
flag that it receives. Everything else may happen in any order.

A *cell* is one chunk, as a pair of a buffer and an index. The buffers are "i", "o" and "s" (input, output, scratch),
and "t" for values that a rank only passes on. All chunks of a vector, or of a rank's share, are equally long but for
one element.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from unisono.foundation.records import record

Cell: TypeAlias = tuple[str, int]


class Place(NamedTuple):
    """Chunks of one rank."""

    rank: int
    cells: tuple[Cell, ...]


@record
class Move:
    """Chunks that are copied, or combined with others.

    Attributes:
        source, target: chunks to be read and to be written; equally many.
        reads, writes: the numbers of the events at which this happens. An event reads before it writes.
        own: chunks of the target's rank, read at `writes`, that are combined with those of the source; None for a copy.
    """

    source: Place
    target: Place
    reads: int
    writes: int
    own: tuple[Cell, ...] | None = None


@record
class Schedule:
    """A collective as moves of chunks.

    Attributes:
        name: the name of the algorithm.
        collective: the name of the collective.
        size: the number of ranks.
        in_place: whether the input of a rank lies in its output, or the output in its input.
        chunks: the number of chunks of a vector, or of a rank's share in collectives with shares.
        events: for each event, the place in the file where it stands, for errors: "rank 1, threadblock 0, step 3".
        before: for each event, the events that directly precede it.
        moves: the moves.
    """

    name: str
    collective: str
    size: int
    in_place: bool
    chunks: int
    events: tuple[str, ...]
    before: tuple[tuple[int, ...], ...]
    moves: tuple[Move, ...]
