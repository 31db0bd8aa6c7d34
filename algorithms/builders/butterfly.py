"""Butterflies: pairs of ranks exchange halves of the blocks that they hold, until each rank holds one block.

In a reduce-scatter, each rank of a pair sends the partial results of one half to its partner and combines those of the
other half. In an allgather, the same exchanges run backwards. A butterfly is the list of its exchanges on one rank.
Algorithms differ in their pairs: ranks whose numbers differ in one bit (`builders.rabenseifner`), or neighbours on a
ring, to both sides in turn (`builders.swing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from unisono.algorithms.ir.plan import Buffer, Group, Lane, Recv, RecvReduce, Send, Span

# A function of (buffer, consecutive positions) that returns the blocks of these positions.
Blocks: TypeAlias = Callable[[Buffer, range], Span]


class PairExchange(NamedTuple):
    """One exchange: the partner, and the positions whose blocks the rank keeps and sends in a reduce-scatter."""

    partner: int
    kept: range
    sent: range


def halves(held: range, *, keeps_upper: bool) -> tuple[range, range]:
    """Return the half of `held` that a rank keeps, and the half that it sends."""
    middle = len(held) // 2
    lower, upper = held[:middle], held[middle:]
    return (upper, lower) if keeps_upper else (lower, upper)


def reduce_scatter_lane(
    rank: int,
    exchanges: Sequence[PairExchange],
    blocks: Blocks,
    current: Buffer,
    partial: Buffer,
    result: Span | None = None,
) -> Lane:
    """Return the groups of a reduce-scatter: the first one sends from `current`, the later ones from `partial`.

    The last group lowers the result, and writes it to `result` or, if that is None, to its block of `partial`.
    """
    lane: Lane = ()
    for partner, kept, sent in exchanges:
        is_last = len(kept) == 1
        arriving = RecvReduce(
            partner,
            dst=result if is_last and result is not None else blocks(partial, kept),
            src=blocks(current, kept),
            received_first=partner < rank,
            lower=is_last,
        )
        lane = (*lane, Group((Send(partner, blocks(current, sent)), arriving)))
        current = partial
    return lane


def allgather_lane(exchanges: Sequence[PairExchange], blocks: Blocks) -> Lane:
    """Return the groups of an allgather, in which a rank starts with its own block of OUTPUT."""
    return tuple(
        Group((Send(partner, blocks(Buffer.OUTPUT, kept)), Recv(partner, blocks(Buffer.OUTPUT, sent))))
        for partner, kept, sent in reversed(exchanges)
    )
