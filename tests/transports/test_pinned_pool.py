"""Pinned memory is pinned once and used again, and is unpinned at the end."""

from __future__ import annotations

import numpy as np

from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda.memory.pinned_pool import PinnedPool


def test_pinned_memory_is_used_again_when_nothing_refers_to_it() -> None:
    gpu = GpuDouble(background=False)
    pool = PinnedPool(gpu.device())
    first, second = pool.array(5000), pool.array(5000)
    addresses = {first.ctypes.data, second.ctypes.data}
    part = first.view(np.float64)[3:]
    del first, second
    third = pool.array(6000)
    assert third.ctypes.data in addresses
    assert third.ctypes.data != part.ctypes.data - 24
    del part, third
    pool.close()
    assert gpu.leaks() == []
    gpu.close()


def test_pinned_memory_beyond_the_limits_of_the_pool_is_unpinned() -> None:
    gpu = GpuDouble(background=False)
    pool = PinnedPool(gpu.device())
    arrays = [pool.array(1) for _ in range(9)]
    large = pool.array((16 << 20) + 1)
    del arrays, large
    assert gpu.leaks() == ["pinned memory of 4096 bytes"] * 4
    lent = pool.array(1)
    pool.close()
    assert len(gpu.leaks()) == 1
    del lent
    assert gpu.leaks() == []
    gpu.close()
