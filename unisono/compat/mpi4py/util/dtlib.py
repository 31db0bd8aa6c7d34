"""Datatypes of MPI and dtypes of numpy: `from_numpy_dtype` and `to_numpy_dtype`."""

from __future__ import annotations

from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.constants import CONSTANTS
from unisono.compat.mpi4py.memory.datatype import CODES, Datatype

_Block = tuple[int, int, Any]  # an offset in bytes, a number of elements, and their datatype


def from_numpy_dtype(dtype: Any) -> Any:
    """Return the datatype of elements of a dtype.

    Raises:
        ValueError: the dtype holds objects, is not in the order of bytes of this processor, or has no datatype.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        raise ValueError("elements that are objects of Python have no datatype")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return from_numpy_dtype(base).Create_subarray(shape, shape, [0] * len(shape))
    if dtype.fields is not None:
        return _struct_of(dtype)
    code = dtype.str[1:]
    if not dtype.isnative or (dtype.char not in CODES and code not in CODES):
        raise ValueError(f"there is no datatype of {dtype}")
    return CODES[dtype.char if dtype.char in CODES else code].Dup()


def _struct_of(dtype: Any) -> Any:
    fields = [dtype.fields[name] for name in dtype.names]
    types = [from_numpy_dtype(field[0]) for field in fields]
    struct = Datatype.Create_struct([1] * len(fields), [field[1] for field in fields], types)
    bounds = struct.Get_extent()
    return struct if bounds == (0, dtype.itemsize) else struct.Create_resized(0, dtype.itemsize)


def to_numpy_dtype(datatype: Any) -> Any:
    """Return the dtype whose elements have the layout of a datatype.

    Raises:
        ValueError: the datatype is null, or no dtype has its layout.
    """
    if not datatype:
        raise ValueError("the datatype is null")
    base, combiner, params = datatype.decode()
    if combiner == "NAMED" or combiner.startswith("F90_"):
        return datatype._live.dtype
    if combiner == "DUP":
        return to_numpy_dtype(base)
    if combiner == "CONTIGUOUS":
        return np.dtype((to_numpy_dtype(base), (params["count"],)))
    if combiner == "SUBARRAY":
        return _whole_array(base, params)
    if combiner == "RESIZED":
        return _resized(base, params["lb"], params["extent"])
    return _of_blocks(_blocks_of(datatype), datatype.extent)


def _whole_array(base: Any, params: dict[str, Any]) -> Any:
    sizes = params["sizes"]
    if params["subsizes"] != sizes:
        raise ValueError("a part of an array has no dtype")
    is_fortran = params["order"] == CONSTANTS["ORDER_F"]
    return np.dtype((to_numpy_dtype(base), tuple(reversed(sizes) if is_fortran else sizes)))


def _blocks_of(datatype: Any) -> list[_Block]:
    base, combiner, params = datatype.decode()
    if combiner == "DUP":
        return _blocks_of(base)
    if combiner not in _BLOCKS:
        raise ValueError(f"a datatype by the constructor {combiner} with these bounds has no dtype")
    blocks: list[_Block] = _BLOCKS[combiner](base, params)
    return blocks


def _resized(base: Any, lb: int, extent: int) -> Any:
    if (lb, extent) == base.Get_extent():
        return to_numpy_dtype(base)
    dtype = _of_blocks(_blocks_of(base), extent)
    if lb != 0 or dtype.itemsize != extent:
        raise ValueError(f"elements with the bounds {lb} and {lb + extent} have no dtype")
    return dtype


def _of_blocks(blocks: list[_Block], extent: int) -> Any:
    formats, offsets = [], []
    for offset, count, base in blocks:
        dtype = to_numpy_dtype(base)
        if offset < 0 or (count > 1 and dtype.itemsize != base.extent):
            raise ValueError("blocks that overlap or begin before the element have no dtype")
        formats.append(dtype if count == 1 else np.dtype((dtype, (count,))))
        offsets.append(offset)
    ends = [offset + each.itemsize for offset, each in zip(offsets, formats, strict=True)]
    return _struct(formats, offsets, max(extent, *ends))


def _struct(formats: list[Any], offsets: list[int], itemsize: int) -> Any:
    """Return the dtype of fields; it is an aligned struct if all fields are aligned."""
    alignment = max((each.alignment for each in formats), default=1)
    is_aligned = itemsize % alignment == 0 and all(
        offset % each.alignment == 0 for offset, each in zip(offsets, formats, strict=True)
    )
    names = [f"f{number}" for number in range(len(formats))]
    fields: Any = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    return np.dtype(fields, align=is_aligned)


def _strided(base: Any, params: dict[str, Any], unit: int) -> list[_Block]:
    return [(n * params["stride"] * unit, params["blocklength"], base) for n in range(params["count"])]


def _indexed(base: Any, params: dict[str, Any], unit: int) -> list[_Block]:
    displacements = params["displacements"]
    lengths = params.get("blocklengths") or [params["blocklength"]] * len(displacements)
    return [(at * unit, count, base) for at, count in zip(displacements, lengths, strict=True)]


def _members(base: Any, params: dict[str, Any]) -> list[_Block]:
    return list(zip(params["displacements"], params["blocklengths"], params["datatypes"], strict=True))


# The blocks of the datatypes by each constructor.
_BLOCKS: dict[str, Any] = {
    "VECTOR": lambda base, params: _strided(base, params, base.extent),
    "HVECTOR": lambda base, params: _strided(base, params, 1),
    "INDEXED": lambda base, params: _indexed(base, params, base.extent),
    "INDEXED_BLOCK": lambda base, params: _indexed(base, params, base.extent),
    "HINDEXED": lambda base, params: _indexed(base, params, 1),
    "HINDEXED_BLOCK": lambda base, params: _indexed(base, params, 1),
    "STRUCT": _members,
}
