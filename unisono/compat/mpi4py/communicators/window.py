"""`Win`: memory that other ranks access by themselves, over `unisono.Window`.

The native window consists of bytes, and accumulates use a view of it with the dtype of their elements. Unisono has no
atomic operation on some dtypes, such as long double, and on elements that are not aligned. Then the origin holds the
lock of the target in a second window, the *guard*, while it gets the elements, combines them and puts them. As all
ranks decide so by the same facts, such accumulates are atomic with respect to each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import NoneType
from typing import Any, ClassVar, SupportsIndex, TypeVar

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole, whole_numbers
from unisono.compat.mpi4py.base.constants import CONSTANTS, PROC_NULL
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.handles import Attributed, Handle, Handled, Named, State, constant
from unisono.compat.mpi4py.calls.collectives import has_native
from unisono.compat.mpi4py.calls.ready import Native
from unisono.compat.mpi4py.calls.request import Request, RequestState
from unisono.compat.mpi4py.communicators.comm import CommState
from unisono.compat.mpi4py.communicators.session import COMM_SELF
from unisono.compat.mpi4py.memory.access import BottomType, buffer, memory_of, nothing
from unisono.compat.mpi4py.memory.buffers import Block, simple
from unisono.compat.mpi4py.memory.datatype import TypeState, datatype_of
from unisono.compat.mpi4py.values.group import Shared
from unisono.compat.mpi4py.values.info import INFO_NULL, Hinted
from unisono.compat.mpi4py.values.op import OPS, OpState, check_operation, combine, op_of
from unisono.dtypes import DTYPES
from unisono.errors import UsageError

_Call = TypeVar("_Call", bound=Callable[..., Any])
_u1 = np.dtype(np.uint8)
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
# The operations that combine nothing, by the name of MPI's constant.
_OTHERS = {"REPLACE": "replace", "NO_OP": "no_op"}
_LOCKS = {CONSTANTS["LOCK_EXCLUSIVE"]: True, CONSTANTS["LOCK_SHARED"]: False}
_NO_SUCCEED = CONSTANTS["MODE_NOSUCCEED"]


def _synchronizing(function: _Call) -> _Call:
    """Return a method whose `UsageError`s are errors of synchronization, because it checks its other arguments."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except UsageError as error:
            raise fail("ERR_RMA_SYNC", f"UsageError: {error}") from error

    return translating(call)  # type: ignore[return-value]


class WinState(State):
    """A window.

    Attributes:
        comm: a communicator for this window alone, so that it outlives that of the program.
        native: the window of bytes.
        guard: the window whose locks guard accumulates that are not native.
        memory: the part of this rank, as bytes.
        units, sizes: the displacement unit and the number of bytes of each part.
        flavor: the constant for how it was made.
    """

    def __init__(self, comm: CommState, part: Any, unit: int, flavor: str, *, contiguous: bool = False) -> None:
        super().__init__()
        if unit <= 0:
            raise fail("ERR_DISP", f"the displacement unit {unit} is not positive")
        self.comm = comm.private()
        self.native = self.comm.native.window(part, "uint8", contiguous=contiguous)
        self.guard = self.comm.native.window(0, "uint8")
        self.memory, self.flavor = self.native.array, CONSTANTS[f"WIN_FLAVOR_{flavor}"]
        self.info: dict[str, str] = {}
        fact = [[unit, self.memory.size, self.address]]
        facts = self.comm.native.allgather(np.array(fact, np.int64)).tolist()
        self.units, self.sizes = [row[0] for row in facts], [row[1] for row in facts]
        self._addresses = [address for _, size, address in facts if size]
        self._views = {_u1: self.native}
        self._pending: list[RequestState] = []

    @property
    def address(self) -> int:
        """The address of this rank's part."""
        return int(self.memory.ctypes.data)

    def later(self, call: Native) -> RequestState:
        """Start a call, which the next synchronization completes."""
        self._pending.append(request := call.start())
        return request

    def settle(self) -> None:
        """Complete the calls of `later`."""
        pending, self._pending = self._pending, []
        for request in pending:
            request.complete()

    def view(self, dtype: np.dtype[Any]) -> Any:
        """Return the native window of elements of a dtype; None if a part is not aligned for it."""
        if any(address % dtype.itemsize for address in self._addresses):
            return None
        if dtype not in self._views:
            self._views[dtype] = self.native.view(dtype)
        return self._views[dtype]

    def group(self, group: Any) -> list[int]:
        """Return the ranks of a group in this window."""
        members = group._live.members
        if not set(members) <= set(self.comm.members):
            raise fail("ERR_GROUP", "the group has members that are not in the window")
        return [self.comm.members.index(member) for member in members]


class _Place:
    """Elements of the part of a target.

    Args:
        rank: the target.
        layout, count: the datatype and the number of elements.
        offset: the offset of the first one in bytes.
    """

    def __init__(self, rank: int, layout: TypeState, count: int, offset: int) -> None:
        self.rank, self.layout, self.count, self.offset = rank, layout, count, offset

    @property
    def nbytes(self) -> int:
        """The number of bytes of data."""
        return self.count * self.layout.size

    def at(self, itemsize: int = 1) -> Any:
        """Return the positions in items, as `un.Window` takes them; None if items are not aligned in the part."""
        if self.layout.is_dense:
            first, rest = divmod(self.offset, itemsize)
            return None if rest else first
        starts = self.layout.positions(self.count, self.offset)[::itemsize]
        return None if (starts % itemsize).any() else starts // itemsize

    def span(self) -> slice:
        """Return the bytes from the first element to the last one, with those between them."""
        return slice(self.offset, self.offset + self.count * self.layout.extent)


def _place(state: WinState, rank: int, target: Any, origin: Block) -> _Place:
    """Return the place of a target: None, a displacement, or ``(displacement, count, datatype)`` or its beginning."""
    if not 0 <= rank < state.comm.size:
        raise fail("ERR_RANK", f"{rank} is not a rank of a window of {state.comm.size}")
    items = [] if target is None else list(target) if isinstance(target, (list, tuple)) else [target]
    if len(items) > 3 or not all(isinstance(item, (SupportsIndex, NoneType)) for item in items[:2]):
        raise ValueError(f"a target is a displacement or (displacement, count, datatype), not {target!r}")
    displacement, count, datatype = [*items, None, None, None][:3]
    layout = origin.layout if datatype is None else datatype_of(datatype)
    count = origin.count if count is None else int(count)
    if layout is None:
        raise fail("ERR_TYPE", "the datatype of the target is null")
    place = _Place(rank, layout, count, int(displacement or 0) * state.units[rank])
    low, high = layout.span(count)
    if place.nbytes and not 0 <= place.offset + low <= place.offset + high <= state.sizes[rank]:
        raise fail(
            "ERR_RMA_RANGE",
            f"bytes {place.offset + low} to {place.offset + high} are not in the part of rank {rank}, "
            f"which has {state.sizes[rank]} bytes",
        )
    if place.nbytes != origin.nbytes:
        raise ValueError(f"the origin has {origin.nbytes} bytes, and the target {place.nbytes}")
    return place


def _put(state: WinState, origin: Block, place: _Place) -> None:
    if place.nbytes:
        state.native.put(origin.array().view(_u1), place.rank, place.at())


def _get(state: WinState, origin: Block, place: _Place) -> RequestState:
    if not place.nbytes:
        return RequestState()
    out = origin.target().view(_u1)
    call = Native(state.native.get, (place.rank, place.at()), {"out": out}, lambda: origin.store(out))
    return state.later(call)


def _native_op(op: OpState, origin: Block) -> str:
    """Return the name of an operation in Unisono; "" if it has none for these elements."""
    if op.constant in _OTHERS:
        return _OTHERS[op.constant] if origin.dtype.name in DTYPES else ""
    return op.native if has_native(op, origin) else ""


def _accumulate(
    state: WinState, origin: Block, place: _Place, op: OpState, result: Block | None = None
) -> RequestState:
    """Combine the elements of a place with the origin; store their values before in `result`, if it is passed."""
    if op.function is not None:
        raise fail("ERR_OP", "windows take predefined operations only")
    if not place.nbytes:
        return RequestState()
    dtype, name = origin.dtype, _native_op(op, origin)
    at, window = place.at(dtype.itemsize), state.view(dtype)
    if not name or at is None or window is None:
        _guarded(state, origin, place, op, result)
        return RequestState()
    if result is None:
        window.accumulate(origin.array(), place.rank, at, name)
        return RequestState()
    out = result.target().view(dtype)
    args = origin.array(), place.rank, at, name
    return state.later(Native(window.get_accumulate, args, {"out": out}, lambda: result.store(out)))


def _guarded(state: WinState, origin: Block, place: _Place, op: OpState, result: Block | None) -> None:
    """Carry an accumulate out by a get and a put, while this rank holds the target's lock of the guard."""
    check_operation(op, origin)
    mine = origin.elements()
    at = place.span() if mine.dtype.names else place.at()
    state.settle()
    with state.guard.lock(place.rank):
        state.native.flush(place.rank)
        old = state.native.get(place.rank, at, out=np.empty(mine.nbytes, _u1)).view(mine.dtype)
        new = np.ascontiguousarray(combine(op, old, mine, origin))
        state.native.put(new.view(_u1), place.rank, at)
        state.native.flush(place.rank)
    if result is not None:
        result.store_elements(old)


def _single(**blocks: Block) -> None:
    """Raise `ValueError` unless all blocks are one element of the same datatype."""
    first = next(iter(blocks.values()))
    for name, block in blocks.items():
        if block.count != 1 or block.nbytes != first.nbytes:
            raise ValueError(f"{name} must be one element of {first.layout.size} bytes, not {block.nbytes} bytes")


@whole_numbers
class Win(Handle, Named, Attributed, Handled, Hinted, Shared):
    """A window: memory of all ranks of a communicator that each of them accesses by itself."""

    __slots__ = ()
    _null, _error = "WIN_NULL", "ERR_WIN"
    _keyvals: ClassVar[dict[int, Any]] = {}

    @classmethod
    @translating
    def Create(cls, memory: Any, disp_unit: int = 1, info: Any = INFO_NULL, comm: Any = COMM_SELF) -> Any:
        """Expose memory of the program. All ranks call it."""
        part = nothing if memory is None or isinstance(memory, BottomType) else memory_of(memory, writable=True)
        part = part.view(np.ndarray)
        return cls._of(WinState(comm._live, part, disp_unit, "CREATE"))

    @classmethod
    @translating
    def Allocate(cls, size: int, disp_unit: int = 1, info: Any = INFO_NULL, comm: Any = COMM_SELF) -> Any:
        """Make `size` bytes of memory, which ranks of one host access directly. All ranks call it."""
        return cls._of(WinState(comm._live, _checked_size(size), disp_unit, "ALLOCATE"))

    @classmethod
    @translating
    def Allocate_shared(cls, size: int, disp_unit: int = 1, info: Any = INFO_NULL, comm: Any = COMM_SELF) -> Any:
        """Make `size` bytes of memory that all ranks map, one part after the other. All ranks call it."""
        state, nbytes = comm._live, _checked_size(size)
        is_shared = np.array([len(state.native.hosts) == 1 and state.native._shares_memory()])
        if not state.native.allreduce(is_shared, "land")[0]:
            raise fail(
                "ERR_RMA_SHARED",
                "not all ranks share memory: they are on several hosts, or the option `transports` leaves out shm. "
                "Split them by MPI.COMM_TYPE_SHARED first, or make a window by MPI.Win.Allocate",
            )
        apart = bool(info) and info.get("alloc_shared_noncontig") == "true"
        return cls._of(WinState(state, nbytes, disp_unit, "SHARED", contiguous=not apart))

    @classmethod
    def Create_dynamic(cls, info: Any = INFO_NULL, comm: Any = COMM_SELF) -> Any:
        """Raise `NotImplementedError`: memory cannot be attached to a window later."""
        raise NotImplementedError("there are no dynamic windows: make a window of all memory by MPI.Win.Allocate")

    Attach = Detach = Create_dynamic

    def Free(self) -> None:
        """Complete all operations, and close the window. All ranks call it."""
        self._free()

    @_synchronizing
    def _release(self) -> None:
        self._delete_attributes()
        self._state.settle()
        self._state.native.free()
        self._state.guard.free()
        self._state.comm.release()

    # Memory and facts.

    @_synchronizing
    def Shared_query(self, rank: int) -> tuple[Any, int]:
        """Return the memory of a rank and its displacement unit; without memory if this rank does not map it.

        `PROC_NULL` stands for the first rank that has memory.
        """
        state = self._live
        if rank == PROC_NULL:
            rank = next((each for each, size in enumerate(state.sizes) if size), 0)
        if not 0 <= rank < state.comm.size:
            raise fail("ERR_RANK", f"{rank} is not a rank of the window")
        try:
            memory = state.native.shared(rank)
        except UsageError:
            if state.flavor == CONSTANTS["WIN_FLAVOR_SHARED"]:
                raise fail("ERR_RMA_SHARED", f"this rank does not map the part of rank {rank}") from None
            memory = nothing
        return buffer._of(memory, memory), state.units[rank]

    def __buffer__(self, flags: int, /) -> memoryview:  # Python calls it from 3.12 on
        return memoryview(self.tomemory())

    @property
    def __array_interface__(self) -> dict[str, Any]:  # numpy reads it in every version of Python
        interface: dict[str, Any] = self._live.memory.__array_interface__
        return interface

    def tomemory(self) -> Any:
        """Return the memory of this rank's part."""
        memory = self._live.memory
        return buffer._of(memory, memory)

    def _predefined_attribute(self, keyval: int) -> Any:
        state = self._live
        values = {
            "WIN_BASE": state.address,
            "WIN_SIZE": state.memory.size,
            "WIN_DISP_UNIT": state.units[state.comm.rank],
            "WIN_CREATE_FLAVOR": state.flavor,
            "WIN_MODEL": CONSTANTS["WIN_UNIFIED"],
        }
        by_keyval = {CONSTANTS[name]: value for name, value in values.items()}
        return by_keyval[keyval] if keyval in by_keyval else super()._predefined_attribute(keyval)

    attrs = property(
        lambda self: tuple(self.Get_attr(CONSTANTS[name]) for name in ("WIN_BASE", "WIN_SIZE", "WIN_DISP_UNIT")),
        doc="The address, the number of bytes and the displacement unit of this rank's part.",
    )
    flavor = property(lambda self: self._live.flavor, doc="How the window was made.")
    model = property(lambda self: self.Get_attr(CONSTANTS["WIN_MODEL"]), doc="The memory model, `WIN_UNIFIED`.")

    # Operations. Those that receive something have done so after the next synchronization.

    @_synchronizing
    def Rput(self, origin: Any, target_rank: int, target: Any = None) -> Any:
        """Copy the origin to the target. Returns a request that is done when the origin may be changed."""
        state = self._live
        if target_rank != PROC_NULL:
            block = simple(origin)
            _put(state, block, _place(state, target_rank, target, block))
        return Request._of(RequestState())

    @_synchronizing
    def Rget(self, origin: Any, target_rank: int, target: Any = None) -> Any:
        """Copy the target to the origin. Returns a request."""
        state = self._live
        if target_rank == PROC_NULL:
            return Request._of(RequestState())
        block = simple(origin, writable=True)
        return Request._of(_get(state, block, _place(state, target_rank, target, block)))

    @_synchronizing
    def Raccumulate(self, origin: Any, target_rank: int, target: Any = None, op: Any = OPS["SUM"]) -> Any:
        """Combine the target with the origin. Returns a request that is done when the origin may be changed."""
        state, operation = self._live, op_of(op)
        if target_rank == PROC_NULL:
            return Request._of(RequestState())
        block = simple(origin)
        return Request._of(_accumulate(state, block, _place(state, target_rank, target, block), operation))

    @_synchronizing
    def Rget_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Any = OPS["SUM"]
    ) -> Any:
        """Combine the target with the origin, and copy the target as it was to the result. Returns a request."""
        state, operation = self._live, op_of(op)
        if target_rank == PROC_NULL:
            return Request._of(RequestState())
        after = simple(result, writable=True)
        block = _zeros_like(after) if operation.constant == "NO_OP" else simple(origin)
        place = _place(state, target_rank, target, block)
        if after.nbytes != place.nbytes:
            raise ValueError(f"the result has {after.nbytes} bytes, and the target {place.nbytes}")
        return Request._of(_accumulate(state, block, place, operation, after))

    def Put(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Copy the origin to the target."""
        self.Rput(origin, target_rank, target)

    def Get(self, origin: Any, target_rank: int, target: Any = None) -> None:
        """Copy the target to the origin."""
        self.Rget(origin, target_rank, target)

    def Accumulate(self, origin: Any, target_rank: int, target: Any = None, op: Any = OPS["SUM"]) -> None:
        """Combine the target with the origin, each element atomically."""
        self.Raccumulate(origin, target_rank, target, op)

    def Get_accumulate(
        self, origin: Any, result: Any, target_rank: int, target: Any = None, op: Any = OPS["SUM"]
    ) -> None:
        """Combine the target with the origin, and copy the target as it was to the result."""
        self.Rget_accumulate(origin, result, target_rank, target, op)

    @_synchronizing
    def Fetch_and_op(
        self, origin: Any, result: Any, target_rank: int, target_disp: int = 0, op: Any = OPS["SUM"]
    ) -> None:
        """Combine one element of the target with the origin, and copy it as it was to the result."""
        state, operation = self._live, op_of(op)
        after = simple(result, writable=True)
        block = _zeros_like(after) if operation.constant == "NO_OP" and origin is None else simple(origin)
        _single(origin=block, result=after)
        if target_rank != PROC_NULL:
            _accumulate(state, block, _place(state, target_rank, target_disp, block), operation, after)

    @_synchronizing
    def Compare_and_swap(self, origin: Any, compare: Any, result: Any, target_rank: int, target_disp: int = 0) -> None:
        """Set one element of the target to the origin if it equals `compare`, and copy it as it was to the result."""
        state = self._live
        block, compared, after = simple(origin), simple(compare), simple(result, writable=True)
        _single(origin=block, compare=compared, result=after)
        if target_rank == PROC_NULL:
            return
        place, dtype = _place(state, target_rank, target_disp, block), _UNSIGNED.get(block.nbytes)
        if dtype is None:
            raise fail("ERR_TYPE", f"an element of {block.nbytes} bytes cannot be compared and swapped")
        at, window = place.at(dtype.itemsize), state.view(dtype)
        if at is None or window is None:
            raise fail("ERR_DISP", f"the element is not aligned to {dtype.itemsize} bytes")
        new, old = (each.array().view(dtype)[0] for each in (block, compared))
        after.store(np.array([window.compare_and_swap(new, old, target_rank, at)], dtype))

    # Epochs.

    def _synchronize(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Complete what has been started, and call a method of the native window."""
        state = self._live
        state.settle()
        if not args or args[0] != PROC_NULL:
            getattr(state.native, method)(*args, **kwargs)

    @_synchronizing
    def Fence(self, assertion: int = 0) -> None:
        """Complete all operations of all ranks, and begin an epoch for all parts, except after `MODE_NOSUCCEED`."""
        self._synchronize("fence", last=bool(assertion & _NO_SUCCEED))

    @_synchronizing
    def Start(self, group: Any, assertion: int = 0) -> None:
        """Wait until the ranks of a group have called `Post`, and begin an epoch for them."""
        self._synchronize("start", self._live.group(group))

    @_synchronizing
    def Post(self, group: Any, assertion: int = 0) -> None:
        """Let the ranks of a group access this rank's part."""
        self._synchronize("post", self._live.group(group))

    @_synchronizing
    def Wait(self) -> bool:
        """Wait until the ranks of `Post` have called `Complete`."""
        self._synchronize("wait")
        return True

    @_synchronizing
    def Test(self) -> bool:
        """Return whether the ranks of `Post` have called `Complete`."""
        return bool(self._live.native.test())

    @_synchronizing
    def Lock(self, rank: int, lock_type: int = CONSTANTS["LOCK_EXCLUSIVE"], assertion: int = 0) -> None:
        """Wait for the lock of a part, and begin an epoch for it."""
        if lock_type not in _LOCKS:
            raise fail("ERR_LOCKTYPE", f"{lock_type} is neither LOCK_EXCLUSIVE nor LOCK_SHARED")
        self._synchronize("lock", rank, exclusive=_LOCKS[lock_type])

    @_synchronizing
    def Lock_all(self, assertion: int = 0) -> None:
        """Share the locks of all parts, and begin an epoch for them."""
        self._synchronize("lock_all")

    @_synchronizing
    def Sync(self) -> None:
        """Order this rank's own accesses to the parts before and after it."""
        self._live.native.sync()


# The methods that call the method of the native window, with the target if it has one.
_ENDS = {
    "Complete": "Complete all operations of the epoch of `Start`, and end it.",
    "Unlock": "Complete all operations on a rank, and give up its lock.",
    "Unlock_all": "Complete all operations, and give up all locks.",
    "Flush": "Complete all operations on a rank.",
    "Flush_all": "Complete all operations.",
    "Flush_local": "Wait until buffers of operations on a rank may be used.",
    "Flush_local_all": "Wait until buffers of all operations may be used.",
}


def _ending(name: str) -> Any:
    @_synchronizing
    def end(self: Win, rank: int | None = None) -> None:
        self._synchronize(name.lower(), *(() if rank is None else (whole(rank),)))

    end.__name__ = end.__qualname__ = name
    end.__doc__ = _ENDS[name]
    return end


for _name in _ENDS:
    setattr(Win, _name, _ending(_name))


def _checked_size(size: int) -> int:
    if size < 0:
        raise fail("ERR_SIZE", f"the size {size} is negative")
    return int(size)


def _zeros_like(block: Block) -> Block:
    """Return zeros of the layout and count of a block."""
    low, high = block.layout.span(block.count)
    return Block(np.zeros(max(high - low, block.count * block.layout.extent), _u1), block.layout, block.count, -low)


WIN_NULL = constant("WIN_NULL", Win, None)
