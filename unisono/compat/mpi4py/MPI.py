"""The module `MPI`, with the names of mpi4py's `MPI`. Importing it joins the other ranks, as in mpi4py.

`unisono.compat.mpi4py.rc.initialize = False` before the import leaves that to `MPI.Init`.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any

from unisono.compat.mpi4py.base import handles as _handles
from unisono.compat.mpi4py.base.constants import CONSTANTS as _CONSTANTS
from unisono.compat.mpi4py.memory import access as _access, datatype as _datatype
from unisono.compat.mpi4py.values import pickles as _pickles

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
    "Any",
    "Sequence",
    "Callable",
}


def _public(module: Any) -> dict[str, Any]:
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
    globals().update(_public(importlib.import_module(f"unisono.compat.mpi4py.{_name}")))
globals().update(_handles.CONSTANT_HANDLES)
globals().update(_datatype.NAMED)
BOTTOM, IN_PLACE, BUFFER_AUTOMATIC = _access.BOTTOM, _access.IN_PLACE, _access.BUFFER_AUTOMATIC
memory, pickle = _access.buffer, _pickles.pickle
_typedict = _typedict_c = _typedict_f = _datatype.CODES
for _value in list(globals().values()):
    if isinstance(_value, type) and _value.__module__.startswith("unisono.compat.mpi4py."):
        _value.__module__ = __name__


def _comm_lock_table(comm: Any) -> dict[Any, Any]:
    return comm._live.locks


def _comm_lock(comm: Any, key: Any = None) -> Any:
    return _comm_lock_table(comm).setdefault(key, threading.Lock())


def _handleof(arg: Any) -> int:
    if isinstance(arg, Status):  # type: ignore[name-defined]  # noqa: F821
        return 0
    if not isinstance(arg, _handles.Handle):
        raise TypeError(f"expecting an object of MPI, got {type(arg).__name__}")
    return arg.handle


def _addressof(arg: Any) -> int:
    _handleof(arg)
    return id(arg)


def _sizeof(arg: Any) -> int:
    if not (isinstance(arg, type) and issubclass(arg, (_handles.Handle, Status))):  # type: ignore[name-defined]  # noqa: F821
        _handleof(arg)
    return 8


from unisono.compat.mpi4py.communicators.session import initialize as _initialize  # noqa: E402

_initialize()
