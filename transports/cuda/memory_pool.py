"""`MemoryPool`: memory of a device that streams take and give, without waiting for the device.

Theory of operation
-------------------
The driver's pool knows the order of streams (`cuMemAllocFromPoolAsync`, `cuMemFreeAsync`). Memory that was given behind
the work of a stream is taken again by later work. The pool keeps some memory that nobody uses, so that a call need not
ask the system for it.

If not all users of memory are known, it is given after all work of the context. The driver has no call that waits for
that during a capture. But it unpins host memory only then, so the pool pins and unpins a little.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from unisono.errors import UsageError
from unisono.transports.cuda.context import CurrentContext
from unisono.transports.cuda.device import Allocation, Stream
from unisono.transports.cuda.driver_errors import ContextLostError, Driver

# So much memory that nobody uses is not returned to the system.
KEPT_NBYTES = 256 << 20
_FENCE_NBYTES = 4096


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

    def give(self, allocation: Allocation, streams: Collection[Stream]) -> None:
        """Return memory behind the work on `streams`.

        Raises:
            UsageError, InternalError: one of the streams cannot be used. The memory has not been returned.
        """
        with self._context:
            for stream in streams:
                self._require_no_capture(stream)
            behind = next(iter(streams)) if len(streams) == 1 else self._joined(streams)
            self._driver("cuMemFreeAsync", allocation.pointer, behind)
        self._taken.discard(allocation.pointer)

    def free(self, allocation: Allocation) -> None:
        """Return memory after all work of the context, for which this waits."""
        with suppress(ContextLostError), self._context:
            fence = self._driver("cuMemHostAlloc", _FENCE_NBYTES, 0)
            self._driver("cuMemFreeHost", fence)
            self._driver("cuMemFreeAsync", allocation.pointer, self._side)
        self._taken.discard(allocation.pointer)

    def trim(self) -> None:
        """Return all memory that nobody uses to the system."""
        with self._context:
            self._driver("cuMemPoolTrimTo", self._pool, 0)

    def _joined(self, streams: Collection[Stream]) -> int:
        """Return a stream behind the work that is on all `streams`."""
        driver = self._driver
        for stream in streams:
            event = driver("cuEventCreate", int(driver.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))
            try:
                driver("cuEventRecord", event, stream)
                driver("cuStreamWaitEvent", self._side, event, 0)
            finally:
                driver("cuEventDestroy", event)
        return self._side

    def _require_no_capture(self, stream: Stream) -> None:
        """Raise `UsageError` if a graph that `stream` records would get the release as a part."""
        status = self._driver("cuStreamIsCapturing", stream)
        if status != self._driver.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise UsageError("the stream records a graph")
