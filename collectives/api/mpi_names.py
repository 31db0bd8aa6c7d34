"""Advice for programs that come from mpi4py: MPI's names of methods raise an error that names the call to make.

Python suggests the right name by itself if only the case or one letter differs, as in ``Allreduce`` or ``Split``. The
table below has the other names. A ``__getattr__`` could handle every name, but it would slow down every call on a
communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

_BROADCAST = "broadcast(x, root=0) for an array, or broadcast_object(value, root=0)"
_SEND = "send(x, dest, tag, wait=False), which returns a Work"
_RECV = "recv(out, source, tag, wait=False), which returns a Work"

# The name in MPI → the call to make instead.
INSTEAD = {
    "bcast": _BROADCAST,
    "Bcast": _BROADCAST,
    "Ibcast": "broadcast(x, root=0, wait=False), which returns a Work",
    "isend": _SEND,
    "Isend": _SEND,
    "irecv": _RECV,
    "Irecv": _RECV,
    "Get_rank": "the attribute rank",
    "Get_size": "the attribute size",
    "Free": "close()",
}


class _Absent:
    """A descriptor that raises `AttributeError` with advice, as if the attribute did not exist."""

    def __init__(self, name: str, instead: str) -> None:
        self._message = f"a communicator has no {name!r}: use {instead}"
        self.__doc__ = f"Not a method here: use {instead}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


class MpiNames:
    """The base class of `Communicator` that answers MPI's names of methods, such as `comm.bcast`, with advice.

    To look up a name of `INSTEAD` raises an `AttributeError` that names the call to make instead. Type checkers and
    `dir` of a communicator do not list these names.
    """

    __slots__ = ()

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in INSTEAD]


if not TYPE_CHECKING:
    for _name, _instead in INSTEAD.items():
        setattr(MpiNames, _name, _Absent(_name, _instead))
