"""Sets floating-point modes of a thread by the C library, as some libraries do and forget to reset them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

_ON_X86 = platform.machine() == "x86_64"
_libm = ctypes.CDLL("libm.so.6")
# glibc's fenv_t: of x86-64, whose last word is MXCSR, and of aarch64, whose first word is FPCR.
_WORDS, _CONTROL = (8, 7) if _ON_X86 else (2, 0)
_FLUSH_SUBNORMALS = 0x8040 if _ON_X86 else 1 << 24
_UPWARD, _DOWNWARD = (0x800, 0x400) if _ON_X86 else (0x400000, 0x800000)
# `feenableexcept` with this mask lets invalid operations, divisions by zero, and overflows stop the program.
_STOPPING = 1 | 4 | 8 if _ON_X86 else 1 | 2 | 4

MODES = ("flush", "upward", "downward", "stop")


@contextmanager
def mode(name: str) -> Iterator[None]:
    """Let this thread compute in one of `MODES` during a with-block. The mode "default" changes nothing."""
    before = _environment()
    if name == "flush":
        changed = _environment()
        changed[_CONTROL] |= _FLUSH_SUBNORMALS
        _libm.fesetenv(changed)
    elif name == "stop":
        _libm.feclearexcept(_STOPPING)
        _libm.feenableexcept(_STOPPING)
    elif name != "default":
        _libm.fesetround({"upward": _UPWARD, "downward": _DOWNWARD}[name])
    control = _environment()[_CONTROL]
    try:
        yield
        assert _environment()[_CONTROL] & ~0x3F == control & ~0x3F, f"the tested code has changed the mode {name!r}"
    finally:
        _libm.fesetenv(before)


def _environment() -> ctypes.Array[ctypes.c_uint32]:
    environment = (ctypes.c_uint32 * _WORDS)()
    _libm.fegetenv(environment)
    return environment
