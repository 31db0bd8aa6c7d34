"""`Info`: texts by key, and `INFO_ENV`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from unisono.compat.mpi4py.base.arguments import whole_numbers
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.base.handles import Handle, State, constant


class InfoState(State):
    """Texts by key."""

    def __init__(self, constant: str = "", items: Mapping[str, str] | None = None) -> None:
        super().__init__(constant)
        self.items = dict(items or {})


@whole_numbers
class Info(Handle):
    """A dictionary of texts."""

    __slots__ = ()
    _null, _error = "INFO_NULL", "ERR_INFO"

    @classmethod
    def Create(cls, items: Any = None) -> Any:
        """Return a new info with these items."""
        self = cls._of(InfoState())
        self.update(items or {})
        return self

    @classmethod
    def Create_env(cls, args: Any = None) -> Any:
        """Return a new info with the items of `INFO_ENV`."""
        return cls._of(InfoState(items=_environment()))

    def Free(self) -> None:
        """Make the handle null."""
        self._free()

    def Dup(self) -> Any:
        """Return a copy."""
        return self._of(InfoState(items=self._live.items))

    def Get(self, key: str) -> str | None:
        """Return the text of a key, or None."""
        value: str | None = self._live.items.get(key)
        return value

    def Set(self, key: str, value: str) -> None:
        """Set the text of a key."""
        self._live.items[key] = value

    def Delete(self, key: str) -> None:
        """Delete a key."""
        if self._live.items.pop(key, None) is None:
            raise fail("ERR_INFO_NOKEY", key)

    def Get_nkeys(self) -> int:
        """Return the number of keys."""
        return len(self._live.items)

    def Get_nthkey(self, n: int) -> str:
        """Return the key of an index."""
        keys = list(self._live.items)
        if not 0 <= n < len(keys):
            raise fail("ERR_ARG", f"there is no key {n} of {len(keys)}")
        return str(keys[n])

    def __reduce__(self) -> Any:
        if self._state is None or self._state.constant:
            return super().__reduce__()
        return _created, (type(self), self.items())

    def __len__(self) -> int:
        return 0 if self._state is None else self.Get_nkeys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: str, /) -> bool:
        return self._state is not None and key in self._state.items

    def __getitem__(self, key: str, /) -> str:
        if key not in self:
            raise KeyError(key)
        return str(self._state.items[key])

    def __setitem__(self, key: str, value: str, /) -> None:
        if self._state is None:
            raise KeyError(key)
        self.Set(key, value)

    def __delitem__(self, key: str, /) -> None:
        if key not in self:
            raise KeyError(key)
        self.Delete(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the text of a key, or the default."""
        return default if self._state is None else self._state.items.get(key, default)

    def keys(self) -> list[str]:
        """Return the keys."""
        return [] if self._state is None else list(self._state.items)

    def values(self) -> list[str]:
        """Return the texts."""
        return [] if self._state is None else list(self._state.items.values())

    def items(self) -> list[tuple[str, str]]:
        """Return the pairs of keys and texts."""
        return [] if self._state is None else list(self._state.items.items())

    def update(self, items: Any = (), **kwds: str) -> None:
        """Set several keys."""
        if self._state is None:
            raise KeyError("INFO_NULL cannot be changed")
        pairs = items.items() if hasattr(items, "items") else items
        for key, value in [*pairs, *kwds.items()]:
            self.Set(key, value)

    def pop(self, key: str, *default: Any) -> Any:
        """Delete a key, and return its text."""
        if key in self:
            value = self[key]
            self.Delete(key)
            return value
        if default:
            return default[0]
        raise KeyError(key)

    def popitem(self) -> tuple[str, str]:
        """Delete the last key; return it with its text."""
        if not len(self):
            raise KeyError("there is no key")
        key = self.keys()[-1]
        return key, self.pop(key)

    def copy(self) -> Any:
        """Return a copy; the copy of a null info is null."""
        return Info() if self._state is None else self.Dup()

    def clear(self) -> None:
        """Delete all keys."""
        if self._state is not None:
            self._state.items.clear()


def _created(of_class: Any, items: Any) -> Any:
    return of_class.Create(items)


def _environment() -> dict[str, str]:
    values = {
        "command": sys.executable,
        "argv": " ".join(sys.argv[1:]),
        "maxprocs": os.environ.get("UNISONO_SIZE", "1"),
        "wdir": os.getcwd() if os.path.isdir(".") else "",
        "thread_level": "MPI_THREAD_MULTIPLE",
        "host": os.uname().nodename,
        "arch": os.uname().machine,
    }
    return {key: value for key, value in values.items() if value}


class Hinted:
    """The methods of objects with hints."""

    __slots__ = ()
    _live: Any

    def Set_info(self, info: Any) -> None:
        """Set hints."""
        self._live.info.update(info.items())

    def Get_info(self) -> Any:
        """Return the hints."""
        return Info.Create(self._live.info)

    info = property(Get_info, Set_info, doc="The hints.")


INFO_NULL = constant("INFO_NULL", Info, None)
INFO_ENV = constant("INFO_ENV", Info, InfoState("INFO_ENV", _environment()))
