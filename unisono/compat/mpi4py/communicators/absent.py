"""`File`, of which there is only the null handle: opening one raises `NotImplementedError`.

Programs that mention the class, but use no files, so run as they are.
"""

from __future__ import annotations

from typing import Any

from unisono.compat.mpi4py.base.handles import Handle, Handled, constant


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


FILE_NULL = constant("FILE_NULL", File, None)
