"""`Group`: ordered sets of processes, which are numbered as in `COMM_WORLD`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.compat.mpi4py.base.constants import IDENT, PROC_NULL, SIMILAR, UNDEFINED, UNEQUAL
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.base.handles import Handle, State, constant
from unisono.compat.mpi4py.memory.access import integer


class GroupState(State):
    """The numbers of the members, in order."""

    def __init__(self, members: Sequence[int], constant: str = "") -> None:
        super().__init__(constant)
        self.members = tuple(members)


class Group(Handle):
    """An ordered set of processes."""

    __slots__ = ()
    _null, _error = "GROUP_NULL", "ERR_GROUP"

    @classmethod
    def _with(cls, members: Sequence[int]) -> Any:
        members = tuple(members)
        return cls._of(GroupState(members) if members else GROUP_EMPTY._state)

    def Get_size(self) -> int:
        """Return the number of members."""
        return len(self._live.members)

    def Get_rank(self) -> int:
        """Return the rank of this process; `UNDEFINED` if it is not a member."""
        from unisono.compat.mpi4py.base.world import own_number

        members, own = self._live.members, own_number()
        return members.index(own) if own in members else UNDEFINED

    def Translate_ranks(self, ranks: Any = None, group: Any = None) -> list[int]:
        """Return the ranks in another group of the members with these ranks."""
        mine = self._live.members
        theirs = (group if group is not None else self)._live.members
        ranks = list(range(len(mine))) if ranks is None else list(ranks)
        if group is None:
            from unisono.compat.mpi4py.base.world import own_number

            theirs = tuple(range(max((*mine, own_number()), default=0) + 1))
        index = {member: rank for rank, member in enumerate(theirs)}
        return [PROC_NULL if rank == PROC_NULL else index.get(mine[self._rank(rank)], UNDEFINED) for rank in ranks]

    def _rank(self, rank: int) -> int:
        rank = integer(rank)
        if not 0 <= rank < self.Get_size():
            raise fail("ERR_RANK", f"{rank} is not a rank of a group of {self.Get_size()}")
        return rank

    def Compare(self, group: Any) -> int:
        """Return whether two groups are identical, similar or unequal."""
        one, other = self._live.members, group._live.members
        return IDENT if one == other else SIMILAR if set(one) == set(other) else UNEQUAL

    def Dup(self) -> Any:
        """Return a copy."""
        return self._with(self._live.members)

    @classmethod
    def Union(cls, group1: Any, group2: Any) -> Any:
        """Return the members of the first group, and then those of the second one."""
        return cls._with(dict.fromkeys((*group1._live.members, *group2._live.members)))  # type: ignore[arg-type]

    @classmethod
    def Intersection(cls, group1: Any, group2: Any) -> Any:
        """Return the members of the first group that are in the second one."""
        return cls._with([member for member in group1._live.members if member in group2._live.members])

    Intersect = Intersection

    @classmethod
    def Difference(cls, group1: Any, group2: Any) -> Any:
        """Return the members of the first group that are not in the second one."""
        return cls._with([member for member in group1._live.members if member not in group2._live.members])

    def Incl(self, ranks: Sequence[int]) -> Any:
        """Return the group of the members with these ranks."""
        ranks = [self._rank(rank) for rank in ranks]
        if len(set(ranks)) != len(ranks):
            raise fail("ERR_RANK", f"a rank occurs twice in {ranks}")
        return self._with([self._live.members[rank] for rank in ranks])

    def Excl(self, ranks: Sequence[int]) -> Any:
        """Return the group of the members without these ranks."""
        ranks = [self._rank(rank) for rank in ranks]
        return self._with([member for rank, member in enumerate(self._live.members) if rank not in ranks])

    def Range_incl(self, ranks: Sequence[tuple[int, int, int]]) -> Any:
        """Return the group of the members with the ranks of ranges (first, last, stride)."""
        return self.Incl(_expanded(ranks))

    def Range_excl(self, ranks: Sequence[tuple[int, int, int]]) -> Any:
        """Return the group of the members without the ranks of ranges (first, last, stride)."""
        return self.Excl(_expanded(ranks))

    @classmethod
    def Create_from_session_pset(cls, session: Any, pset_name: str) -> Any:
        """Return the group of a process set: "mpi://WORLD" or "mpi://SELF"."""
        return session.Create_group(pset_name)

    def Free(self) -> None:
        """Make the handle null."""
        self._live  # noqa: B018
        self._state = None

    size = property(Get_size, doc="The number of members.")
    rank = property(Get_rank, doc="The rank of this process.")


def _expanded(ranges: Sequence[tuple[int, int, int]]) -> list[int]:
    for _, _, stride in ranges:
        if stride == 0:
            raise fail("ERR_ARG", "the stride of a range is 0")
    return [rank for first, last, stride in ranges for rank in range(first, last + (1 if stride > 0 else -1), stride)]


class Shared:
    """The methods of objects that all ranks of a communicator make, which is their own."""

    __slots__ = ()
    _live: Any

    def Get_group(self) -> Any:
        """Return the group of the ranks."""
        return Group._with(self._live.comm.members)

    group = property(Get_group, doc="The group of the ranks.")
    group_size = property(lambda self: self._live.comm.size, doc="The number of ranks.")
    group_rank = property(lambda self: self._live.comm.rank, doc="This rank.")


GROUP_NULL = constant("GROUP_NULL", Group, None)
GROUP_EMPTY = constant("GROUP_EMPTY", Group, GroupState((), "GROUP_EMPTY"))
