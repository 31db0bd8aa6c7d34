"""Direct exchange: every rank sends its data to every other rank, and each rank computes the whole result itself.

- Allreduce: a single `Reduce` combines all contributions in ascending order of ranks, so the result is rounded once for
  any dtype. It takes one message latency if all ranks fit into one window. The volume grows with the number of ranks.
  So it suits short vectors, and results that must depend on nothing but the contributions.
- Reduce-scatter: it combines in the same way. Its volume, like the volume of the allgather, is the least possible. Only
  a window of ranks sends to a rank at a time, so no rank is flooded.
- All pairs: a reduce-scatter, followed by messages with the results to all ranks or to the root. It rounds once, too.
  The allreduce has the least possible volume. The reduce has the same volume as a reduce up a tree.
- Barrier: a token to every other rank. If ranks share cores, the time of a barrier is mostly the time of switching
  between ranks. Here each rank waits only for ranks that have not come yet.
"""

from __future__ import annotations

from collections.abc import Callable

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import (
    copy_own_block,
    empty_groups,
    exchange_with_all,
    in_windows,
    single_rank_lane,
)
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

    INPUT and OUTPUT are one block each and may be the same memory. SCRATCH holds one copy of INPUT for each other rank,
    in ascending order of ranks. All ranks get the same bits, rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    arrive = exchange_with_all(size, rank, window, lambda distance: input_block(), _copies(rank, window))
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
        lanes=((*arrive, _combine(size, rank, input_block(), output_block())) if size > 1 else single_rank_lane(),),
    )


def reduce_scatter_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of a reduce-scatter by direct exchange, with `window` ranks at a time.

    INPUT is `size` blocks: equal ones or, if `varying`, by the counts of the ranks. OUTPUT is one block, and may be the
    memory of block `rank` of INPUT. SCRATCH holds one copy of OUTPUT for each other rank, in ascending order of ranks.
    Contributions are combined in one step and in that order.
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
        lanes=(_combined(size, rank, window, output_block()) if size > 1 else single_rank_lane(),),
    )


def allreduce_all_pairs(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an allreduce by two direct exchanges, with `window` ranks at a time.

    INPUT and OUTPUT are cut into `size` blocks, and may be the same memory. SCRATCH holds one copy of block `rank` for
    each other rank, in ascending order of ranks. All ranks get the same bits, rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    vector = even(size)
    gather = exchange_with_all(
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
        lanes=((*_combined(size, rank, window, output_block(rank)), *gather) if size > 1 else single_rank_lane(),),
    )


def reduce_all_pairs(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a reduce by a direct exchange, after which all ranks send their blocks to the root.

    Buffers are as in `allreduce_all_pairs`, except that only the root has an OUTPUT. The result is rounded once.
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
        lanes=(lane if size > 1 else single_rank_lane(),),
    )


def allgather_direct(size: int, rank: int, root: int = 0, varying: bool = False, window: int = 32) -> Plan:
    """Return the plan of an allgather by direct exchange, with `window` ranks at a time.

    INPUT is one block, and may be the memory of block `rank` of OUTPUT. OUTPUT is `size` blocks: equal ones or, if
    `varying`, by the counts of the ranks.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = exchange_with_all(
        size,
        rank,
        window,
        sent=lambda distance: input_block(),
        received=lambda distance: output_block(rank - distance, advance=-window),
        own=copy_own_block(rank).steps,
    )
    return Plan("allgather", "direct", size, rank, root, even(1), shares(size, varying), lanes=(lane,))


def barrier_direct(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of a barrier by direct exchange, with `window` ranks at a time.

    No rank ends before all have begun. INPUT is a token of one element with any value, which the executor provides.
    SCRATCH receives the tokens of the other ranks. There is no OUTPUT.
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
        lanes=(exchange_with_all(size, rank, window, lambda distance: input_block(), _copies(rank, window)),),
    )


def _copies(rank: int, window: int) -> Callable[[int], Span]:
    """Return the function from a distance to the copy in SCRATCH that receives from the rank that far before this rank.

    A rank has no copy for itself, so copies are counted modulo `size` - 1.
    """
    return lambda distance: scratch_block(rank - distance, advance=-window)


def _combine(size: int, rank: int, own: Span, result: Span) -> Group:
    """Return the group that combines all contributions in the order of ranks; `own` is this rank's contribution."""
    before, after = (tuple(map(scratch_block, copies)) for copies in (range(rank), range(rank, size - 1)))
    return Group((Reduce(result, (*before, own, *after), lower=True),))


def _combined(size: int, rank: int, window: int, result: Span) -> Lane:
    """Return the groups that send every rank its block, receive the rank's own block, and combine it into `result`."""
    arrive = exchange_with_all(
        size, rank, window, lambda distance: input_block(rank + distance, advance=window), _copies(rank, window)
    )
    return (*arrive, _combine(size, rank, input_block(rank), result))


def _to_root(size: int, rank: int, root: int, window: int, own: Span) -> Lane:
    """Return the groups in which the root receives the blocks of all other ranks, and each of them sends `own`."""

    def batch(first: int, number: int) -> Group:
        sources = range(root + 1 + first, root + 1 + first + number)
        return Group(tuple(Recv(source % size, output_block(source, advance=window), window) for source in sources))

    if rank == root:
        return in_windows(size - 1, window, batch)
    return (*empty_groups(((rank - root) % size - 1) // window), Group((Send(root, own),)))
