"""`Intercomm`: communicators between two groups.

All messages travel over a *bridge*, a communicator of both groups, in which one group lies behind the other. A
collective on buffers is one `alltoallw` of the bridge, in which each rank has blocks for ranks of the other group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.compat.mpi4py.base.arguments import whole_arguments, whole_numbers
from unisono.compat.mpi4py.base.constants import PROC_NULL, ROOT, UNDEFINED
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.world import Universe, own_number, own_universe
from unisono.compat.mpi4py.calls import collectives
from unisono.compat.mpi4py.calls.ready import Native
from unisono.compat.mpi4py.communicators.comm import CLASSES, Comm, CommState, Intracomm, add_collective
from unisono.compat.mpi4py.memory.buffers import Block, no_store, simple, vector, vector_w
from unisono.compat.mpi4py.memory.datatype import BYTE
from unisono.compat.mpi4py.values.group import Group
from unisono.compat.mpi4py.values.op import SUM, check_operation, combine, function_of, op_of
from unisono.compat.mpi4py.values.pickles import pickle

# The kind of intercommunicators in `CLASSES`.
_INTER = -1
# Pairs of a rank of the other group and a block.
_Blocks = Sequence[tuple[int, Block]]


class BridgedState(CommState):
    """An intercommunicator.

    Attributes:
        remote: the numbers of the ranks of the other group.
        bridge: the communicator of both groups.
        places: the rank in the bridge of each rank of the other group.
    """

    kind = _INTER

    def __init__(self, local: Sequence[int], remote: Sequence[int], universe: Universe | None = None) -> None:
        if set(local) & set(remote):
            raise fail("ERR_COMM", "the two groups of an intercommunicator have a process in common")
        super().__init__(local, universe)
        self.remote: tuple[int, ...] = tuple(remote)
        first, second = sorted((self.members, self.remote), key=self.universe.ranks)
        self.bridge = CommState((*first, *second), universe)
        self.places = [self.bridge.members.index(member) for member in remote]

    @property
    def peers(self) -> int:
        return len(self.remote)

    @property
    def paths(self) -> tuple[Communicator, Sequence[int]]:
        return self.bridge.native, self.places

    def duplicate(self) -> CommState:
        return BridgedState(self.members, self.remote, self.universe)

    def created(self, members: Sequence[int]) -> CommState | None:
        ranks = self.told(self.universe.ranks(members))[0]
        remote = [self.universe.numbers[rank] for rank in ranks]
        return BridgedState(members, remote, self.universe) if own_number() in members and remote else None

    def split(self, color: int, key: int) -> CommState | None:
        everything = self.bridge.native.allgather_object((color, key))
        told = dict(zip(self.bridge.members, everything, strict=True))
        mine, theirs = (
            sorted((member for member in members if told[member][0] == color), key=lambda member: told[member][1])
            for members in (self.members, self.remote)
        )
        return BridgedState(mine, theirs, self.universe) if color != UNDEFINED and theirs else None

    def release(self) -> None:
        super().release()
        self.bridge.release()

    def told(self, obj: Any) -> list[Any]:
        """Return the objects of the ranks of the other group; all ranks of both call it."""
        everything = self.bridge.native.allgather_object(pickle.dumps(obj))
        return [pickle.loads(everything[place]) for place in self.places]

    def exchange(self, sends: _Blocks, receives: _Blocks, finish: Callable[[], None] = no_store) -> Native:
        """Return the call that sends blocks to ranks of the other group, and receives blocks from there."""
        x: list[Any] = [None] * self.bridge.size
        out: list[Any] = [None] * self.bridge.size
        arriving = [(rank, block, block.target()) for rank, block in receives if block.nbytes]
        for rank, block in sends:
            x[self.places[rank]] = block.array() if block.nbytes else None
        for rank, _, array in arriving:
            out[self.places[rank]] = array

        def store() -> None:
            for _, block, array in arriving:
                block.store(array)
            finish()

        return Native(self.bridge.native.alltoallw, (x, out), {}, store)

    def everyone(self, block: Block) -> _Blocks:
        """Return pairs of each rank of the other group and the block."""
        return [(rank, block) for rank in range(self.peers)]


@whole_arguments
@translating
def _joined(self: Any, local_leader: int, peer_comm: Any, remote_leader: int, tag: int = 0) -> Any:
    """Return a communicator to another group, whose leader is a rank of `peer_comm`. All are processes of this job."""
    state = self._live
    if not 0 <= local_leader < state.size:
        raise fail("ERR_RANK", f"the leader {local_leader} is not a rank of the communicator")
    remote = None
    if state.rank == local_leader:
        remote = peer_comm.sendrecv(own_universe().ranks(state.members), remote_leader, tag, None, remote_leader, tag)
    return Intercomm._of(BridgedState(state.members, self.bcast(remote, local_leader)))


@whole_numbers
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
        return cls._of(BridgedState(local_group._live.members, remote_group._live.members))

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
        theirs = bool(state.told(bool(high))[0])
        is_first = state.bridge.members[0] in state.members if theirs == bool(high) else not high
        members = (*state.members, *state.remote) if is_first else (*state.remote, *state.members)
        return Intracomm._of(CommState(members, state.universe))

    def _rooted(self, root: int) -> Any:
        """Return the state; raises `Exception` if there is no such root."""
        return _checked(self._live, root)

    @translating
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the root, which is in the other group."""
        told = self._rooted(root).told(obj if root == ROOT else None)
        return told[root] if root >= 0 else None

    @translating
    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return the objects of the other group on the root."""
        told = self._rooted(root).told(sendobj if root >= 0 else None)
        return told if root == ROOT else None

    @translating
    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of a list of the root, which is in the other group."""
        told = self._rooted(root).told(list(sendobj) if root == ROOT else None)
        return told[root][self._live.rank] if root >= 0 else None

    @translating
    def allgather(self, sendobj: Any) -> Any:
        """Return the objects of the other group."""
        return self._live.told(sendobj)

    @translating
    def alltoall(self, sendobj: Any) -> list[Any]:
        """Send each rank of the other group an object, and return those from there."""
        state = self._live
        items = [None] * state.peers if sendobj is None else list(sendobj)
        if len(items) != state.peers:
            raise ValueError(f"expecting {state.peers} items, got {len(items)}")
        return [objects[state.rank] for objects in state.told(items)]

    def reduce(self, sendobj: Any, op: Any = SUM, root: int = 0) -> Any:
        """Return the combination of the objects of the other group on the root."""
        function, objects = function_of(op), self.gather(sendobj, root)
        return None if objects is None else functools.reduce(function, objects)

    def allreduce(self, sendobj: Any, op: Any = SUM) -> Any:
        """Return the combination of the objects of the other group."""
        return functools.reduce(function_of(op), self.allgather(sendobj))


# The collectives on buffers. A function of blocks turns a specification into pairs of a rank and its block.


def _shares(state: BridgedState, spec: Any, *, writable: bool = False) -> _Blocks:
    block = simple(spec, writable=writable, blocks=state.peers)
    return [(rank, block.part(rank * block.count, block.count)) for rank in range(state.peers)]


def _parts(state: BridgedState, spec: Any, *, writable: bool = False) -> _Blocks:
    return list(enumerate(vector(spec, state.peers, writable=writable)))


def _parts_w(state: BridgedState, spec: Any, *, writable: bool = False) -> _Blocks:
    return list(enumerate(vector_w(spec, state.peers, writable=writable)))


def _checked(state: BridgedState, root: int) -> BridgedState:
    if root not in {ROOT, PROC_NULL} and not 0 <= root < state.peers:
        raise fail("ERR_ROOT", f"root {root} is not a rank of the other group")
    return state


def _rooted(state: BridgedState, root: int, on_root: Callable[[], Any], elsewhere: Callable[[], Any]) -> Native:
    """Return the exchange of a call with a root; both functions return the arguments of `exchange`."""
    if root == PROC_NULL:
        return state.exchange([], [])
    return _checked(state, root).exchange(*(on_root() if root == ROOT else elsewhere()))


def _barrier(state: BridgedState) -> Native:
    return Native(state.bridge.native.barrier, (), {})


def _bcast(state: BridgedState, buf: Any, root: int = 0) -> Native:
    return _rooted(
        state, root,
        lambda: (state.everyone(simple(buf)), []),
        lambda: ([], [(root, simple(buf, writable=True))]),
    )  # fmt: skip


def _gathering(blocks: Any) -> Any:
    def call(state: BridgedState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Native:
        return _rooted(
            state, root,
            lambda: ([], blocks(state, recvbuf, writable=True)),
            lambda: ([(root, simple(sendbuf))], []),
        )  # fmt: skip

    return call


def _scattering(blocks: Any) -> Any:
    def call(state: BridgedState, sendbuf: Any, recvbuf: Any, root: int = 0) -> Native:
        return _rooted(
            state, root,
            lambda: (blocks(state, sendbuf), []),
            lambda: ([], [(root, simple(recvbuf, writable=True))]),
        )  # fmt: skip

    return call


def _allgathering(blocks: Any) -> Any:
    def call(state: BridgedState, sendbuf: Any, recvbuf: Any) -> Native:
        return state.exchange(state.everyone(simple(sendbuf)), blocks(state, recvbuf, writable=True))

    return call


def _exchanging(blocks: Any) -> Any:
    def call(state: BridgedState, sendbuf: Any, recvbuf: Any) -> Native:
        return state.exchange(blocks(state, sendbuf), blocks(state, recvbuf, writable=True))

    return call


def _folded(state: BridgedState, source: Block, op: Any, take: Callable[[Any], None]) -> tuple[_Blocks, Any]:
    """Return the blocks for elements of the other group, and the function that takes their combination."""
    operation, like = op_of(op), source.elements()
    check_operation(operation, source)
    arriving = [np.empty(like.nbytes, np.uint8) for _ in range(state.peers)]

    def finish() -> None:
        parts = [each.view(like.dtype) for each in arriving]
        take(functools.reduce(lambda left, right: combine(operation, left, right, source), parts))

    return [(rank, Block(each, BYTE._state, each.size)) for rank, each in enumerate(arriving)], finish


def _raw(block: Block) -> Block:
    """Return the elements of a block for a reduction as bytes."""
    data = np.ascontiguousarray(block.elements()).view(np.uint8)
    return Block(data, BYTE._state, data.size)


def _reduce(state: BridgedState, sendbuf: Any, recvbuf: Any, op: Any = SUM, root: int = 0) -> Native:
    def on_root() -> Any:
        target = simple(recvbuf, writable=True)
        return ([], *_folded(state, target, op, target.store_elements))

    return _rooted(state, root, on_root, lambda: ([(root, _raw(simple(sendbuf)))], []))


def _allreduce(state: BridgedState, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Native:
    source, target = simple(sendbuf), simple(recvbuf, writable=True)
    return state.exchange(state.everyone(_raw(source)), *_folded(state, source, op, target.store_elements))


def _reduce_scatter(state: BridgedState, sendbuf: Any, recvbuf: Any, recvcounts: Any = None, op: Any = SUM) -> Native:
    source, target = simple(sendbuf), simple(recvbuf, writable=True)
    counts = state.native.allgather_object(target.count) if recvcounts is None else list(recvcounts)
    whole = source.part(0, sum(counts))
    target = target.part(0, counts[state.rank])
    take = functools.partial(collectives.store_part, target, sum(counts[: state.rank]), whole.count)

    return state.exchange(state.everyone(_raw(whole)), *_folded(state, whole, op, take))


def _reduce_scatter_block(state: BridgedState, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Native:
    count = simple(recvbuf, writable=True).count
    return _reduce_scatter(state, sendbuf, recvbuf, [count] * state.size, op)


_CALLS: dict[str, Any] = {
    "Barrier": _barrier,
    "Bcast": _bcast,
    "Gather": _gathering(_shares),
    "Gatherv": _gathering(_parts),
    "Scatter": _scattering(_shares),
    "Scatterv": _scattering(_parts),
    "Allgather": _allgathering(_shares),
    "Allgatherv": _allgathering(_parts),
    "Alltoall": _exchanging(_shares),
    "Alltoallv": _exchanging(_parts),
    "Alltoallw": _exchanging(_parts_w),
    "Reduce": _reduce,
    "Allreduce": _allreduce,
    "Reduce_scatter": _reduce_scatter,
    "Reduce_scatter_block": _reduce_scatter_block,
}
for _name, _call in _CALLS.items():
    _call.__doc__ = f"{(collectives.ARGUMENTS[_name].__doc__ or '').rstrip('.')}, between the two groups."
    add_collective(Intercomm, _name, whole_arguments(_call))
CLASSES[_INTER] = Intercomm
_joined.__name__ = _joined.__qualname__ = "Create_intercomm"
Intracomm.Create_intercomm = _joined  # type: ignore[attr-defined]
