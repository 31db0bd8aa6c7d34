"""The collectives on objects: `bcast`, `gather`, `allreduce` and so on."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.errors import translating
from unisono.compat.mpi4py.calls.collectives import checked_root
from unisono.compat.mpi4py.values.op import SUM, function_of
from unisono.compat.mpi4py.values.pickles import pickle


class ObjectCalls:
    """The methods of `Comm` that make collectives on objects, which all ranks call in the same order."""

    __slots__ = ()
    _live: Any

    def _collective(self, name: str) -> Any:
        """Return the state with which a collective is made."""
        state = self._live
        if name[0].islower() and name not in state.locks:
            state.locks[name] = threading.Lock()
        return state

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.Barrier()  # type: ignore[attr-defined]

    @translating
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the root."""
        state = self._collective("bcast")
        root = checked_root(state, root)
        is_root = root == state.rank
        data = state.native.broadcast_object(_dumped(obj) if is_root else None, root)
        return obj if is_root else pickle.loads(data)

    @translating
    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return the objects of all ranks on the root, and None on other ranks."""
        state = self._collective("gather")
        data = state.native.gather_object(_dumped(sendobj), checked_root(state, root))
        return None if data is None else [pickle.loads(each) for each in data]

    @translating
    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of a list of the root."""
        state = self._collective("scatter")
        data, root = None, checked_root(state, root)
        if root == state.rank:
            data = [_dumped(each) for each in _items(sendobj, state.size)]
        return pickle.loads(state.native.scatter_object(data, root))

    @translating
    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        state = self._collective("allgather")
        return [pickle.loads(each) for each in state.native.allgather_object(_dumped(sendobj))]

    @translating
    def alltoall(self, sendobj: Any) -> list[Any]:
        """Send each rank an object, and return those of all ranks."""
        state = self._collective("alltoall")
        data = [_dumped(each) for each in _items(sendobj, state.size)]
        counts = np.array([each.size for each in data], np.int64)
        arriving = state.native.alltoall(counts).tolist()
        communicator = state.native._for_objects()
        received = communicator.alltoallv(np.concatenate(data), counts.tolist(), arriving)
        ends = np.cumsum(arriving)
        return [pickle.loads(received[end - count : end]) for end, count in zip(ends, arriving, strict=True)]

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return the combination of the objects of all ranks on the root, and None on other ranks."""
        function = function_of(op)
        objects = self.gather(sendobj, root)
        return None if objects is None else functools.reduce(function, objects)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the combination of the objects of all ranks."""
        return functools.reduce(function_of(op), self.allgather(sendobj))

    def scan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the combination of the objects of the ranks up to this one."""
        return functools.reduce(function_of(op), self.allgather(sendobj)[: self._live.rank + 1])

    def exscan(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the combination of the objects of the ranks below this one; None on rank 0."""
        before = self.allgather(sendobj)[: self._live.rank]
        return functools.reduce(function_of(op), before) if before else None


def _dumped(obj: Any) -> Any:
    return np.frombuffer(pickle.dumps(obj), np.uint8)


def _items(objects: Any, size: int) -> Sequence[Any]:
    items = [None] * size if objects is None else list(objects)
    if len(items) != size:
        raise ValueError(f"expecting {size} items, got {len(items)}")
    return items
