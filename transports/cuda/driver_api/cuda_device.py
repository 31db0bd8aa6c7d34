"""`CudaDevice`: the implementation of `device.Device` by the CUDA driver.

It uses the device's primary context, as torch and CuPy do, so it can use their addresses, streams and events. The
context is current during each call, and afterwards the previous one is again. It stays until the process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.dtypes import DType
from unisono.errors import AbortedError, InternalError, TransportUnavailableError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.operations import Op
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import (
    ALLOCATION_NBYTES,
    RELEASED,
    Allocation,
    DeviceCopy,
    DeviceGraph,
    Event,
    Flags,
    PointerFacts,
    Stream,
    is_over,
)
from unisono.transports.cuda.driver_api.context import CurrentContext
from unisono.transports.cuda.driver_api.context_fence import ContextFence, has_context_events
from unisono.transports.cuda.driver_api.errors import ContextLostError, Driver
from unisono.transports.cuda.driver_api.native_programs import NativePrograms
from unisono.transports.cuda.issued_calls import IssuedCall, issue
from unisono.transports.cuda.kernels.cache import user_cache
from unisono.transports.cuda.kernels.catalogue import MOST_SOURCES
from unisono.transports.cuda.kernels.launcher import (
    KernelLaunch,
    Launcher,
    as_number,
    as_pointer,
    as_pointers,
    dequantise_launch,
    extents_launch,
    pieces_of,
    quantise_launch,
    reduction_launch,
    scaling_launch,
)
from unisono.transports.cuda.kernels.tables import Tables
from unisono.transports.cuda.memory.host import HostMemory, MemoryHandle
from unisono.transports.cuda.memory.pool import MemoryPool
from unisono.transports.cuda.memory.reaper import Reaper
from unisono.transports.cuda.peers.process_token import TOKEN_NBYTES, process_token
from unisono.transports.executors.polling import pauses_of_polling
from unisono.transports.reductions.definition import factor_of

_HANDLE_NBYTES = 64
# The exporting process, the size of the memory, and the driver's handle.
_HANDLE = struct.Struct(f"{TOKEN_NBYTES}sQ{_HANDLE_NBYTES}s")
# How long an allocation that finds no memory waits for memory that is being given back.
_MEMORY_S = 2.0
# How long the device may take for a graph that shows whether graphs work. It may do work of others meanwhile.
_TRIAL_S = 5.0

# The environment variable by which measurements switch off "flags" or "graphs" where those of a driver do not work.
_WITHOUT = "BENCH_GPU_WITHOUT"

_ON_HOST = 1  # CU_MEMORYTYPE_HOST
_POINTER_ATTRIBUTES = (
    *("MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL", "IS_LEGACY_CUDA_IPC_CAPABLE"),
    *("RANGE_START_ADDR", "RANGE_SIZE", "MEMPOOL_HANDLE"),
)


class CudaDevice:
    """The GPU number `ordinal` of this process; the contract is that of `device.Device`."""

    def __init__(self, ordinal: int = 0, *, native: bool = True) -> None:
        """Open the device and retain its primary context.

        Args:
            ordinal: its number in this process.
            native: whether native code makes calls that are made again, if the driver has all functions that it needs;
                otherwise Python makes them.

        Raises:
            TransportUnavailableError: the driver, the device or the compiler cannot be used. The message says
                why and what to do.
        """
        self._driver = driver = Driver()
        self.ordinal = ordinal
        self._device = driver("cuDeviceGet", ordinal)
        self.name = driver("cuDeviceGetName", 256, self._device).rstrip(b"\0 ").decode()
        self.uuid = _uuid(driver, self._device)
        major, minor, multiprocessors, has_waits, registers, pools = (
            driver(
                "cuDeviceGetAttribute",
                getattr(driver.api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"),
                self._device,
            )
            for name in (
                *("COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"),
                *("CAN_USE_64_BIT_STREAM_MEM_OPS", "HOST_REGISTER_SUPPORTED", "MEMORY_POOLS_SUPPORTED"),
            )
        )
        without = os.environ.get(_WITHOUT, "").split(",")
        known = driver.api.CUpointer_attribute
        self._attributes = [getattr(known, f"CU_POINTER_ATTRIBUTE_{name}") for name in _POINTER_ATTRIBUTES]
        self._has_flags = bool(has_waits and registers) and "flags" not in without
        self._has_graphs: bool | None = False if "graphs" in without else None  # None: unknown
        self._flags: dict[int, _MappedFlags] = {}
        self._launcher = Launcher(driver, (major, minor), multiprocessors, user_cache(os.environ))
        context = driver("cuDevicePrimaryCtxRetain", self._device)
        self._context = CurrentContext(driver, context)
        self._programs: NativePrograms | None = None
        if native:
            with contextlib.suppress(RuntimeError):
                self._programs = NativePrograms(driver, context, self._launcher, self._address_of, self._failure_of)
        self._tables = Tables(self)
        self._aborted = False
        self._recordings = threading.Lock()  # held while a graph is recorded
        self._pool = MemoryPool(driver, self._context, ordinal) if pools else None
        self._lasting = self.new_stream()
        self._reaper = Reaper(f"unisono-gpu-{ordinal}")
        weakref.finalize(self, self._reaper.end).atexit = False

    # --- memory ----------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Allocation:
        whole = max(1, -(-nbytes // ALLOCATION_NBYTES)) * ALLOCATION_NBYTES
        try:
            return Allocation(int(self._issue("cuMemAlloc", whole)), whole)
        except TransportUnavailableError:
            has_released = not self._reaper.is_idle() and self._reaper.wait_idle(_MEMORY_S)
            if self._pool is not None:
                self._pool.trim()
            elif not has_released:
                raise
        return Allocation(int(self._issue("cuMemAlloc", whole)), whole)

    def free(self, allocation: Allocation) -> None:
        if self._pool is None or not self._pool.has(allocation):
            self._give_back("cuMemFree", allocation.pointer)
        elif not self._context.is_lost:
            self._pool.free(allocation)

    def give(self, allocation: Allocation, events: Collection[Event] | None) -> None:
        if self._context.is_lost:
            return
        if events is None:
            may_run = ContextFence(self._driver, self._context, self._recordings).is_over
        else:
            may_run = functools.partial(self._have_ended, deque(events))
            if may_run():
                self.free(allocation)
                return
        self._reaper.put(functools.partial(self.free, allocation), may_run)

    def has_pool(self) -> bool:
        return self._pool is not None

    def take(self, nbytes: int, stream: Stream) -> Allocation:
        self._require_running()
        assert self._pool is not None, "the caller has asked `has_pool`"
        return self._pool.take(nbytes, stream)

    def export(self, allocation: Allocation) -> bytes:
        handle = self._issue("cuIpcGetMemHandle", allocation.pointer)
        return _HANDLE.pack(process_token(), allocation.nbytes, _bytes_of(handle))

    def open(self, handle: bytes) -> Allocation:
        api = self._driver.api
        nbytes, opaque = _opened(handle, api.CUipcMemHandle())
        flag = api.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return Allocation(int(self._issue("cuIpcOpenMemHandle", opaque, int(flag))), nbytes)

    def close(self, allocation: Allocation) -> None:
        self._give_back("cuIpcCloseMemHandle", allocation.pointer)

    def can_reach(self, uuid: str) -> bool:
        self._require_running()
        driver = self._driver
        others = [driver("cuDeviceGet", ordinal) for ordinal in range(driver("cuDeviceGetCount"))]
        match = next((other for other in others if _uuid(driver, other) == uuid), None)
        # The driver cannot be asked about a device that this process does not see.
        return match is not None and (uuid == self.uuid or bool(driver("cuDeviceCanAccessPeer", self._device, match)))

    def pin(self, nbytes: int) -> AnyArray:
        flag = self._driver.api.CU_MEMHOSTALLOC_PORTABLE
        address = int(self._issue("cuMemHostAlloc", max(1, nbytes), flag))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def unpin(self, array: AnyArray) -> None:
        self._give_back("cuMemFreeHost", array.ctypes.data)

    def current(self) -> contextlib.AbstractContextManager[object]:
        return self._context

    def has_released(self) -> bool:
        return self._reaper.is_idle()

    def facts(self, pointer: int) -> PointerFacts:
        self._require_running()
        values = self._call("cuPointerGetAttributes", len(self._attributes), self._attributes, pointer)
        return _facts(pointer, *map(int, values))

    # --- streams and events ----------------------------------------------------------------------------------------

    def new_stream(self, most_blocks: int = 0) -> Stream:
        flag = self._driver.api.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = Stream(self._driver.number_of(self._issue("cuStreamCreate", int(flag))))
        if most_blocks:
            self._launcher.most_blocks[stream] = most_blocks
        return stream

    def lasting_stream(self) -> Stream:
        return self._lasting

    def end_stream(self, stream: Stream) -> None:
        self._launcher.most_blocks.pop(stream, None)
        self._destroy("cuStreamDestroy", stream)

    def is_capturing(self, stream: Stream) -> bool:
        try:
            status = self._issue("cuStreamIsCapturing", stream)
        except UsageError:  # another stream records, and the legacy stream would take part
            return True
        return bool(status != self._driver.api.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def new_event(self, *, shared: bool = False) -> Event:
        api = self._driver.api.CUevent_flags
        flags = int(api.CU_EVENT_DISABLE_TIMING) | (int(api.CU_EVENT_INTERPROCESS) if shared else 0)
        return Event(self._driver.number_of(self._issue("cuEventCreate", flags)))

    def export_event(self, event: Event) -> bytes:
        return _HANDLE.pack(process_token(), 0, _bytes_of(self._issue("cuIpcGetEventHandle", event.handle)))

    def open_event(self, handle: bytes) -> Event:
        _, opaque = _opened(handle, self._driver.api.CUipcEventHandle())
        return Event(self._driver.number_of(self._issue("cuIpcOpenEventHandle", opaque)))

    def end_event(self, event: Event) -> None:
        self._destroy("cuEventDestroy", event.handle)

    def record(self, event: Event, stream: Stream) -> None:
        self._issue("cuEventRecord", event.handle, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self._issue("cuStreamWaitEvent", stream, event.handle, 0)

    def done(self, event: Event) -> bool:
        results = self._driver.api.CUresult
        with self._context:
            (result,) = self._driver.attempt("cuEventQuery", event.handle)
            if result not in (results.CUDA_SUCCESS, results.CUDA_ERROR_NOT_READY):
                raise self._driver.error("cuEventQuery", result)
        return bool(result == results.CUDA_SUCCESS)

    # --- work ------------------------------------------------------------------------------------------------------

    def has_flags(self) -> bool:
        return self._has_flags

    def new_flags(self, count: int) -> Flags:
        return self._mapped(HostMemory.new(-(-8 * count // mmap.PAGESIZE) * mmap.PAGESIZE), count)

    def export_flags(self, flags: Flags) -> bytes:
        return self._flags[flags.address].memory.handle(flags.count).pack()

    def open_flags(self, handle: bytes) -> Flags:
        unpacked = MemoryHandle.unpack(handle)
        return self._mapped(HostMemory.opened(unpacked), unpacked.number)

    def end_flags(self, flags: Flags) -> None:
        mapped = self._flags.pop(flags.address)
        self._reaper.put(functools.partial(_unmap, self._driver, self._context, mapped.memory))

    def raise_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        self._issue("cuStreamWriteValue64", stream, self._address_of(flags, index), number, 0)

    def await_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        at_least = int(self._driver.api.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
        self._issue("cuStreamWaitValue64", stream, self._address_of(flags, index), number, at_least)

    def release_flags(self, flags: Flags, number: int = RELEASED) -> None:
        words = self._flags[flags.address].memory.view.cast("Q")
        for index in range(flags.count):
            words[index] = number

    def has_graphs(self) -> bool:
        if self._has_graphs is None:
            self._has_graphs = self._has_flags and has_context_events(self._driver) and self._captures_flags()
        return self._has_graphs

    def capture(self, calls: Sequence[IssuedCall], stream: Stream) -> DeviceGraph:
        graph = self._captured(calls, stream)
        try:
            return DeviceGraph(self._driver.number_of(self._call("cuGraphInstantiate", graph, 0)))
        finally:
            self._call("cuGraphDestroy", graph)

    def launch(self, graph: DeviceGraph, stream: Stream) -> None:
        self._issue("cuGraphLaunch", graph.handle, stream)

    def end_graph(self, graph: DeviceGraph) -> None:
        self._destroy("cuGraphExecDestroy", graph.handle)

    def _captured(self, calls: Sequence[IssuedCall], stream: Stream) -> Any:
        mode = self._driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        with self._recordings:
            self._issue("cuStreamBeginCapture", stream, mode)
            try:
                issue(self, calls)
            except BaseException:
                with contextlib.suppress(UnisonoError):  # the stream may be used again in any case
                    self._call("cuGraphDestroy", self._call("cuStreamEndCapture", stream))
                raise
            return self._call("cuStreamEndCapture", stream)

    def _captures_flags(self) -> bool:
        """Return whether the device raises flags and waits for them in graphs, by a graph that does so."""
        flags, stream, event = self.new_flags(1), self.new_stream(), self.new_event()
        calls = [IssuedCall("raise_flag", (flags, 0, 1, stream)), IssuedCall("await_flag", (flags, 0, 1, stream))]
        try:
            graph = self.capture(calls, stream)
            self.launch(graph, stream)
            self.record(event, stream)
            works = self._happens(event) and self._flags[flags.address].memory.view.cast("Q")[0] == 1
            self.end_graph(graph)
        except (TransportUnavailableError, UsageError, InternalError):
            self._require_running()
            works = False
        self.release_flags(flags)
        if self._happens(event):  # or else the flags are in use
            self.end_stream(stream)
            self.end_event(event)
            self.end_flags(flags)
        return works

    def _happens(self, event: Event) -> bool:
        """Wait for an event for a while; return whether it has happened."""
        deadline = Deadline(_TRIAL_S)
        for pause_s in pauses_of_polling():
            if is_over(self, event) or deadline.has_passed():
                break
            time.sleep(pause_s or 0.0)
        return is_over(self, event)

    def _address_of(self, flags: Flags, index: int) -> int:
        """Return the address of a flag on the device."""
        return self._flags[flags.address].pointer + 8 * index

    def _mapped(self, memory: HostMemory, count: int) -> Flags:
        """Let the device use flags in memory that processes of this host share."""
        api, nbytes = self._driver.api, len(memory.view)
        try:
            self._issue("cuMemHostRegister", memory.address, nbytes, api.CU_MEMHOSTREGISTER_DEVICEMAP)
            pointer = int(self._issue("cuMemHostGetDevicePointer", memory.address, 0))
        except BaseException:
            memory.close()
            raise
        self._flags[memory.address] = _MappedFlags(memory, pointer)
        return Flags(memory.address, count)

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        self._require_running()
        if nbytes:
            self._call("cuMemcpyAsync", dst, src, nbytes, stream)

    def reduce(
        self, dst: int, sources: Sequence[int], count: int, dtype: DType, op: Op, divisor: int, stream: Stream
    ) -> None:
        k = len(sources)
        if k <= MOST_SOURCES:
            self._launch(reduction_launch(dst, (as_pointers(sources),), k, count, dtype, op, divisor), stream)
            return
        with self._tables.holding(sources, stream) as address:
            addresses = as_pointer(address), as_number(k)
            self._launch(reduction_launch(dst, addresses, k, count, dtype, op, divisor), stream)

    def load_reduction(self, k: int, dtype: DType, op: Op) -> None:
        self._require_running()
        with self._context:
            self._launcher.load(reduction_launch(0, (), k, 0, dtype, op, 1))
            if op.factor is not None:
                self._launcher.load(scaling_launch(0, 0, b"", 0, dtype))

    def lift(self, dst: int, src: int, count: int, dtype: DType, op: Op, stream: Stream) -> None:
        self._launch(scaling_launch(dst, src, factor_of(op, dtype).tobytes(), count, dtype), stream)

    def copy_extents(self, extents: Sequence[DeviceCopy], stream: Stream) -> None:
        pieces = pieces_of(extents)
        if pieces:
            numbers = [number for piece in pieces for number in piece]
            with self._tables.holding(numbers, stream) as address:
                self._launch(extents_launch(address, len(pieces)), stream)

    def quantise(
        self,
        codes: int,
        src: int,
        residual: int,
        count: int,
        dtype: DType,
        form: DType,
        stream: Stream,
        *,
        feeds: bool = True,
        weight: float = 1.0,
    ) -> None:
        self._launch(quantise_launch(codes, src, residual, count, dtype, form, feeds, weight), stream)

    def dequantise(
        self,
        dst: int,
        codes: int,
        rows: int,
        count: int,
        dtype: DType,
        form: DType,
        divisor: int,
        stream: Stream,
        *,
        stride: int = 0,
    ) -> None:
        self._launch(dequantise_launch(dst, codes, rows, count, dtype, form, divisor, stride), stream)

    def compile(self, calls: Sequence[IssuedCall]) -> Callable[[], None]:
        self._require_running()
        if self._programs is None or not self._programs.takes(calls):
            return functools.partial(issue, self, calls)
        with self._context:
            return self._programs.compiled(calls)

    def abort(self) -> None:
        self._aborted = True
        if self._programs is not None:
            self._programs.abort()

    def _launch(self, launch: KernelLaunch, stream: Stream) -> None:
        self._require_running()
        if launch.units:
            with self._context:
                self._launcher.launch(launch, stream)

    def _failure_of(self, name: str, result: int) -> Exception:
        """Return the error for a call of a program; see `NativePrograms`."""
        if not name:
            return self._aborted_error()
        failure = self._driver.failure(name, result)
        self._context.note(failure)
        return failure

    def _issue(self, name: str, *arguments: Any) -> Any:
        """Call the driver, unless the device has been aborted."""
        self._require_running()
        return self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        with self._context:
            return self._driver(name, *arguments)

    def _destroy(self, name: str, handle: int) -> None:
        """Destroy an object of the driver by its handle.

        The driver does not wait for work. If the context has ended, the object has ended with it.
        """
        if not self._context.is_lost:
            with contextlib.suppress(ContextLostError):
                self._call(name, handle)

    def _have_ended(self, events: deque[Event]) -> bool:
        """End the events that have happened, and return whether all have."""
        while events and is_over(self, events[0]):
            self.end_event(events.popleft())
        return not events

    def _give_back(self, name: str, address: int) -> None:
        """Let the device's own thread free memory, because the driver may wait for all work meanwhile."""
        if not self._context.is_lost:
            self._reaper.put(functools.partial(_release, self._driver, self._context, name, address))

    def _require_running(self) -> None:
        if self._aborted:
            raise self._aborted_error()

    def _aborted_error(self) -> AbortedError:
        return AbortedError(f"the device {self.ordinal} was aborted")


def current_ordinal() -> int:
    """Return the number of the device whose context is current in this thread; 0 if there is none.

    Raises:
        TransportUnavailableError: there is no driver.
    """
    driver = Driver()
    if not driver.number_of(driver("cuCtxGetCurrent")):
        return 0
    current, count = int(driver("cuCtxGetDevice")), driver("cuDeviceGetCount")
    return next(ordinal for ordinal in range(count) if int(driver("cuDeviceGet", ordinal)) == current)


class _MappedFlags(NamedTuple):
    """Flags in memory of the host, and their address on the device."""

    memory: HostMemory
    pointer: int


def _release(driver: Driver, context: CurrentContext, name: str, address: int) -> None:
    """Give memory back to the driver, which may wait for all work of the context."""
    with contextlib.suppress(ContextLostError), context:
        driver(name, address)


def _unmap(driver: Driver, context: CurrentContext, memory: HostMemory) -> None:
    """End the device's use of flags, and unmap them. The driver may wait for all work of the context."""
    _release(driver, context, "cuMemHostUnregister", memory.address)
    memory.close()


def _uuid(driver: Driver, device: Any) -> str:
    uuid: bytes = driver("cuDeviceGetUuid", device).bytes
    return uuid.hex()


def _bytes_of(handle: Any) -> bytes:
    return ctypes.string_at(handle.getPtr(), _HANDLE_NBYTES)


def _opened(handle: bytes, opaque: Any) -> tuple[int, Any]:
    """Return the size of the memory that a handle stands for; stores the driver's part of the handle in `opaque`."""
    if len(handle) != _HANDLE.size:
        raise InternalError(f"a handle of a device has {_HANDLE.size} bytes, and this one has {len(handle)}")
    process, nbytes, opaque_bytes = _HANDLE.unpack(handle)
    if process == process_token():
        raise TransportUnavailableError("the process that exported a handle cannot open it")
    ctypes.memmove(opaque.getPtr(), opaque_bytes, _HANDLE_NBYTES)
    return nbytes, opaque


def _facts(
    pointer: int, memory: int, managed: int, ordinal: int, exportable: int, start: int, nbytes: int, pool: int
) -> PointerFacts:
    kinds = (
        ("host", not memory),
        ("managed", managed),
        ("pinned", memory == _ON_HOST),
        ("pooled", pool or not exportable),
    )
    kind = next((kind for kind, holds in kinds if holds), "device")
    whole = Allocation(start, nbytes) if nbytes else Allocation(pointer, 0)
    return PointerFacts(kind, -1 if kind in ("host", "pinned") else ordinal, whole)
