"""Staging through the host: memory stays in use while a failed exchange still has work in flight."""

from __future__ import annotations

from typing import Any

import pytest

from unisono.errors import CollectiveTimeoutError, PeerLostError
from unisono.foundation.deadlines import Deadline
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda.executors.staging import StagedPart, Staging, await_event

N = 1000
PATIENCE_S = 20.0


def passes(source: Any, target: Any) -> None:
    target[:] = source


def fails(source: Any, target: Any) -> None:
    raise PeerLostError("rank 1 has been lost")


def late(source: Any, target: Any) -> None:
    raise CollectiveTimeoutError("rank 1 is late")


@pytest.mark.parametrize("exchanges", [(fails, passes), (passes, late), (passes, passes, fails, passes)])
def test_failed_staging_finishes_after_its_pending_copies(exchanges: tuple[Any, ...]) -> None:
    gpu = GpuDouble(1, background=False)
    device = gpu.device()
    staging, finished, stream = Staging(device), device.new_event(), device.new_stream()
    source, target, other = (device.allocate(4 * N).pointer for _ in range(3))
    parts = [StagedPart([(source + i * N, N)], [(target + i * N, N)], exchange) for i, exchange in enumerate(exchanges)]
    with pytest.raises((PeerLostError, CollectiveTimeoutError)):
        staging.run(parts, [], finished, Deadline(PATIENCE_S))
    device.wait(stream, finished)
    for memory in (source, target):
        # the double traps this copy unless it is ordered behind the work in flight
        device.copy(memory, other, 4 * N, stream)
    await_event(device, finished, Deadline(PATIENCE_S))
    staging.close(Deadline(PATIENCE_S))
    gpu.close()
