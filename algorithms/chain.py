"""Chain algorithms: data flows along all ranks in a row, and over many segments all links of the row are busy at once.

With S segments, the last rank has everything after p - 2 + S rounds of n / S elements: close to the n elements that any
algorithm must move, once S is large against the number of ranks p. This is for few ranks and long vectors.

Lanes alternate along the row: the k-th link is used by lane k modulo 2, in its only group. A single lane would need a
group for each link, most of them empty; so a plan is two groups long at any number of ranks.
"""

from __future__ import annotations

from unisono.algorithms.checks import check_ranks
from unisono.algorithms.plan import Copy, Group, Lane, Plan, Recv, Send, Step, even, output_block
from unisono.algorithms.tree import at_root, source_of_broadcast


def broadcast_chain(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast along the ranks in ascending order from the root, modulo `size`.

    The data is the INPUT of the root, one block; all other ranks have no INPUT. Every rank ends with it in OUTPUT: the
    root copies it there, which executors skip when both are the same memory.
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
