"""Shared memory of a fixed size: a memfd that no process can shrink, so that reading it never ends in SIGBUS."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def sealed_memory(name: str, nbytes: int) -> int:
    """Return the descriptor of new memory of `nbytes` zero bytes, whose size is sealed.

    Args:
        name: what /proc shows as its name, for people.
        nbytes: its size.

    Raises:
        OSError: the system refuses it, or does not have so much memory and does not overcommit.
        AttributeError: this Python has no memfd.
    """
    from unisono.transports import _core  # `unisono doctor` also describes surroundings where the core is missing

    memory = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, nbytes)
        _core.reserve_pages(memory, nbytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(memory)
        raise
    return memory
