"""Long use leaves nothing behind: descriptors, threads, mappings and memory stay as they are."""

from __future__ import annotations

import os

import numpy as np
import pytest

import unisono as un
from unisono.bench.studies.leaks import RANKS, USES, HeldResources, growth

# How much may stay for each repetition. Records of calls are kept, 4096 signatures at most, and no test is long enough
# to fill them. Python's blocks and the mappings of malloc and of stacks vary a little, and a
# connection may be closed a little later.
MOST_NBYTES, MOST_BLOCKS, MOST_MAPPINGS = 1500, 4, 0.25
COUNTS = {"communicators": 120, "operations": 2000, "aborts": 40}


def leaks(grown: HeldResources, count: int) -> list[str]:
    """Return the names of what has grown in `count` repetitions."""
    limits = (2, 0, MOST_MAPPINGS * count + 4, MOST_BLOCKS * count + 1000, MOST_NBYTES * count + (512 << 10))
    return [name for name, value, most in zip(HeldResources._fields, grown, limits, strict=True) if value > most]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("use", COUNTS)
def test_long_use_leaves_nothing_behind(use: str, transport: str) -> None:
    count = COUNTS[use]
    for grown in un.launch(growth, RANKS, USES[use][0], count, options=un.Options(transports=transport)):
        assert leaks(grown, count // 2) == [], grown


def forget_nothing(world: un.Communicator, count: int) -> None:
    kept = world.__dict__.setdefault("kept", [])
    for _ in range(count):
        kept.append((os.open(os.devnull, os.O_RDONLY), [object() for _ in range(9)], np.ones(1000)))


def test_leak_of_each_kind_is_noticed() -> None:
    (grown,) = un.launch(growth, 1, forget_nothing, 400)
    assert leaks(grown, 200) == ["descriptors", "blocks", "nbytes"]
