"""Chain algorithms: data flows along all ranks in a row. With many segments, all links of the row are busy at once.

With S segments, the last rank has all n elements after p - 2 + S rounds of n / S elements each. If S is large compared
with the number of ranks p, this is close to the n elements that any algorithm must move. So chains suit few ranks and
long vectors.

Lanes alternate along the row: link k is used by lane k modulo 2, in its only group. A single lane would need one group
for each link, most of them empty. With two lanes, a plan is two groups long at any number of ranks.
"""

from __future__ import annotations

from unisono.algorithms.builders.arguments import check_ranks
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
    Send,
    Span,
    Step,
    even,
    input_block,
    output_block,
    scratch_block,
    scratch_like,
)


def broadcast_chain(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast along the ranks in ascending order from the root, modulo `size`.

    The data is the INPUT of the root, one block; the other ranks have no INPUT. Every rank ends with the data in
    OUTPUT. The root copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)
    position = (rank - root) % size
    source = source_of_broadcast(rank, root)
    arriving: Step = Recv((rank - 1) % size, output_block()) if position else Copy(output_block(), source)
    leaving = Send((rank + 1) % size, source)
    lanes: list[Lane] = [(), ()]
    lanes[(position - 1) % 2] = (Group((arriving,)),)
    if position < size - 1:
        after = (((position - 1) % 2, 0),) if position else ()
        lanes[position % 2] = (Group((leaving,), after),)
    return Plan("broadcast", "chain", size, rank, root, at_root(rank, root, even(1)), even(1), lanes=tuple(lanes))


def reduce_chain(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a reduce along the ranks in descending order to the root, modulo `size`.

    INPUT and the root's OUTPUT are one block each, and may be the same memory. The ranks inside the chain have one
    block of SCRATCH. Contributions are combined in ascending order from the root, modulo `size`.
    """
    check_ranks(size, rank, root)
    vector, position = even(1), (rank - root) % size
    into = output_block() if rank == root else scratch_block()
    return Plan(
        collective="reduce",
        algorithm="chain",
        size=size,
        rank=rank,
        root=root,
        input=vector,
        output=at_root(rank, root, vector),
        scratch=scratch_like(Buffer.INPUT, vector) if 0 < position < size - 1 else Partition(0),
        lanes=_towards_first(size, rank, position, into) if size > 1 else (single_rank_lane(),),
    )


def allreduce_chain(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of an allreduce as a reduce along all ranks to rank 0 and a broadcast back the same way.

    INPUT and OUTPUT are one block each, and may be the same memory. There is no SCRATCH. Contributions are combined in
    ascending order. Two lanes carry the reduce and two the broadcast, so that both overlap.
    """
    check_ranks(size, rank, root)
    vector = even(1)
    lanes = (*_towards_first(size, rank, rank, output_block()), *_back(size, rank))
    return Plan(
        "allreduce", "chain", size, rank, root, vector, vector, lanes=lanes if size > 1 else (single_rank_lane(),)
    )


def _towards_first(size: int, rank: int, position: int, into: Span) -> tuple[Lane, Lane]:
    """Return the two lanes that carry partial results to the rank at position 0, which lowers the result."""
    lanes: list[Lane] = [(), ()]
    is_last = position == size - 1
    if not is_last:
        arriving = RecvReduce((rank + 1) % size, into, input_block(), lower=position == 0)
        lanes[position % 2] = (Group((arriving,)),)
    if position:
        leaving = Send((rank - 1) % size, input_block() if is_last else into)
        lanes[(position - 1) % 2] = (Group((leaving,), after=() if is_last else ((position % 2, 0),)),)
    return lanes[0], lanes[1]


def _back(size: int, rank: int) -> tuple[Lane, Lane]:
    """Return the two lanes, number 2 and 3 of the plan, that carry the result of rank 0 to all other ranks."""
    lanes: list[Lane] = [(), ()]
    before, here = (rank - 1) % 2, rank % 2
    if rank:
        # OUTPUT holds the partial result until the reduce has sent it.
        lanes[before] = (Group((Recv(rank - 1, output_block()),), after=((before, 0),)),)
    if rank < size - 1:
        lanes[here] = (Group((Send(rank + 1, output_block()),), after=((2 + before if rank else here, 0),)),)
    return lanes[0], lanes[1]
