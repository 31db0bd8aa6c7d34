"""The algorithms that there are: a literal table of those that Unisono comes with, and what users have added to it.

Costs are the closed forms of the references, for any number of ranks p ≥ 1. The verifier's tests compare them with what
the plans really do.

Users' algorithms come in through `algorithms.registration`, at any time; those of installed packages, which name a
module that registers them in the entry point group `unisono.algorithms`, when algorithms are first asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from unisono.algorithms.catalogue.algorithm import Algorithm, suggestion
from unisono.algorithms.catalogue.composed import COMPOSED
from unisono.algorithms.catalogue.moving import ALLGATHER, ALLTOALL, BARRIER, BROADCAST, GATHER, SCATTER
from unisono.algorithms.catalogue.reducing import ALLREDUCE, EXSCAN, REDUCE, REDUCE_SCATTER, SCAN
from unisono.algorithms.catalogue.vendors import VENDORS
from unisono.entry_points import entry_points
from unisono.errors import NoAlgorithmError, UsageError

if TYPE_CHECKING:
    pass

ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "allreduce": {**ALLREDUCE, **COMPOSED["allreduce"]},
    "reduce": {**REDUCE, **COMPOSED["reduce"]},
    "reduce_scatter": {**REDUCE_SCATTER, **COMPOSED["reduce_scatter"]},
    "scan": {**SCAN, **COMPOSED["scan"]},
    "exscan": {**EXSCAN, **COMPOSED["exscan"]},
    "broadcast": {**BROADCAST, **COMPOSED["broadcast"]},
    "allgather": {**ALLGATHER, **COMPOSED["allgather"]},
    "gather": GATHER,
    "scatter": SCATTER,
    "alltoall": {**ALLTOALL, **COMPOSED["alltoall"]},
    "barrier": {**BARRIER, **COMPOSED["barrier"]},
}


# What `algorithms.registration` has added, by collective and name.
REGISTERED: dict[str, dict[str, Algorithm]] = {}

_groups_to_load = ["unisono.algorithms"]


def algorithms_of(collective: str) -> Mapping[str, Algorithm]:
    """Return all algorithms of `collective`, by name: those that Unisono comes with, then those that were registered.

    Raises:
        NoAlgorithmError: there is no such collective; the message lists those there are, and suggests the nearest. Or
            installed packages cannot be looked at.
    """
    if collective not in ALGORITHMS:
        known = f"{', '.join(ALGORITHMS)}{suggestion(collective, ALGORITHMS)}"
        raise NoAlgorithmError(f"no algorithm carries out {collective!r}: there are {known}")
    _load_installed()
    return {**ALGORITHMS[collective], **REGISTERED.get(collective, {})}


def candidates_of(collective: str) -> Mapping[str, Algorithm]:
    """Return all that may carry out `collective`, by name: its algorithms, and what libraries do by themselves.

    Raises:
        NoAlgorithmError: as `algorithms_of` does.
    """
    return {**algorithms_of(collective), **VENDORS[collective]}


def _load_installed() -> None:
    """Import, once, the modules in which installed packages register algorithms; what one of them raises is raised."""
    while _groups_to_load:
        group = _groups_to_load.pop()  # First, because the modules that are imported ask for algorithms themselves.
        try:
            for entry in entry_points(group=group):
                entry.load()
        except BaseException:
            _groups_to_load.append(group)
            raise


def find(collective: str, name: str) -> Algorithm:
    """Return the algorithm of `collective` that is called `name`, which may be what a library does by itself.

    Raises:
        NoAlgorithmError: there is none; the message lists those there are, and suggests the nearest.
    """
    of_collective = candidates_of(collective)
    if name not in of_collective:
        known = f"{', '.join(of_collective)}{suggestion(name, of_collective)}"
        raise NoAlgorithmError(f"{collective} has no algorithm {name!r}: it has {known}")
    return of_collective[name]


def check_known(name: str) -> None:
    """Check that some collective has an algorithm that is called `name`.

    Raises:
        UsageError: none has; the message names the nearest algorithms, and the collectives that have them.
    """
    collectives = defaultdict[str, list[str]](list)
    for collective in ALGORITHMS:
        for each in candidates_of(collective):
            collectives[each].append(collective)
    if name not in collectives:
        from difflib import get_close_matches

        near = [f"{each!r} (of {', '.join(collectives[each])})" for each in get_close_matches(name, collectives)]
        meant = f"; did you mean {' or '.join(near)}?" if near else f": there are {', '.join(collectives)}"
        raise UsageError(f"no collective has an algorithm {name!r}{meant}")
