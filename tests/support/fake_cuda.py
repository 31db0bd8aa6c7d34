"""Selects the device of a test: the GPU of this machine, or a double of its driver (tests/native/fake_libcuda.cpp).

The double has the file name of the driver. So ``dlopen`` finds it in this process because it is loaded already, and in
other processes because its folder is in `LD_LIBRARY_PATH`. The Python binding of the driver is the real one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.cuda_on_host import COMPILER, ROOT, built_library, libraries_of

from unisono.transports.cuda.kernels import launcher
from unisono.transports.cuda.kernels.catalogue import Kernel

SOURCE = ROOT / "tests" / "native" / "fake_libcuda.cpp"
NAME = "libcuda.so.1"
BUILT = ROOT / "build" / "fake_cuda"
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{NAME}")
FAIL, VERSION, CAPABILITY, PEERS, KERNELS, LOST, STUCK, FLAGS, DEPTH, LOG, POOLS = (
    f"FAKE_CUDA_{name}"
    for name in (
        *("FAIL", "VERSION", "CAPABILITY", "PEERS", "KERNELS", "LOST", "STUCK", "FLAGS", "DEPTH", "LOG", "POOLS"),
    )
)

FORBIDDEN = "FAKE_CUDA_FORBIDDEN"


@functools.cache
def has_gpu() -> bool:
    """Return whether this machine has a GPU and its driver."""
    if str(BUILT) in os.environ.get("LD_LIBRARY_PATH", ""):  # a test has started this process with the double
        return False
    try:
        ctypes.CDLL(NAME)
    except OSError:
        return False
    # In another process, because children of a process that has used the driver cannot use it, and this may be a server
    # that ranks are forked from.
    return subprocess.run([sys.executable, "-c", COUNT], capture_output=True, timeout=60, check=False).returncode == 0


COUNT = f"""
import ctypes, sys
driver, count = ctypes.CDLL({NAME!r}), ctypes.c_int()
sys.exit(not (driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value))
"""


@functools.cache
def folder() -> Path:
    """Compile the double if necessary; return its folder.

    Raises:
        RuntimeError: the environment variable `FORBIDDEN` says that outcomes on a double would be taken for a GPU's.
    """
    if os.environ.get(FORBIDDEN):
        raise RuntimeError(f"this machine has no GPU that works, and {FORBIDDEN} forbids the double of its driver")
    library = built_library(SOURCE.read_text(), (COMPILER, *OPTIONS), BUILT)
    beside = library.with_suffix("")
    beside.mkdir(exist_ok=True)
    named = beside / NAME
    if not named.exists():
        scratch = beside / f"{os.getpid()}"
        os.link(library, scratch)
        scratch.replace(named)
    return beside


def use(monkeypatch: pytest.MonkeyPatch, kernels: Sequence[Kernel] = (), exchanging: Sequence[Kernel] = ()) -> None:
    """Use the double in this process and its children if the machine has no GPU. The double can run `kernels`.

    It can run `exchanging`, too, which are kernels whose threads exchange values.
    """
    if has_gpu():
        return
    monkeypatch.setenv("LD_LIBRARY_PATH", str(folder()), prepend=os.pathsep)
    ctypes.CDLL(str(folder() / NAME), ctypes.RTLD_GLOBAL)
    if kernels:
        libraries = [*libraries_of(kernels), *libraries_of(exchanging, "-DUNISONO_WARPS")]
        monkeypatch.setenv(KERNELS, ":".join(map(str, libraries)))
        # The double runs kernels compiled for the host. So NVRTC need not compile them.
        monkeypatch.setattr(launcher, "built", lambda kernel, target, folder: b"\x7fELF")
