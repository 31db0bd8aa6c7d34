"""A double of NCCL (tests/native/fake_libnccl.cpp), which its binding for Python finds in place of the library.

The binding looks for a library of this name that is loaded already. So the double is loaded first, in each process.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from support.cuda_on_host import COMPILER, ROOT, built_library

SOURCE = ROOT / "tests" / "native" / "fake_libnccl.cpp"
NAME = "libnccl.so.2"
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}")
VERSION, LOG, FAIL = "FAKE_NCCL_VERSION", "FAKE_NCCL_LOG", "FAKE_NCCL_FAIL"


@functools.cache
def library() -> Path:
    """Compile the double if necessary; return its path."""
    return built_library(SOURCE.read_text(), (COMPILER, *OPTIONS), ROOT / "build" / "fake_nccl")


def use() -> None:
    """Use the double in this process, which must not have imported a binding of NCCL."""
    ctypes.CDLL(str(library()), ctypes.RTLD_GLOBAL)
