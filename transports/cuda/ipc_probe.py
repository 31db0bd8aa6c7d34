"""Tests whether processes here can share memory and events of a GPU: this process and one that it starts try it.

The other process runs `main`. It reads handles from its standard input and writes its answer to its standard output.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from unisono.errors import TransportUnavailableError
from unisono.processes import python_command
from unisono.transports.cuda.device import Device, Event

PATTERN = b"unisono!" * 512
TIMEOUT_S = 30.0
Made = TypeVar("Made")
_POLL_S = 0.001


def try_sharing(device: Device) -> None:
    """Let another process copy within memory of this one, in the order of shared events.

    Raises:
        TransportUnavailableError: it could not, or not within `TIMEOUT_S` seconds; says why.
    """
    with ExitStack() as made:

        def keep(thing: Made, release: Callable[[Made], None]) -> Made:
            made.callback(release, thing)
            return thing

        memory = keep(device.allocate(2 * len(PATTERN)), device.free)
        event, stream = (
            keep(device.new_event(shared=True), device.end_event),
            keep(device.new_stream(), device.end_stream),
        )
        pinned = keep(device.pin(len(PATTERN)), device.unpin)
        pinned[:] = bytearray(PATTERN)
        device.copy(memory.pointer, pinned.ctypes.data, len(PATTERN), stream)
        device.record(event, stream)
        with _Other(device.ordinal) as other:
            theirs = device.open_event(other.ask(device.export(memory), device.export_event(event)))
            made.callback(device.end_event, theirs)
            pinned[:] = 0
            device.wait(stream, theirs)
            device.copy(pinned.ctypes.data, memory.pointer + len(PATTERN), len(PATTERN), stream)
            device.record(event, stream)
            _wait(device, event)
        if pinned.tobytes() != PATTERN:
            raise TransportUnavailableError("another process opened memory of the GPU, but read other bytes from it")


class _Other:
    """The other process. It closes the memory and events that it has opened when the body ends."""

    def __init__(self, ordinal: int) -> None:
        command = python_command("from unisono.transports.cuda.ipc_probe import main; main()", str(ordinal))
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
            raise TransportUnavailableError(f"an event of another process did not happen within {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def main() -> None:
    """Run the other process."""
    from unisono.transports.cuda.driver import CudaDevice

    device = CudaDevice(int(sys.argv[1]))
    memory, theirs = device.open(_read_handle()), device.open_event(_read_handle())
    event, stream = device.new_event(shared=True), device.new_stream()
    device.wait(stream, theirs)
    device.copy(memory.pointer + len(PATTERN), memory.pointer, len(PATTERN), stream)
    device.record(event, stream)
    sys.stdout.write(f"{device.export_event(event).hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the first process has finished
    device.end_event(theirs)
    device.close(memory)
    while not device.has_released():
        time.sleep(_POLL_S)


def _read_handle() -> bytes:
    return bytes.fromhex(sys.stdin.readline())
