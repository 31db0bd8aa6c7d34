"""Jobs over a UCX with CUDA support, which tests/native/cuda_ucx.cpp pretends to be."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support.cuda_on_host import COMPILER, ROOT, built_library
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.foundation.once import once_per_process
from unisono.testing.device_arrays import device_double
from unisono.transports.ucx import library as ucx

SOURCE = ROOT / "tests" / "native" / "cuda_ucx.cpp"
BUILT = ROOT / "build" / "cuda_ucx"
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


@functools.cache
def library() -> Path:
    """Compile the library that passes device memory to the real UCX as host memory; return it."""
    real = Path(ucx.library_path())
    include = next(folder for folder in (real.parents[1] / "include", real.parents[2] / "include") if folder.is_dir())
    link = (f"-Wl,--no-as-needed,-rpath,{real.parent}", f"-L{real.parent}", "-l:libucp.so.0")
    return built_library(SOURCE.read_text(), (COMPILER, *OPTIONS, f"-I{include}", *link), BUILT)


def device_traffic() -> tuple[int, int]:
    """Return the bytes of device memory that this process has passed to UCX to send, and to receive."""
    return _counter("cuda_nbytes_sent"), _counter("cuda_nbytes_received")


def calls_after_device_memory() -> tuple[int, int]:
    """Return the number of calls of UCX since the first one with device memory, and how many had no CUDA context."""
    return _counter("cuda_entries"), _counter("cuda_entries_without_context")


def _counter(name: str) -> int:
    counter = getattr(ctypes.CDLL(str(library())), name)
    counter.restype = ctypes.c_size_t
    value: int = counter()
    return value


@contextlib.contextmanager
def cuda_support() -> Iterator[None]:
    """Let communicators that are created in a with-block use the UCX with CUDA support."""
    ucx.imported()
    before = ucx._messenger
    with (
        mock.patch.object(ucx, "library_path", return_value=str(library())),
        mock.patch.object(ucx, "_messenger", _messenger_of(before)),
    ):
        yield


@functools.cache
def _messenger_of(before: Any) -> Any:
    """Return the function that creates the one messenger of this process, for the UCX with CUDA support."""
    return once_per_process(before.__wrapped__)


def joined(world: un.Communicator, store: str, transports: str = "ucx") -> un.Communicator:
    """Start a new job of the ranks of `world`, which meet at the file `store`; return its communicator."""
    options = un.Options(transports=transports, timeout_s=DEADLINE_S)
    return un.init(options, store=f"file://{store}", rank=world.rank, size=world.size)


def on_double(
    world: un.Communicator, store: str, body: Callable[..., Any], *args: Any, transports: str = "ucx", **double: Any
) -> Any:
    """Start a new job of the ranks of `world`, each with a device double; return ``body(comm, gpu, stream, *args)``."""
    with cuda_support(), device_double(world.rank, **double) as gpu:
        stream = gpu.device().new_stream()
        with joined(world, store, transports) as comm:
            result = body(comm, gpu, stream, *args)
        gc.collect()
        gpu.device().end_stream(stream)
    return result
