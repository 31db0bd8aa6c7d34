"""The library that XLA takes for MPI, and the variables by which XLA's trampoline finds it.

jaxlib reads the variables and loads the library when it is imported. So `unisono.jax` calls `announce` before that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from unisono.transports import core_path

_LIBRARY = "MPITRAMPOLINE_LIB"
# With "dlmopen", the default, XLA would get a copy of the library that knows no handler.
_MODE = "MPITRAMPOLINE_DLOPEN_MODE"


def path() -> str:
    """Return the path of the library, which lies beside the native core."""
    return str(Path(core_path()).with_name("mpi_for_xla.so"))


def announce() -> None:
    """Set the variables, unless jaxlib is loaded already, or the user wants an MPI library."""
    if "jaxlib" not in sys.modules and _LIBRARY not in os.environ:
        os.environ[_LIBRARY], os.environ[_MODE] = path(), "dlopen"


def obstacle() -> str:
    """Return why XLA cannot use the library in this process, and what to do; empty if it can."""
    named = os.environ.get(_LIBRARY)
    if named is None:
        return (
            "JAX was imported before unisono.jax, and looks for its libraries at its import: import unisono.jax first"
        )
    if named != path():
        return f"{_LIBRARY} names another MPI library, {named}: unset it"
    if os.environ.get(_MODE) != "dlopen":
        return f"{_MODE} must be dlopen: unset it and {_LIBRARY}"
    return ""
