"""Arrays with more than 2^31 elements. Each rank needs 4 GiB in all, so these tests run only by ``pytest -m slow``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unisono as un

COUNT = (1 << 31) + 7
NEEDED_GIB = 16
# Positions before, at and after those where a 31-bit count would overflow.
PLACES = (0, 6, 7, COUNT // 2, (1 << 31) - 1, 1 << 31, COUNT - 1)


def available_gib() -> float:
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(facts["MemAvailable"].split()[0]) / (1 << 20)


def reduce_and_broadcast(world: un.Communicator) -> list[list[int]]:
    x = np.zeros(COUNT, np.int8)
    for number, place in enumerate(PLACES):
        x[place] = number + 10 * world.rank if number % 2 else -number
    world.allreduce(x, "max", out=x)
    reduced = x[list(PLACES)].tolist()
    assert np.count_nonzero(x) == len(PLACES) - 1
    x[list(PLACES)] += np.int8(world.rank)
    world.broadcast(x, root=1, out=x)
    return [reduced, x[list(PLACES)].tolist()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_arrays_may_have_more_elements_than_31_bits_count(transport: str) -> None:
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of memory; {available_gib():.0f} GiB are available")
    reduced = [0, 11, -2, 13, -4, 15, -6]
    expected = [reduced, [value + 1 for value in reduced]]
    results = un.launch(
        reduce_and_broadcast, 2, options=un.Options(transports=transport, timeout_s=300.0), timeout_s=500
    )
    assert results == [expected] * 2
