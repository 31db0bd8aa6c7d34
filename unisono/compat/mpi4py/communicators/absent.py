"""`Win` and `File`, of which there are only the null handles: making one raises `NotImplementedError`.

Programs that mention the classes, but use neither windows nor files, so run as they are.
"""

from __future__ import annotations

from typing import Any, ClassVar

from unisono.compat.mpi4py.base.handles import Attributed, Handle, Handled, Named, constant


class Win(Handle, Named, Attributed, Handled):
    """A window, of which there are none."""

    __slots__ = ()
    _null, _error = "WIN_NULL", "ERR_WIN"
    _keyvals: ClassVar[dict[int, Any]] = {}

    @classmethod
    def Create(cls, *_: Any, **__: Any) -> Any:
        """Raise `NotImplementedError`: there are no windows."""
        raise NotImplementedError("unisono.compat.mpi4py has no windows: exchange messages, or use a real MPI")

    Allocate = Allocate_shared = Create_dynamic = Create

    def Free(self) -> None:
        """Raise the error of a null handle."""
        self._free()


class File(Handle, Handled):
    """A file, of which there are none."""

    __slots__ = ()
    _null, _error = "FILE_NULL", "ERR_FILE"

    @classmethod
    def Open(cls, *_: Any, **__: Any) -> Any:
        """Raise `NotImplementedError`: there are no files."""
        raise NotImplementedError("unisono.compat.mpi4py has no files: write numpy files by rank, or use a real MPI")

    Delete = Open

    def Close(self) -> None:
        """Raise the error of a null handle."""
        self._free()


WIN_NULL = constant("WIN_NULL", Win, None)
FILE_NULL = constant("FILE_NULL", File, None)
