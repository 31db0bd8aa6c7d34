"""Broadcast as scatter and allgather: the root sends every rank a part of the vector, and the ranks collect the whole.

The root sends a little more than twice the vector, for any number of ranks and without segments. This suits long
vectors on so many ranks that a chain is too long. The scatter goes down a binomial tree. The allgather goes around a
ring or by recursive doubling. Reference: van de Geijn 1994, and Thakur, Rabenseifner, Gropp 2005.
"""

from __future__ import annotations

from unisono.algorithms.builders import doubling, ring
from unisono.algorithms.builders.arguments import check_ranks, check_supported, needs_power_of_two
from unisono.algorithms.builders.gather_scatter import scatter_lane
from unisono.algorithms.builders.tree import at_root, source_of_broadcast
from unisono.algorithms.ir.plan import Copy, Group, Lane, Plan, even, input_block, output_block


def broadcast_scatter_ring(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast as binomial scatter and ring allgather.

    The data is the INPUT of the root, `size` blocks; the other ranks have no INPUT. Every rank ends with the data in
    OUTPUT. The root copies it there; executors skip the copy if INPUT and OUTPUT are the same memory.
    """
    check_ranks(size, rank, root)
    return _broadcast("scatter_ring", size, rank, root, ring.allgather_lane(size, rank, rank))


def broadcast_scatter_doubling(size: int, rank: int, root: int = 0) -> Plan:
    """Return the plan of a broadcast as binomial scatter and allgather by recursive doubling.

    Buffers are as in `broadcast_scatter_ring`.

    Raises:
        UsageError: `size` is not a power of two.
    """
    check_ranks(size, rank, root)
    check_supported(needs_power_of_two(size))
    return _broadcast("scatter_doubling", size, rank, root, doubling.allgather_lane(size, rank))


def _broadcast(algorithm: str, size: int, rank: int, root: int, allgather: Lane) -> Plan:
    keep = Group((Copy(output_block(0, size), input_block(0, size)),) if rank == root else ())
    lane = (*scatter_lane(size, rank, root, source_of_broadcast(rank, root, rank)), keep, *allgather)
    vector = even(size)
    return Plan("broadcast", algorithm, size, rank, root, at_root(rank, root, vector), vector, lanes=(lane,))
