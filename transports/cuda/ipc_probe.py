"""Whether processes here can share memory and events of a GPU: two of them try, this one and another that it starts.

That one runs `main`: it is told handles on its standard input, and answers on its standard output.
"""

from __future__ import annotations

import subprocess
import sys
import time

from unisono.errors import TransportUnavailableError
from unisono.processes import python_command
from unisono.transports.cuda.device import Device, Event

PATTERN = b"unisono!" * 512
TIMEOUT_S = 30.0
_POLL_S = 0.001


def try_sharing(device: Device) -> None:
    """Have another process copy in memory of this one, in the order that events say.

    Raises:
        TransportUnavailableError: it could not, or not within `TIMEOUT_S` seconds; says why.
    """
    memory, event, stream = device.allocate(2 * len(PATTERN)), device.new_event(shared=True), device.new_stream()
    pinned = device.pin(len(PATTERN))
    pinned[:] = bytearray(PATTERN)
    device.copy(memory.pointer, pinned.ctypes.data, len(PATTERN), stream)
    device.record(event, stream)
    with _Other(device.ordinal) as other:
        theirs = device.open_event(other.ask(device.export(memory), device.export_event(event)))
        pinned[:] = 0
        device.wait(stream, theirs)
        device.copy(pinned.ctypes.data, memory.pointer + len(PATTERN), len(PATTERN), stream)
        device.record(event, stream)
        _wait(device, event)
        device.end_event(theirs)
    seen = pinned.tobytes()
    device.end_event(event)
    device.end_stream(stream)
    device.unpin(pinned)
    device.free(memory)
    if seen != PATTERN:
        raise TransportUnavailableError("another process opened memory of the GPU, and saw other bytes in it")


class _Other:
    """The other process; it gives back what it has opened when the body ends."""

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
        """Tell it handles, and return the one that it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("".join(f"{handle.hex()}\n" for handle in handles))
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            _, said = self._process.communicate(timeout=TIMEOUT_S)
            why = said.strip().splitlines()[-1:] or ["it ended"]
            raise TransportUnavailableError(f"another process cannot open memory of the GPU: {why[0]}")
        return bytes.fromhex(answer)


def _wait(device: Device, event: Event) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not device.done(event):
        if time.monotonic() > deadline:
            raise TransportUnavailableError(f"an event of another process did not happen within {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)


def main() -> None:
    """Be the other process."""
    from unisono.transports.cuda.driver import CudaDevice

    device = CudaDevice(int(sys.argv[1]))
    memory, theirs = device.open(_told()), device.open_event(_told())
    event, stream = device.new_event(shared=True), device.new_stream()
    device.wait(stream, theirs)
    device.copy(memory.pointer + len(PATTERN), memory.pointer, len(PATTERN), stream)
    device.record(event, stream)
    sys.stdout.write(f"{device.export_event(event).hex()}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the one that asks has done
    device.end_event(theirs)
    device.close(memory)


def _told() -> bytes:
    return bytes.fromhex(sys.stdin.readline())
