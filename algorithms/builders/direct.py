"""Direct exchange: every rank sends what it has to every other rank, and each makes the whole result itself.

Allreduce: one rounding whatever the dtype, because a single n-ary `Reduce` combines all contributions in ascending rank
order, and one message latency as long as the ranks fit a window. The volume grows with the number of ranks, so this is
for vectors whose latency outweighs their bytes, and for results that must not depend on anything but the ranks.
Reduce-scatter combines in the same way, and has the least possible volume, as has allgather. With a window of ranks at
a time, none of them is flooded.

All pairs: a reduce-scatter, whose results then travel to all ranks, or to the root: the one rounding at the volume that
an allreduce must have, and at that of a reduce up a tree.

Barrier: a token to every other rank. Where ranks share cores, what a barrier takes is mostly how often these change
hands, and nobody waits here for anybody but those who have not come yet.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import alone, exchange, idle, in_windows, place_own
from unisono.algorithms.ir.plan import (
    Buffer,
    Group,
    Lane,
    Partition,
    Plan,
    Recv,
    Reduce,
    Send,
    Span,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
    scratch_like_block,
    shares,
)


def allreduce_direct(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce by direct exchange, with `window` ranks at a time.

    INPUT and OUTPUT are one block each and may be the same memory; SCRATCH holds one copy of INPUT for each other rank,
    in ascending rank order. The result is the same on all ranks to the bit, and rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    arrive = exchange(size, rank, window, lambda distance: input_block(), _copies(rank, window))
    vector = even(1)
    return Plan(
        collective="allreduce",
        algorithm="direct",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like(Buffer.INPUT, vector, copies=size - 1),
        lanes=((*arrive, _combine(size, rank, input_block(), output_block())) if size > 1 else alone(),),
    )


def reduce_scatter_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a reduce-scatter by direct exchange, with `window` ranks at a time.

    INPUT is `size` blocks, by the counts of the ranks if `varying`; OUTPUT is one block, and may be the memory of block
    `rank` of INPUT; SCRATCH holds one copy of OUTPUT for each other rank, in ascending rank order. Contributions are
    combined at once and in that order.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    return Plan(
        collective="reduce_scatter",
        algorithm="direct",
        size=size,
        rank=rank,
        root=root,
        input=shares(size, varying),
        output=even(1),
        scratch=scratch_like(Buffer.OUTPUT, even(1), copies=size - 1),
        lanes=(_combined(size, rank, window, output_block()) if size > 1 else alone(),),
    )


def allreduce_all_pairs(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce by two direct exchanges, with `window` ranks at a time.

    INPUT and OUTPUT are cut into `size` blocks, and may be the same memory; SCRATCH is copies of block `rank`, one for
    each other rank, in ascending rank order. The result is the same on all ranks to the bit, and rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(size)
    gather = exchange(
        size,
        rank,
        window,
        sent=lambda distance: output_block(rank),
        received=lambda distance: output_block(rank - distance, advance=-window),
    )
    return Plan(
        collective="allreduce",
        algorithm="all_pairs",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector,
        scratch=scratch_like_block(Buffer.INPUT, vector, rank, copies=size - 1),
        lanes=((*_combined(size, rank, window, output_block(rank)), *gather) if size > 1 else alone(),),
    )


def reduce_all_pairs(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a reduce by a direct exchange, after which all send their blocks to the root.

    The buffers are those of `allreduce_all_pairs`, but that only the root has an OUTPUT. The result is rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector, own = even(size), output_block(rank) if rank == root else scratch_block()
    lane = (*_combined(size, rank, window, own), *_to_root(size, rank, root, window, own))
    return Plan(
        collective="reduce",
        algorithm="all_pairs",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=vector if rank == root else Partition(0),
        scratch=scratch_like_block(Buffer.INPUT, vector, rank, copies=size - 1),
        lanes=(lane if size > 1 else alone(),),
    )


def allgather_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of an allgather by direct exchange, with `window` ranks at a time.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT, which is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = exchange(
        size,
        rank,
        window,
        sent=lambda distance: input_block(),
        received=lambda distance: output_block(rank - distance, advance=-window),
        own=place_own(rank).steps,
    )
    return Plan("allgather", "direct", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def barrier_direct(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a barrier by direct exchange, with `window` ranks at a time: none ends before all have begun.

    INPUT is a token of one element, of any value, which the executor provides; SCRATCH receives those of all others;
    there is no OUTPUT.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    token = even(1)
    return Plan(
        collective="barrier",
        algorithm="direct",
        size=size,
        rank=rank,
        root=root,
        input=token,
        output=Partition(0),
        scratch=scratch_like(Buffer.INPUT, token, copies=size - 1),
        lanes=(exchange(size, rank, window, lambda distance: input_block(), _copies(rank, window)),),
    )


def _copies(rank: int, window: int) -> Callable[[int], Span]:
    """Return where what comes from each distance before a rank is received: in the copy of SCRATCH for that rank.

    A rank keeps no copy of its own, so the copies are counted modulo one less than the ranks.
    """
    return lambda distance: scratch_block(rank - distance, advance=-window)


def _combine(size: int, rank: int, own: Span, result: Span) -> Group:
    """Return the group that combines all contributions, of which `own` is this rank's, in the order of ranks."""
    before, after = (tuple(map(scratch_block, copies)) for copies in (range(rank), range(rank, size - 1)))
    return Group((Reduce(result, (*before, own, *after), lower=True),))


def _combined(size: int, rank: int, window: int, result: Span) -> Lane:
    """Return the groups that send every rank its block, receive one's own from all, and combine it into `result`."""
    arrive = exchange(
        size, rank, window, lambda distance: input_block(rank + distance, advance=window), _copies(rank, window)
    )
    return (*arrive, _combine(size, rank, input_block(rank), result))


def _to_root(size: int, rank: int, root: int, window: int, own: Span) -> Lane:
    """Return the groups in which the root receives the blocks of all others, and each of them sends its `own`."""

    def batch(first: int, number: int) -> Group:
        sources = range(root + 1 + first, root + 1 + first + number)
        return Group(tuple(Recv(source % size, output_block(source, advance=window), window) for source in sources))

    if rank == root:
        return in_windows(size - 1, window, batch)
    return (*idle(((rank - root) % size - 1) // window), Group((Send(root, own),)))
