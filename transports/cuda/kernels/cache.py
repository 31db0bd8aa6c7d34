"""The cache of compiled kernels on disk. A file's name has a hash of everything that decides about its content.

Processes may share the folder: a file appears in it as a whole, and never changes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from unisono.transports.cuda.kernels.catalogue import Kernel
from unisono.transports.cuda.kernels.compiler import compile_kernel, fingerprint, is_ptx
from unisono.transports.host.whole_file import whole_file


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of this user for compiled kernels: in ``XDG_CACHE_HOME``, by default ``~/.cache``.

    It is None if the user has no home, such as the random user of a container: nothing is kept then.

    >>> user_cache({"XDG_CACHE_HOME": "/var/cache/me"}).as_posix()
    '/var/cache/me/unisono/cuda'
    """
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says that relative paths must be ignored.
    try:
        cache = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor the system's users say
        return None
    return cache / "unisono" / "cuda"


def built(kernel: Kernel, target: str, folder: Path | None) -> bytes:
    """Return `kernel` compiled for `target`, from `folder` if it is there. Otherwise compile it and store it there.

    Without a folder, or if it is not writable, that costs time but is no error.

    Raises:
        TransportUnavailableError: NVRTC is not installed; says what to install.
        InternalError: the kernel cannot be compiled.
    """
    if folder is None:
        return compile_kernel(kernel, target).code
    suffix = "ptx" if is_ptx(target) else "cubin"
    cached = folder / f"{kernel.name}-{target}-{fingerprint(kernel, target)[:32]}.{suffix}"
    try:
        return cached.read_bytes()
    except OSError:
        code = compile_kernel(kernel, target).code
    with contextlib.suppress(OSError):
        _store(code, cached)
    return code


def _store(code: bytes, path: Path) -> None:
    """Create the file `path`, so that other processes see all of it or nothing."""
    # Other users may not put code here, because this user would run it.
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with whole_file(path, "wb") as file:
        file.write(code)
