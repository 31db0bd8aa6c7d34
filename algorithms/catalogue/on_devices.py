"""The algorithms that calls on GPU arrays can use, over mapped memory and others, and a rule that chooses one."""

from __future__ import annotations

from collections.abc import Mapping

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.catalogue.moving import SCATTER_ON_DEVICES
from unisono.algorithms.catalogue.registry import algorithms_of, find
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE

# The routes besides algorithms over mapped memory, by the name that tables have, with their transport.
STAGED = "staged"
ROUTES: Mapping[str, str] = {STAGED: "the host", NCCL_NATIVE: "NCCL"}
# The algorithms over mapped memory that only GPUs run, by collective.
ONLY_ON_DEVICES: Mapping[str, Mapping[str, Algorithm]] = {"scatter": SCATTER_ON_DEVICES}
# Up to this many bytes of all contributions together, it is faster that every rank reads all of them than to
# synchronise once more.
_ONE_SHOT_NBYTES = 1 << 20


def mapped_names(collective: str) -> list[str]:
    """Return the names of the algorithms over mapped memory."""
    names = [name for name, algorithm in algorithms_of(collective).items() if algorithm.mapped]
    return [*names, *ONLY_ON_DEVICES.get(collective, ())]


def find_on_devices(collective: str, name: str) -> Algorithm:
    """Return an algorithm that GPUs run; raises NoAlgorithmError, as `find` does, if there is none of this name."""
    return ONLY_ON_DEVICES.get(collective, {}).get(name) or find(collective, name)


def usual_on_devices(collective: str, nbytes: int, size: int) -> str | None:
    """Return the algorithm for vectors of `nbytes` on `size` ranks by a rule; None if there is none."""
    if collective == "allreduce" and nbytes:
        return "one_shot" if nbytes * size <= _ONE_SHOT_NBYTES else "two_shot"
    return next(iter(mapped_names(collective)), None)
