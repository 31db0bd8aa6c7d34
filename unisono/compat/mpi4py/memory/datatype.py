"""`Datatype`: the layout of elements in memory, as runs of bytes.

A datatype is a list of *runs*, each an offset and a length in bytes, in the order in which its bytes travel. A *dense*
datatype is one run as long as its extent, so many elements of it are one piece of memory that is sent where it lies.
Elements of any other datatype are packed by an index array, and unpacked by it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole_numbers
from unisono.compat.mpi4py.base.constants import CONSTANTS
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.base.handles import Attributed, Handle, Named, State, constant
from unisono.compat.mpi4py.memory.access import memory_of


class TypeState(State):
    """A layout.

    Attributes:
        size: the number of bytes of data in an element.
        lb, extent: the lower bound, and the distance from an element to the next one.
        dtype: the numpy dtype of the numbers in it, if all are alike; None otherwise.
        itemsizes: the size of each number in it, in order; a single one if all are alike.
        envelope: combiner, integers, addresses and datatypes by which it was made.
        param: the arguments of the constructor, for `decode`.
    """

    def __init__(
        self,
        size: int,
        lb: int,
        extent: int,
        make_runs: Callable[[], np.ndarray[Any, Any]],
        dtype: np.dtype[Any] | None,
        itemsizes: Callable[[], np.ndarray[Any, Any]],
        constant: str = "",
    ) -> None:
        super().__init__(constant)
        self.size, self.lb, self.extent, self.dtype = size, lb, extent, dtype
        self._make_runs, self._make_itemsizes = make_runs, itemsizes
        self.envelope: tuple[str, list[int], list[int], list[Datatype]] = ("NAMED", [], [], [])
        self.base: TypeState | None = None
        self.params: dict[str, Any] = {}

    @cached_property
    def runs(self) -> np.ndarray[Any, Any]:
        """Rows of offset and length, where adjacent runs are one."""
        runs = self._make_runs()
        runs = runs[runs[:, 1] > 0]
        if len(runs) < 2:
            return runs
        starts = np.flatnonzero(np.concatenate(([True], runs[1:, 0] != runs[:-1, 0] + runs[:-1, 1])))
        return np.stack((runs[starts, 0], np.add.reduceat(runs[:, 1], starts)), axis=1)

    @cached_property
    def itemsizes(self) -> np.ndarray[Any, Any]:
        return self._make_itemsizes()

    @cached_property
    def is_dense(self) -> bool:
        """Whether elements one after the other are one piece of memory."""
        return self.size == 0 or (
            self.size == self.extent and self.lb == 0 and len(self.runs) == 1 and self.runs[0, 0] == 0
        )

    @cached_property
    def true_bounds(self) -> tuple[int, int]:
        """The offsets of the first byte and behind the last byte of data."""
        if not len(self.runs):
            return 0, 0
        return int(self.runs[:, 0].min()), int((self.runs[:, 0] + self.runs[:, 1]).max())

    @cached_property
    def index(self) -> np.ndarray[Any, Any]:
        """The offset of each byte of data."""
        starts, lengths = self.runs[:, 0], self.runs[:, 1]
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        return np.repeat(starts, lengths) + within

    def positions(self, count: int, origin: int) -> np.ndarray[Any, Any]:
        """Return the offset of each byte of `count` elements from `origin` on."""
        return (origin + np.arange(count)[:, None] * self.extent + self.index).ravel()

    def span(self, count: int, displ: int = 0) -> tuple[int, int]:
        """Return the offsets of the first byte and behind the last byte of `count` elements."""
        if count == 0 or self.size == 0:
            return 0, 0
        low, high = self.true_bounds
        first, last = sorted((displ * self.extent, (displ + count - 1) * self.extent))
        return first + low, last + high


def _no_runs() -> np.ndarray[Any, Any]:
    return np.zeros((0, 2), np.int64)


def _ones(size: int) -> Callable[[], np.ndarray[Any, Any]]:
    return lambda: np.array([size])


@whole_numbers
class Datatype(Handle, Named, Attributed):
    """The layout of elements in memory."""

    __slots__ = ()
    _null, _error = "DATATYPE_NULL", "ERR_TYPE"
    _keyvals: ClassVar[dict[int, Any]] = {}

    @classmethod
    def _made(
        cls,
        combiner: str,
        blocks: Sequence[tuple[Any, Any, TypeState]],
        params: dict[str, Any],
        contents: tuple[list[int], list[int]],
        bounds: tuple[int, int] | None = None,
        base: Datatype | None = None,
    ) -> Any:
        """Return the datatype of blocks: arrays of offsets in bytes and of numbers of elements, with a layout."""
        blocks = [(np.asarray(at, np.int64), np.asarray(of, np.int64), layout) for at, of, layout in blocks]
        size = sum(int(of.sum()) * layout.size for _, of, layout in blocks)
        edges = []
        for at, of, layout in blocks:
            near, counts = at[of > 0], of[of > 0]
            if len(near):
                far = near + (counts - 1) * layout.extent
                first, last = np.minimum(near, far).min(), np.maximum(near, far).max()
                edges += [first + layout.lb, last + layout.lb + layout.extent]
        low, high = bounds or ((int(min(edges)), int(max(edges))) if edges else (0, 0))
        layouts = [layout for _, of, layout in blocks if of.sum() > 0]
        dtypes = {layout.dtype for layout in layouts}
        state = TypeState(
            size, low, high - low, lambda: _runs_of(blocks), dtypes.pop() if len(dtypes) == 1 else None,
            lambda: _itemsizes_of(blocks),
        )  # fmt: skip
        types = [base] if base is not None else params.get("datatypes", [])
        if "datatypes" in params:
            params["datatypes"] = [_same(datatype) for datatype in types]  # the program may free its handles
        state.envelope = combiner, *contents, [_same(datatype) for datatype in types]
        state.base, state.params = None if base is None else base._state, params
        return cls._of(state)

    def Get_size(self) -> int:
        """Return the number of bytes of data in an element."""
        return int(self._live.size)

    def Get_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent."""
        return self._live.lb, self._live.extent

    def Get_true_extent(self) -> tuple[int, int]:
        """Return the lower bound and the extent of the data."""
        low, high = self._live.true_bounds
        return low, high - low

    def Dup(self) -> Any:
        """Return a copy, with the attributes whose keyvals copy them."""
        state = self._live
        new = self._made("DUP", [([0], [1], state)], {}, ([], []), (state.lb, state.lb + state.extent), self)
        self._copy_attributes(new._state)
        return new

    Create_dup = Dup

    def Create_contiguous(self, count: int) -> Any:
        """Return the datatype of `count` elements one after the other."""
        return self._made("CONTIGUOUS", [([0], [count], self._live)], {"count": count}, ([count], []), None, self)

    def Create_vector(self, count: int, blocklength: int, stride: int) -> Any:
        """Return the datatype of `count` blocks that are `stride` elements apart."""
        params = {"count": count, "blocklength": blocklength, "stride": stride}
        at = np.arange(count) * stride * self._live.extent
        blocks = [(at, [blocklength] * count, self._live)]
        return self._made("VECTOR", blocks, params, ([count, blocklength, stride], []), None, self)

    def Create_hvector(self, count: int, blocklength: int, stride: int) -> Any:
        """Return the datatype of `count` blocks that are `stride` bytes apart."""
        params = {"count": count, "blocklength": blocklength, "stride": stride}
        blocks = [(np.arange(count) * stride, [blocklength] * count, self._live)]
        return self._made("HVECTOR", blocks, params, ([count, blocklength], [stride]), None, self)

    def _indexed(self, combiner: str, lengths: Any, displacements: Sequence[int], unit: int) -> Any:
        is_block = combiner.endswith("BLOCK")
        at = np.array(list(displacements), np.int64) * unit
        displacements = [int(displacement) for displacement in displacements]
        of = [lengths] * len(at) if is_block else [int(length) for length in lengths]
        params = {"blocklength" if is_block else "blocklengths": lengths if is_block else of}
        params["displacements"] = displacements
        integers = [len(at), lengths] if is_block else [len(at), *of]
        contents = (integers, displacements) if combiner.startswith("H") else ([*integers, *displacements], [])
        return self._made(combiner, [(at, of, self._live)], params, contents, None, self)

    def Create_indexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Any:
        """Return the datatype of blocks at displacements in elements."""
        return self._indexed("INDEXED", blocklengths, displacements, self._live.extent)

    def Create_hindexed(self, blocklengths: Sequence[int], displacements: Sequence[int]) -> Any:
        """Return the datatype of blocks at displacements in bytes."""
        return self._indexed("HINDEXED", blocklengths, displacements, 1)

    def Create_indexed_block(self, blocklength: int, displacements: Sequence[int]) -> Any:
        """Return the datatype of blocks of one length at displacements in elements."""
        return self._indexed("INDEXED_BLOCK", blocklength, displacements, self._live.extent)

    def Create_hindexed_block(self, blocklength: int, displacements: Sequence[int]) -> Any:
        """Return the datatype of blocks of one length at displacements in bytes."""
        return self._indexed("HINDEXED_BLOCK", blocklength, displacements, 1)

    @classmethod
    def Create_struct(
        cls, blocklengths: Sequence[int], displacements: Sequence[int], datatypes: Sequence[Datatype]
    ) -> Any:
        """Return the datatype of blocks of datatypes of their own, at displacements in bytes."""
        lengths, at, types = list(blocklengths), list(displacements), list(datatypes)
        if not len(lengths) == len(at) == len(types):
            raise ValueError("expecting as many displacements and datatypes as blocklengths")
        params = {"blocklengths": lengths, "displacements": at, "datatypes": types}
        blocks = [([where], [count], each._live) for where, count, each in zip(at, lengths, types, strict=True)]
        new = cls._made("STRUCT", blocks, params, ([len(lengths), *lengths], at))
        state = new._state
        unit = max((_alignment(each._state) for each in types), default=1)
        state.extent = -(-state.extent // unit) * unit
        return new

    def _nested(self, combiner: str, sizes: Any, picks: Any, order: int, params: Any, contents: list[int]) -> Any:
        """Return the datatype of some elements of an array: in each dimension, those at the indices of `picks`."""
        old = self._live
        dims = range(len(sizes)) if order == CONSTANTS["ORDER_F"] else reversed(range(len(sizes)))
        at, stride = np.zeros(1, np.int64), old.extent
        for dim in dims:
            at = (np.asarray(picks[dim], np.int64)[:, None] * stride + at).ravel()
            stride *= sizes[dim]
        blocks = [(at, np.ones(len(at), np.int64), old)]
        return self._made(combiner, blocks, params, (contents, []), (0, stride), self)

    def Create_subarray(
        self, sizes: Sequence[int], subsizes: Sequence[int], starts: Sequence[int], order: int = CONSTANTS["ORDER_C"]
    ) -> Any:
        """Return the datatype of a part of an array."""
        sizes, subsizes, starts = list(sizes), list(subsizes), list(starts)
        picks = [range(start, start + subsize) for start, subsize in zip(starts, subsizes, strict=True)]
        params = {"sizes": sizes, "subsizes": subsizes, "starts": starts, "order": order}
        return self._nested(
            "SUBARRAY", sizes, picks, order, params, [len(sizes), *sizes, *subsizes, *starts, order]
        )  # fmt: skip

    def Create_darray(
        self,
        size: int,
        rank: int,
        gsizes: Any,
        distribs: Any,
        dargs: Any,
        psizes: Any,
        order: int = CONSTANTS["ORDER_C"],
    ) -> Any:
        """Return the datatype of the part of a distributed array that belongs to a rank."""
        gsizes, distribs, dargs, psizes = list(gsizes), list(distribs), list(dargs), list(psizes)
        coords = np.unravel_index(rank, psizes)
        picks = [_share(*each) for each in zip(gsizes, distribs, dargs, psizes, coords, strict=True)]
        params = {"size": size, "rank": rank, "gsizes": gsizes, "distribs": distribs, "dargs": dargs}
        params |= {"psizes": psizes, "order": order}
        contents = [size, rank, len(gsizes), *gsizes, *distribs, *dargs, *psizes, order]
        return self._nested("DARRAY", gsizes, picks, order, params, contents)

    def Create_resized(self, lb: int, extent: int) -> Any:
        """Return the datatype with other bounds."""
        params = {"lb": lb, "extent": extent}
        return self._made("RESIZED", [([0], [1], self._live)], params, ([], [lb, extent]), (lb, lb + extent), self)

    Resized = Create_resized

    @classmethod
    def Get_value_index(cls, value: Datatype, index: Datatype) -> Any:
        """Return the datatype of pairs of a value and an index; null if there is none."""
        names = value._live.constant, index._live.constant
        return PAIRS.get(names, DATATYPE_NULL)

    @classmethod
    def _f90(cls, combiner: str, base: Datatype, params: dict[str, int]) -> Any:
        key = combiner, *params.values()
        if key not in _f90_types:
            new = base.Dup()
            new._state.envelope = combiner, list(params.values()), [], []
            new._state.params, new._state.base = params, None
            new._state.constant = "f90"
            _f90_types[key] = new
        return cls._of(_f90_types[key]._state)

    @classmethod
    def Create_f90_integer(cls, r: int) -> Any:
        """Return the integer of at least `r` decimal digits."""
        base = next(
            (named for digits, named in ((2, "INT8_T"), (4, "INT16_T"), (9, "INT32_T")) if r <= digits), "INT64_T"
        )
        return cls._f90("F90_INTEGER", NAMED[base], {"r": r})

    @classmethod
    def Create_f90_real(cls, p: int, r: int) -> Any:
        """Return the float of at least `p` decimal digits and a range of 10^r."""
        return cls._f90("F90_REAL", NAMED["FLOAT" if p <= 6 and r <= 37 else "DOUBLE"], {"p": p, "r": r})

    @classmethod
    def Create_f90_complex(cls, p: int, r: int) -> Any:
        """Return the complex number of at least `p` decimal digits and a range of 10^r."""
        named = "C_FLOAT_COMPLEX" if p <= 6 and r <= 37 else "C_DOUBLE_COMPLEX"
        return cls._f90("F90_COMPLEX", NAMED[named], {"p": p, "r": r})

    @classmethod
    def Match_size(cls, typeclass: int, size: int) -> Any:
        """Return the predefined datatype of a class and a size."""
        names = {CONSTANTS[f"TYPECLASS_{name}"]: name for name in ("REAL", "INTEGER", "COMPLEX", "LOGICAL")}
        found = NAMED.get(f"{names.get(typeclass)}{size}")
        if found is None:
            raise fail("ERR_ARG", f"there is no datatype of {size} bytes in this class")
        return found

    def Commit(self) -> Any:
        """Return the datatype: it needs no preparation."""
        self._live  # noqa: B018
        return self

    def Free(self) -> None:
        """Make the handle null, and delete the attributes."""
        self._free()

    def _release(self) -> None:
        self._delete_attributes()

    def Get_envelope(self) -> tuple[int, int, int, int, int]:
        """Return the numbers of integers, addresses, counts and datatypes in `Get_contents`, and the combiner."""
        combiner, integers, addresses, types = self._live.envelope
        return len(integers), len(addresses), 0, len(types), CONSTANTS[f"COMBINER_{combiner}"]

    def Get_contents(self) -> tuple[list[int], list[int], list[int], list[Datatype]]:
        """Return the integers, addresses, counts and datatypes by which it was made."""
        combiner, integers, addresses, types = self._live.envelope
        if combiner == "NAMED":
            raise fail("ERR_TYPE", "a predefined datatype has no contents")
        return list(integers), list(addresses), [], [_same(each) for each in types]

    def decode(self) -> tuple[Any, str, dict[str, Any]]:
        """Return the datatype that it was made of, the name of the constructor, and its arguments."""
        state = self._live
        params = dict(state.params)
        if "datatypes" in params:
            params["datatypes"] = [_same(each) for each in params["datatypes"]]
        if state.envelope[0] == "NAMED":
            return self, "NAMED", {}
        base = DATATYPE_NULL if state.base is None else _same(Datatype._of(state.base))
        return base, state.envelope[0], params

    def __reduce__(self) -> Any:
        if self._state is None or (self._state.constant and self._state.constant != "f90"):
            return super().__reduce__()
        base, combiner, params = self.decode()
        return _rebuilt, (type(self), base, combiner, params)

    # Packing, in the same bytes as messages.

    def Pack(self, inbuf: Any, outbuf: Any, position: int, comm: Any) -> int:
        """Pack elements of `inbuf` into `outbuf` from a position on, and return the position behind them."""
        return self._pack(memory_of(inbuf), memory_of(outbuf, writable=True), position)

    def Unpack(self, inbuf: Any, position: int, outbuf: Any, comm: Any) -> int:
        """Unpack elements from `inbuf` into `outbuf`, and return the position behind them."""
        return self._unpack(memory_of(inbuf), position, memory_of(outbuf, writable=True))

    def Pack_size(self, count: int, comm: Any) -> int:
        """Return the number of bytes of `count` packed elements."""
        return count * int(self._live.size)

    def Pack_external(self, datarep: str, inbuf: Any, outbuf: Any, position: int) -> int:
        """Pack elements in the representation "external32", whose bytes are in big-endian order."""
        _check_external(datarep)
        packed = np.empty(memory_of(inbuf).size, np.uint8)
        end = self._pack(memory_of(inbuf), packed, 0)
        memory_of(outbuf, writable=True)[position : position + end] = self._swapped(packed[:end])
        return position + end

    def Unpack_external(self, datarep: str, inbuf: Any, position: int, outbuf: Any) -> int:
        """Unpack elements from the representation "external32"."""
        _check_external(datarep)
        target = memory_of(outbuf, writable=True)
        end = position + self._count_in(target) * self._live.size
        self._unpack(self._swapped(memory_of(inbuf)[position:end]), 0, target)
        return end

    def Pack_external_size(self, datarep: str, count: int) -> int:
        """Return the number of bytes of `count` elements in the representation "external32"."""
        _check_external(datarep)
        return self.Pack_size(count, None)

    def _count_in(self, memory: Any) -> int:
        """Return the number of elements in memory: all of them have their extent and their data there."""
        extent, high = self._live.extent, self._live.true_bounds[1]
        if not self._live.size:
            return 0
        return int(max(0, min(memory.size, memory.size - high + extent) // extent)) if extent > 0 else 1

    def _pack(self, source: Any, target: Any, position: int) -> int:
        count = self._count_in(source)
        end = position + count * self._live.size
        if end > target.size:
            raise fail("ERR_TRUNCATE", f"{count} elements do not fit in the buffer behind position {position}")
        if end > position:
            target[position:end] = source[self._live.positions(count, 0)]
        return int(end)

    def _unpack(self, source: Any, position: int, target: Any) -> int:
        state = self._live
        count = min(self._count_in(target), (source.size - position) // state.size if state.size else 0)
        end = position + count * state.size
        if end > position:
            target[state.positions(count, 0)] = source[position:end]
        return int(end)

    def _swapped(self, packed: Any) -> Any:
        dtype = self._live.dtype
        if dtype is None or dtype.names:
            return _swapped_items(self._live, packed)
        if dtype.itemsize == 1 or dtype.kind in "SV" or dtype.char in "gG":
            return packed
        unit = np.dtype(f"u{dtype.itemsize // 2 if dtype.kind == 'c' else dtype.itemsize}")
        return packed.view(unit).byteswap().view(np.uint8)

    # Codes of numpy and the array interface.

    def tocode(self) -> str:
        """Return the code of a predefined datatype for `fromcode`."""
        code = "" if self._state is None else _code_of(self._state)
        if not code or code.startswith("V"):
            raise ValueError(f"datatype {self.Get_name()} has no code")
        return code if _OF_FIXED_SIZE.fullmatch(_origin(self._state).constant) else self.typechar

    @classmethod
    def fromcode(cls, code: str) -> Any:
        """Return the predefined datatype of a code, such as "i", "f8" or "MPI_INT"."""
        if code not in CODES:
            raise ValueError(f"cannot map code {code!r} to a datatype")
        return CODES[code]

    @property
    def typestr(self) -> str:
        """The code of the array interface."""
        return "" if self._state is None else _code_of(self._state) or f"V{self._state.extent}"

    @property
    def typechar(self) -> str:
        """The character of numpy."""
        code = self.typestr
        if not code or code.startswith("V"):
            return code[:1]
        name = _origin(self._state).constant
        return _CHARACTERS.get(name) or np.dtype(_TABLE.get(name, code)).char

    size = property(Get_size, doc="The number of bytes of data in an element.")
    extent = property(lambda self: self._live.extent, doc="The distance from an element to the next one.")
    lb = property(lambda self: self._live.lb, doc="The lower bound.")
    ub = property(lambda self: self._live.lb + self._live.extent, doc="The upper bound.")
    true_lb = property(lambda self: self._live.true_bounds[0], doc="The lower bound of the data.")
    true_ub = property(lambda self: self._live.true_bounds[1], doc="The upper bound of the data.")
    true_extent = property(lambda self: self.Get_true_extent()[1], doc="The extent of the data.")
    envelope = property(Get_envelope, doc="The result of Get_envelope.")
    contents = property(Get_contents, doc="The result of Get_contents.")
    combiner = property(lambda self: self.Get_envelope()[-1], doc="The combiner.")
    is_named = property(lambda self: self._live.envelope[0] == "NAMED", doc="Whether it is predefined and has a name.")
    is_predefined = property(lambda self: bool(self._state and self._state.constant), doc="Whether it is predefined.")


def _same(datatype: Any) -> Any:
    """Return the constant of a predefined datatype; another handle for others."""
    name = datatype._state.constant
    return NAMED[name] if name in NAMED else Datatype._of(datatype._state)


def _rebuilt(of_class: Any, base: Any, combiner: str, params: dict[str, Any]) -> Any:
    method = "Dup" if combiner == "DUP" else f"Create_{combiner.lower()}"
    return getattr(base, method)(**params)


def _check_external(datarep: str) -> None:
    if datarep != "external32":
        raise fail("ERR_ARG", f"there is no data representation {datarep!r} but external32")


def _swapped_items(layout: TypeState, packed: Any) -> Any:
    """Return packed elements of several kinds of numbers, with the bytes of each number in the other order."""
    if any(dtype.kind == "c" or dtype.char == "g" for dtype in _dtypes_in(layout)):
        raise fail("ERR_TYPE", "external32 has no structures with complex numbers or long doubles here")
    ends = np.cumsum(layout.itemsizes)
    index = np.repeat(2 * ends - layout.itemsizes - 1, layout.itemsizes) - np.arange(layout.size)
    return packed.reshape(-1, layout.size)[:, index].ravel()


def _dtypes_in(layout: TypeState) -> set[Any]:
    """Return the dtypes of all numbers of a layout."""
    if layout.dtype is None:
        return set().union(*(_dtypes_in(datatype._state) for datatype in layout.envelope[3]))
    names = layout.dtype.names
    return {layout.dtype[name] for name in names} if names else {layout.dtype}


def _runs_of(blocks: Any) -> Any:
    parts = [_no_runs()]
    for at, of, layout in blocks:
        if layout.is_dense:
            parts.append(np.stack((at, of * layout.size), axis=1))
            continue
        within = np.arange(of.sum()) - np.repeat(np.cumsum(of) - of, of)
        starts = np.repeat(at, of) + within * layout.extent
        offsets = (starts[:, None] + layout.runs[:, 0]).ravel()
        parts.append(np.stack((offsets, np.tile(layout.runs[:, 1], len(starts))), axis=1))
    return np.concatenate(parts)


def _itemsizes_of(blocks: Any) -> Any:
    parts = [np.tile(layout.itemsizes, int(of.sum())) for _, of, layout in blocks if len(layout.itemsizes) > 1]
    if parts or len({int(layout.itemsizes[0]) for _, _, layout in blocks if len(layout.itemsizes)}) != 1:
        return np.concatenate(
            [np.tile(layout.itemsizes, int(of.sum()) * _units(layout)) for _, of, layout in blocks]
            or [np.zeros(0, int)]
        )
    return next(layout.itemsizes for _, _, layout in blocks if len(layout.itemsizes))


def _units(layout: TypeState) -> int:
    """Return how often the item sizes of a layout stand for its numbers."""
    return layout.size // int(layout.itemsizes[0]) if len(layout.itemsizes) == 1 else 1


def _share(gsize: int, distribution: int, darg: int, psize: int, coord: Any) -> np.ndarray[Any, Any]:
    """Return the indices of a dimension of a distributed array that belong to a coordinate."""
    if distribution == CONSTANTS["DISTRIBUTE_NONE"]:
        return np.arange(gsize)
    is_cyclic = distribution == CONSTANTS["DISTRIBUTE_CYCLIC"]
    default = 1 if is_cyclic else math.ceil(gsize / psize)
    block = default if darg == CONSTANTS["DISTRIBUTE_DFLT_DARG"] else darg
    indices = np.arange(gsize)
    return indices[(indices // block) % psize == coord]


def _alignment(layout: TypeState) -> int:
    if layout.dtype is not None:
        return layout.dtype.alignment
    return max((_alignment(each._state) for each in layout.envelope[3]), default=1)


def _named(name: str, dtype: Any, itemsizes: list[int] | None = None) -> Datatype:
    dtype = np.dtype(dtype)
    if dtype.names:
        runs = [(dtype.fields[each][1], dtype.fields[each][0].itemsize) for each in dtype.names]
    else:
        runs = [(0, dtype.itemsize)]
    size = sum(length for _, length in runs)
    state = TypeState(
        size, 0, dtype.itemsize, lambda: np.array(runs, np.int64), dtype,
        _ones(dtype.itemsize) if len(runs) == 1 else (lambda: np.array([length for _, length in runs])), name,
    )  # fmt: skip
    handle: Datatype = constant(name, Datatype, state)
    return handle


def _origin(state: TypeState) -> TypeState:
    """Return the datatype from which a copy was made by `Dup`; return a datatype that is no copy unchanged."""
    return _origin(state.base) if state.envelope[0] == "DUP" and state.base is not None else state


def _code_of(state: TypeState) -> str:
    """Return the code of a predefined datatype, or of a copy of one; "" for others."""
    state = _origin(state)
    if state.envelope[0] not in {"NAMED", "F90_INTEGER", "F90_REAL", "F90_COMPLEX"} or state.dtype is None:
        return ""
    if state.dtype.kind == "V":
        return f"V{state.extent}"
    return state.dtype.str.lstrip("<>|=")


# The predefined datatypes whose code is a kind and a size, and those whose code is another character than in numpy.
_OF_FIXED_SIZE = re.compile(r"U?INT\d+_T|C_BOOL|(LOGICAL|INTEGER|REAL|COMPLEX)\d+|f90")
_CHARACTERS = {"AINT": "p", "OFFSET": "p", "COUNT": "p", "CHAR": "c", "CHARACTER": "c", "BYTE": "B", "PACKED": "B"}
DATATYPE_NULL: Datatype = constant("DATATYPE_NULL", Datatype, None)
# The numpy dtype of each predefined datatype, the name of another one that it equals in all, or "" if it is null.
_TABLE = {
    "BYTE": "V1", "PACKED": "V1", "AINT": "p", "OFFSET": "q", "COUNT": "q", "CHAR": "S1", "WCHAR": "U1",
    "SIGNED_CHAR": "b", "SHORT": "h", "INT": "i", "LONG": "l", "LONG_LONG": "q", "UNSIGNED_CHAR": "B",
    "UNSIGNED_SHORT": "H", "UNSIGNED": "I", "UNSIGNED_LONG": "L", "UNSIGNED_LONG_LONG": "Q", "FLOAT": "f",
    "DOUBLE": "d", "LONG_DOUBLE": "g", "C_BOOL": "?", "INT8_T": "i1", "INT16_T": "i2", "INT32_T": "i4",
    "INT64_T": "i8", "UINT8_T": "u1", "UINT16_T": "u2", "UINT32_T": "u4", "UINT64_T": "u8", "FLOAT16_T": "e",
    "FLOAT32_T": "f4", "FLOAT64_T": "f8", "BFLOAT16_T": "V2", "C_COMPLEX": "F", "C_FLOAT_COMPLEX": "F",
    "C_DOUBLE_COMPLEX": "D", "C_LONG_DOUBLE_COMPLEX": "G", "CXX_BOOL": "?", "CXX_FLOAT_COMPLEX": "F",
    "CXX_DOUBLE_COMPLEX": "D", "CXX_LONG_DOUBLE_COMPLEX": "G", "SHORT_INT": "h,i", "INT_INT": "i,i",
    "LONG_INT": "l,i", "FLOAT_INT": "f,i", "DOUBLE_INT": "d,i", "LONG_DOUBLE_INT": "g,i", "CHARACTER": "S1",
    "LOGICAL": "i4", "INTEGER": "i4", "REAL": "f4", "DOUBLE_PRECISION": "f8", "COMPLEX": "F", "DOUBLE_COMPLEX": "D",
    "LOGICAL1": "i1", "LOGICAL2": "i2", "LOGICAL4": "i4", "LOGICAL8": "i8", "LOGICAL16": "", "INTEGER1": "i1",
    "INTEGER2": "i2", "INTEGER4": "i4", "INTEGER8": "i8", "INTEGER16": "", "REAL2": "e", "REAL4": "f4",
    "REAL8": "f8", "REAL16": "", "COMPLEX4": "", "COMPLEX8": "F", "COMPLEX16": "D", "COMPLEX32": "",
}  # fmt: skip
_ALIASES = {
    "TWOINT": "INT_INT", "UNSIGNED_INT": "UNSIGNED", "SIGNED_SHORT": "SHORT", "SIGNED_INT": "INT",
    "SIGNED_LONG": "LONG", "SIGNED_LONG_LONG": "LONG_LONG", "BOOL": "C_BOOL", "SINT8_T": "INT8_T",
    "SINT16_T": "INT16_T", "SINT32_T": "INT32_T", "SINT64_T": "INT64_T", "F_BOOL": "LOGICAL", "F_INT": "INTEGER",
    "F_FLOAT": "REAL", "F_DOUBLE": "DOUBLE_PRECISION", "F_COMPLEX": "COMPLEX", "F_FLOAT_COMPLEX": "COMPLEX",
    "F_DOUBLE_COMPLEX": "DOUBLE_COMPLEX",
}  # fmt: skip


def _dtype_of(code: str) -> Any:
    if "," not in code:
        return np.dtype(code)
    return np.dtype([(f"f{n}", each) for n, each in enumerate(code.split(","))], align=True)


# The predefined datatypes by name.
NAMED: dict[str, Any] = {
    name: _named(name, _dtype_of(code)) if code else DATATYPE_NULL for name, code in _TABLE.items()
}
NAMED.update({name: NAMED[other] for name, other in _ALIASES.items()})
BYTE: Datatype = NAMED["BYTE"]
for _name in ("BYTE", "PACKED"):
    NAMED[_name]._state.dtype = np.dtype("u1")
PAIRS = {(value, "INT"): NAMED[f"{value}_INT"] for value in ("SHORT", "INT", "LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE")}
_f90_types: dict[Any, Any] = {}

# The datatype of each code: characters of numpy and of `struct`, sizes of the array interface, and names.
CODES: dict[str, Any] = {}
for _name in [*_TABLE, *_ALIASES]:
    if NAMED[_name]:
        CODES[f"MPI_{_name}"] = NAMED[_name]
for _name in reversed(list(_TABLE)):
    _state = NAMED[_name]._state
    if _state is not None and not _state.dtype.names and _name not in {"PACKED", "BFLOAT16_T", "CHARACTER"}:
        CODES[_state.dtype.str.lstrip("<>|=")] = NAMED[_name]
for _name in ("SIGNED_CHAR", "SHORT", "INT", "LONG", "LONG_LONG", "UNSIGNED_CHAR", "UNSIGNED_SHORT", "UNSIGNED",
              "UNSIGNED_LONG", "UNSIGNED_LONG_LONG", "FLOAT", "DOUBLE", "LONG_DOUBLE", "C_BOOL", "FLOAT16_T",
              "C_FLOAT_COMPLEX", "C_DOUBLE_COMPLEX", "C_LONG_DOUBLE_COMPLEX"):  # fmt: skip
    CODES[_TABLE[_name]] = NAMED[_name]
CODES |= {"c": NAMED["CHAR"], "S": NAMED["CHAR"], "S1": NAMED["CHAR"], "U": NAMED["WCHAR"], "U1": NAMED["WCHAR"]}
CODES |= {"B": NAMED["UNSIGNED_CHAR"], "b1": NAMED["C_BOOL"]}
for _bits in (8, 16, 32, 64):
    CODES |= {f"i{_bits // 8}": NAMED[f"INT{_bits}_T"], f"u{_bits // 8}": NAMED[f"UINT{_bits}_T"]}
CODES["P"] = NAMED["UNSIGNED_LONG"]
CODES |= {"p": NAMED["AINT"], "n": NAMED["AINT"], "Zf": NAMED["C_FLOAT_COMPLEX"], "Zd": NAMED["C_DOUBLE_COMPLEX"]}
CODES |= {"Zg": NAMED["C_LONG_DOUBLE_COMPLEX"], "w": NAMED["WCHAR"]}


def datatype_of(spec: Any) -> TypeState | None:
    """Return the layout of a datatype or a code; None if it is null.

    Raises:
        KeyError: there is no such code.
        TypeError: it is neither.
    """
    if isinstance(spec, Datatype):
        state: TypeState | None = spec._state
        return state
    if isinstance(spec, str):
        code = spec.lstrip("@=<>|^") if spec[:1] in {"@", "=", "<", ">", "|", "^"} else spec
        return CODES[code]._state
    raise TypeError(f"expecting a datatype or its code, got {type(spec).__name__}")
