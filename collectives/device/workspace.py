"""`Workspace`: memory of a device with a stream of its own, for work between collectives, such as on gradients."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from unisono.collectives.arrays.dlpack import typestr
from unisono.collectives.device.work import keep_late
from unisono.dtypes import DTYPES
from unisono.errors import CollectiveTimeoutError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.operations import OPERATIONS
from unisono.transports.cuda.device import Allocation, Device, DeviceCopy, Event, Stream, is_over
from unisono.transports.cuda.executors.staging import await_event

if TYPE_CHECKING:
    from unisono.collectives.communicator import Communicator

# How long `Workspace.close` and copies to the host wait for the device.
_FAREWELL_S = 2.0
_COPY_S = 300.0


class Vector:
    """A flat or shaped array in the memory of a workspace, used on one stream. It has `__cuda_array_interface__`.

    Attributes:
        pointer: the address of the first element on the device.
        shape, dtype, size, nbytes: as numpy's. Elements lie in C order.
        stream: the stream on which it is used.
    """

    def __init__(
        self, workspace: Workspace, owner: object, pointer: int, shape: tuple[int, ...], dtype: Any, stream: Stream
    ) -> None:
        self._workspace, self._owner = workspace, owner
        self.pointer, self.shape, self.dtype, self.stream = pointer, shape, np.dtype(dtype), stream
        self.size = prod(shape)
        self.nbytes = self.size * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"<unisono gradient {self.dtype}{list(self.shape)} on cuda:{self._workspace.device.ordinal}>"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The dictionary of protocol version 3. The elements are complete when the work of the stream is done."""
        return {
            "data": (self.pointer if self.size else 0, False),
            "shape": self.shape,
            "strides": None,
            "typestr": typestr(self.dtype),
            "stream": int(self.stream),
            "version": 3,
        }

    def __getitem__(self, part: slice) -> Vector:
        """Return consecutive elements of a flat vector, in the same memory."""
        start, stop, _ = part.indices(self.size)
        return self._at(self.pointer + start * self.dtype.itemsize, (max(0, stop - start),), self.dtype, self.stream)

    def reshape(self, *shape: Any) -> Vector:
        """Return the same elements in another shape; -1 stands for a flat vector."""
        wanted = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return self._at(self.pointer, (self.size,) if wanted == (-1,) else wanted, self.dtype, self.stream)

    def view(self, dtype: DTypeLike) -> Vector:
        """Return the same bytes as a flat vector of another dtype."""
        return self._at(self.pointer, (self.nbytes // np.dtype(dtype).itemsize,), dtype, self.stream)

    def on(self, stream: Stream) -> Vector:
        """Return the same elements, used on another stream. The caller orders the streams."""
        return self._at(self.pointer, self.shape, self.dtype, stream)

    def copy(self) -> Vector:
        """Return a new vector with the same elements."""
        made = self._workspace.empty(self.size, self.dtype)
        self._workspace.device.copy(made.pointer, self.pointer, self.nbytes, self.stream)
        return made.reshape(self.shape)

    def load(self, elements: NDArray[Any]) -> None:
        """Copy elements from the host, and wait until that is done."""
        workspace = self._workspace
        staged = workspace.device.pin(max(1, self.nbytes))
        staged[: self.nbytes] = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        workspace.device.copy(self.pointer, staged.ctypes.data, self.nbytes, self.stream)
        workspace.wait(self.stream)
        workspace.device.unpin(staged)

    def fetch(self) -> NDArray[Any]:
        """Return the elements on the host, when the work of the stream is done."""
        workspace = self._workspace
        staged = workspace.device.pin(max(1, self.nbytes))
        workspace.device.copy(staged.ctypes.data, self.pointer, self.nbytes, self.stream)
        workspace.wait(self.stream)
        elements: NDArray[Any] = staged[: self.nbytes].copy().view(self.dtype).reshape(self.shape)
        workspace.device.unpin(staged)
        return elements

    def _at(self, pointer: int, shape: tuple[int, ...], dtype: Any, stream: Stream) -> Vector:
        return Vector(self._workspace, self._owner, pointer, shape, dtype, stream)


class _Owner:
    """Keeps an allocation of a workspace; the workspace frees it when no object refers to this one any more."""


class _Ending:
    """Allocations that no new work uses, and an event behind all earlier work of the workspace."""

    def __init__(self, device: Device, allocations: list[Allocation], event: Event) -> None:
        self.device, self.allocations, self.event = device, allocations, event

    def is_over(self) -> bool:
        return is_over(self.device, self.event)

    def free(self) -> None:
        for allocation in self.allocations:
            self.device.free(allocation)
        self.device.end_event(self.event)


class Workspace:
    """Memory of a device, and streams on which it is used. Any thread may use it.

    Attributes:
        device: the device.
        stream: the stream of new vectors.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.stream = device.new_stream()
        self._streams = [self.stream]
        self._dropped: deque[Allocation] = deque()
        self._ending: deque[_Ending] = deque()
        self._lock = threading.Lock()

    def stream_for(self, communicator: Communicator) -> Stream:
        """Return one more stream, which ends with the workspace; its kernels go beside calls of a communicator."""
        stream = self.device.new_stream(communicator._options.gpu_blocks)
        self._streams.append(stream)
        return stream

    def empty(self, count: int, dtype: DTypeLike) -> Vector:
        """Return a new flat vector; its content is undefined."""
        self._sweep()
        wanted = np.dtype(dtype)
        allocation, owner = self.device.allocate(max(1, count * wanted.itemsize)), _Owner()
        weakref.finalize(owner, self._drop, allocation).atexit = False
        return Vector(self, owner, allocation.pointer, (count,), wanted, self.stream)

    def zeros(self, count: int, dtype: DTypeLike) -> Vector:
        """Return a new flat vector of zeros."""
        made = self.empty(count, dtype)
        self.clear(made)
        return made

    def at(self, pointer: int, count: int, dtype: DTypeLike, owner: object) -> Vector:
        """Return a flat vector in memory of the caller, which `owner` keeps alive."""
        return Vector(self, owner, pointer, (count,), dtype, self.stream)

    def clear(self, vector: Vector) -> None:
        """Set all elements to zero."""
        xor = OPERATIONS["bxor"]  # of any bits with themselves it is 0
        at = vector.pointer
        self.device.reduce(at, [at, at], vector.nbytes, DTYPES["uint8"], xor, 1, vector.stream)

    def add(self, total: Vector, other: Vector) -> None:
        """Add the elements of another vector of the same stream to `total`."""
        dtype = DTYPES[total.dtype.name]
        sources = [total.pointer, other.pointer]
        self.device.reduce(total.pointer, sources, total.size, dtype, OPERATIONS["sum"], 1, total.stream)

    def copy_extents(self, extents: Iterable[DeviceCopy]) -> None:
        """Make copies by one kernel, on the stream of the workspace."""
        self.device.copy_extents([extent for extent in extents if extent.dst != extent.src], self.stream)

    def order(self, later: Stream, earlier: Stream) -> None:
        """Make later work of one stream wait for the work that another one has now."""
        if later != earlier:
            event = self.device.new_event()
            self.device.record(event, earlier)
            self.device.wait(later, event)
            self.device.end_event(event)

    def wait(self, stream: Stream) -> None:
        """Block until a stream has done its work.

        Raises:
            CollectiveTimeoutError: it has not done it in minutes.
        """
        event = self.device.new_event()
        self.device.record(event, stream)
        try:
            await_event(self.device, event, Deadline(_COPY_S))
        finally:
            self.device.end_event(event)

    def close(self) -> None:
        """Free all memory that no object uses, once the device has done its work. Keep the memory of unfinished work.

        Memory that the program uses longer is freed by later workspaces, or when the process ends.
        """
        self._end_dropped()
        deadline = Deadline(_FAREWELL_S)
        try:
            for ending in self._ending:
                await_event(self.device, ending.event, deadline)
        except CollectiveTimeoutError:
            keep_late(self._ending)
            return
        except UnisonoError:  # the device has failed, and nothing is to be freed
            return
        while self._ending:
            self._ending.popleft().free()
        for stream in self._streams:
            self.device.end_stream(stream)
        self._streams.clear()

    def _drop(self, allocation: Allocation) -> None:
        """Note that no new work will use memory. Runs in any thread, when objects are finalized."""
        if self._streams:
            self._dropped.append(allocation)
        else:  # closed, so that the device has done all work
            self.device.free(allocation)

    def _sweep(self) -> None:
        """Free memory that has been dropped and that the device does not use any more."""
        with self._lock:
            self._end_dropped()
            while self._ending and self._ending[0].is_over():
                self._ending.popleft().free()

    def _end_dropped(self) -> None:
        """Record an event behind all work that may use the memory that has been dropped."""
        dropped = []
        while self._dropped:
            dropped.append(self._dropped.popleft())
        if dropped:
            for stream in self._streams[1:]:
                self.order(self.stream, stream)
            event = self.device.new_event()
            self.device.record(event, self.stream)
            self._ending.append(_Ending(self.device, dropped, event))
