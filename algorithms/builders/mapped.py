"""Mapped memory: ranks read data directly from each other's memory, and synchronise by flags before and after.

A rank may not read a peer's memory before the peer has begun, nor while the memory is being written. And no rank may
end while a peer still reads its memory. So all ranks *meet* between the phases of an algorithm: each raises its flag at
every other rank and waits for theirs. These meetings are the only latency. In a broadcast, ranks meet the root only.
With a window of ranks at a time plans stay small, and one window covers the ranks of most hosts.

One `ReadReduce` combines all contributions in ascending order of ranks, so the result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import copy_own_block, empty_groups, in_windows, lane_from_steps
from unisono.algorithms.builders.tree import at_root
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Partition,
    Plan,
    Read,
    ReadReduce,
    Signal,
    Span,
    Wait,
    as_written,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    shares,
)


def allreduce_one_shot(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce in which every rank reads and combines the INPUTs of all ranks.

    INPUT and OUTPUT are one block each and may be the same memory, because SCRATCH holds the result until all ranks
    have read. Before and after, each rank signals every other rank and waits for its signal. One group has at most
    `window` signals or waits, so that plans for many ranks stay a short loop.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(1)
    meet = _meet(size, rank, window)
    combine = Group((ReadReduce(scratch_block(), _of_all(size, input_block()), lower=True),))
    keep = Group((Copy(output_block(), scratch_block()),))
    return Plan(
        collective="allreduce",
        algorithm="one_shot",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector),
        lanes=((*meet, combine, *meet, keep),),
    )


def allreduce_two_shot(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce in which every rank combines one block of all INPUTs and reads the others.

    INPUT and OUTPUT are `size` blocks each and may be the same memory, because only rank r reads block r of an INPUT.
    Flags and reads are `window` at a time.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(size)
    meet = _meet(size, rank, window)
    combine = Group((ReadReduce(output_block(rank), _of_all(size, input_block(rank)), lower=True),))
    gather = _read_others(size, rank, window, lambda peer: output_block(peer, advance=window))
    lane = (*meet, combine, *meet, *gather, *meet)
    return Plan("allreduce", "two_shot", size, rank, root, vector, vector, lanes=(lane,))


def reduce_scatter_read(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a reduce-scatter in which every rank reads and combines its block of all INPUTs.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT, because no other rank reads that block. Flags are raised `window` at a time.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    meet = _meet(size, rank, window)
    combine = Group((ReadReduce(output_block(), _of_all(size, input_block(rank)), lower=True),))
    lane = (*meet, combine, *meet)
    return Plan("reduce_scatter", "read", size, rank, root, shares(size, varying), even(1), lanes=(lane,))


def reduce_read(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a reduce in which the root reads and combines the INPUTs of all ranks.

    INPUT and the root's OUTPUT are one block each, and may be the same memory. There are `window` flags in a group.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(1)
    combine = Group((ReadReduce(output_block(), _of_all(size, input_block()), lower=True),))
    lane = _to_root(size, rank, root, window, (combine,))
    return Plan("reduce", "read", size, rank, root, vector, at_root(rank, root, vector), lanes=(lane,))


def allgather_read(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of an allgather in which every rank reads the INPUTs of all others, `window` of them at a time.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    meet = _meet(size, rank, window)
    gather = _read_others(size, rank, window, lambda peer: input_block())
    lane = (copy_own_block(rank), *meet, *gather, *meet)
    return Plan("allgather", "read", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def broadcast_read(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a broadcast in which every rank reads the INPUT of the root.

    The root's INPUT and every OUTPUT are one block each, and may be the same memory. The root raises a flag at every
    other rank when it has begun. It ends when every other rank has raised a flag after reading. There are `window`
    flags in a group.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = _from_root(size, rank, root, window, input_block())
    vector = even(1)
    return Plan("broadcast", "read", size, rank, root, at_root(rank, root, vector), vector, lanes=(lane,))


def gather_read(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a gather in which the root reads the INPUTs of all others, `window` of them at a time.

    INPUT is one block. Only the root has an OUTPUT: `size` blocks, equal ones or, if `varying`, by the counts of the
    ranks. The root's INPUT may be the memory of its block of OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    reads = (copy_own_block(root), *_read_others(size, root, window, lambda peer: input_block()))
    lane = _to_root(size, rank, root, window, reads)
    whole = at_root(rank, root, shares(size, varying))
    return Plan("gather", "read", size, rank, root, even(1), whole, lanes=(lane,))


def scatter_read(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a scatter in which every rank reads its share of the INPUT of the root.

    Only the root has an INPUT: `size` blocks, equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one
    block; the root's may be the memory of its block of INPUT. There are `window` flags in a group.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = _from_root(size, rank, root, window, input_block(rank))
    whole = at_root(rank, root, shares(size, varying))
    return Plan("scatter", "read", size, rank, root, whole, even(1), lanes=(lane,))


def alltoall_read(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an alltoall in which every rank reads its block of the INPUTs of all others.

    INPUT and OUTPUT are `size` equal blocks, and must not share memory. Flags and reads are `window` at a time.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    meet = _meet(size, rank, window)
    own = Group((Copy(output_block(rank), input_block(rank)),))
    gather = _read_others(size, rank, window, lambda peer: input_block(rank))
    return Plan("alltoall", "read", size, rank, root, even(size), even(size), lanes=((own, *meet, *gather, *meet),))


def barrier_flags(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a barrier in which all ranks meet, `window` flags at a time.

    INPUT is the token of every barrier, but this plan does not use it. There is no OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    return Plan("barrier", "flags", size, rank, root, even(1), Partition(0), lanes=(_meet(size, rank, window),))


def _meet(size: int, rank: int, window: int) -> Lane:
    """Return the groups in which all ranks raise flags at each other and wait for each other's flags."""

    def batch(first: int, number: int) -> Group:
        distances = range(first + 1, first + 1 + number)
        signals = [Signal((rank + distance) % size, peer_advance=window) for distance in distances]
        return Group((*signals, *[Wait((rank - distance) % size, peer_advance=-window) for distance in distances]))

    return in_windows(size - 1, window, batch)


def _from_root(size: int, rank: int, root: int, window: int, block: Span) -> Lane:
    """Return the lane in which this rank sets OUTPUT to `block` of the root's INPUT, as each rank does with its own.

    The root raises a flag at every other rank when it has begun, and ends when all have raised a flag after reading.
    """
    if rank == root:
        own = Group((Copy(output_block(), block),))
        signals, waits = (_flags_of_root(size, root, window, flag) for flag in (Signal, Wait))
        return (own, *signals, *empty_groups(1), *waits)
    groups, own_window = -(-(size - 1) // window), _window_of(size, rank, root, window)
    read = Read(root, output_block(), block)
    return lane_from_steps(
        {1 + own_window: (Wait(root),), groups + 1: (read,), groups + 2 + own_window: (Signal(root),)}
    )


def _to_root(size: int, rank: int, root: int, window: int, reads: Lane) -> Lane:
    """Return the lane in which the root runs `reads` when all other ranks have raised a flag that they have begun.

    After the reads, the root raises a flag at every other rank, which may then end.
    """
    if rank == root:
        waits, signals = (_flags_of_root(size, root, window, flag) for flag in (Wait, Signal))
        return (*waits, *reads, *signals)
    groups, own_window = -(-(size - 1) // window), _window_of(size, rank, root, window)
    number = sum(times * len(item_groups) for times, item_groups in map(as_written, reads))
    return lane_from_steps({own_window: (Signal(root),), groups + number + own_window: (Wait(root),)})


def _window_of(size: int, rank: int, root: int, window: int) -> int:
    """Return the index of the group in which the root signals `rank`: one group signals `window` ranks."""
    return ((rank - root) % size - 1) // window


def _flags_of_root(size: int, root: int, window: int, flag: type[Signal | Wait]) -> Lane:
    """Return the groups in which the root raises flags at all other ranks, or waits for theirs, in rank order."""

    def batch(first: int, number: int) -> Group:
        distances = range(first + 1, first + 1 + number)
        return Group(tuple(flag((root + distance) % size, peer_advance=window) for distance in distances))

    return in_windows(size - 1, window, batch)


def _of_all(size: int, span: Span) -> tuple[tuple[int, Span], ...]:
    """Return the same span of the memory of every rank, in ascending order of ranks."""
    return tuple((peer, span) for peer in range(size))


def _read_others(size: int, rank: int, window: int, theirs: Callable[[int], Span]) -> Lane:
    """Return the groups that read every other rank's block, `theirs(peer)` in the peer's memory, into OUTPUT.

    A rank starts with the rank after it, so that not all ranks read from the same rank first.
    """

    def batch(first: int, number: int) -> Group:
        peers = [(rank + distance) % size for distance in range(first + 1, first + 1 + number)]
        own = {peer: output_block(peer, advance=window) for peer in peers}
        return Group(tuple(Read(peer, own[peer], theirs(peer), peer_advance=window) for peer in peers))

    return in_windows(size - 1, window, batch)
