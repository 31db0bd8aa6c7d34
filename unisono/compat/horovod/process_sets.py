"""Process sets: groups of ranks that make calls of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from unisono.errors import UsageError

if TYPE_CHECKING:
    from unisono.compat.horovod.negotiation import Negotiator


class ProcessSet:
    """Some ranks of the job. It can be passed to calls when `init` or `add_process_set` has registered it.

    Args:
        ranks: the ranks, in any order. They become the ranks 0, 1, … of the set in ascending order.

    Attributes:
        process_set_id: its number, the same on all ranks; None if it is not registered. All ranks together have 0.
        ranks: the ranks, ascending; None for all ranks before `init`.
        negotiator: the calls of the set on this rank; None if it is not registered or this rank is not in it.

    Raises:
        UsageError: a rank is no integer, or occurs twice.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        listed = list(ranks) if isinstance(ranks, Iterable) else None
        if listed is None or any(isinstance(rank, bool) or not isinstance(rank, int) for rank in listed):
            raise UsageError(f"a ProcessSet takes a list of ranks, such as [0, 2], not {ranks!r}")
        if len(set(listed)) != len(listed):
            raise UsageError(f"a rank occurs twice in the process set {listed}: name each rank once")
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = sorted(listed)
        self.negotiator: Negotiator | None = None
        self._own_rank: int | None = None

    def register(self, number: int, own_rank: int, negotiator: Negotiator | None) -> None:
        """Note that the set has been registered; `own_rank` is the rank of this process in the job."""
        self.process_set_id, self._own_rank, self.negotiator = number, own_rank, negotiator

    def invalidate(self) -> None:
        """Note that the set is not registered any more."""
        self.process_set_id = self.negotiator = None

    def size(self) -> int | None:
        """Return the number of ranks in the set; None if it is not registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """Return the rank of this process in the set; None if the set is not registered.

        Raises:
            UsageError: this process is not in the set.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        return self.index(self._own_rank if self._own_rank is not None else -1)

    def index(self, rank: int) -> int:
        """Return the number in this set of a rank of the job; raises `UsageError` if the set does not include it."""
        if self.ranks is None or rank not in self.ranks:
            raise UsageError(f"rank {rank} is not in {self}")
        return self.ranks.index(rank)

    def included(self) -> bool | None:
        """Return whether this process is in the set; None if the set is not registered."""
        return None if self._own_rank is None or self.ranks is None else self._own_rank in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def _all_ranks() -> ProcessSet:
    ranks = ProcessSet([])
    ranks.process_set_id, ranks.ranks = 0, None
    return ranks


# All ranks of the job.
global_process_set = _all_ranks()
