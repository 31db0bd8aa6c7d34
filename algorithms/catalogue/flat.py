"""The flat algorithms: every algorithm that is not composed of phases. A phase of a composition is one of these.

Two tables hold them: `FLAT` has the algorithms of Unisono, and `REGISTERED` has algorithms of users, from
`catalogue.registration`. An installed package adds algorithms through the entry-point group `unisono.algorithms`: the
entry point names a module that registers them, and that module is imported when algorithms are first asked for.
"""

from __future__ import annotations

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.moving import ALLGATHER, ALLTOALL, BARRIER, BROADCAST, GATHER, SCATTER
from unisono.algorithms.catalogue.reducing import ALLREDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
from unisono.foundation.entry_points import entry_points

FLAT: dict[str, dict[str, Algorithm]] = {
    "allreduce": ALLREDUCE,
    "reduce": REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "scan": SCAN,
    "exscan": EXSCAN,
    "broadcast": BROADCAST,
    "allgather": ALLGATHER,
    "gather": GATHER,
    "scatter": SCATTER,
    "alltoall": ALLTOALL,
    "barrier": BARRIER,
}

# The algorithms that users have registered, by collective and name.
REGISTERED: dict[str, dict[str, Algorithm]] = {}

_groups_to_load = ["unisono.algorithms"]


def flat_algorithms_of(collective: str) -> dict[str, Algorithm]:
    """Return the flat algorithms of `collective` by name: first those of Unisono, then the registered ones."""
    load_installed()
    return {**FLAT[collective], **REGISTERED.get(collective, {})}


def load_installed() -> None:
    """Import the modules in which installed packages register algorithms, the first time that this is called.

    An error that such a module raises is raised here, and the next call tries again.
    """
    while _groups_to_load:
        group = _groups_to_load.pop()  # first, because the imported modules ask for algorithms themselves
        try:
            for entry in entry_points(group=group):
                entry.load()
        except BaseException:
            _groups_to_load.append(group)
            raise
