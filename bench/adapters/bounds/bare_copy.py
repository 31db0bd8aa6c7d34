"""Not a library: each rank only copies the result of an allreduce, which an earlier call has computed, to its place.

So each rank reads and writes as many bytes as the vector has, at the same time as the others. No allreduce takes less
time unless caches hold the vector. `numpy.copyto` writes long vectors past the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.bench.adapters.unisono_api import UnisonoAdapter


class CopyAdapter(UnisonoAdapter):
    """The world communicator, which provides the barriers and the result."""

    def __init__(self) -> None:
        super().__init__()
        self.version = "a copy by each rank"

    def call(self, collective: str, array: Any, out: Any) -> Callable[[], object]:
        """Return the call to measure.

        The first use of the call computes the result by an allreduce, and copies it. Every later use only copies it.
        The benchmark does not count the first use, which warms up.
        """
        if collective != "allreduce":
            raise NotImplementedError(f"the bound of a bare copy is measured for allreduce only, not for {collective}")
        results: list[Any] = []

        def copy() -> None:
            if not results:
                results.append(self._world.allreduce(array))
            np.copyto(out, results[0])

        return copy


connect = CopyAdapter
