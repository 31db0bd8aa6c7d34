"""Compiles kernels for GPUs as libraries for the host and runs them there, with tests/native/cuda_on_host.h."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support.deadlines import DEADLINE_S

from unisono.transports.cuda.kernels.catalogue import KERNELS, MOST_SOURCES, SHARED, Kernel, Macros
from unisono.transports.cuda.kernels.compiler import defines

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda_on_host"
COMPILER = os.environ.get("CXX", "c++")
TIMEOUT_S = 240
# The sanitizer ends the process at a misaligned access, because a GPU does not allow it, and the host's processor does.
OPTIONS = (
    *("-std=c++20", "-shared", "-fPIC", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-DUNISONO_ISA=cuda"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    *("-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"),
    *(f"-I{KERNELS}", f"-I{SHARED}", f"-I{ROOT / 'tests' / 'native'}"),
)

Run = Callable[..., None]


@functools.cache
def compiled(kernels: tuple[Kernel, ...], *options: str) -> dict[str, Run]:
    """Return the kernels by name, as functions of the number of blocks and of arguments, as ctypes objects."""
    libraries = [ctypes.CDLL(str(path)) for path in libraries_of(kernels, *options)]
    functions = {kernel.name: f"{kernel.name}_on_host" for kernel in kernels}
    return {
        name: functools.partial(_run, getattr(library, function))
        for name, function in functions.items()
        for library in libraries
        if hasattr(library, function)
    }


def libraries_of(kernels: Sequence[Kernel], *options: str) -> list[Path]:
    """Return libraries that export each kernel as the function ``<name>_on_host``, one for each set of macros."""
    of_macros: dict[Macros, list[str]] = {}
    for kernel in kernels:
        of_macros.setdefault(kernel.macros, []).append(f"{kernel.source}UNISONO_ON_HOST({kernel.name})\n")
    return [
        built_library("".join(sources), (COMPILER, *OPTIONS, *defines(macros), *options), BUILT)
        for macros, sources in of_macros.items()
    ]


def _run(function: Any, blocks: int, *arguments: Any) -> None:
    function(blocks, (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments)))


def built_library(source: str, command: Sequence[str], folder: Path) -> Path:
    """Compile `source` by the compiler's `command` into `folder`, and return the library.

    The library's name is a hash of the command, the compiler's version, and all sources and headers. So a library that
    exists is returned without compiling it again.
    """
    library = folder / f"{_hash(source, command)}.so"
    folder.mkdir(parents=True, exist_ok=True)
    # The lock lets only one of several concurrent tests compile the library.
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(source, command, library)
    return library


def _compile(source: str, command: Sequence[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        text, output = Path(folder, "source.cpp"), Path(folder, "output.so")
        text.write_text(source)
        compiler = subprocess.run(
            [*command, "-o", output, text], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert compiler.returncode == 0, compiler.stderr
        output.rename(library)


def _hash(source: str, command: Sequence[str]) -> str:
    version = subprocess.run(
        [COMPILER, "--version"], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    ).stdout
    files = [
        *sorted(KERNELS.glob("*.cuh")),
        *sorted(SHARED.glob("*.h")),
        *sorted((ROOT / "tests/native").glob("cuda*.h")),
    ]
    parts = [source, *command, version, *(path.read_text() for path in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def addresses(arrays: Sequence[Any]) -> Any:
    """Return the addresses of arrays as one argument of a kernel."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def reduce(run: Run, blocks: int, dst: Any, sources: Sequence[Any], divisor: int) -> None:
    """Run a kernel of a reduction. More than `MOST_SOURCES` sources are passed by a table of their addresses."""
    count, divisor_argument = ctypes.c_uint64(dst.size), ctypes.c_uint64(divisor)
    pointers = addresses(sources)
    if len(sources) <= MOST_SOURCES:
        run(blocks, address(dst), pointers, count, divisor_argument)
    else:
        table = ctypes.c_void_p(ctypes.addressof(pointers))
        run(blocks, address(dst), table, ctypes.c_uint64(len(sources)), count, divisor_argument)


def address(array: Any) -> Any:
    """Return the address of an array as an argument of a kernel."""
    return ctypes.c_void_p(array.ctypes.data)
