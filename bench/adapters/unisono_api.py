"""Unisono, through its public interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import unisono as un


class UnisonoAdapter:
    """The world communicator, over the transports in ``UNISONO_TRANSPORTS``."""

    def __init__(self) -> None:
        self._world = un.init()
        self.size = self._world.size
        self.version = f"Unisono {un.__version__}"
        self.barrier = self._world.barrier

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure. It is a lambda, because `partial` takes 70 ns to pass keywords on."""
        world = self._world
        calls: dict[str, Callable[[], object]] = {
            "allreduce": lambda: world.allreduce(array, out=out),
            "reduce": lambda: world.reduce(array, out=out),
            "broadcast": lambda: world.broadcast(array, out=out),
            "scan": lambda: world.scan(array, out=out),
            "gather": lambda: world.gather(array, out=out),
            "scatter": lambda: world.scatter(array, out=out),
            "allgather": lambda: world.allgather(array, out=out),
            "reduce_scatter": lambda: world.reduce_scatter(array, out=out),
            "alltoall": lambda: world.alltoall(array, out=out),
            "barrier": world.barrier,
        }
        return calls[collective]

    def close(self) -> None:
        """Leave the communicator."""
        self._world.close()


connect = UnisonoAdapter
