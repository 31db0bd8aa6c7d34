"""The contract of `Device`, as checks over a `Bench`, which holds a device and one stream.

The checks hold for the double of a device, and for `CudaDevice` on a GPU or on the driver's double. Functions that run
on ranks in other processes are module-level and take a function that makes the bench.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono.dtypes import DTYPES
from unisono.errors import AbortedError, TransportUnavailableError, UnisonoError
from unisono.operations import Op, operation
from unisono.testing import oracles
from unisono.testing.device_double import GpuDouble
from unisono.testing.quantisation import dequantised, with_feedback
from unisono.transports.cuda.device import Allocation, Device, DeviceCopy, Stream
from unisono.transports.cuda.issued_calls import Counters, IssuedCall, NextNumber
from unisono.transports.cuda.kernels.quantised_form import quantised_nbytes
from unisono.transports.reductions.definition import lift, reduce_into

PATIENCE_S = 20.0
N = 1000
REDUCTIONS = [("float32", "sum", 2), ("bfloat16", "avg", 3)]
FACTORS = [("float32", 0.5)]
QUANTISATIONS = [("float32", "int8"), ("float32", "bfloat16"), ("bfloat16", "float8_e4m3fn")]


class Bench:
    """A device under test with one stream. `gpu` is the simulated GPU if the device is a double."""

    def __init__(self, device: Device, gpu: GpuDouble | None = None) -> None:
        self.device, self.gpu = device, gpu
        self.stream = device.new_stream()
        self._memory: list[Allocation] = []

    @classmethod
    def of_double(cls, **options: Any) -> Bench:
        gpu = GpuDouble(**options)
        return cls(gpu.device(), gpu)

    def memory(self, values: Any) -> int:
        """Return the device address of a copy of `values`."""
        values = np.ascontiguousarray(values)
        allocation, pinned = self.device.allocate(values.nbytes), self.device.pin(values.nbytes)
        self._memory.append(allocation)
        pinned[:] = values.view(np.uint8).reshape(-1)
        self.device.copy(allocation.pointer, pinned.ctypes.data, values.nbytes, self.stream)
        self.finish(self.stream)
        self.device.unpin(pinned)
        return allocation.pointer

    def zeros(self, count: int = N, dtype: str = "uint8") -> int:
        return self.memory(np.zeros(count, dtype))

    def values(self, pointer: int, like: Any) -> Any:
        """Wait for the stream of the bench, and return the values at a device address, as an array like `like`."""
        pinned = self.device.pin(like.nbytes)
        self.device.copy(pinned.ctypes.data, pointer, like.nbytes, self.stream)
        self.finish(self.stream)
        values = pinned.copy().view(like.dtype)
        self.device.unpin(pinned)
        return values

    def finish(self, *streams: Stream) -> None:
        """Wait until the device has done all work that was issued to the streams."""
        for stream in streams:
            event = self.device.new_event()
            self.device.record(event, stream)
            self.wait_until(lambda event=event: self.device.done(event))
            self.device.end_event(event)

    @staticmethod
    def wait_until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"the condition does not hold after {PATIENCE_S} s"
            time.sleep(0.0001)

    def close_opened(self, opened: Allocation) -> None:
        """Close memory of another process, which may free it afterwards."""
        self.device.close(opened)
        self.wait_until(self.device.has_released)

    def close(self) -> None:
        for allocation in self._memory:
            self.device.free(allocation)
        self.device.end_stream(self.stream)
        if self.gpu is not None:
            leaks = self.gpu.leaks()
            self.gpu.close()
            assert leaks == []


# Checks that hold on any device.


def driver_bench() -> Bench:
    """Return a bench over the GPU of this machine, or over the double of its driver."""
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    return Bench(CudaDevice())


def check_a_stream_keeps_the_order_of_its_work(bench: Bench) -> None:
    ones, b, c = bench.memory(np.ones(N, np.uint8)), bench.zeros(), bench.zeros()
    bench.device.copy(b, ones, N, bench.stream)
    bench.device.copy(c, b, N, bench.stream)
    assert bench.values(c, np.ones(N, np.uint8)).all()


def check_streams_take_and_give_memory_of_the_pool(bench: Bench) -> None:
    device, other = bench.device, bench.device.new_stream()
    ones = bench.memory(np.ones(N, np.uint8))
    for _ in range(3):
        taken, events = device.take(N, other), [device.new_event(), device.new_event()]
        device.copy(taken.pointer, ones, N, other)
        device.record(events[0], other)
        device.wait(bench.stream, events[0])
        assert bench.values(taken.pointer, np.ones(N, np.uint8)).all()
        device.record(events[1], bench.stream)
        device.give(taken, events)
    unused = device.take(0, other)
    bench.finish(other)
    device.free(unused)
    bench.wait_until(device.has_released)
    device.end_stream(other)


def check_memory_is_given_behind_all_work_of_the_process(bench: Bench) -> None:
    device, other = bench.device, bench.device.new_stream()
    ones, target = bench.memory(np.ones(N, np.uint8)), bench.zeros()
    for make in (device.allocate, lambda nbytes: device.take(nbytes, other)):
        made = make(N)
        device.copy(made.pointer, ones, N, other)
        device.copy(target, made.pointer, N, other)
        device.give(made, None)
    bench.finish(other)
    assert bench.values(target, np.ones(N, np.uint8)).all()
    bench.wait_until(device.has_released)
    device.end_stream(other)


def check_the_lasting_stream_is_one(bench: Bench) -> None:
    assert bench.device.lasting_stream() == bench.device.lasting_stream()
    assert not bench.device.is_capturing(bench.device.lasting_stream())


def check_a_wait_orders_streams(bench: Bench) -> None:
    device, other, event = bench.device, bench.device.new_stream(), bench.device.new_event()
    ones, b, c = bench.memory(np.ones(N, np.uint8)), bench.zeros(), bench.zeros()
    device.copy(b, ones, N, bench.stream)
    device.record(event, bench.stream)
    device.wait(other, event)
    device.copy(c, b, N, other)
    device.record(event, other)
    device.wait(bench.stream, event)
    assert bench.values(c, np.ones(N, np.uint8)).all()
    bench.finish(other)
    device.end_stream(other)
    device.end_event(event)


def check_an_event_without_a_record_blocks_no_stream(bench: Bench) -> None:
    event, after = bench.device.new_event(), bench.device.new_event()
    assert bench.device.done(event)
    bench.device.wait(bench.stream, event)
    bench.device.record(after, bench.stream)
    bench.wait_until(lambda: bench.device.done(after))
    bench.device.end_event(event)
    bench.device.end_event(after)


def check_reductions_follow_the_definition(bench: Bench) -> None:
    for dtype, op, k in REDUCTIONS:
        rows = oracles.contributions(dtype, op, k, 333)
        sources = [bench.memory(row) for row in rows]
        expected = np.empty_like(rows[0])
        reduce_into(expected, list(rows), operation(op), k, lower=True)
        target = bench.zeros(333, dtype)
        for dst in (target, sources[0]):
            bench.device.reduce(dst, sources, 333, DTYPES[dtype], operation(op), k, bench.stream)
            result = bench.values(dst, expected)
            assert (result.view(np.uint8) == expected.view(np.uint8)).all(), f"{op} of {k} {dtype}"


def check_lifts_follow_the_definition(bench: Bench) -> None:
    for dtype, factor in FACTORS:
        op, row = Op.premul_sum(factor), oracles.contributions(dtype, "sum", 1, 333)[0]
        source, target = bench.memory(row), bench.zeros(333, dtype)
        for dst in (target, source):
            bench.device.lift(dst, source, 333, DTYPES[dtype], op, bench.stream)
            assert (bench.values(dst, row) == lift(op, row)).all(), dtype


def check_extents_are_packed_and_unpacked(bench: Bench) -> None:
    rows = [np.arange(n, dtype=np.uint8) for n in (1, 0, 100, 64, 33)]
    places = [0, 16, 16, 128, 192]
    sources, bucket = [bench.memory(row) for row in rows], bench.zeros(256)
    pairs = [(bucket + place, source, row.size) for place, source, row in zip(places, sources, rows, strict=True)]
    bench.device.copy_extents([DeviceCopy(*pair) for pair in pairs], bench.stream)
    expected = np.zeros(256, np.uint8)
    for place, row in zip(places, rows, strict=True):
        expected[place : place + row.size] = row
    assert (bench.values(bucket, expected) == expected).all()
    targets = [bench.zeros(max(1, row.size)) for row in rows]
    bench.device.copy_extents(
        [DeviceCopy(target, dst, nbytes) for target, (dst, _, nbytes) in zip(targets, pairs, strict=True)], bench.stream
    )
    for target, row in zip(targets, rows, strict=True):
        assert (bench.values(target, row) == row).all()
    bench.device.copy_extents([], bench.stream)


def check_quantised_arrays_follow_the_definition(bench: Bench) -> None:
    for dtype, form in QUANTISATIONS:
        of, codes, count = DTYPES[dtype], DTYPES[form], 333
        rows = [np.random.default_rng(i).normal(size=count).astype(dtype) for i in range(2)]
        wire_nbytes, total, kept = quantised_nbytes(codes, count), np.zeros(count, np.float32), np.zeros(count, "f4")
        wire, residual = bench.zeros(2 * wire_nbytes), bench.zeros(count, "float32")
        for i, row in enumerate(rows):
            feedback = {"feeds": i == 0, "weight": 2.0}
            at, source = wire + i * wire_nbytes, bench.memory(row)
            bench.device.quantise(at, source, residual, count, of, codes, bench.stream, **feedback)
            total += dequantised(with_feedback(row, kept, form, **feedback))
        assert (bench.values(residual, kept) == kept).all(), f"the residual of {dtype} as {form}"
        target, expected = bench.zeros(count, dtype), (total / np.float32(3)).astype(dtype)
        bench.device.dequantise(target, wire, 2, count, of, codes, 3, bench.stream)
        result = bench.values(target, expected)
        assert (result.view(np.uint8) == expected.view(np.uint8)).all(), f"{dtype} of {form}"


def check_handles_do_not_open_in_their_own_process(bench: Bench) -> None:
    allocation, event = bench.device.allocate(N), bench.device.new_event(shared=True)
    with pytest.raises(TransportUnavailableError):
        bench.device.open(bench.device.export(allocation))
    with pytest.raises(TransportUnavailableError):
        bench.device.open_event(bench.device.export_event(event))
    bench.device.free(allocation)
    bench.device.end_event(event)


def check_facts_describe_addresses(bench: Bench) -> None:
    allocation, pinned, ordinary = bench.device.allocate(N), bench.device.pin(N), np.zeros(N)
    inside = bench.device.facts(allocation.pointer + 10)
    assert (inside.kind, inside.ordinal) == ("device", bench.device.ordinal)
    assert inside.allocation.pointer == allocation.pointer
    assert inside.allocation.nbytes >= N
    assert bench.device.facts(pinned.ctypes.data).kind == "pinned"
    assert bench.device.facts(ordinary.ctypes.data).kind == "host"
    bench.device.free(allocation)
    bench.device.unpin(pinned)


def check_a_device_reaches_itself_and_no_unknown_device(bench: Bench) -> None:
    assert bench.device.can_reach(bench.device.uuid)
    assert not bench.device.can_reach("some other device")
    assert not bench.device.is_capturing(bench.stream)


def check_a_flag_orders_streams_although_the_wait_is_issued_first(bench: Bench) -> None:
    device, other, after = bench.device, bench.device.new_stream(), bench.device.new_event()
    ones, b, c = bench.memory(np.ones(N, np.uint8)), bench.zeros(), bench.zeros()
    flags = device.new_flags(2)
    opened = device.open_flags(device.export_flags(flags))
    for number in (1, 2):
        device.await_flag(flags, 1, number, other)
    device.copy(c, b, N, other)
    device.record(after, other)
    device.raise_flag(opened, 1, 1, bench.stream)
    device.copy(b, ones, N, bench.stream)
    bench.finish(bench.stream)
    assert not device.done(after)
    device.raise_flag(opened, 1, 2, bench.stream)
    bench.wait_until(lambda: device.done(after))
    assert bench.values(c, np.ones(N, np.uint8)).all()
    for memory in (opened, flags):
        device.end_flags(memory)
    device.end_stream(other)
    device.end_event(after)


def check_the_host_releases_streams_that_wait_for_flags(bench: Bench) -> None:
    device, after = bench.device, bench.device.new_event()
    flags = device.new_flags(3)
    for index in range(3):
        device.await_flag(flags, index, 1000, bench.stream)
    device.record(after, bench.stream)
    assert not device.done(after)
    device.release_flags(flags)
    bench.wait_until(lambda: device.done(after))
    device.end_flags(flags)
    device.end_event(after)


def check_graphs_issue_their_work_again(bench: Bench) -> None:
    device, stream, third = bench.device, bench.stream, 2**64 // 3
    assert device.has_graphs()
    flags, dtype, op, k = device.new_flags(1), *REDUCTIONS[0]
    nbytes = N * DTYPES[dtype].itemsize
    rows, target = [bench.zeros(N, dtype) for _ in range(k)], bench.memory(np.full(N, 9, dtype))
    graphs = [
        device.capture(
            [
                IssuedCall("raise_flag", (flags, 0, part * third + 1, stream)),
                IssuedCall("await_flag", (flags, 0, part * third + 1, stream)),
                IssuedCall("copy", (rows[0], rows[1], nbytes, stream)),
                IssuedCall("reduce", (target, rows, N, DTYPES[dtype], operation(op), k, stream)),
            ],
            stream,
        )
        for part in range(3)
    ]
    assert (bench.values(target, np.zeros(N, dtype)) == 9).all(), "a capture issues nothing"
    for number in range(5):
        device.copy(rows[1], bench.memory(np.full(N, number, dtype)), nbytes, stream)
        device.launch(graphs[number % 3], stream)
        assert (bench.values(target, np.zeros(N, dtype)) == 2 * number).all()
    for graph in graphs:
        device.end_graph(graph)
    device.end_flags(flags)


def check_flags_are_compared_cyclically(bench: Bench) -> None:
    device, after, third = bench.device, bench.device.new_event(), 2**64 // 3
    flags = device.new_flags(1)
    for number in (1, third + 1, 2 * third + 1, 1):
        device.await_flag(flags, 0, number, bench.stream)
        device.record(after, bench.stream)
        assert not device.done(after), number
        device.release_flags(flags, number + third // 4)
        bench.wait_until(lambda: device.done(after))
    device.end_flags(flags)
    device.end_event(after)


def check_compiled_calls_are_made_again_in_order(bench: Bench) -> None:
    device, event, counters = bench.device, bench.device.new_event(), Counters(2)
    flags = device.new_flags(2)
    dtype, op, k = REDUCTIONS[0]
    rows, target, copied = [bench.zeros(N, dtype) for _ in range(k)], bench.zeros(N, dtype), bench.zeros(N, dtype)
    nbytes = N * DTYPES[dtype].itemsize
    again = device.compile(
        [
            IssuedCall("raise_flag", (flags, 1, NextNumber(counters, 0), bench.stream)),
            IssuedCall("await_flag", (flags, 1, NextNumber(counters, 1), bench.stream)),
            IssuedCall("reduce", (target, rows, N, DTYPES[dtype], operation(op), k, bench.stream)),
            IssuedCall("copy", (copied, target, nbytes, bench.stream)),
            IssuedCall("record", (event, bench.stream)),
            IssuedCall("wait", (bench.stream, event)),
        ]
    )
    for number in (1, 2, 3):
        ones = bench.memory(np.full(N, number, dtype))
        device.copy(rows[1], ones, nbytes, bench.stream)
        again()
        assert (bench.values(copied, np.zeros(N, dtype)) == number).all()
        assert device.done(event)
        assert list(counters.numbers) == [number, number]
    device.end_flags(flags)
    device.end_event(event)


def check_an_aborted_device_takes_no_new_work(bench: Bench) -> None:
    device, event = bench.device, bench.device.new_event()
    a, b = bench.zeros(), bench.zeros()
    again = device.compile([IssuedCall("copy", (a, b, N, bench.stream))])
    device.abort()
    for issue in (
        lambda: device.copy(a, b, N, bench.stream),
        lambda: device.record(event, bench.stream),
        lambda: device.allocate(N),
        device.new_event,
        again,
    ):
        with pytest.raises(AbortedError):
            issue()
    assert device.done(event)
    device.end_event(event)


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}


# Functions for ranks in different processes.


def share_memory_and_an_event(world: Any, make: Callable[[], Bench]) -> str:
    """Let rank 0 export memory and an event, and rank 1 open, use and close them twice; return a fault, or ""."""
    bench = make()
    device, event = bench.device, bench.device.new_event(shared=True)
    whole = device.allocate(1 << 16)
    for round_ in range(2):
        if world.rank == 0:
            values = bench.memory(np.full(N, round_ + 1, np.uint8))
            device.copy(whole.pointer + round_ * N, values, N, bench.stream)
            device.record(event, bench.stream)
            world.broadcast_object((device.export(whole), device.export_event(event)), root=0)
            world.barrier()
            continue
        handle, event_handle = world.broadcast_object(None, root=0)
        opened, theirs, mine = device.open(handle), device.open_event(event_handle), bench.zeros()
        device.wait(bench.stream, theirs)
        device.copy(mine, opened.pointer + round_ * N, N, bench.stream)
        result = bench.values(mine, np.zeros(N, np.uint8))
        bench.close_opened(opened)
        device.end_event(theirs)
        world.barrier()
        if not (result == round_ + 1).all():
            return f"{result[:4]} in round {round_}"
    world.barrier()
    device.free(whole)
    device.end_event(event)
    bench.close()
    return ""


def order_of_processes(world: Any, make: Callable[[], Bench], waits: bool) -> str:
    """Let rank 1 read memory that rank 0 writes, after a wait for rank 0's event or without one.

    Returns:
        The text of the error by which the double reports the missing wait, on rank 1; otherwise "".
    """
    bench = make()
    device, event = bench.device, bench.device.new_event(shared=True)
    said = ""
    if world.rank == 0:
        whole, ones = device.allocate(N), bench.memory(np.ones(N, np.uint8))
        device.copy(whole.pointer, ones, N, bench.stream)
        device.record(event, bench.stream)
        world.broadcast_object((device.export(whole), device.export_event(event)), root=0)
        world.barrier()
        bench.finish(bench.stream)
        device.free(whole)
    else:
        handle, event_handle = world.broadcast_object(None, root=0)
        opened, theirs, mine = device.open(handle), device.open_event(event_handle), bench.zeros()
        if waits:
            device.wait(bench.stream, theirs)
        try:
            device.copy(mine, opened.pointer, N, bench.stream)
        except AssertionError as error:
            said = str(error)
        bench.finish(bench.stream)
        bench.close_opened(opened)
        device.end_event(theirs)
        world.barrier()
    device.end_event(event)
    bench.close()
    return said


def order_by_a_flag(world: Any, make: Callable[[], Bench], waits: bool) -> str:
    """Let rank 1 issue a read of memory that rank 0 writes later, behind a wait for a flag or without one.

    Returns:
        The text of the error by which the double reports the missing wait, on the rank whose access runs last; or "".
    """
    bench = make()
    device, said = bench.device, ""
    whole, flags, ones = device.allocate(N), device.new_flags(1), bench.memory(np.ones(N, np.uint8))
    handles = world.allgather_object((device.export(whole), device.export_flags(flags)))
    opened, theirs = device.open(handles[0][0]) if world.rank else whole, device.open_flags(handles[1][1])

    def use() -> None:
        if world.rank == 1:
            if waits:
                device.await_flag(flags, 0, 1, bench.stream)
            device.copy(mine, opened.pointer, N, bench.stream)
        world.barrier()
        if world.rank == 0:
            device.copy(whole.pointer, ones, N, bench.stream)
            device.raise_flag(theirs, 0, 1, bench.stream)
        bench.finish(bench.stream)
        if world.rank == 1 and waits:
            assert bench.values(mine, np.ones(N, np.uint8)).all()

    mine = bench.zeros()
    try:
        use()
    except AssertionError as error:
        said = str(error)
    world.barrier()
    device.end_flags(theirs)
    device.end_flags(flags)
    if world.rank:
        bench.close_opened(opened)
    world.barrier()
    device.free(whole)
    bench.close()
    return said


def outcome(run: Callable[[], Any]) -> str:
    """Return the text of the error that `run` raises, or ""."""
    try:
        run()
    except (AssertionError, UnisonoError) as error:
        return str(error)
    return ""


def break_a_rule_between_processes(world: Any, lenient: tuple[str, ...], rule: str) -> str:
    """Let rank 0 export memory and an event to rank 1, and let one of the two ranks break `rule`.

    Returns:
        The text of the error by which the double reports that, on the rank that broke the rule; otherwise "".
    """
    bench = Bench.of_double(lenient=lenient)
    device, said = bench.device, ""
    whole, event = device.allocate(N), device.new_event(shared=True)
    handles = world.broadcast_object((device.export(whole), device.export_event(event)), root=0)
    if world.rank == 1:
        opened = device.open(handles[0])
        theirs = device.open_event(handles[1])
        if rule == "opens_twice":
            said = outcome(lambda: device.open(handles[0]))
        if rule == "releases_at_once":
            device.close(opened)
    world.barrier()
    if world.rank == 0 and rule in ("frees_opened", "releases_at_once"):
        said = outcome(lambda: device.free(whole))
    if world.rank == 0 and rule == "uses_ended":
        device.end_event(event)
    world.barrier()
    if world.rank == 1 and rule == "uses_ended":
        said = outcome(lambda: device.wait(bench.stream, theirs))
    assert bench.gpu is not None
    bench.gpu.close()
    return said
