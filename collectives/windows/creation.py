"""How the ranks of a communicator make a window together.

Each rank checks its own arguments first. Then all ranks exchange the facts of their parts, the names of segments,
whether they could open them, and whether they have memory: four small allgathers. So all ranks know the same about
every part, and either all of them make the window or none does.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono.collectives.arrays.mapped import element_of, extents_of
from unisono.collectives.arrays.operands import check_dtype
from unisono.collectives.windows.contracts import WindowComm, WindowTarget
from unisono.collectives.windows.mapped import MappedTarget
from unisono.collectives.windows.memory import Layout, Segment, SegmentName, layout_of, own_bytes, private_locks
from unisono.collectives.windows.operations import Element
from unisono.collectives.windows.remote import RemoteTarget
from unisono.collectives.windows.window import OpenWindow, Window
from unisono.dtypes import DTYPES
from unisono.errors import MismatchError, UsageError
from unisono.foundation import log
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import WindowExecutor

_log = log.get("calls")

_NAMES = {dtype.code: dtype.name for dtype in DTYPES.values()}


class _Plan(NamedTuple):
    """The part of one rank: its array, or the shape of a new one, and the flat memory of the array as bytes."""

    element: Element
    shape: tuple[int, ...]
    array: AnyArray | None
    memory: AnyArray | None
    nbytes: int


class _Fact(NamedTuple):
    """A rank's row of the first allgather."""

    is_new: int
    dtype: int
    nbytes: int
    is_contiguous: int


def planned(shape_or_array: Any, dtype: Any) -> _Plan:
    """Return the part of this rank, from the arguments of `Communicator.window`.

    Raises:
        UsageError: the arguments are wrong.
    """
    if isinstance(shape_or_array, np.ndarray):
        numpy_dtype = element_of(shape_or_array.dtype if dtype is None else dtype)
        array = shape_or_array if dtype is None else shape_or_array.view(numpy_dtype)
        memory = own_bytes(array)
        return _Plan(
            Element(check_dtype(numpy_dtype, "the window"), numpy_dtype), array.shape, array, memory, array.nbytes
        )
    numpy_dtype = element_of("float64" if dtype is None else dtype)
    shape = extents_of(shape_or_array)
    nbytes = int(np.prod(shape, dtype=object)) * numpy_dtype.itemsize
    if nbytes > sys.maxsize:
        raise UsageError(f"a part of shape {shape} has {nbytes} bytes, and no memory holds more than {sys.maxsize}")
    return _Plan(Element(check_dtype(numpy_dtype, "the window"), numpy_dtype), shape, None, None, nbytes)


def create(comm: WindowComm, executor: WindowExecutor, plan: _Plan, *, is_contiguous: bool, timeout_s: float) -> Window:
    """Make the window with the other ranks of `comm`, whose executor is `executor`.

    Raises:
        UsageError: a rank has no memory for its part.
        MismatchError: the ranks pass different dtypes, or differ in `is_contiguous`.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in `allgather`.
    """
    fact = _Fact(plan.array is None, plan.element.dtype.code, plan.nbytes, is_contiguous)
    facts = [_Fact(*row) for row in _gathered(comm, fact, timeout_s)]
    _check_agreement(facts, comm)
    host = next(ranks for ranks in comm.hosts if comm.rank in ranks)
    sharing = [rank for rank in host if facts[rank].is_new]
    layout = layout_of([facts[rank].nbytes for rank in sharing], is_contiguous=is_contiguous)
    segment = None
    if executor.shares_memory_with(host) and comm.rank in sharing:
        segment = _shared(comm, sharing, layout, timeout_s)
    else:
        _gathered(comm, _NOTHING, timeout_s)
        _gathered(comm, (1,), timeout_s)
    if segment is None:
        plan = _with_memory(plan)
    _check_memory(_gathered(comm, (segment is not None or plan.memory is not None,), timeout_s), facts, comm)
    if segment is None:
        return _on_own_memory(comm, executor, plan, facts)
    return _on_segment(comm, executor, plan, facts, sharing, segment)


_NOTHING = SegmentName(0, 0, 0)


def _gathered(comm: WindowComm, row: Sequence[int], timeout_s: float) -> list[list[int]]:
    rows: list[list[int]] = comm.allgather(np.array([row], np.int64), timeout_s=timeout_s).tolist()
    return rows


def _check_agreement(facts: Sequence[_Fact], comm: WindowComm) -> None:
    first = facts[0]
    for rank, fact in enumerate(facts):
        if fact.dtype != first.dtype:
            names = _name_of(fact.dtype), _name_of(first.dtype)
            raise MismatchError(
                f"rank {comm.world_ranks[rank]} makes a window of {names[0]}, and rank {comm.world_ranks[0]} of "
                f"{names[1]}: pass the same dtype on all ranks",
                peer=comm.world_ranks[rank],
            )
        if fact.is_contiguous != first.is_contiguous:
            raise MismatchError("ranks pass different values of contiguous", peer=comm.world_ranks[rank])


def _with_memory(plan: _Plan) -> _Plan:
    """Return the part with an array of its own; without one if the system has no memory for it."""
    if plan.array is not None:
        return plan
    try:
        array: AnyArray = np.zeros(plan.shape, plan.element.numpy)
    except (MemoryError, ValueError):
        return plan
    return plan._replace(array=array, memory=array.reshape(-1).view(np.uint8))


def _check_memory(have: Sequence[Sequence[int]], facts: Sequence[_Fact], comm: WindowComm) -> None:
    for rank, (has_memory,) in enumerate(have):
        if not has_memory:
            number, nbytes = comm.world_ranks[rank], facts[rank].nbytes
            raise UsageError(
                f"rank {number} has no memory for its part of {nbytes} bytes: pass a smaller shape there", peer=number
            )


def _name_of(code: int) -> str:
    if code in _NAMES:
        return _NAMES[code]
    from unisono.transports.contracts.byte_dtypes import byte_dtype_of  # most programs do not need it

    return byte_dtype_of(code).name


def _shared(comm: WindowComm, sharing: Sequence[int], layout: Layout, timeout_s: float) -> Segment | None:
    """Return the segment of this host, or None if not all of its ranks could map it."""
    segment, name = None, _NOTHING
    is_maker = comm.rank == sharing[0]
    if is_maker:
        with contextlib.suppress(OSError, AttributeError, ValueError):
            segment = Segment.make(layout)
            name = segment.name
    names = _gathered(comm, name, timeout_s)
    if not is_maker:
        try:
            segment = Segment.opened(SegmentName(*names[sharing[0]]), layout)
        except (OSError, ValueError) as error:
            _log.debug("the memory of a window cannot be shared: %s", error)
    have = _gathered(comm, (segment is not None,), timeout_s)
    if segment is not None and is_maker:
        segment.close()
    return segment if all(have[rank][0] for rank in sharing) else None


def _on_own_memory(comm: WindowComm, executor: WindowExecutor, plan: _Plan, facts: Sequence[_Fact]) -> Window:
    """Return a window in which this rank maps only its own part."""
    assert plan.memory is not None
    part = executor.part_of(plan.memory, private_locks(), 0, comm.timeout_s)
    return _opened(comm, executor, plan, facts, {comm.rank: part}, {comm.rank: plan.memory})


def _on_segment(
    comm: WindowComm,
    executor: WindowExecutor,
    plan: _Plan,
    facts: Sequence[_Fact],
    sharing: Sequence[int],
    segment: Segment,
) -> Window:
    """Return a window in which this rank maps the new parts of its host."""
    memory = {rank: segment.bytes_of(index, facts[rank].nbytes) for index, rank in enumerate(sharing)}
    parts = {
        rank: executor.part_of(memory[rank], segment.locks(), index, comm.timeout_s)
        for index, rank in enumerate(sharing)
    }
    mine = memory[comm.rank]
    array = mine.view(plan.element.numpy).reshape(plan.shape)
    return _opened(comm, executor, plan._replace(array=array, memory=mine), facts, parts, memory)


def _opened(
    comm: WindowComm,
    executor: WindowExecutor,
    plan: _Plan,
    facts: Sequence[_Fact],
    parts: dict[int, _core.WindowPart],
    memory: dict[int, AnyArray],
) -> Window:
    targets: list[WindowTarget] = [
        MappedTarget(executor, parts[rank], rank) if rank in parts else RemoteTarget(executor, rank, comm.timeout_s)
        for rank in range(comm.size)
    ]
    server = executor.serve_part(parts[comm.rank]) if len(parts) < comm.size else None
    assert plan.array is not None
    opened = OpenWindow(comm, executor, targets, tuple(fact.nbytes for fact in facts), memory, server)
    return Window(opened, plan.element, plan.array)
