"""The dtypes of elements that are moved as bytes: dates, durations, texts and structures.

Theory of operation
-------------------
Each dtype of numpy has a canonical name. Ranks compare these names in the signatures of collectives, so the name holds
all that gives the bytes a meaning: the size, the fields in their order, and the format and the offset of each. Fields
have their byte order in their format, as in ``void64{a:<i4@0,b:<f4@4}``. A long name is shortened, and ends with a
hash of the whole one.

A message carries a number instead of a name: 30 bits of a hash of the name, below the bit `_BYTES_BIT`. Two names with
one number have a chance of 1 in 10⁹. The native core also gets the names of the dtypes that this process has used,
for its errors.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from unisono.dtypes import DTYPES, DType, Kind
from unisono.transports import _core

_KINDS: dict[str, Kind] = {"M": "date", "m": "duration", "S": "text", "U": "text", "V": "structure"}
# The types of elements; subclasses, such as that of records, count as well. Other types may hold pointers.
_TYPES = (np.void, np.bytes_, np.str_, np.datetime64, np.timedelta64)
# Fields of these formats are moved too. Extended floats are not among them, because their bytes differ by machine.
_NUMBERS = frozenset("?bBhHiIlLqQefdFD")
# The bit of all numbers of such dtypes: as in transports/native/core/kernels/dtype.h.
_BYTES_BIT = 1 << 30
_MOST_NAMED = 120

_BY_NAME: dict[str, DType] = {}
_BY_NUMBER: dict[int, DType] = {}


def byte_dtype(element: np.dtype[Any]) -> DType | None:
    """Return the dtype of a date, duration, text or structure of numpy; None if its elements are not moved as bytes.

    Equal dtypes have one `DType`. None is returned for elements of another byte order than the machine's, too, and for
    those that are or contain Python objects or extended floats. The fields of a structure may have any byte order.
    """
    if not _is_moved(element) or not issubclass(element.type, _TYPES) or not element.itemsize:
        return None
    if element.names is None and not element.isnative:
        return None
    name = _shortened(_described(element))
    dtype = _BY_NAME.get(name)
    return _interned(name, element.itemsize, _KINDS[element.kind]) if dtype is None else dtype


def byte_dtype_of(number: int) -> DType:
    """Return the dtype of this number, for a message of a peer.

    A dtype that this process has not used has no known name or size: it counts as bytes.
    """
    return _BY_NUMBER.get(number) or DType(f"uint8 of an unknown dtype {number:#x}", number, 1, "structure", "")


def _interned(name: str, itemsize: int, kind: Kind) -> DType:
    digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
    number = int.from_bytes(digest, "little") % _BYTES_BIT | _BYTES_BIT
    dtype = _BY_NAME.setdefault(name, DType(name, number, itemsize, kind, name))
    _BY_NUMBER.setdefault(number, dtype)
    _core.name_dtype(number, name, itemsize)
    return dtype


def _is_moved(element: np.dtype[Any]) -> bool:
    """Return whether the bytes of an element have the same meaning on all ranks."""
    if element.hasobject:
        return False
    if element.fields is not None:
        return all(_is_moved(field[0]) for field in element.fields.values())
    if element.subdtype is not None:
        return _is_moved(element.subdtype[0])
    return issubclass(element.type, _TYPES) or element.char in _NUMBERS or element.name in DTYPES


def _described(element: np.dtype[Any]) -> str:
    """Return all that gives an element its meaning, such as ``void64{a:<i4@0,b:<f4@4}``. Its size in bits is first."""
    if element.names is None or element.fields is None:
        return str(element.name)
    fields = [(name, *element.fields[name][:2]) for name in element.names]
    shown = ",".join(f"{_quoted(name)}:{_format(field)}@{offset}" for name, field, offset in fields)
    return f"void{8 * element.itemsize}{{{shown}}}"


def _format(field: np.dtype[Any]) -> str:
    if field.subdtype is not None:
        base, shape = field.subdtype
        return f"{'x'.join(map(str, shape))}*{_format(base)}"
    if field.names is not None:
        return _described(field)
    return str(field.name if field.name in DTYPES and field.char not in _NUMBERS else field.str)


def _quoted(name: str) -> str:
    return name if name.isidentifier() else repr(name)


def _shortened(name: str) -> str:
    if len(name) <= _MOST_NAMED:
        return name
    return f"{name[:_MOST_NAMED]}…#{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"
