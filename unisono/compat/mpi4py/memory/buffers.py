"""Buffer specifications: ``data``, ``[data, count, displacement, datatype]`` and their shorter forms.

`simple` and `vector` turn a specification into a `Block` or a list of them: elements of a layout in memory. A block of
a dense layout is sent where it lies; any other one is packed, and unpacked after the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.memory.access import (
    BOTTOM,
    BottomType,
    Special,
    at_address,
    exported,
    integer,
    memory_of,
    nothing,
)
from unisono.compat.mpi4py.memory.datatype import BYTE, CODES, Datatype, TypeState, datatype_of
from unisono.dtypes import DTYPES

_u1 = np.dtype(np.uint8)
# The sum of a few of them is less than the longest array of numpy.
_MOST_NBYTES = 1 << 56
# The dtypes of numpy that Unisono has.
NATIVE_DTYPES = {
    np.dtype(name): dtype for name, dtype in DTYPES.items() if name not in {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
}


def code_of(obj: Any) -> str:
    """Return the code of the elements of an object with memory; raises `BufferError` if their bytes are swapped."""
    if isinstance(obj, np.ndarray):
        if not obj.dtype.isnative:
            raise BufferError("the bytes of the array are not in the order of this machine")
        by_char = obj.dtype.kind not in "SU" and obj.dtype.char in CODES  # the character tells no length of strings
        return obj.dtype.char if by_char else obj.dtype.str.lstrip("<>|=")
    try:
        code = memoryview(obj).format
    except TypeError:
        return exported(obj)[1]
    order = "<" if code[:1] == ">" else ""
    if order:
        raise BufferError("the bytes of the buffer are not in the order of this machine")
    return code.lstrip("@=<|^")


class Block:
    """Some elements of a layout in memory.

    Attributes:
        layout: the layout of an element.
        count: the number of elements.
        memory: bytes.
        origin: the offset of the first element in `memory`.
    """

    __slots__ = ("count", "layout", "memory", "origin")

    def __init__(self, memory: Any, layout: TypeState, count: int, origin: int = 0) -> None:
        self.memory, self.layout, self.count, self.origin = memory, layout, count, origin

    @property
    def nbytes(self) -> int:
        """The number of bytes of data."""
        return self.count * self.layout.size

    @property
    def dtype(self) -> Any:
        """The dtype in which the elements travel: that of the numbers if Unisono has it, otherwise bytes."""
        dtype = self.layout.dtype
        return dtype if dtype in NATIVE_DTYPES else _u1

    @property
    def is_direct(self) -> bool:
        """Whether the elements are one piece of aligned memory, which is sent where it lies."""
        return self.layout.is_dense and (
            not self.nbytes or (self.memory.ctypes.data + self.origin) % self.dtype.itemsize == 0
        )

    def array(self) -> Any:
        """Return the elements as a flat array of `dtype`: their own memory if they are direct, otherwise a copy."""
        if self.layout.is_dense:
            data = self.memory[self.origin : self.origin + self.nbytes]
            return data.view(self.dtype) if self.is_direct else data.copy().view(self.dtype)
        return self.memory[self.layout.positions(self.count, self.origin)].view(self.dtype)

    def target(self) -> Any:
        """Return an array for the elements: their own memory if they are direct, otherwise new."""
        return self.array() if self.is_direct else np.empty(self.nbytes, np.uint8).view(self.dtype)

    def store(self, received: Any, nbytes: int | None = None) -> None:
        """Copy elements that have been received in `target`, or another array, to the memory."""
        data = received.view(_u1) if nbytes is None else received.view(_u1)[:nbytes]
        if self.layout.is_dense:
            if not (self.is_direct and received.ctypes.data == self.memory.ctypes.data + self.origin):
                self.memory[self.origin : self.origin + data.size] = data
        elif data.size:
            count = -(-data.size // self.layout.size)
            self.memory[self.layout.positions(count, self.origin)[: data.size]] = data

    def elements(self) -> Any:
        """Return the elements as an array for reductions; a copy if packed.

        The dtype is that of the numbers in the layout. Characters become integers. If the layout has numbers of several
        dtypes, the array has bytes.
        """
        dtype = self.layout.dtype
        if dtype is None:
            return self.array()
        if dtype.kind == "S":
            return self.array().view(np.int8)
        if dtype.itemsize == self.layout.extent and dtype.names:
            return self.memory[self.origin : self.origin + self.count * dtype.itemsize].view(dtype)
        return self.array().view(dtype)

    def store_elements(self, elements: Any) -> None:
        """Copy elements to the memory, as `elements` returns them."""
        data = np.ascontiguousarray(elements)
        if data.dtype.names:
            self.memory[self.origin : self.origin + data.nbytes] = data.view(_u1)
        else:
            self.store(data)

    def part(self, index: int, count: int) -> Block:
        """Return `count` elements from an index on."""
        return Block(self.memory, self.layout, count, self.origin + index * self.layout.extent)


def _items(spec: Any) -> tuple[Any, Any, Any, Any]:
    """Return the data, counts, displacements and datatype of a specification; None for those that are missing."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    if not 1 <= len(spec) <= 4:
        raise ValueError(f"a buffer specification has 1 to 4 items, not {len(spec)}")
    data, counts, displs, datatype = spec[0], None, None, None
    if len(spec) == 2:
        if spec[1] is None or isinstance(spec[1], (Datatype, str)):
            datatype = spec[1]
        else:
            counts = spec[1]
    elif len(spec) == 3:
        counts, datatype = spec[1:]
        if datatype is not None and not isinstance(datatype, (Datatype, str)):
            counts, displs, datatype = spec[1], spec[2], None
    elif len(spec) == 4:
        counts, displs, datatype = spec[1:]
    if isinstance(counts, tuple) and displs is None:
        if len(counts) != 2:
            raise ValueError("expecting a pair (count, displacement)")
        counts, displs = counts
    return data, counts, displs, datatype


def _located(data: Any, datatype: Any, writable: bool) -> tuple[Any, TypeState | None]:
    """Return the memory and the layout of a specification; the memory of `None` and `BOTTOM` is empty."""
    if data is None or isinstance(data, Special):
        return nothing, datatype_of(BYTE if datatype is None else datatype)
    memory = memory_of(data, writable)
    return memory, datatype_of(code_of(data) if datatype is None else datatype)


def _number_of(memory: Any, layout: TypeState | None, start: int) -> int:
    """Return the number of elements from an offset to the end of the memory."""
    if layout is None:
        raise ValueError("cannot infer the count: the datatype is null")
    if layout.extent <= 0:
        raise ValueError(f"cannot infer the count: the datatype has the extent {layout.extent}")
    number, rest = divmod(memory.size - start, layout.extent)
    if rest or number < 0:
        raise ValueError(f"{memory.size - start} bytes are no multiple of the extent {layout.extent}")
    return number


def _block(data: Any, memory: Any, layout: TypeState, count: int, offset: int) -> Block:
    """Return a block at an offset of the memory, which must have all its bytes."""
    if count * layout.size > _MOST_NBYTES:
        raise fail("ERR_COUNT", f"{count} elements of {layout.size} bytes are more than any memory holds")
    low, high = layout.span(count)
    if isinstance(data, BottomType) and count and layout.size:
        return Block(at_address(offset + low, high - low), layout, count, -low)
    if count and layout.size and (offset + low < 0 or offset + high > memory.size):
        raise ValueError(
            f"the buffer of {memory.size} bytes is too small: bytes {offset + low} to {offset + high} are needed"
        )
    return Block(memory, layout, count, offset)


def plain(spec: Any, blocks: int = 1) -> Any:
    """Return the elements of a specification of the commonest forms as a flat array; None for all others.

    The forms are an array of numbers, and ``[memory, datatype]`` and ``[memory, count, datatype]`` of elements one
    after the other, all in memory that is aligned and can be written. The array is the memory of the specification,
    and has the dtype in which the elements travel. `simple` takes the other forms, and raises the error of a wrong one.
    With `blocks`, a count is for each of so many ranks, and the array has the elements of all.
    """
    if type(spec) is np.ndarray:
        array = spec
    elif type(spec) is list and len(spec) in {2, 3} and type(spec[-1]) is Datatype:
        array = _dense(spec[0], spec[1] if len(spec) == 3 else None, spec[-1], blocks)
    else:
        return None
    if array is None or not array.flags.carray or array.dtype not in NATIVE_DTYPES:
        return None
    return array if array.ndim == 1 else array.reshape(-1)


def plain_numbers(spec: Any, blocks: int = 1) -> Any:
    """Return as `plain` does; None for bytes, which have other operations than numbers."""
    if type(spec) is list and spec and isinstance(spec[-1], Datatype):
        state = spec[-1]._state
        return plain(spec, blocks) if state is not None and state.dtype in NATIVE_DTYPES else None
    return plain(spec, blocks)


def plain_vector(spec: Any, ranks: int) -> tuple[Any, list[int]] | None:
    """Return the elements of a specification with a list of counts as a flat array, and the number for each rank.

    None stands for all specifications but ``[memory, counts, datatype]`` and ``[memory, counts, displacements,
    datatype]`` of `plain` memory, in which the elements for one rank lie right behind those for the rank before it.
    `vector` takes the other ones.
    """
    if type(spec) is not list or len(spec) not in {3, 4} or type(counts := spec[1]) is not list or len(counts) != ranks:
        return None
    ends = list(accumulate(counts))
    if min(counts) < 0 or not ends[-1] or (len(spec) == 4 and spec[2] is not None and spec[2] != [0, *ends[:-1]]):
        return None
    array = plain([spec[0], ends[-1], spec[-1]])
    if array is None:
        return None
    units = array.size // ends[-1]
    return array, [count * units for count in counts]


def _dense(memory: Any, count: Any, datatype: Datatype, blocks: int) -> Any:
    """Return elements one after the other as an array, or None; without a count, all elements in the memory."""
    layout = datatype._state
    if layout is None or not layout.is_dense or not layout.size:
        return None
    rest = 0
    try:
        if count is None:
            count, rest = divmod(memoryview(memory).nbytes, layout.size)
        elif type(count) is int:
            count *= blocks
        else:
            return None
        if count < 0 or rest:
            return None
        dtype = layout.dtype if layout.dtype in NATIVE_DTYPES else _u1
        return np.frombuffer(memory, dtype, count * layout.size // dtype.itemsize)
    except (TypeError, ValueError, BufferError):
        return None


def simple(spec: Any, *, writable: bool = False, blocks: int = 1) -> Block:
    """Return the block of a specification; with `blocks`, its count is for each of so many ranks."""
    data, count, displ, datatype = _items(spec)
    memory, layout = _located(data, datatype, writable)
    offset = 0
    displ = 0 if displ is None else integer(displ)
    if displ < 0:
        raise ValueError(f"negative displacement {displ}")
    if layout is not None:
        offset = displ * layout.extent
    if count is None:
        number = _number_of(memory, layout, offset)
        count, rest = divmod(number, max(blocks, 1))
        if rest:
            raise ValueError(f"{number} elements cannot be divided among {blocks} ranks")
    count = integer(count)
    if count < 0:
        raise ValueError(f"negative count {count}")
    if layout is None or layout.extent < 0:
        raise ValueError("the datatype is null or has a negative extent")
    if displ and offset > memory.size and not isinstance(data, Special):
        raise ValueError(f"displacement {displ} is behind the end of the buffer")
    if data is None and count * blocks * layout.size:
        raise ValueError(f"there is no buffer for {count} elements")
    block = _block(data, memory, layout, count * max(blocks, 1), offset)
    block.count = count
    return block


def elements_of(spec: Any) -> Any:
    """Return the elements of a specification as a flat array."""
    array = plain(spec)
    return simple(spec).array() if array is None else array


def target_in(spec: Any) -> tuple[Any, Callable[..., None]]:
    """Return a flat array for the elements of a specification, and a function that stores them there.

    The function gets the number of bytes, if it is less than that of the array.
    """
    array = plain(spec)
    if array is not None:
        return array, no_store
    block = simple(spec, writable=True)
    array = block.target()
    return array, partial(block.store, array)


def no_store(nbytes: int | None = None) -> None:
    """Do nothing, because the array is the memory of the specification."""


def _counts(counts: Any, ranks: int) -> list[int]:
    if isinstance(counts, np.ndarray) and counts.ndim == 0:
        counts = integer(counts)
    values = (
        [integer(counts)] * ranks if not isinstance(counts, (Sequence, np.ndarray)) else [integer(n) for n in counts]
    )
    if len(values) != ranks:
        raise ValueError(f"expecting {ranks} counts or displacements, got {len(values)}")
    return values


def vector(spec: Any, ranks: int, *, writable: bool = False) -> list[Block]:
    """Return the blocks of a specification with counts and displacements for each of `ranks` ranks."""
    data, counts, displs, datatype = _items(spec)
    memory, layout = _located(data, datatype, writable)
    if counts is None:
        first = displs if displs is not None and not isinstance(displs, (Sequence, np.ndarray)) else 0
        number = _number_of(memory, layout, integer(first) * (layout.extent if layout else 0))
        share, rest = divmod(number, ranks)
        if rest:
            raise ValueError(f"{number} elements cannot be divided among {ranks} ranks")
        counts = share
    if layout is None or layout.extent < 0:
        raise ValueError("the datatype is null or has a negative extent")
    numbers = _counts(counts, ranks)
    if displs is None:
        starts = [sum(numbers[:rank]) for rank in range(ranks)]
    elif isinstance(displs, (Sequence, np.ndarray)) and np.ndim(displs):
        starts = _counts(displs, ranks)
    else:
        starts = [rank * integer(displs) for rank in range(ranks)]  # a stride
    if any(number < 0 for number in numbers):
        raise ValueError("negative count")
    if data is None and sum(numbers) * layout.size:
        raise ValueError("there is no buffer for the elements")
    return [
        _block(data, memory, layout, number, start * layout.extent)
        for number, start in zip(numbers, starts, strict=True)
    ]


def vector_w(spec: Any, ranks: int, *, writable: bool = False) -> list[Block]:
    """Return the blocks of ``[data, counts, displacements in bytes, datatypes]``."""
    if not isinstance(spec, (list, tuple)) or not 2 <= len(spec) <= 4:
        raise ValueError("expecting [data, counts, displacements, datatypes]")
    data, types = spec[0], spec[-1]
    counts, displs = (None, None) if len(spec) == 2 else spec[1] if len(spec) == 3 else spec[1:3]
    if data is BOTTOM and (counts is None or displs is None):
        raise ValueError("expecting counts and displacements")
    counts, displs = (1 if counts is None else counts), (0 if displs is None else displs)
    memory = nothing if data is None or isinstance(data, Special) else memory_of(data, writable)
    layouts = [datatype_of(each) for each in types]
    if len(layouts) != ranks:
        raise ValueError(f"expecting {ranks} datatypes, got {len(layouts)}")
    numbers, starts = _counts(counts, ranks), _counts(displs, ranks)
    return [
        _block(data, memory, layout or _bytes(), number if layout is not None else 0, start)
        for layout, number, start in zip(layouts, numbers, starts, strict=True)
    ]


def _bytes() -> TypeState:
    return BYTE._state
