"""Tests whether processes here can share memory of a GPU and order their streams: this one and another one try it.

The other process runs `main`. It reads lines from its standard input and writes its answers to its standard output:

1. This process sends handles of its memory and of its flag or event; the other one opens them and answers with its own.
2. This process writes to the memory, signals, and sends an empty line.
3. The other process follows the signal, copies within the memory, signals, and answers with an empty line.
4. This process follows that signal, and reads the copy.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Protocol

from unisono.errors import TransportUnavailableError, UnisonoError
from unisono.foundation.processes import python_command
from unisono.transports.cuda.device import Device, Event, Flags, Stream, is_over

PATTERN = b"unisono!" * 512
TIMEOUT_S = 30.0
_POLL_S = 0.001


class _Order(Protocol):
    """Makes a stream of this process and one of the other process wait for each other, by flags or events."""

    def handle(self) -> bytes:
        """Return the handle for the other process."""

    def meet(self, handle: bytes) -> None:
        """Open the handle of the other process."""

    def signal(self) -> None:
        """Signal the other process when the work that is on the stream now is done."""

    def follow(self) -> None:
        """Make the stream wait for the signal of the other process."""

    def release(self) -> None:
        """End the wait of the stream, because the other process may have ended."""

    def end(self) -> None:
        """Release the flags, events and streams of this process."""


class _ByFlags:
    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._own, self._theirs = device.new_flags(1), list[Flags]()

    def handle(self) -> bytes:
        return self._device.export_flags(self._own)

    def meet(self, handle: bytes) -> None:
        self._theirs.append(self._device.open_flags(handle))

    def signal(self) -> None:
        self._device.raise_flag(self._theirs[0], 0, 1, self._stream)

    def follow(self) -> None:
        self._device.await_flag(self._own, 0, 1, self._stream)

    def release(self) -> None:
        self._device.release_flags(self._own)

    def end(self) -> None:
        for flags in (self._own, *self._theirs):
            self._device.end_flags(flags)


class _ByEvents:
    def __init__(self, device: Device, stream: Stream) -> None:
        self._device, self._stream = device, stream
        self._own, self._theirs = device.new_event(shared=True), list[Event]()

    def handle(self) -> bytes:
        return self._device.export_event(self._own)

    def meet(self, handle: bytes) -> None:
        self._theirs.append(self._device.open_event(handle))

    def signal(self) -> None:
        self._device.record(self._own, self._stream)

    def follow(self) -> None:
        self._device.wait(self._stream, self._theirs[0])

    def release(self) -> None:
        """Do nothing: the stream waits only for work that the other process has recorded."""

    def end(self) -> None:
        for event in (self._own, *self._theirs):
            self._device.end_event(event)


_ORDERS: dict[str, type[_ByFlags | _ByEvents]] = {"flags": _ByFlags, "events": _ByEvents}


def try_sharing(device: Device) -> str:
    """Let another process copy within memory of this one, in the order of signals; return "flags" or "events".

    Raises:
        TransportUnavailableError: it could not, or not within `TIMEOUT_S` seconds; says why.
    """
    way = "flags" if device.has_flags() else "events"
    with ExitStack() as made:
        stream, memory, pinned, event = (
            *(device.new_stream(), device.allocate(2 * len(PATTERN))),
            *(device.pin(2 * len(PATTERN)), device.new_event()),
        )
        made.callback(device.end_stream, stream)
        made.callback(device.free, memory)
        made.callback(device.unpin, pinned)
        made.callback(device.end_event, event)
        order: _Order = _ORDERS[way](device, stream)
        made.callback(order.end)
        try:
            with _Other(device.ordinal, way) as other:
                order.meet(other.ask(device.export(memory), order.handle()))
                written, read = pinned[: len(PATTERN)], pinned[len(PATTERN) :]
                written[:], read[:] = bytearray(PATTERN), 0
                device.copy(memory.pointer, written.ctypes.data, len(PATTERN), stream)
                order.signal()
                other.ask(b"")
                order.follow()
                device.copy(read.ctypes.data, memory.pointer + len(PATTERN), len(PATTERN), stream)
                device.record(event, stream)
                _wait(device, event)
        except BaseException:
            with suppress(UnisonoError):
                order.release()
                device.record(event, stream)
                _wait(device, event)
            if not is_over(device, event):
                made.pop_all()  # leaks it, because memory in use may not be freed
            raise
        if read.tobytes() != PATTERN:
            raise TransportUnavailableError("another process opened memory of the GPU, but read other bytes from it")
    return way


class _Other:
    """A second process, which the probe asks. It closes all that it has opened when the with-block ends."""

    def __init__(self, ordinal: int, way: str) -> None:
        command = python_command("from unisono.transports.cuda.peers.probe import main; main()", str(ordinal), way)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def __enter__(self) -> _Other:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._process.kill()
        try:
            self._process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def ask(self, *handles: bytes) -> bytes:
        """Send handles to the process, and return the handle that it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("".join(f"{handle.hex()}\n" for handle in handles))
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            _, errors = self._process.communicate(timeout=TIMEOUT_S)
            why = errors.strip().splitlines()[-1:] or ["it ended"]
            raise TransportUnavailableError(f"another process cannot open memory of the GPU: {why[0]}")
        return bytes.fromhex(answer)


def _wait(device: Device, event: Event) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise TransportUnavailableError(f"a signal of another process did not come within {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def main() -> None:
    """Run as the second process of a probe, until the first one ends it."""
    from unisono.transports.cuda.driver_api.cuda_device import CudaDevice

    device = CudaDevice(int(sys.argv[1]))
    stream, event = device.new_stream(), device.new_event()
    order: _Order = _ORDERS[sys.argv[2]](device, stream)
    memory = device.open(_read_handle())
    order.meet(_read_handle())
    _answer(order.handle())
    _read_handle()
    order.follow()
    device.copy(memory.pointer + len(PATTERN), memory.pointer, len(PATTERN), stream)
    order.signal()
    device.record(event, stream)
    _answer(b"")
    sys.stdin.read()  # until the first process has finished
    _wait(device, event)
    order.end()
    device.close(memory)
    while not device.has_released():
        time.sleep(_POLL_S)


def _answer(handle: bytes) -> None:
    sys.stdout.write(f"{handle.hex()}\n")
    sys.stdout.flush()


def _read_handle() -> bytes:
    return bytes.fromhex(sys.stdin.readline())
