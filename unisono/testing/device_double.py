"""A simulated device in host memory that does everything as late and in as bad an order as the rules of devices allow.

Theory of operation ------------------- A `GpuDouble` is one GPU as one process uses it. Its devices, one for each rank
that is a thread, share addresses, streams and events. Issued work waits in the queue of its stream. A thread runs it
late, or a caller that asks whether an event has happened. A seed decides which stream goes on next. Memory and events
are in memfds that other processes open (`device_segments`), so ranks may be processes, and may be killed.

Breaking a rule is a trap: the call that breaks it raises `DeviceTrapError` or, if that call has returned, the next one
does. Vector clocks (`device_clocks`) detect overlapping accesses without an order when they are issued, so every run
detects a missing wait. Accesses are ordered by records and waits, and by the host of a process seeing its own work
done. A flag orders them, too: a wait may be issued before the raise, so the accesses behind it are checked when they
run. A flag that a killed process should raise stays as it is, until the host of its owner releases it. Other
communication between processes is not visible to the double.

Each rule can be switched off by its name in `device_gpu.LENIENCIES`, so that tests can show that they need it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.dtypes import DTYPES, DType
from unisono.errors import AbortedError, TransportUnavailableError
from unisono.operations import Op
from unisono.testing.device_gpu import LASTING, LASTING_STREAM, DeviceTrapError, GpuState
from unisono.testing.device_segments import DeviceSegment
from unisono.testing.quantisation import Quantised, dequantised, with_feedback
from unisono.transports.contracts.call import AnyArray
from unisono.transports.cuda.device import (
    RELEASED,
    Allocation,
    DeviceCopy,
    DeviceGraph,
    Event,
    Flags,
    PointerFacts,
    Stream,
)
from unisono.transports.cuda.issued_calls import IssuedCall, NextNumber, issue
from unisono.transports.cuda.kernels.quantised_form import QUANTISED_BLOCK, quantised_nbytes, scales_offset
from unisono.transports.cuda.memory.host import HANDLE_NBYTES
from unisono.transports.reductions.definition import lift, numpy_dtype, reduce_into

__all__ = ["DeviceDouble", "DeviceTrapError", "GpuDouble"]

# The calls that a graph may issue, all on the stream that is the last argument.
_CAPTURED = ("copy", "reduce", "lift", "raise_flag", "await_flag")


class GpuDouble(GpuState):
    """A GPU as this process uses it.

    Args:
        seed: the seed of the order and the times in which work runs.
        lenient: the rules to switch off, from `device_gpu.LENIENCIES`.
        background: whether a thread runs work by and by; otherwise it runs only when a caller asks for an event.
        uuid: the name of the device in all processes.
        reaches: the uuids of other devices whose memory can be opened here.
        exports: whether the device can export memory at all.
        gives_up: whether records of an ended process count as having happened; otherwise work after them never runs.
        flags: whether streams can raise flags and wait for them.
        pool: whether the device has a pool of memory that streams take and give.
        graphs: whether work with flags can be captured into graphs.
    """

    def device(self, ordinal: int = 0) -> DeviceDouble:
        """Return a device; ranks that are threads have one each."""
        return DeviceDouble(self, ordinal)

    def memory(self, nbytes: int, kind: str = "device") -> Allocation:
        """Return new memory of a user, to be released as usual: ``"device"``, ``"pooled"`` or ``"managed"``."""
        with self.lock:
            return self._add(DeviceSegment.new(max(nbytes, 1)), kind)

    def view(self, pointer: int, nbytes: int) -> NDArray[np.uint8]:
        """Return memory as it is now, without waiting for work on it."""
        with self.lock:
            self._region(pointer, nbytes)
        return _bytes(pointer, nbytes)

    def lose(self) -> None:
        """End the context of the device, as a kernel does that reads memory which it may not read."""
        with self.lock:
            self.is_lost = True

    def capture(self, stream: Stream, is_capturing: bool = True) -> None:
        """Start or end the recording of a graph on a stream."""
        with self.lock:
            self.stream(stream).is_capturing = is_capturing

    def synchronize(self) -> None:
        """Run all work that does not depend on other processes."""
        with self.lock:
            self.check()
            while self._schedule.step():
                pass

    def leaks(self) -> list[str]:
        """Return the memory, streams and events that were not released. Finishes all releases first."""
        with self.lock:
            if self.is_lost:
                return []
            self.release_all()
            memory = [
                f"{region.kind} memory of {region.nbytes} bytes"
                for region in self._regions.values()
                if not region.is_gone
            ]
            own = [f"stream {handle}" for handle, _ in self._streams if handle not in LASTING]
            flags = [f"{page.count} flags" for page in self._flags.values()]
            graphs = [f"graph {handle}" for handle in self._graphs]
            return [*memory, *own, *(f"event {handle}" for handle in self._events), *flags, *graphs]

    def close(self) -> None:
        """Stop, and raise a trap that has not been raised yet."""
        self._schedule.close()
        with self.lock:
            for page in (self._page, *self._pages.values()):
                page.close()
            self._pages.clear()
            self.check()


class DeviceDouble:
    """A `Device` on a `GpuDouble`."""

    def __init__(self, gpu: GpuDouble, ordinal: int) -> None:
        self.name = "device double"
        self.uuid = gpu.uuid
        self.ordinal = ordinal
        self._gpu = gpu
        self._is_aborted = False

    def allocate(self, nbytes: int) -> Allocation:
        with self._issuing():
            return self._gpu.allocate(nbytes)

    def free(self, allocation: Allocation) -> None:
        self._give_back(self._gpu.release, allocation.pointer, ("dedicated", "device", "pooled", "managed"))

    def has_pool(self) -> bool:
        return self._gpu.has_pool

    def take(self, nbytes: int, stream: Stream) -> Allocation:
        with self._issuing():
            return self._gpu.take(nbytes, stream)

    def give(self, allocation: Allocation, events: Collection[Event] | None) -> None:
        self._give_back(self._gpu.give, allocation, events)

    def export(self, allocation: Allocation) -> bytes:
        with self._issuing():
            if not self._gpu.exports:
                raise TransportUnavailableError("this device cannot export memory")
            return self._gpu.export(allocation) + self.uuid.encode()

    def open(self, handle: bytes) -> Allocation:
        with self._issuing():
            uuid = handle[HANDLE_NBYTES:].decode()
            if not self.can_reach(uuid):
                raise TransportUnavailableError(f"memory of device {uuid} cannot be reached from device {self.uuid}")
            return self._gpu.open(handle)

    def close(self, allocation: Allocation) -> None:
        self._give_back(self._gpu.release, allocation.pointer, ("opened",))

    def can_reach(self, uuid: str) -> bool:
        return uuid == self.uuid or uuid in self._gpu.reaches

    def new_stream(self, most_blocks: int = 0) -> Stream:
        with self._issuing():
            return self._gpu.new_stream()

    def lasting_stream(self) -> Stream:
        return LASTING_STREAM

    def end_stream(self, stream: Stream) -> None:
        self._give_back(self._gpu.end_stream, stream)

    def is_capturing(self, stream: Stream) -> bool:
        with self._issuing():
            return self._gpu.stream(stream).is_capturing

    def new_event(self, *, shared: bool = False) -> Event:
        with self._issuing():
            return self._gpu.new_event(shared)

    def export_event(self, event: Event) -> bytes:
        with self._issuing():
            return self._gpu.export_event(event)

    def open_event(self, handle: bytes) -> Event:
        with self._issuing():
            return self._gpu.open_event(handle)

    def end_event(self, event: Event) -> None:
        self._give_back(self._gpu.end_event, event)

    def record(self, event: Event, stream: Stream) -> None:
        with self._issuing():
            self._gpu.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        with self._issuing():
            self._gpu.wait(stream, event)

    def done(self, event: Event) -> bool:
        with self._gpu.lock:
            return self._gpu.done(event)

    def has_flags(self) -> bool:
        return self._gpu.has_flags

    def new_flags(self, count: int) -> Flags:
        with self._issuing():
            return self._gpu.new_flags(count)

    def export_flags(self, flags: Flags) -> bytes:
        with self._issuing():
            return self._gpu.flag_page(flags).handle().pack()

    def open_flags(self, handle: bytes) -> Flags:
        with self._issuing():
            return self._gpu.open_flags(handle)

    def end_flags(self, flags: Flags) -> None:
        self._give_back(self._gpu.end_flags, flags)

    def raise_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        with self._issuing():
            self._gpu.raise_flag(flags, index, number, stream)

    def await_flag(self, flags: Flags, index: int, number: int, stream: Stream) -> None:
        with self._issuing():
            self._gpu.await_flag(flags, index, number, stream)

    def release_flags(self, flags: Flags, number: int = RELEASED) -> None:
        with self._gpu.lock:
            self._gpu.flag_page(flags).release(number)

    def has_graphs(self) -> bool:
        return self._gpu.has_graphs

    def capture(self, calls: Sequence[IssuedCall], stream: Stream) -> DeviceGraph:
        with self._issuing():
            if not self._gpu.has_graphs:
                raise DeviceTrapError("the device has no graphs")
            for call in calls:
                is_constant = not any(isinstance(each, NextNumber) for each in call.arguments)
                if call.method not in _CAPTURED or call.arguments[-1] != stream or not is_constant:
                    raise DeviceTrapError(f"{call} was captured")
            return self._gpu.new_graph(calls)

    def launch(self, graph: DeviceGraph, stream: Stream) -> None:
        with self._issuing():
            for method, arguments in self._gpu.graph(graph):
                getattr(self, method)(*arguments[:-1], stream)

    def end_graph(self, graph: DeviceGraph) -> None:
        self._give_back(self._gpu.end_graph, graph)

    def copy(self, dst: int, src: int, nbytes: int, stream: Stream) -> None:
        if not nbytes:
            return
        with self._issuing():
            self._gpu.rule("overlaps", dst != src, "a copy to itself")
            self._gpu.use(stream, [(src, nbytes)], (dst, nbytes), lambda: _copy(dst, src, nbytes))

    def lift(self, dst: int, src: int, count: int, dtype: DType, op: Op, stream: Stream) -> None:
        def run() -> None:
            lift(op, _elements(src, count, dtype), _elements(dst, count, dtype))

        self._elementwise(dst, [src], count, dtype, stream, run)

    def reduce(
        self, dst: int, sources: Sequence[int], count: int, dtype: DType, op: Op, divisor: int, stream: Stream
    ) -> None:
        def run() -> None:
            operands = [_elements(source, count, dtype) for source in sources]
            reduce_into(_elements(dst, count, dtype), operands, op, divisor, lower=True)

        self._elementwise(dst, sources, count, dtype, stream, run)

    def load_reduction(self, k: int, dtype: DType, op: Op) -> None:
        """Do nothing: a double has no kernels."""

    def copy_extents(self, extents: Sequence[DeviceCopy], stream: Stream) -> None:
        whole = [extent for extent in extents if extent.nbytes]
        if not whole:
            return

        def run() -> None:
            for extent in whole:
                _copy(*extent)

        reads = [(extent.src, extent.nbytes) for extent in whole]
        writes = [(extent.dst, extent.nbytes) for extent in whole]
        with self._issuing():
            self._gpu.rule("overlaps", _are_apart(writes, reads), "an extent that is written is used by another copy")
            self._gpu.use_all(stream, reads, writes, run)

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
        if not count:
            return
        offset, nbytes = scales_offset(form, count), quantised_nbytes(form, count)

        def run() -> None:
            kept = _elements(residual, count, DTYPES["float32"]) if residual else np.zeros(count, np.float32)
            made = with_feedback(_elements(src, count, dtype), kept, form.name, feeds=feeds, weight=weight)
            _elements(codes, count, form)[:] = made.codes
            _elements(codes + offset, made.scales.size, DTYPES["float32"])[:] = made.scales

        kept = [(residual, 4 * count)] if residual else []
        with self._issuing():
            self._gpu.rule("misaligned", not (codes % 16 or residual % 4 or src % dtype.itemsize), "codes or elements")
            self._gpu.use_all(stream, [(src, count * dtype.itemsize)], [(codes, nbytes), *kept], run)

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
        offset, nbytes = scales_offset(form, count), quantised_nbytes(form, count)

        def values_of(row: int) -> NDArray[np.float32]:
            begin = codes + row * (stride or nbytes)
            blocks = (nbytes - offset) // 4 and -(-count // QUANTISED_BLOCK)
            return dequantised(
                Quantised(_elements(begin, count, form), _elements(begin + offset, blocks, DTYPES["float32"]))
            )

        def run() -> None:
            total = values_of(0)
            with np.errstate(all="ignore"):
                for row in range(1, rows):
                    total += values_of(row)
                _elements(dst, count, dtype)[:] = (total / np.float32(divisor)).astype(numpy_dtype(dtype))

        if count:
            with self._issuing():
                self._gpu.rule("misaligned", not (codes % 16 or dst % dtype.itemsize), "codes or elements")
                self._gpu.use(
                    stream, [(codes, (rows - 1) * (stride or nbytes) + nbytes)], (dst, count * dtype.itemsize), run
                )

    def compile(self, calls: Sequence[IssuedCall]) -> Callable[[], None]:
        return functools.partial(issue, self, calls)

    def pin(self, nbytes: int) -> AnyArray:
        with self._issuing():
            return self._gpu.pin(nbytes)

    def unpin(self, array: AnyArray) -> None:
        self._give_back(self._gpu.release, array.ctypes.data, ("pinned",))

    def current(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def has_released(self) -> bool:
        with self._gpu.lock:
            return self._gpu.has_released()

    def facts(self, pointer: int) -> PointerFacts:
        with self._issuing():
            return self._gpu.facts(pointer, self.ordinal)

    def abort(self) -> None:
        self._is_aborted = True

    def _elementwise(
        self, dst: int, sources: Sequence[int], count: int, dtype: DType, stream: Stream, run: Callable[[], None]
    ) -> None:
        if not count:
            return
        nbytes = count * dtype.itemsize
        with self._issuing():
            aligned = not any(pointer % numpy_dtype(dtype).alignment for pointer in (dst, *sources))
            self._gpu.rule("misaligned", aligned, f"elements of {dtype.name} are not aligned")
            self._gpu.use(stream, [(source, nbytes) for source in sources], (dst, nbytes), run)

    def _give_back(self, release: Callable[..., None], *arguments: Any) -> None:
        with self._gpu.lock:
            if not self._gpu.is_lost:
                release(*arguments)

    @contextlib.contextmanager
    def _issuing(self) -> Iterator[None]:
        with self._gpu.lock:
            if self._is_aborted and not self._gpu.allows("aborted"):
                raise AbortedError("the device was aborted")
            self._gpu.require_context()
            self._gpu.check()
            yield


def _bytes(pointer: int, nbytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


def _elements(pointer: int, count: int, dtype: DType) -> NDArray[Any]:
    return _bytes(pointer, count * dtype.itemsize).view(numpy_dtype(dtype))


def _are_apart(writes: Sequence[tuple[int, int]], reads: Sequence[tuple[int, int]]) -> bool:
    """Return whether no range that is written overlaps another one; each range is (address, bytes)."""
    merged = sorted([*((*each, True) for each in writes), *((*each, False) for each in reads)])
    end_of_read = end_of_write = 0
    for begin, nbytes, is_written in merged:
        if begin < end_of_write or (is_written and begin < end_of_read):
            return False
        end_of_read = max(end_of_read, begin + nbytes)
        end_of_write = max(end_of_write, begin + nbytes if is_written else 0)
    return True


def _copy(dst: int, src: int, nbytes: int) -> None:
    _bytes(dst, nbytes)[:] = _bytes(src, nbytes)
