"""Unisono, through its public interface, on arrays of `unisono.empty`, which other ranks read by reference."""

from __future__ import annotations

from typing import Any

import unisono as un
from unisono.bench.adapters.unisono_api import UnisonoAdapter
from unisono.bench.adapters.worker import NumpyMemory


class MappedMemory(NumpyMemory):
    """Creates arrays in shared memory, which the other ranks of the host can map."""

    @staticmethod
    def empty(count: int, dtype: Any) -> Any:
        """Return a flat array to be overwritten, of a dtype of numpy."""
        return un.empty(count, dtype)


class MappedAdapter(UnisonoAdapter):
    """The world communicator, on arrays in shared memory."""

    memory = MappedMemory()


connect = MappedAdapter
