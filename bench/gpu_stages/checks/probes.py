"""Tests on a real driver whether the driver behaves as the code assumes, and measures calls that issue a collective.

Each *premise* is a sentence about the driver. A record says whether it holds, by which figure, and which part of the
code stands on it. A premise is tried on a stream that a flag holds up, which the host releases after `HELD_S`. The
double of the driver behaves as the code assumes, so it says nothing about a premise.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import unisono as un
from unisono.bench.gpu_stages.gpu import FLUSH_NBYTES, STREAM, DeviceClock, MeasuredGpu
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.bench.gpu_stages.speeds.kernels import compile_all
from unisono.bench.sizes import parse_sizes
from unisono.dtypes import DTYPES
from unisono.errors import UnisonoError
from unisono.operations import OPERATIONS
from unisono.transports.cuda.device import Device, Event, Flags, Stream
from unisono.transports.cuda.driver_api.context_fence import has_context_events
from unisono.transports.cuda.driver_api.errors import Driver
from unisono.transports.cuda.issued_calls import Counters, IssuedCall, NextNumber

HELD_S = 0.3
SOON_S, LATE_S = 2.0, 0.1
THIRD = 2**64 // 3
STREAMS = 12
BATCH, BATCHES = 100, 5
LAUNCH_S = 25.0
SUM = OPERATIONS["sum"]

# Premises, and the parts of the code that stand on them.
RELEASED = "a wait for a flag ends when the host writes the flag"
CYCLIC = "flags are compared cyclically"
GRAPHS = "flags in a graph wait and are written, each time the graph is launched"
BESIDE = "a stream goes on beside one that waits"
BESIDE_BY_QUEUES = f"{BESIDE}, with 32 hardware queues"
CAPTURES = "a kernel is first launched while another thread captures a graph"
FENCED = "an event of the context is behind the work of every stream"
GONE = "the handle of a destroyed stream is refused, and no new stream gets it"
HANDED = "a flag of one process releases a stream of another one"
PREMISES = {
    RELEASED: "peers/channel.py: a rank whose peer has died releases its own streams",
    CYCLIC: "executors/replays.py: numbers of flags in replays of graphs",
    GRAPHS: "executors/replays.py: persistent calls are replayed as graphs",
    BESIDE: "peers/collectives.py: side streams of a communicator beside the user's",
    BESIDE_BY_QUEUES: "peers/collectives.py: the same in a process with the variable CUDA_DEVICE_MAX_CONNECTIONS=32",
    CAPTURES: "driver_api/errors.py: calls that are made in the relaxed mode",
    FENCED: "driver_api/context_fence.py: memory is released only after the work that uses it",
    GONE: "memory/pool.py: memory returns by a stream of the pool's own, so nothing stands on it",
    HANDED: "peers/channel.py: ranks that are processes order their streams by flags",
}
WAITING = "{} while a stream is held up for {:.0f} ms"


class Held(NamedTuple):
    """A stream, its flag that holds it up, and an event."""

    device: Any
    stream: Stream
    flags: Flags
    event: Event

    @classmethod
    def of(cls, device: Any) -> Held:
        """Return a new stream of a device."""
        return cls(device, device.new_stream(), device.new_flags(1), device.new_event())

    def passes(self, seconds: float) -> bool:
        """Return whether all that was issued to the stream is done within some seconds."""
        self.device.record(self.event, self.stream)
        end = time.monotonic() + seconds
        while not self.device.done(self.event) and time.monotonic() < end:
            time.sleep(0.0005)
        return bool(self.device.done(self.event))

    def finish(self) -> None:
        """Wait until all that was issued to the stream is done, but not for ever."""
        self.passes(SOON_S)

    def seconds(self, number: int, call: Callable[[], object]) -> float:
        """Return the time of a call while the stream waits for `number`, which the host writes after `HELD_S`."""
        self.device.await_flag(self.flags, 0, number, self.stream)
        timer = threading.Timer(HELD_S, self.device.release_flags, (self.flags, number))
        timer.start()
        started = time.perf_counter()
        try:
            call()
            return time.perf_counter() - started
        finally:
            timer.join()


def say(name: str, holds: bool, figure: str, premise: str = "") -> None:
    """Print whether the driver behaves as the code assumes in one point."""
    tell("premise", name=name, holds=holds, figure=figure, premise=premise or PREMISES[name])


def say_waits(name: str, seconds: float) -> None:
    """Print how long a call took while a stream was held up. The code is right whether or not the call waits."""
    tell("cost", name=WAITING.format(name, HELD_S * 1e3), us=seconds * 1e6)


class GpuProbes:
    """The probes of one process, with a current context."""

    def __init__(self, gpu: MeasuredGpu, clock: DeviceClock, dtype: str) -> None:
        self._gpu, self._clock, self._driver, self._dtype = gpu, clock, Driver(), dtype
        self.device = gpu.device

    def releases(self) -> bool:
        """Try whether the host can release a stream; without that, no stream may be held up."""
        held = Held.of(self.device)
        self.device.await_flag(held.flags, 0, 1, held.stream)
        waits = not held.passes(LATE_S)
        self.device.release_flags(held.flags, 1)
        ends = held.passes(SOON_S)
        say(RELEASED, waits and ends, f"waits: {waits}, ends: {ends}")
        return ends

    def releases_of_memory(self) -> None:
        """Try which calls that release memory wait for work under way."""
        driver, held, flags = self._driver, Held.of(self.device), self.device.new_flags(1)
        free = int(driver("cuMemAlloc", 2 << 20))
        pinned = {nbytes: int(driver("cuMemHostAlloc", nbytes, 0)) for nbytes in (4096, 2 << 20)}
        calls = {
            "cuMemFreeHost of 4 KiB": lambda: driver("cuMemFreeHost", pinned[4096]),
            "cuMemFreeHost of 2 MiB": lambda: driver("cuMemFreeHost", pinned[2 << 20]),
            "cuMemFree of 2 MiB": lambda: driver("cuMemFree", free),
            "cuMemHostUnregister": lambda: driver("cuMemHostUnregister", flags.address),
        }
        for number, (name, call) in enumerate(calls.items(), 1):
            say_waits(name, held.seconds(number, call))

    def fence(self) -> None:
        """Record an event behind all work of the context while one stream waits for a flag."""
        device, driver, held, event = self.device, self._driver, Held.of(self.device), self.device.new_event()
        if not has_context_events(driver):
            say(FENCED, False, "the driver lacks cuCtxRecordEvent")
            return
        device.await_flag(held.flags, 0, 1, held.stream)
        driver("cuCtxRecordEvent", driver("cuCtxGetCurrent"), event.handle)
        waits = not _eventually(lambda: device.done(event), LATE_S)
        device.release_flags(held.flags, 1)
        ends = _eventually(lambda: device.done(event))
        say(FENCED, waits and ends, f"waits: {waits}, ends: {ends}")

    def cyclic(self) -> None:
        """Compare numbers of flags around their end."""
        held, wrong = Held.of(self.device), []
        for flag, number, expected in (
            (2 * THIRD + 5, 2 * THIRD + 1, True),
            (7, 2 * THIRD + 1, True),
            (2 * THIRD, 7, False),
        ):
            self.device.release_flags(held.flags, flag)
            self.device.await_flag(held.flags, 0, number, held.stream)
            passes = held.passes(SOON_S if expected else LATE_S)
            wrong += [] if passes is expected else [f"{flag:x} {'passes' if passes else 'holds up'} {number:x}"]
            self.device.release_flags(held.flags, number)
            held.passes(SOON_S)
        say(CYCLIC, not wrong, ", ".join(wrong) or "3 comparisons")

    def graphs(self) -> None:
        """Launch a graph of a wait, a copy and a write, and measure its replays beside a program."""
        device, held, data = self.device, Held.of(self.device), self._gpu.empty(2, np.dtype(np.int64))
        written = device.new_flags(2)
        calls = [
            IssuedCall("await_flag", (held.flags, 0, 1, held.stream)),
            IssuedCall("copy", (data.pointer + 8, data.pointer, 8, held.stream)),
            IssuedCall("raise_flag", (written, 0, 5, held.stream)),
        ]
        graph, right = device.capture(calls, held.stream), True
        for turn in (1, 2):
            self._gpu.fill(data, np.array([turn, 0]))
            device.release_flags(held.flags, 0)
            device.launch(graph, held.stream)
            waits = not held.passes(LATE_S)
            device.release_flags(held.flags, 1)
            right &= waits and held.passes(SOON_S) and int(self._gpu.fetch(data)[1]) == turn
        device.await_flag(written, 0, 5, held.stream)
        say(GRAPHS, right and held.passes(SOON_S), "2 launches")
        device.release_flags(written, 5)
        numbers = Counters(2)
        program = device.compile(
            [
                IssuedCall("raise_flag", (written, 1, NextNumber(numbers, 0), held.stream)),
                IssuedCall("await_flag", (written, 1, NextNumber(numbers, 1), held.stream)),
                calls[1],
            ]
        )
        tell_cost("replay of a graph of 3 calls", lambda: device.launch(graph, held.stream), held.finish)
        tell_cost("program of 3 calls", program, held.finish)

    def streams(self, premise: str = BESIDE) -> None:
        """Try which other streams cannot go on while one stream waits for a flag."""
        device, held, words = self.device, Held.of(self.device), self._gpu.empty(2 * STREAMS, np.dtype(np.int64))
        others = [Held.of(device) for _ in range(STREAMS - 1)]
        device.await_flag(held.flags, 0, 1, held.stream)
        for i, other in enumerate(others):
            device.copy(words.pointer + 16 * i + 8, words.pointer + 16 * i, 8, other.stream)
        late = [i for i, other in enumerate(others, 1) if not other.passes(LATE_S)]
        device.release_flags(held.flags, 1)
        say(premise, not late, f"late: {late or 'none'} of {STREAMS - 1}")

    def loads(self) -> None:
        """Launch kernels for the first time: behind a stream that is held up, and beside a capture."""
        device, driver, held, memory = self.device, self._driver, Held.of(self.device), self.device.allocate(4096)
        other = device.new_stream()

        def first(k: int) -> None:
            device.reduce(memory.pointer, [memory.pointer] * k, 64, DTYPES[self._dtype], SUM, 1, other)

        seconds = held.seconds(1, lambda: first(3))
        tell("cost", name="first launch of a kernel beside a stream that is held up", us=seconds * 1e6)
        mode = driver.api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        reasons = list[str]()

        def attempt() -> None:
            try:
                first(2)
            except UnisonoError as error:
                reasons.append(reason_of(error))

        driver("cuStreamBeginCapture", held.stream, mode)
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        try:
            driver("cuGraphDestroy", driver("cuStreamEndCapture", held.stream))
        except UnisonoError as error:
            reasons.append(f"the capture has ended: {reason_of(error)}")
        say(CAPTURES, not reasons, "; ".join(reasons) or "both went on")

    def costs(self) -> None:
        """Measure the host's time for the calls of the driver that issue a call."""
        device, held = self.device, Held.of(self.device)
        stream = held.stream
        memory, flags, events = device.allocate(2 << 20), device.new_flags(1), [device.new_event() for _ in range(2)]
        dtype, number = DTYPES[self._dtype], iter(range(1, 1 << 62))
        device.record(events[0], stream)
        calls: dict[str, Callable[[], object]] = {
            "cuStreamWriteValue64": lambda: device.raise_flag(flags, 0, next(number), stream),
            "cuStreamWaitValue64": lambda: device.await_flag(flags, 0, 1, stream),
            "cuMemcpyAsync of 8 bytes": lambda: device.copy(memory.pointer + 8, memory.pointer, 8, stream),
            "cuLaunchKernel": lambda: device.reduce(memory.pointer, [memory.pointer] * 2, 64, dtype, SUM, 1, stream),
            "cuEventRecord": lambda: device.record(events[1], stream),
            "cuStreamWaitEvent": lambda: device.wait(stream, events[0]),
            "cuEventQuery": lambda: device.done(events[0]),
            "cuPointerGetAttributes": lambda: device.facts(memory.pointer),
            "cuStreamIsCapturing": lambda: device.is_capturing(stream),
        }
        if device.has_pool():
            calls["memory of the pool, taken and given"] = lambda: _take_and_give(device, stream)
        for name, call in calls.items():
            tell_cost(name, call, held.finish)


def _take_and_give(device: Device, stream: Stream) -> None:
    memory, event = device.take(4096, stream), device.new_event()
    device.record(event, stream)
    device.give(memory, [event])


def _eventually(condition: Callable[[], bool], seconds: float = SOON_S) -> bool:
    """Return whether a condition becomes true within some seconds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.0005)
    return condition()


def tell_cost(name: str, call: Callable[[], object], finish: Callable[[], object]) -> None:
    """Print the microseconds of the host for a call: the median of batches, after each of which the device finishes."""
    call()
    finish()
    times = []
    for _ in range(BATCHES):
        started = time.perf_counter()
        for _ in range(BATCH):
            call()
        times.append((time.perf_counter() - started) / BATCH)
        finish()
    tell("cost", name=name, us=statistics.median(times) * 1e6)


_GONE = """
from unisono.errors import UnisonoError
from unisono.transports.cuda.driver_api.cuda_device import CudaDevice
device = CudaDevice()
for has_another in (False, True):
    stream = device.new_stream()
    memory = device.take(4096, stream)
    device.end_stream(stream)
    other = device.new_stream() if has_another else None
    try:
        device._call("cuMemFreeAsync", memory.pointer, stream)
        said = "is taken"
    except UnisonoError as error:
        said = f"is refused ({error})"
    print(f"its handle {said}" + (", the same as a new one" if other == stream else ""), end="; ")
"""


def gone() -> None:
    """Give memory back behind a stream that has been destroyed, in a process that may crash."""
    process = subprocess.run([sys.executable, "-c", _GONE], capture_output=True, text=True, timeout=30, check=False)
    code = process.returncode
    said = (process.stdout if code == 0 else f"code {code}: {process.stderr}").strip()[-300:]
    say(GONE, code == 0 and "is taken" not in said and "a new one" not in said, said)


def by_queues() -> None:
    """Try streams in a process of its own, which has as many hardware queues as the driver offers."""
    command = [sys.executable, "-m", "unisono.bench.gpu_stages.checks.probes", "--streams"]
    environ = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    process = subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, check=False)
    if process.returncode:
        raise RuntimeError(f"code {process.returncode}: {process.stderr.strip()[-300:]}")
    sys.stdout.write(process.stdout)


def of_pair(world: un.Communicator, rounds: int, copy_nbytes: int) -> list[tuple[str, float]]:
    """Return the seconds of each action of two processes, by name. The name "" is the closing of a handle in use."""
    gpu = MeasuredGpu()
    device, held, side = gpu.device, Held.of(gpu.device), gpu.device.new_stream()
    own, memory = device.new_flags(1), device.allocate(max(4096, 2 * copy_nbytes))
    flags, handle = world.allgather_object((device.export_flags(own), device.export(memory)))[1 - world.rank]
    theirs, times = device.open_flags(flags), list[tuple[str, float]]()
    first = 1
    for name, copies in (("idle", 0), ("with copies beside", 50)):
        world.barrier()
        for _ in range(copies):
            device.copy(memory.pointer + copy_nbytes, memory.pointer, copy_nbytes, side)
        started = time.perf_counter()
        for number in range(first, first + rounds):
            if world.rank:
                device.await_flag(own, 0, number, held.stream)
            device.raise_flag(theirs, 0, number, held.stream)
            if not world.rank:
                device.await_flag(own, 0, number, held.stream)
        if not held.passes(LAUNCH_S / 3):
            device.release_flags(own)
            return [*times, (f"{HANDED}: not within {LAUNCH_S / 3:.0f} s", 0.0)]
        times.append((f"hand-over between processes, {name}", (time.perf_counter() - started) / rounds / 2))
        first += rounds
        device.record(held.event, side)
        while not device.done(held.event):
            time.sleep(0.001)
    opened, driver, clock = list[int](), Driver(), DeviceClock(gpu, 4096)
    started = time.perf_counter()
    opened.append(device.open(handle).pointer)
    times.append(("cuIpcOpenMemHandle", time.perf_counter() - started))
    with clock.current():
        times.append(("", held.seconds(1, lambda: driver("cuIpcCloseMemHandle", opened[0]))))
    world.barrier()
    return times


def pairs(rounds: int, copy_nbytes: int) -> None:
    """Print the costs of two processes, which share a GPU."""
    try:
        of_ranks = un.launch(of_pair, 2, rounds, copy_nbytes, timeout_s=LAUNCH_S)
    except UnisonoError as error:
        say(HANDED, False, reason_of(error))
        return
    slowest = {name: max(seconds, dict(of_ranks[1]).get(name, 0.0)) for name, seconds in of_ranks[0]}
    failures = [name for of_rank in of_ranks for name, _ in of_rank if name.startswith(HANDED)]
    say(HANDED, not failures, failures[0] if failures else f"{2 * rounds} hand-overs each")
    for name, seconds in slowest.items():
        if not name:
            say_waits("cuIpcCloseMemHandle", seconds)
        elif name not in failures:
            tell("cost", name=name, us=seconds * 1e6)


def peak(gpu: MeasuredGpu, clock: DeviceClock, nbytes: int) -> None:
    """Print the speed of a copy on the device, which bounds the speed of every collective."""
    target, source = (gpu.device.allocate(nbytes).pointer for _ in range(2))
    milliseconds = min(clock.milliseconds(lambda: gpu.device.copy(target, source, nbytes, STREAM)) for _ in range(9))
    tell("cost", name=f"copy of {nbytes} bytes", us=milliseconds * 1e3, gbps=2 * nbytes / milliseconds / 1e6)


def attempt(name: str, probe: Callable[[], object]) -> None:
    """Run one probe, and print why it failed if it fails.

    If it raises an error, the premise that it tries counts as refuted.
    """
    try:
        probe()
    except Exception as error:  # noqa: BLE001  (any failure is a finding, and the other probes go on)
        say(f"the probe of {name} runs", False, reason_of(error), "all parts that use it")


def try_streams(dtype: str) -> None:
    """Make the probe of streams in this process, whose environment decides about its hardware queues."""
    gpu = MeasuredGpu()
    clock = DeviceClock(gpu, 4096)
    with clock.current():
        GpuProbes(gpu, clock, dtype).streams(BESIDE_BY_QUEUES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the probes that the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="int16", help="a dtype whose kernels nothing has used before")
    parser.add_argument("--rounds", type=int, default=1000, help="the flags that two processes pass to each other")
    parser.add_argument("--copy", type=parse_sizes, default=(512 << 20,), help="the bytes of copies")
    parser.add_argument("--streams", action="store_true", help="only try which streams wait for others")
    options = parser.parse_args(arguments)
    if options.streams:
        try_streams(options.dtype)
        return 0
    gpu, (nbytes,) = MeasuredGpu(), options.copy
    clock = DeviceClock(gpu, min(nbytes, FLUSH_NBYTES))
    attempt("a copy", lambda: peak(gpu, clock, nbytes))
    compile_all((options.dtype,), (2, 3))
    with clock.current():
        probes = GpuProbes(gpu, clock, options.dtype)
        if not gpu.device.has_flags():
            say(RELEASED, False, "the driver has no flags")
            return 0
        if not probes.releases():
            sys.stdout.flush()
            os._exit(1)  # an end in order would wait for the stream
        for name in ("releases_of_memory", "fence", "cyclic", "graphs", "streams", "loads", "costs"):
            attempt(name, getattr(probes, name))
    attempt("streams with more hardware queues", by_queues)
    attempt("a stream that is gone", gone)
    attempt("two processes", lambda: pairs(options.rounds, nbytes // 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
