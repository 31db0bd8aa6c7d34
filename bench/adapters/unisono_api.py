"""Unisono, through its public interface."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import unisono as un


class UnisonoAdapter:
    """The world communicator; ``UNISONO_TRANSPORTS`` in the environment says what carries it."""

    def __init__(self) -> None:
        self._world = un.init()
        self.size = self._world.size
        self.version = f"Unisono {un.__version__}"
        self.barrier = self._world.barrier

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure."""
        calls: dict[str, Callable[[], object]] = {
            "allreduce": partial(self._world.allreduce, array, out=out),
            "reduce": partial(self._world.reduce, array, out=out),
            "broadcast": partial(self._world.broadcast, array, out=out),
            "allgather": partial(self._world.allgather, array, out=out),
            "reduce_scatter": partial(self._world.reduce_scatter, array, out=out),
            "alltoall": partial(self._world.alltoall, array, out=out),
            "barrier": self._world.barrier,
        }
        return calls[collective]

    def close(self) -> None:
        """Leave the communicator."""
        self._world.close()


connect = UnisonoAdapter
