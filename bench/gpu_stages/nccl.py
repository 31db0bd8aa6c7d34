"""The version of NCCL that a process here gets: a library that is preloaded, or that of a package."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Iterator
from pathlib import Path

NAME = "libnccl.so.2"
SEVERAL_RANKS_OF_A_GPU = (2, 30)  # the first version that supports them


def library_version() -> tuple[int, int] | None:
    """Return the major and minor version that the library itself reports; None if there is none."""
    for path in _places():
        try:
            function = ctypes.CDLL(path).ncclGetVersion
        except (OSError, AttributeError):
            continue
        number = ctypes.c_int()
        if function(ctypes.byref(number)) == 0:
            return number.value // 10000, number.value % 10000 // 100
    return None


def refusal() -> str | None:
    """Return why NCCL cannot be measured among ranks of one GPU; None if it can."""
    version = library_version()
    if version is None:
        return f"{NAME} is not installed"
    few = f"NCCL {version[0]}.{version[1]} supports only one rank of a GPU; 2.30 supports more"
    return None if version >= SEVERAL_RANKS_OF_A_GPU else few


def _places() -> Iterator[str]:
    """Yield the name by which a preloaded or installed library is found, and the path of the package's one."""
    yield NAME
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from map(str, sorted(Path(folder).glob(f"nccl/lib/{NAME}")))
