"""The cores that ranks are bound to. `unisono.transports.host.core_distance` measures how far apart two of them are."""

from __future__ import annotations

import os


def cores_to_bind(ranks: int, bind: str) -> list[int]:
    """Return the cores of the ranks, rank by rank, or an empty list if they are not bound.

    "core" gives each rank one of the cores that this process may use, starting again after the last one; "none" leaves
    them to the scheduler; "auto" is "core" if there are enough cores for each rank to have its own one, else "none".
    """
    allowed = sorted(os.sched_getaffinity(0))
    if bind == "none" or (bind == "auto" and ranks > len(allowed)):
        return []
    return [allowed[rank % len(allowed)] for rank in range(ranks)]
