"""`PinnedPool`: pinned host memory that is used again.

The driver takes a tenth of a millisecond to a millisecond to pin a MiB, and may wait for all work of the process before
it unpins memory.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import Device

_LEAST_NBYTES = 4096
# Memory of up to this size is kept when nothing refers to it any more: at most _MOST_IDLE pieces of each size.
_MOST_NBYTES = 16 << 20
_MOST_IDLE = 4


class PinnedPool:
    """Pinned memory of one device, for any thread.

    No lock guards the lists, because memory is returned by finalizers, which may run at any point of any thread. Each
    operation on a list is atomic by itself.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: defaultdict[int, deque[AnyArray]] = defaultdict(deque)  # by size
        self._is_closed = False

    def array(self, nbytes: int) -> AnyArray:
        """Return pinned memory as uint8, which returns to the pool when nothing refers to it; its content is undefined.

        The device may no longer use it then.
        """
        room = max(_LEAST_NBYTES, 1 << max(0, nbytes - 1).bit_length())
        try:
            memory = self._idle[room].pop()
        except IndexError:
            memory = self._device.pin(room)
        array: AnyArray = np.asarray(_Lent(self, memory))[:nbytes]
        return array

    def close(self) -> None:
        """Unpin all memory that is not in use. The rest is unpinned when it is returned."""
        self._is_closed = True
        for idle in self._idle.values():
            while idle:
                self._device.unpin(idle.pop())

    def take_back(self, memory: AnyArray) -> None:
        """Keep memory that is no longer in use for later requests, or unpin it if enough is kept."""
        idle = self._idle[memory.nbytes]
        if self._is_closed or memory.nbytes > _MOST_NBYTES or len(idle) >= _MOST_IDLE:
            self._device.unpin(memory)
        else:
            idle.append(memory)


class _Lent:
    """Memory that a pool has lent. Arrays refer to this object as long as they use it."""

    def __init__(self, pool: PinnedPool, memory: AnyArray) -> None:
        self._pool = pool
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._pool.take_back(self._memory)
