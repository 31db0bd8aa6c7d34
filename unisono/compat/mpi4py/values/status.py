"""`Status`: the source, the tag and the length of a message."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole_numbers
from unisono.compat.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, UNDEFINED
from unisono.compat.mpi4py.memory.datatype import BYTE

_FIELDS = ("source", "tag", "error")


@whole_numbers
class Status:
    """The description of a message that has been received or probed."""

    __slots__ = ("__weakref__", "_fields", "cancelled", "nbytes")
    __hash__ = None  # type: ignore[assignment]

    def __new__(cls, status: Any = None) -> Any:
        if status is not None and not isinstance(status, Status):
            raise TypeError(f"expected a Status, got {type(status).__name__}")
        self = object.__new__(cls)
        if status is None:
            self._set(ANY_SOURCE, ANY_TAG, 0)
        else:
            self._fields, self.nbytes, self.cancelled = status._fields[:], status.nbytes, status.cancelled
        return self

    def _set(self, source: int, tag: int, nbytes: int, cancelled: bool = False) -> None:
        self._fields = array("i", (source, tag, 0, 0, 0, 0))
        self.nbytes, self.cancelled = nbytes, cancelled

    def _copy(self, to: Any) -> None:
        """Set the fields of another status, if it is one, but not its error."""
        if to is not None:
            to._fields[:3] = self._fields[:3]
            to.nbytes, to.cancelled = self.nbytes, self.cancelled

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Status):
            return NotImplemented
        return (self._fields, self.nbytes, self.cancelled) == (other._fields, other.nbytes, other.cancelled)

    def __ne__(self, other: object) -> bool:
        return NotImplemented if not isinstance(other, Status) else not self == other

    def __getstate__(self) -> Any:
        return {name: getattr(self, name) for name in _FIELDS}

    def __setstate__(self, state: Any) -> None:
        for name, value in state.items():
            setattr(self, name, value)

    def __reduce__(self) -> Any:
        return type(self), (), self.__getstate__()

    def Get_source(self) -> int:
        """Return the source."""
        return self._fields[0]

    def Set_source(self, source: int) -> None:
        """Set the source."""
        self._fields[0] = source

    def Get_tag(self) -> int:
        """Return the tag."""
        return self._fields[1]

    def Set_tag(self, tag: int) -> None:
        """Set the tag."""
        self._fields[1] = tag

    def Get_error(self) -> int:
        """Return the error code."""
        return self._fields[2]

    def Set_error(self, error: int) -> None:
        """Set the error code."""
        self._fields[2] = error

    def Get_count(self, datatype: Any = BYTE) -> int:
        """Return the number of elements; `UNDEFINED` if the bytes are no whole number of elements."""
        size = datatype._live.size
        if size == 0:
            return 0
        count, rest = divmod(self.nbytes, size)
        return UNDEFINED if rest else int(count)

    def Get_elements(self, datatype: Any) -> int:
        """Return the number of basic elements."""
        state = datatype._live
        if state.size == 0:
            return 0
        sizes = state.itemsizes
        if len(sizes) == 1:
            count, rest = divmod(self.nbytes, int(sizes[0]))
            return UNDEFINED if rest else int(count)
        whole, rest = divmod(self.nbytes, state.size)
        ends = np.cumsum(sizes)
        more = int(np.searchsorted(ends, rest, side="right"))
        is_whole = rest == 0 or (more > 0 and ends[more - 1] == rest)
        return int(whole * len(sizes) + more) if is_whole else UNDEFINED

    def Set_elements(self, datatype: Any, count: int) -> None:
        """Set the number of basic elements."""
        state = datatype._live
        sizes = state.itemsizes
        whole, rest = divmod(count, len(sizes))
        self.nbytes = int(whole * sizes.sum() + sizes[:rest].sum())

    def Is_cancelled(self) -> bool:
        """Return whether the request has been cancelled."""
        return self.cancelled

    def Set_cancelled(self, flag: bool) -> None:
        """Set whether the request has been cancelled."""
        self.cancelled = bool(flag)

    def tomemory(self) -> memoryview:
        """Return the memory of the fields."""
        return memoryview(self._fields)

    def py2f(self) -> list[int]:
        """Return the fields as integers, which `f2py` takes."""
        return [*self._fields[:3].tolist(), self.nbytes, int(self.cancelled), 0]

    @classmethod
    def f2py(cls, arg: list[int]) -> Any:
        """Return the status of the fields that `py2f` returned."""
        status = cls()
        status._fields[:3] = array("i", arg[:3])
        status.nbytes, status.cancelled = arg[3], bool(arg[4])
        return status

    def _count(self) -> int:
        return self.nbytes

    def _set_count(self, count: int) -> None:
        self.nbytes = count

    source = property(Get_source, Set_source, doc="The source.")
    tag = property(Get_tag, Set_tag, doc="The tag.")
    error = property(Get_error, Set_error, doc="The error code.")
    count = property(_count, _set_count, doc="The number of bytes.")


def empty_status() -> Status:
    """Return the status of a null request."""
    status: Status = Status()
    return status
