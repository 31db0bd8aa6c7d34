"""Runs a command for which the kernel refuses system calls, as in sandboxes, on old kernels and in containers.

``python refused_calls.py CALL[,CALL…] ERRNO COMMAND…`` runs the command, and these calls fail with that error.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_REFUSE, _ALLOW = 0x0005_0000, 0x7FFF_0000
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in the kernel's struct seccomp_data
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NO_NEW_PRIVILEGES, _SET_FILTER, _BY_FILTER = 38, 22, 2  # of prctl


class _Call(NamedTuple):
    """A system call: its number on each machine, and a test of one argument if only some arguments are refused."""

    numbers: dict[str, int]
    argument: int = 0
    test: int | None = None
    value: int = 0


_SOCKET, _BIND, _CLONE = {"x86_64": 41, "aarch64": 198}, {"x86_64": 49, "aarch64": 200}, {"x86_64": 56, "aarch64": 220}
_CALLS = {
    "memfd_create": _Call({"x86_64": 319, "aarch64": 279}),
    "pidfd_open": _Call({"x86_64": 434, "aarch64": 434}),
    "process_vm_readv": _Call({"x86_64": 310, "aarch64": 270}),
    "membarrier": _Call({"x86_64": 324, "aarch64": 283}),
    "fallocate": _Call({"x86_64": 285, "aarch64": 47}),
    "eventfd": _Call({"x86_64": 290, "aarch64": 19}),
    "unix_sockets": _Call(_SOCKET, 0, _EQUAL, 1),  # AF_UNIX; pairs of sockets are made by another call
    "names_of_unix_sockets": _Call(_BIND, 2, _GREATER, 28),  # an address that is longer than those of IPv6
    "threads": _Call(_CLONE, 0, _ANY_BIT, 0x0001_0000),  # CLONE_THREAD
}
# glibc prefers clone3 for threads. A filter cannot read its arguments, because they are in memory.
_CLONE3 = 435


def refused(calls: str, error: str) -> list[str]:
    """Return the words that run a command without the system calls `calls` if they stand before the command's words."""
    return [sys.executable, str(Path(__file__).resolve()), calls, error]


def refuse(names: Sequence[str], number: int) -> None:
    """Let system calls fail with the error `number` in this process and in all processes that it starts."""
    machine = os.uname().machine
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_RETURN, 0, 0, _ALLOW)]
    lines.append((_LOAD, 0, 0, _NUMBER))
    if "threads" in names:
        lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _REFUSE | errno.ENOSYS)]
    for name in names:
        call = _CALLS[name]
        refusal = (_RETURN, 0, 0, _REFUSE | number)
        if call.test is None:
            lines += [(_EQUAL, 0, 1, call.numbers[machine]), refusal]
        else:
            lines += [(_EQUAL, 0, 4, call.numbers[machine]), (_LOAD, 0, 0, _ARGUMENTS + 8 * call.argument)]
            lines += [(call.test, 0, 1, call.value), refusal, (_LOAD, 0, 0, _NUMBER)]
    lines.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_FILTER, _BY_FILTER, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


if __name__ == "__main__":
    refuse(sys.argv[1].split(","), getattr(errno, sys.argv[2]))
    os.execvp(sys.argv[3], sys.argv[3:])
