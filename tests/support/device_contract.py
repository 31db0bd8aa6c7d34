"""What every device must do: checks over a `Bench`, which is a device and how to see what it does.

They hold for the double and for `CudaDevice`, on a GPU or on its driver's double. What runs on ranks, which are
processes, is module-level and takes how to make the bench.
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
from unisono.testing.device_double import Gpu
from unisono.transports.cuda.device import Allocation, Device, Stream
from unisono.transports.reductions.definition import lift, reduce_into

PATIENCE_S = 20.0
N = 1000
REDUCTIONS = [("float32", "sum", 2), ("bfloat16", "avg", 3)]
FACTORS = [("float32", 0.5)]


class Bench:
    """A device under test, with one stream; `gpu` is what it is a double of, if it is one."""

    def __init__(self, device: Device, gpu: Gpu | None = None) -> None:
        self.device, self.gpu = device, gpu
        self.stream = device.new_stream()
        self._memory: list[Allocation] = []

    @classmethod
    def of_double(cls, **options: Any) -> Bench:
        gpu = Gpu(**options)
        return cls(gpu.device(), gpu)

    def memory(self, values: Any) -> int:
        """Return the address of a copy of `values`."""
        values = np.ascontiguousarray(values)
        made, pinned = self.device.allocate(values.nbytes), self.device.pin(values.nbytes)
        self._memory.append(made)
        pinned[:] = values.view(np.uint8).reshape(-1)
        self.device.copy(made.pointer, pinned.ctypes.data, values.nbytes, self.stream)
        self.finish(self.stream)
        self.device.unpin(pinned)
        return made.pointer

    def zeros(self, count: int = N, dtype: str = "uint8") -> int:
        return self.memory(np.zeros(count, dtype))

    def values(self, pointer: int, like: Any) -> Any:
        """Return what is at an address, when all that is on the stream of the bench has been done."""
        pinned = self.device.pin(like.nbytes)
        self.device.copy(pinned.ctypes.data, pointer, like.nbytes, self.stream)
        self.finish(self.stream)
        found = pinned.copy().view(like.dtype)
        self.device.unpin(pinned)
        return found

    def finish(self, *streams: Stream) -> None:
        """Wait until all that was issued to the streams has been done."""
        for stream in streams:
            event = self.device.new_event()
            self.device.record(event, stream)
            self.until(lambda event=event: self.device.done(event))
            self.device.end_event(event)

    @staticmethod
    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, "it never happens"
            time.sleep(0.0001)

    def close(self) -> None:
        for made in self._memory:
            self.device.free(made)
        self.device.end_stream(self.stream)
        if self.gpu is not None:
            leaks = self.gpu.leaks()
            self.gpu.close()
            assert leaks == []


# What holds on any device.


def check_a_stream_does_things_in_order(bench: Bench) -> None:
    ones, b, c = bench.memory(np.ones(N, np.uint8)), bench.zeros(), bench.zeros()
    bench.device.copy(b, ones, N, bench.stream)
    bench.device.copy(c, b, N, bench.stream)
    assert bench.values(c, np.ones(N, np.uint8)).all()


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


def check_an_event_that_was_not_recorded_is_no_hindrance(bench: Bench) -> None:
    event, after = bench.device.new_event(), bench.device.new_event()
    assert bench.device.done(event)
    bench.device.wait(bench.stream, event)
    bench.device.record(after, bench.stream)
    bench.until(lambda: bench.device.done(after))
    bench.device.end_event(event)
    bench.device.end_event(after)


def check_reductions_are_those_of_the_definition(bench: Bench) -> None:
    for dtype, op, k in REDUCTIONS:
        rows = oracles.contributions(dtype, op, k, 333)
        sources = [bench.memory(row) for row in rows]
        wanted = np.empty_like(rows[0])
        reduce_into(wanted, list(rows), operation(op), k, lower=True)
        target = bench.zeros(333, dtype)
        for dst in (target, sources[0]):
            bench.device.reduce(dst, sources, 333, DTYPES[dtype], operation(op), k, bench.stream)
            found = bench.values(dst, wanted)
            assert (found.view(np.uint8) == wanted.view(np.uint8)).all(), f"{op} of {k} {dtype}"


def check_contributions_are_lifted_as_the_definition_says(bench: Bench) -> None:
    for dtype, factor in FACTORS:
        op, row = Op.premul_sum(factor), oracles.contributions(dtype, "sum", 1, 333)[0]
        source, target = bench.memory(row), bench.zeros(333, dtype)
        for dst in (target, source):
            bench.device.lift(dst, source, 333, DTYPES[dtype], op, bench.stream)
            assert (bench.values(dst, row) == lift(op, row)).all(), dtype


def check_handles_do_not_open_in_their_process(bench: Bench) -> None:
    made, event = bench.device.allocate(N), bench.device.new_event(shared=True)
    with pytest.raises(TransportUnavailableError):
        bench.device.open(bench.device.export(made))
    with pytest.raises(TransportUnavailableError):
        bench.device.open_event(bench.device.export_event(event))
    bench.device.free(made)
    bench.device.end_event(event)


def check_addresses_are_known(bench: Bench) -> None:
    made, pinned, ordinary = bench.device.allocate(N), bench.device.pin(N), np.zeros(N)
    inside = bench.device.facts(made.pointer + 10)
    assert (inside.kind, inside.ordinal) == ("device", bench.device.ordinal)
    assert inside.allocation.pointer == made.pointer
    assert inside.allocation.nbytes >= N
    assert bench.device.facts(pinned.ctypes.data).kind == "pinned"
    assert bench.device.facts(ordinary.ctypes.data).kind == "host"
    bench.device.free(made)
    bench.device.unpin(pinned)


def check_only_what_can_be_reached_is(bench: Bench) -> None:
    assert bench.device.can_reach(bench.device.uuid)
    assert not bench.device.can_reach("some other device")
    assert not bench.device.is_capturing(bench.stream)


def check_after_an_abort_things_are_given_back_only(bench: Bench) -> None:
    device, event = bench.device, bench.device.new_event()
    a, b = bench.zeros(), bench.zeros()
    device.abort()
    for issue in (
        lambda: device.copy(a, b, N, bench.stream),
        lambda: device.record(event, bench.stream),
        lambda: device.allocate(N),
        device.new_event,
    ):
        with pytest.raises(AbortedError):
            issue()
    assert device.done(event)
    device.end_event(event)


CHECKS = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}


# Between processes.


def share_memory_and_an_event(world: Any, make: Callable[[], Bench]) -> str:
    """Rank 0 exports what rank 1 opens, uses behind an event, closes and opens again; return what went wrong."""
    bench = make()
    device, event = bench.device, bench.device.new_event(shared=True)
    whole = device.allocate(1 << 16)
    for turn in range(2):
        if world.rank == 0:
            ones = bench.memory(np.full(N, turn + 1, np.uint8))
            device.copy(whole.pointer + turn * N, ones, N, bench.stream)
            device.record(event, bench.stream)
            world.broadcast_object((device.export(whole), device.export_event(event)), root=0)
            world.barrier()
            continue
        handle, event_handle = world.broadcast_object(None, root=0)
        opened, theirs, mine = device.open(handle), device.open_event(event_handle), bench.zeros()
        device.wait(bench.stream, theirs)
        device.copy(mine, opened.pointer + turn * N, N, bench.stream)
        found = bench.values(mine, np.zeros(N, np.uint8))
        device.close(opened)
        device.end_event(theirs)
        world.barrier()
        if not (found == turn + 1).all():
            return f"{found[:4]} in turn {turn}"
    world.barrier()
    device.free(whole)
    device.end_event(event)
    bench.close()
    return ""


def order_of_processes(world: Any, make: Callable[[], Bench], waits: bool) -> str:
    """Rank 1 reads what rank 0 writes, with a wait or without; return the trap, if there is one."""
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
        device.close(opened)
        device.end_event(theirs)
        world.barrier()
    device.end_event(event)
    bench.close()
    return said


def outcome(run: Callable[[], Any]) -> str:
    """Return what `run` raises."""
    try:
        run()
    except (AssertionError, UnisonoError) as error:
        return str(error)
    return ""


def break_a_rule_between_processes(world: Any, lenient: tuple[str, ...], what: str) -> str:
    """Let rank 0 export memory and an event to rank 1, and one of them break a rule; return the trap there."""
    bench = Bench.of_double(lenient=lenient)
    device, said = bench.device, ""
    whole, event = device.allocate(N), device.new_event(shared=True)
    handles = world.broadcast_object((device.export(whole), device.export_event(event)), root=0)
    if world.rank == 1:
        device.open(handles[0])
        theirs = device.open_event(handles[1])
        if what == "opens_twice":
            said = outcome(lambda: device.open(handles[0]))
    world.barrier()
    if world.rank == 0 and what == "frees_opened":
        said = outcome(lambda: device.free(whole))
    if world.rank == 0 and what == "uses_ended":
        device.end_event(event)
    world.barrier()
    if world.rank == 1 and what == "uses_ended":
        said = outcome(lambda: device.wait(bench.stream, theirs))
    assert bench.gpu is not None
    bench.gpu.close()
    return said
