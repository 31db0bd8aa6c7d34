"""Scans: every rank gets the combination of the contributions of all ranks up to its own, or before its own.

- Linear: prefixes travel along the ranks, and each rank adds its contribution. Over many segments all links are busy at
  once.
- Recursive doubling: after k rounds a rank has the contributions of the last 2^k ranks up to its own. It sends them to
  the rank 2^k after it. Reference: Hillis, Steele 1986.
- Direct: every rank sends its contribution to all ranks after it. A rank combines everything that arrives in one step,
  in ascending order. So each prefix is rounded once, which is impossible if partial results are passed on.

All of them combine runs of consecutive ranks in ascending order, so the operation need not be commutative. The
exclusive scan by recursive doubling first sends every contribution to the next rank. Then ranks 1 … p - 1 do an
inclusive scan.
"""

from __future__ import annotations

from itertools import pairwise

from unisono.algorithms.builders.arguments import check_at_least, check_ranks
from unisono.algorithms.builders.lane_pieces import distances, lane_from_steps
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Group,
    Lane,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)


def scan_linear(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an inclusive scan along the ranks.

    INPUT, OUTPUT and SCRATCH are one block each. INPUT and OUTPUT may be the same memory.
    """
    check_ranks(size, rank, root)
    prefix = scratch_block() if rank else input_block()
    steps: dict[int, tuple[Step, ...]] = {}
    if rank:
        steps[rank - 1] = (RecvReduce(rank - 1, prefix, input_block(), received_first=True),)
    if rank < size - 1:
        steps[rank] = (Send(rank + 1, prefix),)
    steps[rank + 1] = (Copy(output_block(), prefix, lower=True),)
    return _plan(("scan", "linear"), size, rank, root, lane_from_steps(steps), scratch=1 if rank else 0)


def exscan_linear(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an exclusive scan along the ranks.

    INPUT and OUTPUT are one block each, and may be the same memory. SCRATCH is two blocks. OUTPUT of rank 0 is not
    written.
    """
    check_ranks(size, rank, root)
    arrived, prefix = scratch_block(0), scratch_block(1) if rank else input_block()
    steps: dict[int, tuple[Step, ...]] = {}
    # The link from rank r to rank r + 1 is used in group 2·r. In the groups between, ranks add their contributions.
    if rank:
        steps[2 * rank - 2] = (Recv(rank - 1, arrived),)
        steps[2 * rank + 1] = (Copy(output_block(), arrived, lower=True),)
    if rank < size - 1:
        steps[2 * rank] = (Send(rank + 1, prefix),)
    if 0 < rank < size - 1:
        steps[2 * rank - 1] = (Reduce(prefix, (arrived, input_block())),)
    return _plan(("exscan", "linear"), size, rank, root, lane_from_steps(steps), scratch=2 if rank else 0)


def scan_recursive_doubling(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an inclusive scan by recursive doubling, for any number of ranks.

    INPUT, OUTPUT and SCRATCH are one block each. INPUT and OUTPUT may be the same memory.
    """
    check_ranks(size, rank, root)
    lane = _doubling(range(size), rank, input_block())
    return _plan(("scan", "recursive_doubling"), size, rank, root, lane, scratch=1 if rank else 0)


def exscan_recursive_doubling(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an exclusive scan by recursive doubling, for any number of ranks.

    INPUT, OUTPUT and SCRATCH are one block each. INPUT and OUTPUT may be the same memory. OUTPUT of rank 0 is not
    written.
    """
    check_ranks(size, rank, root)
    shift: list[Step] = [Send(rank + 1, input_block())] if rank < size - 1 else []
    shift += [Recv(rank - 1, scratch_block())] if rank else []
    doubling = _doubling(range(1, size), rank, scratch_block()) if rank else ()
    lane = (Group(tuple(shift)), *doubling)
    return _plan(("exscan", "recursive_doubling"), size, rank, root, lane, scratch=1 if rank else 0)


def scan_direct(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an inclusive scan by direct exchange, with `window` ranks before and after at a time.

    INPUT and OUTPUT are one block each, and may be the same memory. SCRATCH holds a copy of INPUT for each rank before
    this one, in ascending order. The result is rounded once.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    lane = (*_from_all_before(size, rank, window), _at_once((*map(scratch_block, range(rank)), input_block())))
    return _plan(("scan", "direct"), size, rank, root, lane, scratch=rank)


def exscan_direct(size: int, rank: int, root: int = 0, window: int = 32) -> Plan:
    """Return the plan of an exclusive scan by direct exchange. Buffers are as in `scan_direct`.

    OUTPUT of rank 0 is not written.
    """
    check_ranks(size, rank, root)
    check_at_least("window", window, 1)
    combine = (_at_once(tuple(map(scratch_block, range(rank)))),) if rank else ()
    return _plan(
        ("exscan", "direct"), size, rank, root, (*_from_all_before(size, rank, window), *combine), scratch=rank
    )


def _from_all_before(size: int, rank: int, window: int) -> Lane:
    """Return the lane that sends INPUT to all ranks after this one, and receives in SCRATCH from all ranks before it.

    A group exchanges over the next `window` distances. There may be fewer ranks on one side than on the other.
    """
    before, after = rank, size - 1 - rank

    def batch(first: int) -> Group:
        steps: list[Step] = []
        for distance in range(first + 1, first + 1 + window):
            if distance <= after:
                steps.append(Send(rank + distance, input_block(), peer_advance=window))
            if distance <= before:
                steps.append(Recv(rank - distance, scratch_block(rank - distance, advance=-window), -window))
        return Group(tuple(steps))

    # From one of these numbers of windows to the next, all groups have the same steps.
    cuts = sorted(
        {0, *(count // window for count in (before, after)), *(-(-count // window) for count in (before, after))}
    )
    return tuple(Repeat(end - start, (batch(start * window),)) for start, end in pairwise(cuts))


def _at_once(sources: tuple[Span, ...]) -> Group:
    """Return the group that combines all `sources` in one step and writes the result."""
    if len(sources) == 1:
        return Group((Copy(output_block(), sources[0], lower=True),))
    return Group((Reduce(output_block(), sources, lower=True),))


def _doubling(ranks: range, rank: int, current: Span) -> Lane:
    """Return the lane of an inclusive scan among consecutive `ranks`, of the values that they have in `current`.

    Partial results alternate between SCRATCH and OUTPUT, because one is sent while the next one is written.
    """
    lane: Lane = ()
    for distance in distances(len(ranks), 2):
        steps: list[Step] = [Send(rank + distance, current)] if rank + distance in ranks else []
        if rank - distance in ranks:
            other = output_block() if current.buffer is Buffer.SCRATCH else scratch_block()
            steps.append(RecvReduce(rank - distance, other, current, received_first=True))
            current = other
        lane = (*lane, Group(tuple(steps)))
    # The copy has a group of its own, because earlier groups may still send a partial result from OUTPUT.
    return (*lane, Group((Copy(output_block(), current, lower=True),)))


def _plan(name: tuple[str, str], size: int, rank: int, root: int, lane: Lane, *, scratch: int) -> Plan:
    """Return the plan with this one lane. INPUT and OUTPUT are one block, and SCRATCH is `scratch` such blocks."""
    vector = even(1)
    return Plan(*name, size, rank, root, vector, vector, scratch_like(Buffer.INPUT, vector, copies=scratch), (lane,))
