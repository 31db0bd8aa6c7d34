"""Kernels for GPUs, compiled for the host and run there: see tests/native/cuda_on_host.h."""

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

from unisono.transports.cuda.kernel_catalogue import KERNELS, MOST_SOURCES, SHARED, Kernel

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "cuda_on_host"
COMPILER = os.environ.get("CXX", "c++")
TIMEOUT_S = 240
# Accesses that are not aligned, which processors allow and GPUs do not, end the process.
OPTIONS = (
    *("-std=c++20", "-shared", "-fPIC", "-O0", "-ffp-contract=off", "-fno-strict-aliasing", "-DUNISONO_ISA=cuda"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-function"),
    *("-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"),
    *(f"-I{KERNELS}", f"-I{SHARED}", f"-I{ROOT / 'tests' / 'native'}"),
)

Run = Callable[..., None]


@functools.cache
def compiled(kernels: tuple[Kernel, ...], *options: str) -> dict[str, Run]:
    """Return the kernels by name, as functions of the number of blocks and of the arguments, which are ctypes objects.

    Libraries stay in `build/`, by a hash of everything that they are made of.
    """
    library = ctypes.CDLL(str(library_of(kernels, *options)))
    return {kernel.name: functools.partial(_run, getattr(library, f"{kernel.name}_on_host")) for kernel in kernels}


def library_of(kernels: Sequence[Kernel], *options: str) -> Path:
    """Return the library that has each kernel as a function of the name with ``_on_host`` behind it."""
    source = "".join(f"{kernel.source}UNISONO_ON_HOST({kernel.name})\n" for kernel in kernels)
    return built(source, (COMPILER, *OPTIONS, *options), BUILT)


def _run(function: Any, blocks: int, *arguments: Any) -> None:
    function(blocks, (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments)))


def built(source: str, command: Sequence[str], folder: Path) -> Path:
    """Return the library that a compiler's `command` makes of `source`, in `folder`, if it is not there."""
    found = folder / f"{_hash(source, command)}.so"
    folder.mkdir(parents=True, exist_ok=True)
    # Tests that run at the same time compile it once.
    with found.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            _compile(source, command, found)
    return found


def _compile(source: str, command: Sequence[str], found: Path) -> None:
    with tempfile.TemporaryDirectory(dir=found.parent) as folder:
        text, made = Path(folder, "source.cpp"), Path(folder, "made.so")
        text.write_text(source)
        ended = subprocess.run(
            [*command, "-o", made, text], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert ended.returncode == 0, ended.stderr
        made.rename(found)


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
    """Return the addresses of arrays as kernels take them as one argument."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))


def reduce(run: Run, blocks: int, dst: Any, sources: Sequence[Any], divisor: int) -> None:
    """Run a reduction by the kernel for as many sources as there are."""
    count, by = ctypes.c_uint64(dst.size), ctypes.c_uint64(divisor)
    pointers = addresses(sources)
    if len(sources) <= MOST_SOURCES:
        run(blocks, address(dst), pointers, count, by)
    else:
        table = ctypes.c_void_p(ctypes.addressof(pointers))
        run(blocks, address(dst), table, ctypes.c_uint64(len(sources)), count, by)


def address(array: Any) -> Any:
    """Return the address of an array as kernels take it."""
    return ctypes.c_void_p(array.ctypes.data)
