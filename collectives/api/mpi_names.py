"""Advice for programs that come from other libraries: a name of mpi4py or torch.distributed says which call to make.

Python suggests a name by itself only if an error is not caught, and if one letter or so differs. A ``__getattr__``
could handle every name, but it would slow down every call on a communicator.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NoReturn

_BROADCAST = "broadcast(x, root=0) for an array, or broadcast_object(value, root=0)"
_SEND = "send(x, dest, tag, wait=False), which returns a Work"
_RECV = "recv(out, source, tag, wait=False), which returns a Work"
_RANK, _SIZE = "the attribute rank", "the attribute size"

_SAME = ("allreduce", "reduce", "gather", "allgather", "scatter", "alltoall", "scan", "exscan", "barrier")
_OTHERS = ("send", "recv", "sendrecv", "probe", "iprobe", "split", "dup")

# The name in MPI or torch.distributed → the call to make instead.
INSTEAD = {
    **{name.capitalize(): f"{name}()" for name in (*_SAME, *_OTHERS)},
    **{f"I{name}": f"{name}(..., wait=False), which returns a Work" for name in _SAME},
    **{f"{name.capitalize()}v": f"{name}v()" for name in ("gather", "scatter", "allgather", "alltoall")},
    **dict.fromkeys(("Reduce_scatter", "Reduce_scatter_block", "reduce_scatter_tensor"), "reduce_scatter()"),
    "all_reduce": "allreduce()",
    **dict.fromkeys(("all_gather", "all_gather_into_tensor"), "allgather()"),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "alltoall()"),
    "all_gather_object": "allgather_object()",
    "broadcast_object_list": "broadcast_object()",
    "new_group": "subgroup()",
    "bcast": _BROADCAST,
    "Bcast": _BROADCAST,
    "Ibcast": "broadcast(x, root=0, wait=False), which returns a Work",
    "isend": _SEND,
    "Isend": _SEND,
    "irecv": _RECV,
    "Irecv": _RECV,
    **dict.fromkeys(("Get_rank", "get_rank"), _RANK),
    **dict.fromkeys(("Get_size", "get_world_size", "world_size"), _SIZE),
    **dict.fromkeys(("Free", "destroy_process_group"), "close()"),
}


class _Absent:
    """A descriptor that raises `AttributeError` with advice, as if the attribute did not exist."""

    def __init__(self, name: str, instead: str) -> None:
        self._message = f"a communicator has no {name!r}: use {instead}"
        self.__doc__ = f"Not a method here: use {instead}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._message)


class _HidesNames(type):
    """A class of communicators, whose `dir` does not list the names of other libraries."""

    def __dir__(cls) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in INSTEAD]


class MpiNames(metaclass=_HidesNames):
    """The base class of `Communicator` that answers names of other libraries, such as `comm.bcast`, with advice.

    To look up a name of `INSTEAD` raises an `AttributeError` that names the call to make instead. Type checkers and
    `dir` do not list these names.
    """

    __slots__ = ()

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in INSTEAD]


if not TYPE_CHECKING:
    for _name, _instead in INSTEAD.items():
        setattr(MpiNames, _name, _Absent(_name, _instead))
