"""`Intercomm`: communicators between two groups. All messages travel over a *bridge*, a communicator of both groups."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.constants import PROC_NULL, ROOT, UNDEFINED
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.world import own_number
from unisono.compat.mpi4py.calls import collectives
from unisono.compat.mpi4py.calls.messages import Port
from unisono.compat.mpi4py.calls.ready import Native, bytes_block
from unisono.compat.mpi4py.communicators.comm import CLASSES, Comm, CommState, Intracomm, add_collective
from unisono.compat.mpi4py.memory.buffers import Block, simple, vector, vector_w
from unisono.compat.mpi4py.values.group import Group
from unisono.compat.mpi4py.values.op import SUM, combine, function_of, op_of
from unisono.transports.contracts.executor import Message

# The kind of intercommunicators in `CLASSES`.
_INTER = -1


class _Bridged(CommState):
    """An intercommunicator.

    Attributes:
        remote: the numbers of the ranks of the other group.
        bridge: the communicator of both groups.
    """

    kind = _INTER

    def __init__(self, local: Sequence[int], remote: Sequence[int]) -> None:
        if set(local) & set(remote):
            raise fail("ERR_COMM", "the two groups of an intercommunicator have a process in common")
        super().__init__(local)
        self.remote: tuple[int, ...] = tuple(remote)
        first, second = sorted((tuple(local), tuple(remote)))
        self.bridge = CommState((*first, *second))

    @property
    def peers(self) -> int:
        return len(self.remote)

    def messages(self, *, for_objects: bool) -> Any:
        return _Across(self, self.bridge.messages(for_objects=for_objects))

    def duplicate(self) -> CommState:
        return _Bridged(self.members, self.remote)

    def created(self, members: Sequence[int]) -> CommState | None:
        remote = _told(self, tuple(members))[0]
        return _Bridged(members, remote) if own_number() in members and remote else None

    def split(self, color: int, key: int) -> CommState | None:
        everything = self.bridge.native.allgather_object((color, key))
        told = dict(zip(self.bridge.members, everything, strict=True))
        mine, theirs = (
            sorted((member for member in members if told[member][0] == color), key=lambda member: told[member][1])
            for members in (self.members, self.remote)
        )
        return _Bridged(mine, theirs) if color != UNDEFINED and theirs else None

    def release(self) -> None:
        super().release()
        self.bridge.release()


def _place(state: Any, remote_rank: int) -> int:
    """Return the rank in the bridge of a rank of the other group."""
    return int(state.bridge.members.index(state.remote[remote_rank]))


class _Across:
    """The messages between the two groups, as a `Port`; ranks are those of the other group."""

    def __init__(self, state: _Bridged, port: Port) -> None:
        self._state, self._port = state, port
        self.limit_s = port.limit_s

    def _named(self, message: Message | None) -> Message | None:
        if message is None:
            return None
        source = self._state.remote.index(self._state.bridge.members[message.source])
        return Message(source, message.tag, message.dtype, message.count)

    def _source(self, source: int | None) -> int | None:
        return None if source is None else _place(self._state, source)

    def send(self, array: Any, dest: int, tag: int, **how: bool) -> Any:
        return self._port.send(array, _place(self._state, dest), tag, **how)

    def receive(self, array: Any, source: int | None, tag: int | None, *, in_background: bool = False) -> Any:
        return _Arriving(self, self._port.receive(array, self._source(source), tag, in_background=in_background))

    def probe(self, source: int | None, tag: int | None, *, once: bool) -> Message | None:
        return self._named(self._port.probe(self._source(source), tag, once=once))

    def take(self, source: int | None, tag: int | None, *, once: bool = False) -> Any:
        found = self._port.take(self._source(source), tag, once=once)
        return None if found is None else (self._named(found[0]), found[1])


class _Arriving:
    """A receive, whose message names the rank in the other group."""

    def __init__(self, across: _Across, operation: Any) -> None:
        self._across, self._operation = across, operation
        self.ended, self.wait, self.cancel = operation.ended, operation.wait, operation.cancel

    def message(self) -> Message | None:
        return self._across._named(self._operation.message())


@translating
def _joined(self: Any, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
    """Return a communicator to another group, whose leader is a rank of `peer_comm`."""
    state = self._live
    if not 0 <= local_leader < state.size:
        raise fail("ERR_RANK", f"the leader {local_leader} is not a rank of the communicator")
    remote = None
    if state.rank == local_leader:
        remote = peer_comm.sendrecv(state.members, remote_leader, tag, None, remote_leader, tag)
    return Intercomm._of(_Bridged(state.members, self.bcast(remote, local_leader)))


def _told(state: Any, obj: Any) -> list[Any]:
    """Return the objects of the ranks of the other group; all ranks of both call it."""
    everything = state.bridge.native.allgather_object(obj)
    return [everything[_place(state, rank)] for rank in range(len(state.remote))]


class Intercomm(Comm):
    """A communicator between two groups."""

    __slots__ = ()

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        return state.remote is not None

    @classmethod
    def Create_from_groups(
        cls,
        local_group: Any,
        local_leader: int,
        remote_group: Any,
        remote_leader: int,
        stringtag: str = "org.mpi4py",
        info: Any = None,
        errhandler: Any = None,
    ) -> Any:
        """Return the communicator between two groups. All of their members call it."""
        return cls._of(_Bridged(local_group._live.members, remote_group._live.members))

    def Get_remote_group(self) -> Any:
        """Return the group of the other ranks."""
        return Group._with(self._live.remote)

    def Get_remote_size(self) -> int:
        """Return the number of the other ranks."""
        return len(self._live.remote)

    remote_group = property(Get_remote_group, doc="The group of the other ranks.")
    remote_size = property(Get_remote_size, doc="The number of the other ranks.")

    @translating
    def Merge(self, high: bool = False) -> Any:
        """Return a communicator of both groups; the group that passes `high` is behind the other one."""
        state = self._live
        theirs = bool(_told(state, bool(high))[0])
        is_first = state.bridge.members[0] in state.members if theirs == bool(high) else not high
        members = (*state.members, *state.remote) if is_first else (*state.remote, *state.members)
        return Intracomm._of(CommState(members))

    def _collective(self, name: str) -> Any:
        return _Sides(self._live)

    def _rooted(self, root: int) -> Any:
        """Return the state; raises `Exception` if there is no such root."""
        if root not in {ROOT, PROC_NULL} and not 0 <= root < len(self._live.remote):
            raise fail("ERR_ROOT", f"root {root} is not a rank of the other group")
        return self._state

    @translating
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the root, which is in the other group."""
        told = _told(self._rooted(root), obj if root == ROOT else None)
        return told[root] if root >= 0 else None

    @translating
    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return the objects of the other group on the root."""
        told = _told(self._rooted(root), sendobj if root >= 0 else None)
        return told if root == ROOT else None

    @translating
    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of a list of the root, which is in the other group."""
        told = _told(self._rooted(root), list(sendobj) if root == ROOT else None)
        return told[root][self._live.rank] if root >= 0 else None

    @translating
    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of the other group."""
        return _told(self._live, sendobj)

    @translating
    def alltoall(self, sendobj: Any) -> list[Any]:
        """Send each rank of the other group an object, and return those from there."""
        state = self._live
        items = [None] * len(state.remote) if sendobj is None else list(sendobj)
        if len(items) != len(state.remote):
            raise ValueError(f"expecting {len(state.remote)} items, got {len(items)}")
        return [objects[state.rank] for objects in _told(state, items)]

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return the combination of the objects of the other group on the root."""
        function, objects = function_of(op), self.gather(sendobj, root)
        return None if objects is None else functools.reduce(function, objects)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the combination of the objects of the other group."""
        return functools.reduce(function_of(op), self.allgather(sendobj))


class _Sides:
    """The state of an intercommunicator as collectives use it.

    Attributes:
        is_inter: always True; each function of `_CALLS` is for such a state.
    """

    def __init__(self, state: Any) -> None:
        self.state, self.rank, self.remote_size = state, state.rank, len(state.remote)
        self.places = [_place(state, rank) for rank in range(self.remote_size)]

    def exchange(self, sends: Any, receives: Any, finish: Any = lambda: None) -> Any:
        """Return an exchange with ranks of the other group."""
        where = self.places
        return self.state.bridge.exchange(
            [(where[rank], block) for rank, block in sends],
            [(where[rank], block) for rank, block in receives],
            finish,
        )

    def everyone(self, block: Block) -> list[tuple[int, Block]]:
        """Return pairs of each rank of the other group and the block."""
        return [(rank, block) for rank in range(self.remote_size)]

    def shares(self, block: Block) -> list[tuple[int, Block]]:
        """Return pairs of each rank of the other group and its share of a block."""
        return [(rank, block.part(rank * block.count, block.count)) for rank in range(self.remote_size)]


def _rooted(on_root: Any, elsewhere: Any) -> Any:
    """Return a call with a root, from the functions for the root and for the ranks of the other group."""

    def call(side: Any, *args: Any, root: int = 0, **kwargs: Any) -> Any:
        if root == PROC_NULL:
            return side.exchange([], [])
        if root == ROOT:
            return on_root(side, *args, **kwargs)
        if not 0 <= root < side.remote_size:
            raise fail("ERR_ROOT", f"root {root} is not a rank of the other group")
        return elsewhere(side, root, *args, **kwargs)

    return call


def _root_last(call: Any, buffers: int) -> Any:
    """Return a call whose root, and op before it, may be passed by position."""

    def positional(side: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > buffers:
            kwargs["root"] = args[-1]
            args = args[:-1]
        return call(side, *args, **kwargs)

    return positional


def _fold(side: Any, source: Block, op: Any, take: Any, *, sends: bool, receives: bool) -> Any:
    """Return the exchange that receives the elements of the other group and takes their combination."""
    operation = op_of(op)
    arriving = [np.empty(source.nbytes, np.uint8) for _ in range(side.remote_size * receives)]

    def finish() -> None:
        parts = [each.view(source.layout.dtype or np.uint8) for each in arriving]
        if parts:
            take(functools.reduce(lambda left, right: combine(operation, left, right, source), parts))

    receiving = [(rank, bytes_block(each)) for rank, each in enumerate(arriving)]
    return side.exchange(side.everyone(source) if sends else [], receiving, finish)


def _barrier(side: Any) -> Any:
    return Native(side.state.bridge.native.barrier, (), {})


def _allgather(side: Any, sendbuf: Any, recvbuf: Any) -> Any:
    target = simple(recvbuf, writable=True, blocks=side.remote_size)
    return side.exchange(side.everyone(simple(sendbuf)), side.shares(target))


def _allgatherv(side: Any, sendbuf: Any, recvbuf: Any) -> Any:
    targets = vector(recvbuf, side.remote_size, writable=True)
    return side.exchange(side.everyone(simple(sendbuf)), list(enumerate(targets)))


def _alltoall(side: Any, sendbuf: Any, recvbuf: Any) -> Any:
    target = simple(recvbuf, writable=True, blocks=side.remote_size)
    return side.exchange(side.shares(simple(sendbuf, blocks=side.remote_size)), side.shares(target))


def _alltoallv(side: Any, sendbuf: Any, recvbuf: Any) -> Any:
    targets = vector(recvbuf, side.remote_size, writable=True)
    return side.exchange(list(enumerate(vector(sendbuf, side.remote_size))), list(enumerate(targets)))


def _alltoallw(side: Any, sendbuf: Any, recvbuf: Any) -> Any:
    targets = vector_w(recvbuf, side.remote_size, writable=True)
    return side.exchange(list(enumerate(vector_w(sendbuf, side.remote_size))), list(enumerate(targets)))


def _allreduce(side: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    target = simple(recvbuf, writable=True)
    return _fold(side, simple(sendbuf), op, target.store_elements, sends=True, receives=True)


def _reduce_on_root(side: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    target = simple(recvbuf, writable=True)
    return _fold(side, target, op, target.store_elements, sends=False, receives=True)


def _reduce_scatter(side: Any, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM) -> Any:
    source, target = simple(sendbuf), simple(recvbuf, writable=True)
    if recvcounts is None:
        recvcounts = [int(count) for count in side.state.native.allgather_object(target.count)]
    start = sum(recvcounts[: side.rank])
    target = target.part(0, recvcounts[side.rank])

    def take(result: Any) -> None:
        target.store_elements(result[start : start + target.count])

    whole = Block(source.memory, source.layout, sum(recvcounts), source.origin)
    operation = op_of(op)
    arriving = [np.empty(whole.nbytes, np.uint8) for _ in range(side.remote_size)]

    def finish() -> None:
        parts = [each.view(source.layout.dtype or np.uint8) for each in arriving]
        take(functools.reduce(lambda left, right: combine(operation, left, right, source), parts))

    receiving = [(rank, bytes_block(each)) for rank, each in enumerate(arriving)]
    return side.exchange(side.everyone(source), receiving, finish)


def _reduce_scatter_block(side: Any, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Any:
    count = simple(recvbuf, writable=True).count
    return _reduce_scatter(side, sendbuf, recvbuf, [count] * side.state.size, op)


_ROOTED = {
    "Bcast": (
        lambda side, buf: side.exchange(side.everyone(simple(buf)), []),
        lambda side, root, buf: side.exchange([], [(root, simple(buf, writable=True))]),
        1,
    ),
    "Gather": (
        lambda side, send, recv: side.exchange([], side.shares(simple(recv, writable=True, blocks=side.remote_size))),
        lambda side, root, send, recv: side.exchange([(root, simple(send))], []),
        2,
    ),
    "Gatherv": (
        lambda side, send, recv: side.exchange([], list(enumerate(vector(recv, side.remote_size, writable=True)))),
        lambda side, root, send, recv: side.exchange([(root, simple(send))], []),
        2,
    ),
    "Scatter": (
        lambda side, send, recv: side.exchange(side.shares(simple(send, blocks=side.remote_size)), []),
        lambda side, root, send, recv: side.exchange([], [(root, simple(recv, writable=True))]),
        2,
    ),
    "Scatterv": (
        lambda side, send, recv: side.exchange(list(enumerate(vector(send, side.remote_size))), []),
        lambda side, root, send, recv: side.exchange([], [(root, simple(recv, writable=True))]),
        2,
    ),
    "Reduce": (
        _reduce_on_root,
        lambda side, root, send, recv, op=SUM: side.exchange([(root, simple(send))], []),
        3,
    ),
}
_CALLS: dict[str, Any] = {
    "Barrier": _barrier,
    "Allgather": _allgather,
    "Allgatherv": _allgatherv,
    "Alltoall": _alltoall,
    "Alltoallv": _alltoallv,
    "Alltoallw": _alltoallw,
    "Allreduce": _allreduce,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
    **{name: _root_last(_rooted(on_root, away), count) for name, (on_root, away, count) in _ROOTED.items()},
}


def _no_parent() -> Intercomm:
    """Return the communicator to the processes that spawned this one: null, because nothing is spawned."""
    return Intercomm()


for _name, _call in _CALLS.items():
    _call.__doc__ = f"{(collectives.ARGUMENTS[_name].__doc__ or '').rstrip('.')}, between the two groups."
    add_collective(Intercomm, _name, _call)
CLASSES[_INTER] = Intercomm
Comm.Get_parent = staticmethod(_no_parent)  # type: ignore[attr-defined]
_joined.__name__ = _joined.__qualname__ = "Create_intercomm"
Intracomm.Create_intercomm = _joined  # type: ignore[attr-defined]
