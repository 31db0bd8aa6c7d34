"""The collectives on buffers: for each one, a function that turns its arguments into a call.

`ARGUMENTS` has them by name. `Comm` gets three methods from each: one that waits, one that starts the call and returns
a request, and one that returns a persistent request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.calls.ready import Native, nothing
from unisono.compat.mpi4py.memory.access import IN_PLACE
from unisono.compat.mpi4py.memory.buffers import NATIVE_DTYPES, Block, plain, simple, vector, vector_w
from unisono.compat.mpi4py.memory.datatype import Datatype
from unisono.compat.mpi4py.values.op import SUM, OpState, combine, op_of
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS

_u1 = np.uint8


def _is_in_place(buf: Any) -> bool:
    return buf is None or buf is IN_PLACE


def checked_root(state: Any, root: int) -> int:
    """Return the root; raises `Exception` if there is no such rank."""
    if not 0 <= root < state.size:
        raise fail("ERR_ROOT", f"root {root} is not a rank of a communicator of {state.size}")
    return root


def barrier(state: Any) -> Any:
    """Wait for all ranks."""
    return Native(state.native.barrier, (), {})


def bcast(state: Any, buf: Any, root: int = 0) -> Any:
    """Copy the elements of the root to all ranks."""
    is_root = checked_root(state, root) == state.rank
    memory = plain(buf)
    if memory is not None:
        return Native(state.native.broadcast, (memory, root), {"out": memory})
    block = simple(buf, writable=not is_root)
    array = block.array() if is_root else block.target()
    if is_root and not array.flags.writeable:
        return Native(state.native.broadcast, (array, root), {})
    return Native(state.native.broadcast, (array, root), {"out": array}, nothing_if(is_root, block, array))


def nothing_if(is_root: bool, block: Block, array: Any) -> Callable[[], None]:
    """Return the function that stores a result, except on the root."""
    return (lambda: None) if is_root else (lambda: block.store(array))


def _blocks(block: Block, size: int) -> Block:
    """Return the elements for all ranks of a block with the count of one."""
    return Block(block.memory, block.layout, block.count * size, block.origin)


def gather(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Collect the elements of all ranks on the root."""
    if checked_root(state, root) != state.rank:
        return Native(state.native.gather, (simple(sendbuf).array(), root), {})
    return _collected(state, state.native.gather, sendbuf, recvbuf, root)


def _collected(state: Any, method: Any, sendbuf: Any, recvbuf: Any, *args: Any) -> Any:
    """Return the call that collects the elements of all ranks in a buffer of this one."""
    x, out = plain(sendbuf), plain(recvbuf)
    if x is not None and out is not None and x.dtype == out.dtype and x.size * state.size == out.size:
        return Native(method, (x, *args), {"out": out})
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
    if checked_root(state, root) != state.rank:
        block = simple(recvbuf, writable=True)
        out = block.target()
        return Native(state.native.scatter, (None, root), {"out": out}, lambda: block.store(out))
    x = _blocks(simple(sendbuf, blocks=state.size), state.size).array()
    if _is_in_place(recvbuf):
        own = _part(x, root, state.size)
        return Native(state.native.scatter, (x, root), {"out": own if own.flags.writeable else own.copy()})
    block = simple(recvbuf, writable=True)
    target = block.target()
    return Native(state.native.scatter, (x.view(target.dtype), root), {"out": target}, lambda: block.store(target))


def alltoall(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each rank a share, and receive one from each."""
    whole = _blocks(simple(recvbuf, writable=True, blocks=state.size), state.size)
    if _is_in_place(sendbuf):
        x = whole.array().copy()
    else:
        x = _blocks(simple(sendbuf, blocks=state.size), state.size).array()
    out = whole.target().view(x.dtype)
    return Native(state.native.alltoall, (x,), {"out": out}, lambda: whole.store(out))


def gatherv(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Collect elements of all ranks on the root, which alone knows the counts."""
    if checked_root(state, root) != state.rank:
        return Native(state.native.gatherv, (simple(sendbuf).array(), None, root), {"counts_at_root": True})
    parts = vector(recvbuf, state.size, writable=True)
    x = parts[root].array() if _is_in_place(sendbuf) else simple(sendbuf).array()
    out, finish = target_of(parts, x.dtype)
    counts = numbers_of(parts, x.dtype)
    return Native(state.native.gatherv, (x, counts, root), {"out": out, "counts_at_root": True}, finish)


def scatterv(state: Any, sendbuf: Any, recvbuf: Any, root: int = 0) -> Any:
    """Send each rank its share of the elements of the root, which alone knows the counts."""
    x, counts, own = None, None, None
    if checked_root(state, root) == state.rank:
        parts = vector(sendbuf, state.size)
        own, dtype = parts[root], parts[root].dtype
        x, counts = concatenated(parts, dtype), numbers_of(parts, dtype)
    if own is not None and _is_in_place(recvbuf):
        out, finish = own.array().copy(), nothing
    else:
        block = simple(recvbuf, writable=True)
        out = block.target()
        finish = functools.partial(block.store, out)
    return Native(state.native.scatterv, (x, counts, root), {"out": out, "counts_at_root": True}, finish)


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
        return joined, nothing
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
    parts = vector(recvbuf, state.size, writable=True)
    x = (parts[state.rank] if _is_in_place(sendbuf) else simple(sendbuf)).array()
    out, finish = target_of(parts, x.dtype)
    return Native(state.native.allgatherv, (x, numbers_of(parts, x.dtype)), {"out": out}, finish)


def alltoallv(state: Any, sendbuf: Any, recvbuf: Any) -> Any:
    """Send each rank some elements, and receive some from each."""
    targets = vector(recvbuf, state.size, writable=True)
    sources = targets if _is_in_place(sendbuf) else vector(sendbuf, state.size)
    dtype = sources[0].dtype
    x = concatenated(sources, dtype)
    x = x.copy() if _is_in_place(sendbuf) else x
    out, finish = target_of(targets, dtype)
    args = x, numbers_of(sources, dtype), numbers_of(targets, dtype)
    return Native(state.native.alltoallv, args, {"out": out}, finish)


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
    mine = np.ascontiguousarray(source.elements())
    raw = mine.view(_u1).copy()
    everything = np.empty(raw.size * state.size, _u1)

    def finish() -> None:
        parts = [part.view(mine.dtype) for part in everything.reshape(state.size, -1)][which]
        if parts:
            take(_folded(op, parts, source))

    return Native(state.native.allgather, (raw,), {"out": everything}, finish)


def allreduce(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of all ranks on all ranks."""
    native, out = op_of(op).native, _numbers_of(recvbuf)
    x = out if _is_in_place(sendbuf) else _numbers_of(sendbuf)
    fit = x is not None and out is not None and (x.dtype, x.size) == (out.dtype, out.size)
    if fit and native and NATIVE_DTYPES[x.dtype].kind in OPERATIONS[native].kinds:
        return Native(state.native.allreduce, (x, native), {"out": out, **_bits(state)})
    return _reduced(state, "allreduce", sendbuf, recvbuf, op_of(op), slice(None), ())


def _numbers_of(spec: Any) -> Any:
    """Return the `plain` array of a specification of numbers; None for bytes, which have other operations."""
    if type(spec) is list and spec and isinstance(spec[-1], Datatype):
        state = spec[-1]._state
        return plain(spec) if state is not None and state.dtype in NATIVE_DTYPES else None
    return plain(spec)


def _reduced(state: Any, name: str, sendbuf: Any, recvbuf: Any, op: OpState, which: Any, args: tuple[Any, ...]) -> Any:
    target = simple(recvbuf, writable=True)
    source = target if _is_in_place(sendbuf) else simple(sendbuf)
    _check_counts(source, target)
    if not has_native(op, source):
        return _gathered(state, op, source, target.store_elements, which)
    x, out = source.array(), target.target()
    if source is target and name != "allreduce":
        x = x.copy()
    method = getattr(state.native, name)
    is_stored = name != "exscan" or state.rank > 0
    out = out if is_stored else np.empty_like(out)
    finish = functools.partial(target.store, out) if is_stored else nothing
    return Native(method, (x, op.native, *args), {"out": out, **_bits(state)}, finish)


def _bits(state: Any) -> dict[str, bool]:
    """Return the argument of reductions whose bits do not depend on the algorithm, if a hint asks for it."""
    return {"reproducible": True} if state.info.get("unisono_reproducible") == "true" else {}


def _check_counts(source: Block, target: Block) -> None:
    if source.nbytes != target.nbytes or source.layout.dtype != target.layout.dtype:
        raise ValueError(f"the send and receive buffers have {source.count} and {target.count} elements")


def reduce(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> Any:
    """Combine the elements of all ranks on the root."""
    operation = op_of(op)
    if checked_root(state, root) == state.rank:
        return _reduced(state, "reduce", sendbuf, recvbuf, operation, slice(None), (root,))
    source = simple(recvbuf if _is_in_place(sendbuf) else sendbuf)
    if not has_native(operation, source):
        return _gathered(state, operation, source, lambda _: None, slice(0))
    return Native(state.native.reduce, (source.array(), operation.native, root), _bits(state))


def scan(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of the ranks up to this one."""
    return _reduced(state, "scan", sendbuf, recvbuf, op_of(op), slice(state.rank + 1), ())


def exscan(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of the ranks below this one; rank 0 keeps its receive buffer."""
    return _reduced(state, "exscan", sendbuf, recvbuf, op_of(op), slice(state.rank), ())


def reduce_scatter(state: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM) -> Any:
    """Combine the elements of all ranks; each rank gets the number of them that `recvcounts` has for it."""
    operation = op_of(op)
    if _is_in_place(sendbuf):
        source = simple(recvbuf, writable=True)
        counts = list(recvcounts) if recvcounts is not None else [source.count // state.size] * state.size
        target = source.part(0, counts[state.rank])
    else:
        source, target = simple(sendbuf), simple(recvbuf, writable=True)
        if recvcounts is None:
            numbers = np.empty(state.size, np.int64)
            state.native.allgather(np.array([target.count]), out=numbers)
            counts = numbers.tolist()
        else:
            counts = list(recvcounts)
            if target.count < counts[state.rank]:
                raise ValueError(f"the receive buffer has {target.count} elements, not {counts[state.rank]}")
            target = target.part(0, counts[state.rank])
    if source.layout.dtype != target.layout.dtype:
        raise ValueError("the send and receive buffers have different datatypes")
    if len(counts) != state.size or sum(counts) != source.count:
        raise ValueError(f"the counts {counts} do not fit {source.count} elements and {state.size} ranks")
    if not has_native(operation, source):
        start = sum(counts[: state.rank])

        def take(result: Any) -> None:
            target.store_elements(result[start : start + target.count])

        return _gathered(state, operation, source, take, slice(None))
    x = source.array().copy() if _is_in_place(sendbuf) else source.array()
    out, units = target.target(), source.layout.size // source.dtype.itemsize
    args = x, [count * units for count in counts], operation.native
    return Native(state.native.reduce_scatterv, args, {"out": out, **_bits(state)}, lambda: target.store(out))


def reduce_scatter_block(state: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    """Combine the elements of all ranks; each rank gets an equal part of them."""
    if _is_in_place(sendbuf):
        count = simple(recvbuf, writable=True, blocks=state.size).count
        return reduce_scatter(state, sendbuf, recvbuf, [count] * state.size, op)
    count = simple(sendbuf, blocks=state.size).count
    target = simple(recvbuf, writable=True)
    if target.count != count:
        raise ValueError(f"each rank gets {count} elements, and the receive buffer has {target.count}")
    whole = sendbuf
    if isinstance(sendbuf, (list, tuple)) and len(sendbuf) > 2:
        block = _blocks(simple(sendbuf, blocks=state.size), state.size)
        raw = block.memory[block.origin :] if block.layout.is_dense else block.memory
        whole = [raw, block.count, _handle(block)]
    return reduce_scatter(state, whole, recvbuf, [count] * state.size, op)


def _handle(block: Block) -> Any:
    return Datatype._of(block.layout)


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
