"""Tree algorithms: data flows from the root towards the leaves, and every rank passes on what it has received."""

from __future__ import annotations

from unisono.algorithms.plan import (
    Buffer,
    Copy,
    Group,
    Partition,
    Plan,
    Recv,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
)


def broadcast_binomial(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast down a binomial tree, for any root.

    The data is the INPUT of the root, one block; all other ranks have no INPUT. Every rank ends with it in OUTPUT: the
    root copies it there, which executors skip when both are the same memory. In each of the ⌈log2 size⌉ rounds, every
    rank that has the data sends it to one that has not, the most distant first.
    """
    source = input_block() if rank == root else output_block()
    position = (rank - root) % size
    distances = [1 << bit for bit in reversed(range((size - 1).bit_length()))]
    rounds = [_round(size, root, position, distance, source) for distance in distances] or [()]
    if rank == root:
        rounds[-1] = (*rounds[-1], Copy(output_block(), source))
    return Plan(
        collective="broadcast",
        algorithm="binomial",
        size=size,
        rank=rank,
        root=root,
        input=even(1) if source.buffer is Buffer.INPUT else Partition(0),
        output=even(1),
        lanes=(tuple(Group(steps) for steps in rounds),),
    )


def _round(size: int, root: int, position: int, distance: int, source: Span) -> tuple[Step, ...]:
    """Return what the rank at `position` after the root does in the round in which data travels `distance`."""
    if position % (2 * distance) == distance:
        return (Recv((root + position - distance) % size, output_block()),)
    if position % (2 * distance) == 0 and position + distance < size:
        return (Send((root + position + distance) % size, source),)
    return ()
