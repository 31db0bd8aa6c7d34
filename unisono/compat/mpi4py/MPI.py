"""The module `MPI`, with the names of mpi4py's `MPI`. Importing it joins the other ranks, as in mpi4py.

`unisono.compat.mpi4py.rc.initialize = False` before the import leaves that to `MPI.Init`.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from threading import Lock as _Lock
from typing import Any as _Any

from unisono.compat.mpi4py.base.constants import CONSTANTS as _CONSTANTS
from unisono.compat.mpi4py.base.handles import CONSTANT_HANDLES as _CONSTANT_HANDLES, Handle as _Handle
from unisono.compat.mpi4py.memory.access import BOTTOM, BUFFER_AUTOMATIC, IN_PLACE, buffer  # noqa: F401
from unisono.compat.mpi4py.memory.datatype import CODES as _CODES, NAMED as _NAMED
from unisono.compat.mpi4py.values.pickles import pickle  # noqa: F401

# The files whose public names are names of this module.
_FILES = (
    "memory.access memory.datatype base.errors base.handles base.world values.op values.status values.info "
    "values.group values.pickles calls.request calls.point_to_point communicators.comm communicators.intercomm "
    "communicators.topology communicators.session communicators.jobs communicators.window communicators.file"
)
_HIDDEN = {
    "Special",
    "State",
    "Handle",
    "Named",
    "Attributed",
    "Handled",
    "Block",
    "Port",
    "Path",
    "Universe",
    "Buffering",
    "Hinted",
    "Shared",
    "Any",
    "Sequence",
    "Callable",
}


def _public(module: _Any) -> dict[str, _Any]:
    """Return the names that a file defines for this module: its classes and functions of MPI."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
        and (name[0].isupper() or name in {"buffer", "get_vendor"})
        and name not in _HIDDEN
        and not name.endswith(("State", "Calls"))
    }


globals().update(_CONSTANTS)
for _name in _FILES.split():
    globals().update(_public(_import_module(f"unisono.compat.mpi4py.{_name}")))
globals().update(_CONSTANT_HANDLES)
for _name in ("Attach_buffer", "Detach_buffer", "Flush_buffer", "Iflush_buffer"):
    globals()[_name] = getattr(_CONSTANT_HANDLES["COMM_SELF"], _name)
globals().update(_NAMED)
memory = buffer
_typedict = _typedict_c = _typedict_f = _CODES
for _value in list(globals().values()):
    if isinstance(_value, type) and _value.__module__.startswith("unisono.compat.mpi4py."):
        _value.__module__ = __name__


def _comm_lock_table(comm: _Any) -> dict[_Any, _Any]:
    return comm._live.locks


def _comm_lock(comm: _Any, key: _Any = None) -> _Any:
    return _comm_lock_table(comm).setdefault(key, _Lock())


def _handleof(arg: _Any) -> int:
    if isinstance(arg, Status):  # type: ignore[name-defined]  # noqa: F821
        return 0
    if not isinstance(arg, _Handle):
        raise TypeError(f"expecting an object of MPI, got {type(arg).__name__}")
    return arg.handle


def _addressof(arg: _Any) -> int:
    _handleof(arg)
    return id(arg)


def _sizeof(arg: _Any) -> int:
    if not (isinstance(arg, type) and issubclass(arg, (_Handle, Status))):  # type: ignore[name-defined]  # noqa: F821
        _handleof(arg)
    return 8


from unisono.compat.mpi4py.communicators.session import initialize as _initialize  # noqa: E402

_initialize()
