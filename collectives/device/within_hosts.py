"""The collectives of the GPUs of one host, as the route across hosts uses them: over CUDA IPC, or by NCCL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Stream
from unisono.transports.cuda.peers.collectives import DeviceCollectives

# Bytes of a slab of mapped memory.
_SLAB_NBYTES = 4 << 20


class Within(Protocol):
    """Collectives of the GPUs of one host.

    Attributes:
        refusal: why the ranks of the host cannot use them; None if they can. Equal on all of them.
    """

    refusal: str | None

    def issue(
        self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream, deadline: Deadline
    ) -> None:
        """Issue a call on flat contiguous arrays to a stream; blocks while other ranks are needed for that."""

    def check(self, operation: str) -> None:
        """Raise the error that prevents a new call, if any."""

    def fail(self, error: UnisonoError) -> None:
        """End the communicator with `error` on all ranks, so that no stream waits for other ranks any more."""

    def is_intact(self) -> bool:
        """Return whether calls end with their results."""

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes that are known to have been moved, by rank of the host."""

    def close(self, deadline: Deadline) -> bool:
        """End this rank's part; return whether the device's work is done."""


class ByMappedMemory:
    """Calls within a host over CUDA IPC."""

    def __init__(self, executor: Executor, device: Device, deadline: Deadline) -> None:
        self._collectives = DeviceCollectives(
            executor, device, timeout_s=deadline.remaining_s(), slab_nbytes=_SLAB_NBYTES
        )
        self.refusal = self._collectives.refusal
        self.check, self.fail = self._collectives.check, self._collectives.fail
        self.is_intact, self.traffic = self._collectives.is_intact, self._collectives.traffic

    def issue(
        self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream, deadline: Deadline
    ) -> None:
        self._collectives.start(signature, extent, source, target, stream).wait(deadline.remaining_s())

    def close(self, deadline: Deadline) -> bool:
        return self._collectives.close(deadline.remaining_s())


# Creates the collectives of a host; all of its ranks call it at the same point.
MakeWithin: TypeAlias = "Callable[[Executor, Device, Deadline], Within]"
