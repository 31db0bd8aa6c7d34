"""Makes the calls that all ranks are ready for, on a communicator. Every rank makes them in the same order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, TypeAlias

import numpy as np

from unisono import Communicator, UsageError
from unisono.compat.horovod import adasum
from unisono.compat.horovod.entries import StartedCall, as_internal
from unisono.compat.horovod.requests import Answer

# Makes the calls of a batch. By the key of a call, its entry, which a rank that has joined lacks.
_Run: TypeAlias = "Callable[[Communicator, Sequence[Answer], Mapping[str, StartedCall]], None]"
# The kinds of calls that can be fused: a communicator takes the arrays of several calls as a list.
_FUSED = ("allreduce", "broadcast")


def batches(answers: Sequence[Answer], most_nbytes: int) -> Iterator[Sequence[Answer]]:
    """Cut answers into batches that run as one call each: neighbours of the same kind, op and root."""
    batch: list[Answer] = []
    nbytes = 0
    for answer in answers:
        request = answer.request
        size = sum(np.dtype(dtype).itemsize * prod(shape) for dtype, shape in request.arrays)
        if batch and (_merged(batch[0]) != _merged(answer) or nbytes + size > most_nbytes):
            yield batch
            batch, nbytes = [], 0
        batch.append(answer)
        nbytes += size
    if batch:
        yield batch


def run(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    """Start the calls of a batch. A call that all ranks refuse alike, such as a sum of booleans, fails alone.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: a call that was made here failed.
    """
    try:
        _BY_KIND[batch[0].request.kind](comm, batch, entries)
    except UsageError as error:  # nothing has been sent
        if len(batch) > 1:
            for answer in batch:
                run(comm, [answer], entries)
        elif batch[0].request.key in entries:
            entries[batch[0].request.key].fail(as_internal(error))


def _merged(answer: Answer) -> object:
    """Return an object that is equal for calls that can be fused."""
    request = answer.request
    if request.kind not in _FUSED or request.op == "adasum" or answer.error:
        return object()
    return request.kind, request.op, request.root


def _arrays(answer: Answer, entries: Mapping[str, StartedCall]) -> list[Any]:
    """Return the arrays of a call on this rank: zeros if this rank has joined."""
    entry = entries.get(answer.request.key)
    if entry is not None:
        return entry.arrays
    return [np.zeros(shape, np.dtype(dtype)) for dtype, shape in answer.request.arrays]


def _start_fused(
    batch: Sequence[Answer], entries: Mapping[str, StartedCall], start: Callable[[list[Any]], Any]
) -> None:
    """Start one call for the arrays of a batch, and give each entry its part of the result."""
    lists = [_arrays(answer, entries) for answer in batch]
    work = start([x for arrays in lists for x in arrays])
    begin = 0
    for answer, arrays in zip(batch, lists, strict=True):
        part = slice(begin, begin + len(arrays))
        begin = part.stop
        if (entry := entries.get(answer.request.key)) is not None:
            entry.start([work], partial(_part, part))


def _part(part: slice, results: list[Any]) -> Any:
    return results[0][part]


def _allreduce(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    op = batch[0].request.op
    if op == "adasum":
        entry = entries[batch[0].request.key]
        reduced = adasum.reduce(comm, entry.arrays)
        return entry.start((), lambda _: reduced)
    return _start_fused(batch, entries, lambda arrays: comm.allreduce(arrays, op, out=arrays, wait=False))


def _broadcast(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    root = batch[0].request.root
    _start_fused(batch, entries, lambda arrays: comm.broadcast(arrays, root, out=arrays, wait=False))


def _allgather(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    (answer,) = batch
    entry = entries[answer.request.key]
    pairs = zip(entry.arrays, answer.rows, strict=True)
    entry.start([comm.allgatherv(x, rows, wait=False) for x, rows in pairs])


def _alltoall(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    (answer,) = batch
    entry = entries[answer.request.key]
    received = [splits[comm.rank] for splits in answer.rows]
    work = comm.alltoallv(entry.arrays[0], answer.rows[comm.rank], received, wait=False)
    entry.start([work], lambda results: (results[0], received))


def _reducescatter(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    (answer,) = batch
    entry = entries[answer.request.key]
    shares = [rows_of(shape[0], comm.size) for _, shape in answer.request.arrays]
    pairs = zip(entry.arrays, shares, strict=True)
    entry.start([comm.reduce_scatterv(x, rows, answer.request.op, wait=False) for x, rows in pairs])


def _barrier(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    entries[batch[0].request.key].start([comm.barrier(wait=False)])


def _together(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    entry = entries[batch[0].request.key]
    (function,) = entry.arrays
    result = function()
    entry.start((), lambda _: result)


def _sparse_allreduce(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    entry = entries[batch[0].request.key]
    (start,) = entry.arrays
    total = start()
    entry.start([total], lambda _: total.result())


def _reducer(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    for entry in entries.values():  # none, if this rank has joined
        entry.start(())


def _broadcast_object(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    entry = entries[batch[0].request.key]
    received = comm.broadcast_object(entry.arrays[0], batch[0].request.root)
    entry.start((), lambda _: received)


def _allgather_object(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    entry = entries[batch[0].request.key]
    received = comm.allgather_object(entry.arrays[0])
    entry.start((), lambda _: received)


def _join(comm: Communicator, batch: Sequence[Answer], entries: Mapping[str, StartedCall]) -> None:
    last = batch[0].last
    entries[batch[0].request.key].start((), lambda _: last)


def rows_of(count: int, size: int) -> list[int]:
    """Return how many of `count` rows each rank gets by a reducescatter: the first ranks one more than the last."""
    return [count // size + (rank < count % size) for rank in range(size)]


_BY_KIND: Mapping[str, _Run] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
    "sparse_allreduce": _sparse_allreduce,
    "together": _together,
    "reducer": _reducer,
    "broadcast_object": _broadcast_object,
    "allgather_object": _allgather_object,
    "join": _join,
}
