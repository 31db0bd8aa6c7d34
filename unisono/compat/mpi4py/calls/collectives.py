"""The collectives on buffers: for each one, a function that turns its arguments into a call.

`ARGUMENTS` has them by name. `Comm` gets three methods from each: one that waits, one that starts the call and returns
a request, and one that returns a persistent request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.calls.ready import Native
from unisono.compat.mpi4py.memory.access import IN_PLACE
from unisono.compat.mpi4py.memory.buffers import (
    NATIVE_DTYPES,
    Block,
    elements_of,
    no_store,
    plain,
    plain_numbers,
    plain_vector,
    simple,
    target_in,
    vector,
    vector_w,
)
from unisono.compat.mpi4py.values.op import SUM, OpState, check_operation, combine, op_of
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS

_u1 = np.uint8


def _is_in_place(buf: Any) -> bool:
    return buf is None or buf is IN_PLACE


def checked_root(state: Any, root: int) -> int:
    """Return the root; raises `Exception` if there is no such rank."""
    rank = whole(root)
    if not 0 <= rank < state.size:
        raise fail("ERR_ROOT", f"root {rank} is not a rank of a communicator of {state.size}")
    return rank


def barrier(state: Any) -> Any:
    """Wait for all ranks."""
    return Native(state.native.barrier, (), {})


def bcast(state: Any, buf: Any, root: int = 0) -> Any:
    """Copy the elements of the root to all ranks."""
    root = checked_root(state, root)
    array, store = (elements_of(buf), no_store) if root == state.rank else target_in(buf)
    return Native(state.native.broadcast, (array, root), {"out": array} if array.flags.writeable else {}, store)


def _blocks(block: Block, size: int) -> Block:
    """Return the elements for all ranks of a block with the count of one."""
    return Block(block.memory, block.layout, block.count * size, block.origin)


def _moved(method: Any, args: tuple[Any, ...], sendbuf: Any, recvbuf: Any, sent: int, received: int) -> Native | None:
    """Return the call on plain buffers of elements for `sent` and `received` ranks; None if they are not plain."""
    x, out = plain(sendbuf, sent), plain(recvbuf, received)
    if x is None or out is None or x.dtype != out.dtype or x.size * received != out.size * sent or x.size % sent:
        return None
    return Native(method, (x, *args), {"out": out})


def gather(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Collect the elements of all ranks on the root."""
    root = checked_root(state, root)
    if root != state.rank:
        return Native(state.native.gather, (elements_of(sendbuf), root), {})
    return _collected(state, state.native.gather, sendbuf, recvbuf, root)


def _collected(state: Any, method: Any, sendbuf: Any, recvbuf: Any, *args: Any) -> Any:
    """Return the call that collects the elements of all ranks in a buffer of this one."""
    whole_plain = plain(recvbuf, state.size) if _is_in_place(sendbuf) else None
    own = sendbuf if whole_plain is None else _part(whole_plain, state.rank, state.size)
    call = _moved(method, args, own, recvbuf, 1, state.size)
    if call is not None:
        return call
    whole = _blocks(simple(recvbuf, writable=True, blocks=state.size), state.size)
    if _is_in_place(sendbuf):
        out = whole.array()
        x = _part(out, state.rank, state.size)
    else:
        x = simple(sendbuf).array()
        out = whole.target().view(x.dtype)
    return Native(method, (x, *args), {"out": out}, lambda: whole.store(out))


def _part(array: Any, rank: int, size: int) -> Any:
    count = array.size // size
    return array[rank * count : (rank + 1) * count]


def allgather(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Collect the elements of all ranks on all ranks."""
    return _collected(state, state.native.allgather, sendbuf, recvbuf)


def scatter(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Send each rank its share of the elements of the root."""
    root, method = checked_root(state, root), state.native.scatter
    is_root = root == state.rank
    call = _moved(method, (root,), sendbuf, recvbuf, state.size, 1) if is_root else None
    if call is not None:
        return call
    x = _blocks(simple(sendbuf, blocks=state.size), state.size).array() if is_root else None
    if is_root and _is_in_place(recvbuf):
        own = _part(x, root, state.size)
        return Native(method, (x, root), {"out": own if own.flags.writeable else own.copy()})
    out, store = target_in(recvbuf)
    return Native(method, (None if x is None else x.view(out.dtype), root), {"out": out}, store)


def alltoall(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each rank a share, and receive one from each."""
    whole_plain = plain(recvbuf, state.size) if _is_in_place(sendbuf) else None
    own = sendbuf if whole_plain is None else whole_plain.copy()
    call = _moved(state.native.alltoall, (), own, recvbuf, state.size, state.size)
    if call is not None:
        return call
    whole = _blocks(simple(recvbuf, writable=True, blocks=state.size), state.size)
    if _is_in_place(sendbuf):
        x = whole.array().copy()
    else:
        x = _blocks(simple(sendbuf, blocks=state.size), state.size).array()
    out = whole.target().view(x.dtype)
    return Native(state.native.alltoall, (x,), {"out": out}, lambda: whole.store(out))


def gatherv(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Collect elements of all ranks on the root, which alone knows the counts."""
    root = checked_root(state, root)
    if root != state.rank:
        return Native(state.native.gatherv, (elements_of(sendbuf), None, root), {"counts_at_root": True})
    x, counts, out, store = _collected_parts(state, sendbuf, recvbuf)
    return Native(state.native.gatherv, (x, counts, root), {"out": out, "counts_at_root": True}, store)


def _collected_parts(state: Any, sendbuf: Any, recvbuf: Any) -> tuple[Any, list[int], Any, Callable[[], None]]:
    """Return the elements to send, the numbers of those of all ranks, the array for these, and how it is stored."""
    plain_parts = None if _is_in_place(sendbuf) else plain_vector(recvbuf, state.size)
    if plain_parts is not None:
        out, counts = plain_parts
        x = elements_of(sendbuf)
        if x.dtype == out.dtype:
            return x, counts, out, no_store
    parts = vector(recvbuf, state.size, writable=True)
    x = parts[state.rank].array() if _is_in_place(sendbuf) else elements_of(sendbuf)
    out, store = target_of(parts, x.dtype)
    return x, numbers_of(parts, x.dtype), out, store


def scatterv(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Send each rank its share of the elements of the root, which alone knows the counts."""
    x: Any = None
    counts: Any = None
    root = checked_root(state, root)
    if root == state.rank:
        x, counts = _sent_parts(sendbuf, state.size)
    if x is not None and _is_in_place(recvbuf):
        start = sum(counts[:root])
        out, store = x[start : start + counts[root]].copy(), no_store
    else:
        out, store = target_in(recvbuf)
    return Native(state.native.scatterv, (x, counts, root), {"out": out, "counts_at_root": True}, store)


def _sent_parts(spec: Any, size: int) -> tuple[Any, Any]:
    """Return the elements for all ranks one after the other, and their numbers."""
    plain_parts = plain_vector(spec, size)
    if plain_parts is not None:
        return plain_parts
    parts = vector(spec, size)
    return concatenated(parts, parts[0].dtype), numbers_of(parts, parts[0].dtype)


def _joined(parts: Sequence[Block], dtype: Any) -> Any:
    """Return the memory of blocks that lie one after the other; None if they do not."""
    full = [part for part in parts if part.nbytes]
    ends = [part.origin + part.nbytes for part in full]
    is_one = all(part.is_direct for part in full) and [part.origin for part in full[1:]] == ends[:-1]
    return full[0].memory[full[0].origin : ends[-1]].view(dtype) if full and is_one else None


def concatenated(parts: Sequence[Block], dtype: Any) -> Any:
    """Return the elements of blocks one after the other: their own memory if they lie so."""
    joined = _joined(parts, dtype)
    if joined is not None:
        return joined
    return np.concatenate([np.empty(0, dtype), *(part.array().view(dtype) for part in parts)])


def target_of(parts: Sequence[Block], dtype: Any) -> tuple[Any, Callable[[], None]]:
    """Return an array for the elements of blocks one after the other, and the function that stores it in the blocks."""
    joined = _joined(parts, dtype)
    if joined is not None:
        return joined, no_store
    array = np.empty(sum(numbers_of(parts, dtype)), dtype)

    def store() -> None:
        raw, start = array.view(_u1), 0
        for part in parts:
            part.store(raw[start : start + part.nbytes])
            start += part.nbytes

    return array, store


def numbers_of(parts: Sequence[Block], dtype: Any) -> list[int]:
    """Return the number of elements of a dtype of each block."""
    return [part.nbytes // dtype.itemsize for part in parts]


def allgatherv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Collect elements of all ranks on all ranks."""
    x, counts, out, store = _collected_parts(state, sendbuf, recvbuf)
    return Native(state.native.allgatherv, (x, counts), {"out": out}, store)


def alltoallv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each rank some elements, and receive some from each."""
    x, sent = _sent_parts(recvbuf if _is_in_place(sendbuf) else sendbuf, state.size)
    x = x.copy() if _is_in_place(sendbuf) else x
    plain_parts = plain_vector(recvbuf, state.size)
    if plain_parts is not None and plain_parts[0].dtype == x.dtype:
        return Native(state.native.alltoallv, (x, sent, plain_parts[1]), {"out": plain_parts[0]})
    parts = vector(recvbuf, state.size, writable=True)
    out, store = target_of(parts, x.dtype)
    return Native(state.native.alltoallv, (x, sent, numbers_of(parts, x.dtype)), {"out": out}, store)


def alltoallw(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each rank elements of a datatype of its own, and receive such elements from each."""
    targets = vector_w(recvbuf, state.size, writable=True)
    sources = vector_w(recvbuf if _is_in_place(sendbuf) else sendbuf, state.size)
    x = [part.array() if part.nbytes else None for part in sources]
    if _is_in_place(sendbuf):
        x = [each if each is None else each.copy() for each in x]
    out = [part.target() if part.nbytes else None for part in targets]

    def store() -> None:
        for part, array in zip(targets, out, strict=True):
            if array is not None:
                part.store(array)

    return Native(state.native.alltoallw, (x, out), {}, store)


# Reductions. If Unisono has no such operation on the dtype, all ranks gather the elements and combine them.


def has_native(op: OpState, block: Block) -> bool:
    """Return whether Unisono has the operation for the elements."""
    dtype = block.layout.dtype
    if not op.native or dtype is None or dtype.name not in DTYPES or block.layout.constant in {"BYTE", "PACKED"}:
        return bool(op.native in {"band", "bor", "bxor"} and block.layout.constant == "BYTE")
    return DTYPES[dtype.name].kind in OPERATIONS[op.native].kinds


def _folded(op: OpState, parts: Sequence[Any], block: Block) -> Any:
    result = parts[0].copy()
    for part in parts[1:]:
        result = combine(op, result, part, block)
    return result


def _gathered(state: Any, op: OpState, source: Block, take: Callable[[Any], None], which: Any) -> Any:
    """Return the call that gathers the elements, and takes the combination of those that `which` chooses."""
    check_operation(op, source)
    mine = np.ascontiguousarray(source.elements())
    raw = mine.view(_u1).copy()
    everything = np.empty(raw.size * state.size, _u1)

    def finish() -> None:
        parts = [part.view(mine.dtype) for part in everything.reshape(state.size, -1)][which]
        if parts:
            take(_folded(op, parts, source))

    return Native(state.native.allgather, (raw,), {"out": everything}, finish)


def store_part(target: Block, start: int, count: int, result: Any) -> None:
    """Store the elements from `start` on of an array of `count` elements, which may be several numbers each."""
    if count:
        units = result.size // count
        target.store_elements(result[start * units : (start + target.count) * units])


def allreduce(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of all ranks on all ranks."""
    return _reduced(state, "allreduce", sendbuf, recvbuf, op_of(op), slice(None), ())


def _has_plain(op: OpState, x: Any) -> bool:
    """Return whether an array is plain, and Unisono has the operation for its elements."""
    return x is not None and op.native != "" and NATIVE_DTYPES[x.dtype].kind in OPERATIONS[op.native].kinds


def _reduced(state: Any, name: str, sendbuf: Any, recvbuf: Any, op: OpState, which: Any, args: tuple[Any, ...]) -> Any:
    is_in_place, out, store = _is_in_place(sendbuf), plain_numbers(recvbuf), no_store
    x = out if is_in_place else plain_numbers(sendbuf)
    if out is None or not _has_plain(op, x) or (x.dtype, x.size) != (out.dtype, out.size):
        target = simple(recvbuf, writable=True)
        source = target if is_in_place else simple(sendbuf)
        _check_counts(source, target)
        if not has_native(op, source):
            return _gathered(state, op, source, target.store_elements, which)
        x, out = source.array(), target.target()
        store = functools.partial(target.store, out)
    if is_in_place and name != "allreduce":
        x = x.copy()
    if name == "exscan" and state.rank == 0:
        out, store = np.empty_like(out), no_store
    return Native(getattr(state.native, name), (x, op.native, *args), {"out": out, **_bits(state)}, store)


def _bits(state: Any) -> dict[str, bool]:
    """Return the argument of reductions whose bits do not depend on the algorithm, if a hint asks for it."""
    return {"reproducible": True} if state.info.get("unisono_reproducible") == "true" else {}


def _check_counts(source: Block, target: Block) -> None:
    if source.layout.dtype != target.layout.dtype:
        raise ValueError(f"the datatypes of the buffers differ: {source.layout.dtype} and {target.layout.dtype}")
    if source.nbytes != target.nbytes:
        raise ValueError(f"the send and receive buffers have {source.count} and {target.count} elements")


def reduce(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> Any:
    """Combine the elements of all ranks on the root."""
    operation, root = op_of(op), checked_root(state, root)
    if root == state.rank:
        return _reduced(state, "reduce", sendbuf, recvbuf, operation, slice(None), (root,))
    spec = recvbuf if _is_in_place(sendbuf) else sendbuf
    x = plain_numbers(spec)
    if not _has_plain(operation, x):
        source = simple(spec)
        if not has_native(operation, source):
            return _gathered(state, operation, source, lambda _: None, slice(0))
        x = source.array()
    return Native(state.native.reduce, (x, operation.native, root), _bits(state))


def scan(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of the ranks up to this one."""
    return _reduced(state, "scan", sendbuf, recvbuf, op_of(op), slice(state.rank + 1), ())


def exscan(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of the ranks below this one; rank 0 keeps its receive buffer."""
    return _reduced(state, "exscan", sendbuf, recvbuf, op_of(op), slice(state.rank), ())


def reduce_scatter(state: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM) -> Any:
    """Combine the elements of all ranks; each rank gets the number of them that `recvcounts` has for it."""
    target = simple(recvbuf, writable=True)
    source = target if _is_in_place(sendbuf) else simple(sendbuf)
    if recvcounts is not None:
        counts = list(recvcounts)
    elif source is target:
        counts = [source.count // state.size] * state.size
    else:
        counts = state.native.allgather(np.array([target.count])).tolist()
    if len(counts) != state.size or sum(counts) != source.count:
        raise ValueError(f"the counts {counts} do not fit {source.count} elements and {state.size} ranks")
    if target.count < counts[state.rank]:
        raise ValueError(f"the receive buffer has {target.count} elements, not {counts[state.rank]}")
    units = source.layout.size // source.dtype.itemsize
    method = functools.partial(state.native.reduce_scatterv, counts=[count * units for count in counts])
    return _reduced_parts(state, method, source, target.part(0, counts[state.rank]), counts, op_of(op))


def _reduced_parts(
    state: Any, method: Any, source: Block, target: Block, counts: Sequence[int], operation: OpState
) -> Native:
    """Return the call of a method that combines the elements of all ranks, of which this one gets a part."""
    if source.layout.dtype != target.layout.dtype:
        raise ValueError("the send and receive buffers have different datatypes")
    if not has_native(operation, source):
        take = functools.partial(store_part, target, sum(counts[: state.rank]), source.count)

        return _gathered(state, operation, source, take, slice(None))
    x, out = source.array(), target.target()
    x = x.copy() if source.memory is target.memory else x
    return Native(
        method, (x,), {"op": operation.native, "out": out, **_bits(state)}, functools.partial(target.store, out)
    )


def reduce_scatter_block(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of all ranks; each rank gets an equal part of them."""
    operation, method, is_in_place = op_of(op), state.native.reduce_scatter, _is_in_place(sendbuf)
    x: Any = None if is_in_place else plain_numbers(sendbuf, state.size)
    out = plain_numbers(recvbuf)
    if out is not None and _has_plain(operation, x) and (x.dtype, x.size) == (out.dtype, out.size * state.size):
        return Native(method, (x,), {"op": operation.native, "out": out, **_bits(state)})
    source = simple(recvbuf if is_in_place else sendbuf, writable=is_in_place, blocks=state.size)
    target = source.part(0, source.count) if is_in_place else simple(recvbuf, writable=True)
    if target.count != source.count:
        raise ValueError(f"each rank gets {source.count} elements, and the receive buffer has {target.count}")
    counts = [source.count] * state.size
    return _reduced_parts(state, method, _blocks(source, state.size), target, counts, operation)


# By the name of the method: the function that makes the call.
ARGUMENTS: dict[str, Callable[..., Any]] = {
    "Barrier": barrier,
    "Bcast": bcast,
    "Gather": gather,
    "Gatherv": gatherv,
    "Scatter": scatter,
    "Scatterv": scatterv,
    "Allgather": allgather,
    "Allgatherv": allgatherv,
    "Alltoall": alltoall,
    "Alltoallv": alltoallv,
    "Alltoallw": alltoallw,
    "Reduce": reduce,
    "Allreduce": allreduce,
    "Reduce_scatter_block": reduce_scatter_block,
    "Reduce_scatter": reduce_scatter,
}
PREFIXES: dict[str, Callable[..., Any]] = {"Scan": scan, "Exscan": exscan}
