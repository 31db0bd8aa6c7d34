"""Compiles kernels by NVRTC, which needs neither a GPU nor a driver: to machine code, or to PTX for newer GPUs.

Machine code for a GPU runs on GPUs of the same major compute capability and an equal or higher minor one. For others
there is PTX, which the driver compiles to machine code when it loads it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.errors import InternalError, TransportUnavailableError
from unisono.foundation.installing import install_command
from unisono.transports.cuda.kernels.catalogue import KERNELS, SHARED, SHARED_HEADERS, Kernel, Macros

_CAPABILITIES = {(8, 0): "80", (9, 0): "90", (10, 0): "100"}
MACHINES = tuple(f"sm_{number}" for number in _CAPABILITIES.values())

# The arithmetic must match the definition, so no product is fused with a sum. Unmarked functions are for the device,
# because the headers shared with processors have no marks. The log reports the resources of a kernel.
OPTIONS = ("-std=c++20", "-fmad=false", "-default-device", "-DUNISONO_ISA=cuda", "--ptxas-options=-v")
_STANDARD = KERNELS / "standard"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of a compilation.

    Attributes:
        code: a cubin, or PTX as text that ends with a zero.
        log: the compiler's messages; for a cubin, with the kernel's registers, stack and spills.
    """

    code: bytes
    log: str


def target_for(capability: tuple[int, int]) -> str:
    """Return the target to compile for: ``sm_…`` for machine code that runs on a GPU, or else ``compute_…`` for PTX.

    Args:
        capability: the GPU's compute capability, major and minor.

    Raises:
        TransportUnavailableError: the GPU is too old.
    """
    older = [supported for supported in _CAPABILITIES if supported <= capability]
    if not older:
        major, minor = capability
        raise TransportUnavailableError(f"GPUs of compute capability {major}.{minor} are too old: 8.0 is needed")
    nearest = max(older)
    return f"{'sm' if nearest[0] == capability[0] else 'compute'}_{_CAPABILITIES[nearest]}"


def is_ptx(target: str) -> bool:
    """Return whether code for `target` is PTX instead of machine code."""
    return target.startswith("compute_")


def compile_kernel(kernel: Kernel, target: str) -> Compiled:
    """Compile `kernel` for `target`, which is a result of `target_for`.

    Raises:
        TransportUnavailableError: NVRTC is not installed; says what to install.
        InternalError: the kernel cannot be compiled; quotes the compiler.
    """
    nvrtc = _nvrtc()
    program = _checked(nvrtc, nvrtc.nvrtcCreateProgram(kernel.source.encode(), f"{kernel.name}.cu".encode(), 0, [], []))
    try:
        folders = (f"-I{folder}" for folder in (KERNELS, _STANDARD, SHARED))
        options = [f"-arch={target}", *OPTIONS, *defines(kernel.macros), *folders]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _fetched(nvrtc, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        messages = log.rstrip(b"\0").decode(errors="replace").strip()
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise InternalError(f"the kernel {kernel.name} cannot be compiled for {target}: {messages or result.name}")
        size, get = (
            (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
            if is_ptx(target)
            else (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        )
        return Compiled(_fetched(nvrtc, size, get, program), messages)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def defines(macros: Macros) -> list[str]:
    """Return the options of a compiler that define the macros of a kernel."""
    return [f"-D{name}={value}" for name, value in macros]


def version() -> tuple[int, int]:
    """Return the CUDA version of NVRTC; raises as `fingerprint` does."""
    nvrtc = _nvrtc()
    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


def fingerprint(kernel: Kernel, target: str) -> str:
    """Return a hash of everything that decides about the compiled code: the sources, the options and the compiler.

    Raises:
        TransportUnavailableError: NVRTC is not installed; says what to install.
    """
    major, minor = version()
    digest = hashlib.sha256()
    sources = kernel.source, *(path.read_text() for path in _files())
    for part in (f"NVRTC {major}.{minor}", target, *OPTIONS, *defines(kernel.macros), *sources):
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()


def _files() -> list[Path]:
    return [*sorted(KERNELS.glob("*.cuh")), *sorted(_STANDARD.iterdir()), *(SHARED / name for name in SHARED_HEADERS)]


def _nvrtc() -> Any:
    """Return the binding of NVRTC, after checking that the library loads."""
    try:
        from cuda import bindings
        from cuda.bindings import nvrtc

        _load_packaged(bindings.__version__.partition(".")[0])
        nvrtc.nvrtcVersion()  # loads the library
    except (ImportError, OSError, RuntimeError) as error:
        why = str(error).partition("\n")[0]
        raise TransportUnavailableError(
            "kernels for GPUs cannot be compiled, because NVRTC was not found in the system and in sys.path "
            f"({why}): {install_command('cuda')}"
        ) from error
    return nvrtc


@functools.cache
def _load_packaged(major: str) -> None:
    """Load NVRTC from packages in any folder of `sys.path`, because the binding looks in folders of `site` only.

    The binding takes a library that is loaded already. It recognises that by its file name, which has the major version
    of CUDA. Old bindings look for the library only once, so it must be loaded before their first call.
    """
    for folder in sys.path:
        for library in Path(folder, "nvidia").glob(f"*/lib/libnvrtc.so.{major}"):
            with contextlib.suppress(OSError):
                # NVRTC opens its builtins by their name alone.
                for needed in (*library.parent.glob(f"libnvrtc-builtins.so.{major}*"), library):
                    ctypes.CDLL(str(needed), ctypes.RTLD_GLOBAL)
                return


def _checked(nvrtc: Any, returned: tuple[Any, ...]) -> Any:
    result, *values = returned
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise InternalError(f"NVRTC failed: {result.name}")
    return values[0] if values else None


def _fetched(nvrtc: Any, size_of: Any, get: Any, program: Any) -> bytes:
    buffer = bytes(_checked(nvrtc, size_of(program)))
    _checked(nvrtc, get(program, buffer))
    return buffer
