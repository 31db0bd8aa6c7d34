"""The API of mpi4py 4.1 over Unisono: ``from unisono.compat.mpi4py import MPI``.

Files and folders:
    MPI: the module with all names.
    hook: makes ``import mpi4py`` find this package.
    run: runs an unchanged program.
    spawned: runs the program of a rank of a spawned job.
    typing: types for annotations.
    base: constants, exceptions, the base of all objects, and the job.
    values: operations, statuses, hints, groups and pickles.
    memory: buffer specifications and layouts.
    calls: messages, collectives and requests.
    communicators: communicators, topologies, sessions, windows and files.
    futures: executors whose workers are ranks.
    util: objects with large arrays, and dtypes.
"""

from __future__ import annotations

import sys
from typing import Any

__version__ = "4.1.2"


class Rc:
    """The settings that are read when `MPI` is imported."""

    initialize: Any = True
    threads: Any = True
    thread_level: Any = "multiple"
    finalize: Any = None
    fast_reduce: Any = True
    recv_mprobe: Any = True
    irecv_bufsz: Any = 32768
    errors: Any = "exception"
    __spec__ = None  # ``import mpi4py.rc`` finds the settings as if they were a module

    def __init__(self, **kwargs: Any) -> None:
        self(**kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if not (hasattr(self, name) or name.startswith("__")):  # the import sets `__name__` and its like
            raise TypeError(f"object has no attribute {name!r}")
        super().__setattr__(name, value)

    def __call__(self, **kwargs: Any) -> None:
        """Set some of the settings.

        Raises:
            TypeError: there is no such setting.
        """
        for name in kwargs:
            if not hasattr(self, name):
                raise TypeError(f"unexpected argument {name!r}")
        for name, value in kwargs.items():
            setattr(self, name, value)

    def __repr__(self) -> str:
        return f"<{__name__}.rc>"


rc = Rc()
sys.modules[f"{__name__}.rc"] = rc  # type: ignore[assignment]


def communicator_of(comm: Any) -> Any:
    """Return the communicator of Unisono of a communicator of `MPI`, for calls that MPI lacks, such as `explain`."""
    return comm._live.native


def get_include() -> str:
    """Raise `NotImplementedError`: mpi4py's C API needs a real MPI."""
    raise NotImplementedError("Unisono has no C API of mpi4py; h5py with MPI and petsc4py need a real MPI")


def get_config() -> dict[str, str]:
    """Return nothing: there is no configuration of a compiler."""
    return {}


def profile(name: str, **_: Any) -> None:
    """Raise `ValueError`: there are no profilers of MPI."""
    raise ValueError(f"there is no profiler {name!r}: use `unisono top` and traces")
