"""What was compiled once is kept on disk, by a hash of everything that it was made of.

Processes may share a folder: a file appears in it as a whole, and one that is there is never changed.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from unisono.transports.cuda.compiler import compile_kernel, fingerprint, is_ptx
from unisono.transports.cuda.kernel_catalogue import Kernel


def user_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user for compiled kernels: in ``XDG_CACHE_HOME``, by default ``~/.cache``.

    >>> user_cache({"XDG_CACHE_HOME": "/var/cache/me"}).as_posix()
    '/var/cache/me/unisono/cuda'
    """
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    # What is not absolute is to be ignored, says the XDG specification.
    return (named if named.is_absolute() else Path.home() / ".cache") / "unisono" / "cuda"


def built(kernel: Kernel, target: str, folder: Path) -> bytes:
    """Return `kernel` compiled for `target`, from `folder` if it is there, and keep it there otherwise.

    A folder that cannot be written to costs time but is no error.

    Raises:
        TransportUnavailableError: NVRTC is not installed; says what to install.
        InternalError: the kernel cannot be compiled.
    """
    suffix = "ptx" if is_ptx(target) else "cubin"
    kept = folder / f"{kernel.name}-{target}-{fingerprint(kernel, target)[:32]}.{suffix}"
    try:
        return kept.read_bytes()
    except OSError:
        code = compile_kernel(kernel, target).code
    with contextlib.suppress(OSError):
        _keep(code, kept)
    return code


def _keep(code: bytes, path: Path) -> None:
    """Make the file `path`; others see all of it or nothing."""
    # Nobody else may put code here that this user would run.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, made = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        os.replace(made, path)
    except BaseException:
        os.unlink(made)
        raise
