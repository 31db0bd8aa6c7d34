"""`Comm` and `Intracomm`: groups of processes that make calls together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole_numbers
from unisono.compat.mpi4py.base.constants import (
    CONGRUENT,
    CONSTANTS,
    IDENT,
    SIMILAR,
    UNDEFINED,
    UNEQUAL,
)
from unisono.compat.mpi4py.base.errors import CODES, fail, translating
from unisono.compat.mpi4py.base.handles import Attributed, Handle, Handled, Named, State, constant
from unisono.compat.mpi4py.base.world import Is_finalized, Universe, abort, native_world, own_number, own_universe
from unisono.compat.mpi4py.calls.collectives import ARGUMENTS, PREFIXES
from unisono.compat.mpi4py.calls.messages import Port
from unisono.compat.mpi4py.calls.objects import ObjectCalls
from unisono.compat.mpi4py.calls.point_to_point import Messages
from unisono.compat.mpi4py.calls.request import PersistentState, Prequest, Request, RequestState
from unisono.compat.mpi4py.communicators.failures import FailureCalls
from unisono.compat.mpi4py.values.group import Group
from unisono.compat.mpi4py.values.info import INFO_NULL, Hinted
from unisono.errors import UnisonoError, UsageError

# The type of place of `Communicator.split` by the resource of MPI.
_PLACES = {"mpi_shared_memory": "shared", "host": "host", "numanode": "numa"}


class CommState(State):
    """A communicator. All of its ranks make it in the same order with other communicators.

    Attributes:
        members: the number of the process of each rank.
        universe: processes among which the members are.
        native: the communicator of Unisono: a grid or a graph if there is a topology.
        remote: the numbers of the ranks of the other group of an intercommunicator; None otherwise.
        topology: the topology, or None.
    """

    remote: tuple[int, ...] | None = None

    def __init__(self, members: Sequence[int], universe: Universe | None = None, topology: Any = None) -> None:
        super().__init__()
        self._begin()
        self.members, self.topology = tuple(members), topology
        self.universe = universe or own_universe()
        self._whole = self.universe.subgroup(self.members)
        self.native: Any = self._whole if topology is None else topology.arranged(self._whole)

    def _begin(self) -> None:
        self.buffer: Any = None
        self.locks: dict[Any, Any] = {}
        self.info: dict[str, str] = {}
        self.is_freed = False

    @property
    def paths(self) -> tuple[Any, Sequence[int] | None]:
        """The communicator of messages, and the rank in it of each rank that they go to; None if it is the same."""
        return self.native, None

    @cached_property
    def port(self) -> Port:
        """The messages of buffers."""
        return Port(*self.paths)

    @cached_property
    def object_port(self) -> Port:
        """The messages of objects, which go over authenticated links only."""
        native, places = self.paths
        return Port(native._for_objects(), places)

    @cached_property
    def agreement(self) -> Any:
        """Another communicator of the same ranks."""
        return self.native.dup()

    @cached_property
    def rank(self) -> int:
        """This rank."""
        return self.members.index(own_number())

    @cached_property
    def size(self) -> int:
        """The number of ranks of the own group."""
        return len(self.members)

    @property
    def peers(self) -> int:
        """The number of ranks that messages may go to."""
        return self.size

    @property
    def kind(self) -> int:
        """The kind of the topology; `UNDEFINED` if there is none."""
        return UNDEFINED if self.topology is None else int(self.topology.kind)

    def duplicate(self) -> CommState:
        """Return the state of a communicator of the same ranks."""
        return CommState(self.members, self.universe, self.topology)

    def private(self) -> CommState:
        """Return the state of a communicator of the same ranks for an object, such as a window, alone."""
        return CommState(self.members, self.universe)

    def created(self, members: Sequence[int]) -> CommState | None:
        """Return the state of a communicator of some of the ranks; None if this process is not among them."""
        return CommState(members, self.universe) if own_number() in members else None

    def split(self, color: int, key: int) -> CommState | None:
        """Return the state of a communicator of the ranks of the same color; None for `UNDEFINED`."""
        rows = self.native.allgather(np.array([[color, key]], np.int64)).tolist()
        if color == UNDEFINED:
            return None
        ranks = sorted((rank for rank in range(self.size) if rows[rank][0] == color), key=lambda rank: rows[rank][1])
        return CommState([self.members[rank] for rank in ranks], self.universe)

    def shrunk(self) -> CommState:
        """Return the state of a communicator of the ranks that are alive."""
        try:
            survivors = self.native.shrink()
        except UsageError:  # nothing has failed
            return self.duplicate()
        if self.universe is not own_universe():
            raise NotImplementedError("only communicators of one job shrink")
        universe = Universe(survivors, survivors.launch_ranks, is_closed_after_use=True)
        return CommState(universe.numbers, universe)

    def release(self) -> None:
        """Close the communicator. All ranks call it."""
        if not self.is_freed and not self.constant and not Is_finalized():
            self.is_freed = True
            with suppress(UnisonoError):  # if a rank has failed, the communicator is closed nevertheless
                self.native.barrier()
            self.universe.close(self._whole)


@whole_numbers
class Comm(Handle, Named, Attributed, Handled, Messages, ObjectCalls, FailureCalls, Hinted):
    """A communicator."""

    __slots__ = ()
    _null, _error = "COMM_NULL", "ERR_COMM"
    _keyvals: ClassVar[dict[int, Any]] = {}

    @property
    def _live(self) -> Any:
        state = self._state
        if state is None:
            return super()._live
        if state.is_freed:
            raise fail("ERR_COMM", "the communicator has been freed through another handle")
        return state

    @classmethod
    def fromhandle(cls, handle: int) -> Any:
        """Return a handle of the communicator of this number."""
        new = super().fromhandle(handle)
        return new if cls is not Comm or new._state is None else handle_of(new._state)

    def Get_group(self) -> Any:
        """Return the group of the ranks."""
        return Group._with(self._live.members)

    def Get_size(self) -> int:
        """Return the number of ranks."""
        return int(self._live.size)

    def Get_rank(self) -> int:
        """Return this rank."""
        return int(self._live.rank)

    def Compare(self, comm: Any) -> int:
        """Return whether two communicators are identical, congruent, similar or unequal."""
        one, other = self._live, comm._live
        if one is other:
            return IDENT
        if (one.remote is None) != (other.remote is None):
            return UNEQUAL
        pairs = (one.members, other.members), (one.remote or (), other.remote or ())
        if all(mine == theirs for mine, theirs in pairs):
            return CONGRUENT
        return SIMILAR if all(set(mine) == set(theirs) for mine, theirs in pairs) else UNEQUAL

    def _duplicate(self) -> Any:
        return self._live.duplicate()

    @translating
    def Clone(self) -> Any:
        """Return a communicator of the same ranks, without attributes."""
        return type(self)._of(self._duplicate())

    @translating
    def Dup(self, info: Any = None) -> Any:
        """Return a communicator of the same ranks, with the attributes whose keyvals copy them."""
        new = self._duplicate()
        self._copy_attributes(new)
        new.errhandler, new.info = self._live.errhandler, dict(self._live.info)
        if info is not None:
            new.info = dict(info.items())
        return type(self)._of(new)

    def Dup_with_info(self, info: Any) -> Any:
        """Return a communicator of the same ranks with other hints."""
        return self.Dup(info)

    def Idup(self, info: Any = None) -> tuple[Any, Request]:
        """Return a communicator of the same ranks, and a request that is done."""
        return self.Dup(info), Request._of(RequestState())

    Idup_with_info = Idup

    @translating
    def Create(self, group: Any) -> Any:
        """Return a communicator of the members of a group; null on other ranks. All ranks call it."""
        members = group._live.members
        if not set(members) <= set(self._live.members):
            raise fail("ERR_GROUP", "the group has members that are not in the communicator")
        return handle_of(self._state.created(members))

    @translating
    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return a communicator of the ranks of the same color, in the order of keys; null for `UNDEFINED`."""
        state = self._live
        if color < 0 and color != UNDEFINED:
            raise fail("ERR_ARG", f"color {color} is negative")
        return handle_of(state.split(color, key))

    @translating
    def Split_type(self, split_type: int, key: int = 0, info: Any = INFO_NULL) -> Any:
        """Return a communicator of the ranks that share memory; null for other types of places."""
        state = self._live
        guided = CONSTANTS["COMM_TYPE_HW_GUIDED"], CONSTANTS["COMM_TYPE_RESOURCE_GUIDED"]
        resource = info.get("mpi_hw_resource_type") if split_type in guided else ""
        place = "shared" if split_type == CONSTANTS["COMM_TYPE_SHARED"] else _PLACES.get(resource, "")
        color = state.native._color_of_place(place) if place else UNDEFINED
        return handle_of(state.split(color, key))

    @translating
    def Shrink(self) -> Any:
        """Return a communicator of the ranks that are alive. They all call it."""
        return handle_of(self._live.shrunk())

    def Ishrink(self) -> tuple[Any, Any]:
        """Return as `Shrink` does, and a request that is done."""
        return self.Shrink(), Request._of(RequestState())

    @translating
    def Free(self) -> None:
        """Close the communicator. All ranks call it."""
        self._free()

    def _release(self) -> None:
        self._delete_attributes()
        self._state.release()

    Disconnect = Free

    def Abort(self, errorcode: int = 0) -> Any:
        """End all processes of the job."""
        self._live  # noqa: B018
        abort(errorcode)

    def Is_inter(self) -> bool:
        """Return whether messages go to another group."""
        return self._live.remote is not None

    def Is_intra(self) -> bool:
        """Return whether messages go to the own group."""
        return self._live.remote is None

    def Get_topology(self) -> int:
        """Return the kind of the topology; `UNDEFINED` if there is none."""
        topology = self._live.topology
        return UNDEFINED if topology is None else int(topology.kind)

    def _predefined_attribute(self, keyval: int) -> Any:
        values = {
            "TAG_UB": (1 << 31) - 1,
            "IO": CONSTANTS["ANY_SOURCE"],
            "WTIME_IS_GLOBAL": False,
            "UNIVERSE_SIZE": native_world().size,
            "LASTUSEDCODE": CODES.last,
            "APPNUM": 0,
        }
        by_keyval = {CONSTANTS[name]: value for name, value in values.items()}
        if keyval not in by_keyval:
            return super()._predefined_attribute(keyval)
        return by_keyval[keyval]

    size = property(Get_size, doc="The number of ranks.")
    rank = property(Get_rank, doc="This rank.")
    group = property(Get_group, doc="The group of the ranks.")
    is_inter = property(Is_inter, doc="Whether messages go to another group.")
    is_intra = property(Is_intra, doc="Whether messages go to the own group.")
    topology = property(Get_topology, doc="The kind of the topology.")
    is_topo = property(lambda self: self._live.topology is not None, doc="Whether there is a topology.")


@whole_numbers
class Intracomm(Comm):
    """A communicator of one group."""

    __slots__ = ()

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        return state.remote is None

    @translating
    def Create_group(self, group: Any, tag: int = 0) -> Any:
        """Return a communicator of the members of a group. Only they call it."""
        members = group._live.members
        return handle_of(self._live.created(members))

    @classmethod
    def Create_from_group(
        cls, group: Any, stringtag: str = "org.mpi4py", info: Any = INFO_NULL, errhandler: Any = None
    ) -> Any:
        """Return a communicator of the members of a group. Only they call it."""
        members = group._live.members
        return Intracomm._of(CommState(members)) if members else COMM_NULL


def handle_of(state: CommState | None) -> Any:
    """Return a handle of a state, whose class is that of its kind; null for None."""
    return COMM_NULL if state is None else CLASSES[state.kind]._of(state)


# The class of handles by the kind of a state; `intercomm` and `topology` add theirs.
CLASSES: dict[int, type[Comm]] = {UNDEFINED: Intracomm}


def add_collective(of_class: Any, name: str, prepare: Any) -> None:
    """Add the three methods of a collective to a class."""

    @translating
    def waits(self: Any, *args: Any, **kwargs: Any) -> None:
        prepare(self._live, *args, **kwargs).run()

    @translating
    def starts(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Request._of(prepare(self._live, *args, **kwargs).start())

    @translating
    def lasts(self: Any, *args: Any, info: Any = INFO_NULL, **kwargs: Any) -> Any:
        state = self._live
        prepare_now = prepare(state, *args, **kwargs)  # wrong arguments raise here, and not at the first start
        del prepare_now
        return Prequest._of(PersistentState(lambda: prepare(state, *args, **kwargs).start()))

    first = (prepare.__doc__ or "").partition("\n")[0]
    nonblocking = "I" + name.lower() if name[0] != "I" else name
    for method, suffix, key in ((waits, "", name), (starts, " Returns a request.", nonblocking),
                                (lasts, " Returns a persistent request.", f"{name}_init")):  # fmt: skip
        method.__name__ = method.__qualname__ = key
        method.__doc__ = first + suffix
        setattr(of_class, key, method)


for _name, _prepare in ARGUMENTS.items():
    add_collective(Comm, _name, _prepare)
for _name, _prepare in PREFIXES.items():
    add_collective(Intracomm, _name, _prepare)

COMM_NULL = constant("COMM_NULL", Comm, None)
