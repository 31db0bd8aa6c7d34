"""The cores to which ranks are bound. `unisono.transports.host.core_distance` measures the distance of two cores."""

from __future__ import annotations

import os


def cores_to_bind(ranks: int, bind: str) -> list[int]:
    """Return the core of each rank, or an empty list if ranks are not bound.

    "core" gives each rank one of the cores that this process may use, and starts again after the last one. "none"
    leaves ranks to the scheduler. "auto" is "core" if there is a core for each rank, else "none".
    """
    allowed = sorted(os.sched_getaffinity(0))
    if bind == "none" or (bind == "auto" and ranks > len(allowed)):
        return []
    return [allowed[rank % len(allowed)] for rank in range(ranks)]
