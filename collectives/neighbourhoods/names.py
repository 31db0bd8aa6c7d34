"""The names of the neighbourhood collectives, and of their counts."""

from __future__ import annotations

# Name of a call → its collective, and the names of its counts.
NEIGHBOUR_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "neighbor_allgather": ("neighbor_allgather", ()),
    "neighbor_allgatherv": ("neighbor_allgather", ("counts",)),
    "neighbor_alltoall": ("neighbor_alltoall", ()),
    "neighbor_alltoallv": ("neighbor_alltoall", ("send_counts", "recv_counts")),
}
