"""A job over UCX that knows CUDA: see tests/native/cuda_ucx.cpp."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support.cuda_on_host import COMPILER, ROOT, built
from support.deadlines import DEADLINE_S

import unisono as un
from unisono.testing.device_arrays import device_double
from unisono.transports.ucx import library as ucx

SOURCE = ROOT / "tests" / "native" / "cuda_ucx.cpp"
BUILT = ROOT / "build" / "cuda_ucx"
OPTIONS = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")


@functools.cache
def library() -> Path:
    """Return the library that stands before the one that a package of UCX has loaded."""
    real = Path(ucx.library_path())
    include = next(folder for folder in (real.parents[1] / "include", real.parents[2] / "include") if folder.is_dir())
    link = (f"-Wl,--no-as-needed,-rpath,{real.parent}", f"-L{real.parent}", "-l:libucp.so.0")
    # The source stands before what it is linked with.
    return built(SOURCE.read_text(), (COMPILER, *OPTIONS, f"-I{include}", *link), BUILT)


def counted() -> tuple[int, int]:
    """Return the bytes of device memory that this process has given UCX to send and to receive."""
    return _counter("cuda_nbytes_sent"), _counter("cuda_nbytes_received")


def entries() -> tuple[int, int]:
    """Return how often UCX has been entered since it has got device memory, and how often without a context of CUDA."""
    return _counter("cuda_entries"), _counter("cuda_entries_without_context")


def _counter(name: str) -> int:
    counter = getattr(ctypes.CDLL(str(library())), name)
    counter.restype = ctypes.c_size_t
    found: int = counter()
    return found


@contextlib.contextmanager
def known() -> Iterator[None]:
    """Let UCX know CUDA for communicators that are made in a with-block."""
    ucx.imported()
    before = ucx._messenger
    with (
        mock.patch.object(ucx, "library_path", return_value=str(library())),
        mock.patch.object(ucx, "_messenger", _messenger_of(before)),
    ):
        yield


@functools.cache
def _messenger_of(before: Any) -> Any:
    """Return what makes the one messenger of this process by that library."""
    return functools.cache(before.__wrapped__)


def joined(world: un.Communicator, store: str, transports: str = "ucx") -> un.Communicator:
    """Return the communicator of the ranks of `world` in a job of their own."""
    options = un.Options(transports=transports, timeout_s=DEADLINE_S)
    return un.init(options, store=f"file://{store}", rank=world.rank, size=world.size)


def on_double(
    world: un.Communicator, store: str, body: Callable[..., Any], *args: Any, transports: str = "ucx", **double: Any
) -> Any:
    """Return ``body(comm, gpu, stream, *args)`` on the ranks of `world` in a job of their own, each with a double."""
    with known(), device_double(world.rank, **double) as gpu:
        stream = gpu.device().new_stream()
        with joined(world, store, transports) as comm:
            result = body(comm, gpu, stream, *args)
        gc.collect()
        gpu.device().end_stream(stream)
    return result
