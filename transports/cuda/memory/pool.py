"""`MemoryPool`: memory of a device that streams take, without waiting for the device.

The driver's pool knows the order of streams (`cuMemAllocFromPoolAsync`, `cuMemFreeAsync`). It keeps some memory that
nobody uses, so that a call need not ask the system for it. Memory is returned on a stream of the pool, when the host
has seen the end of all work on it. So no user's stream is needed, which may have been destroyed.
"""

from __future__ import annotations

from contextlib import suppress

from unisono.transports.cuda.device import Allocation, Stream
from unisono.transports.cuda.driver_api.context import CurrentContext
from unisono.transports.cuda.driver_api.errors import ContextLostError, Driver

# So much memory that nobody uses is not returned to the system.
KEPT_NBYTES = 256 << 20


class MemoryPool:
    """A pool of one device, beside those of other libraries. For any thread.

    Args:
        driver: the driver.
        context: the context of the device.
        ordinal: the number of the device.
    """

    def __init__(self, driver: Driver, context: CurrentContext, ordinal: int) -> None:
        self._driver, self._context = driver, context
        api = driver.api
        properties = api.CUmemPoolProps()
        properties.allocType = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = ordinal
        with context:
            self._pool = driver("cuMemPoolCreate", properties)
            threshold = api.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
            driver("cuMemPoolSetAttribute", self._pool, threshold, api.cuuint64_t(KEPT_NBYTES))
            self._side = driver.number_of(driver("cuStreamCreate", int(api.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self._taken: set[int] = set()  # addresses; each operation on it is atomic

    def take(self, nbytes: int, stream: Stream) -> Allocation:
        """Return memory for work on `stream`; raises `TransportUnavailableError` if there is too little."""
        with self._context:
            pointer = int(self._driver("cuMemAllocFromPoolAsync", max(1, nbytes), self._pool, stream))
        self._taken.add(pointer)
        return Allocation(pointer, max(1, nbytes))

    def has(self, allocation: Allocation) -> bool:
        """Return whether memory is taken from this pool."""
        return allocation.pointer in self._taken

    def free(self, allocation: Allocation) -> None:
        """Return memory, on which no work is under way."""
        with suppress(ContextLostError), self._context:
            self._driver("cuMemFreeAsync", allocation.pointer, self._side)
        self._taken.discard(allocation.pointer)

    def trim(self) -> None:
        """Return all memory that nobody uses to the system."""
        with self._context:
            self._driver("cuMemPoolTrimTo", self._pool, 0)
