"""Which targets the program may access now.

Theory of operation
-------------------
MPI-4.1 (12.5) allows operations only within an epoch, of which there are three kinds at the origin. `fence` begins one
for all targets, `start` one for a group of targets, and `lock` one for a single target. `Epochs` keeps the targets of
the present epochs in one dict. So an operation in an epoch costs one look-up, and any other one is refused.

Epochs of different kinds exclude each other, except that a lock may follow a fence: that ends the epoch of the fence.
"""

from __future__ import annotations

from collections.abc import Sequence

from unisono.collectives.windows.contracts import WindowTarget
from unisono.errors import UsageError

_ADVICE = "open one by fence(), lock(rank), lock_all() or start(ranks)"


class Epochs:
    """The epochs of one rank on one window.

    Attributes:
        open: the targets that the program may access, by rank; always the same dict.
        locked: the ranks whose lock this rank holds, and whether exclusively.
        all_locked: whether the locks come from `lock_all`.
        started: the ranks of the epoch of `start`, or None.
        posted: the ranks to which `post` has exposed this rank's part, or None.
        is_fenced: whether a fence has begun the present epoch.
    """

    def __init__(self, targets: Sequence[WindowTarget]) -> None:
        self._targets = targets
        self.open: dict[int, WindowTarget] = {}
        self.locked: dict[int, bool] = {}
        self.all_locked = False
        self.started: tuple[int, ...] | None = None
        self.posted: tuple[int, ...] | None = None
        self.is_fenced = False

    def outside(self, rank: int) -> UsageError:
        """Return the error of an access to a target outside of all epochs."""
        return UsageError(f"no epoch allows access to rank {rank} now: {_ADVICE}")

    def check_fence(self) -> None:
        """Raise `UsageError` if a fence cannot come now."""
        if self.locked:
            raise UsageError(f"this rank holds the lock of rank {next(iter(self.locked))}: unlock it before the fence")
        if self.started is not None:
            raise UsageError("an epoch of start() is open: call complete() before the fence")
        if self.posted is not None:
            raise UsageError("this rank's part is exposed by post(): call wait() before the fence")

    def fence(self, is_last: bool) -> None:
        """Begin the epoch of a fence, or, after the last fence, none."""
        self.is_fenced = not is_last
        self.open.clear()
        if not is_last:
            self.open.update(enumerate(self._targets))

    def check_lock(self, rank: int) -> None:
        """Raise `UsageError` if the lock of a rank cannot be taken now."""
        if self.started is not None:
            raise UsageError("an epoch of start() is open: call complete() before lock()")
        if self.all_locked or rank in self.locked:
            raise UsageError(f"this rank holds the lock of rank {rank} already")

    def check_lock_all(self) -> None:
        """Raise `UsageError` if the locks of all ranks cannot be taken now."""
        for rank in range(len(self._targets)):
            self.check_lock(rank)

    def lock(self, rank: int, exclusive: bool) -> None:
        """Note that this rank holds a lock."""
        if self.is_fenced:
            self.end()
        self.locked[rank] = exclusive
        self.open[rank] = self._targets[rank]

    def unlock(self, rank: int) -> bool:
        """Note that a lock has been given up; return whether it was exclusive.

        Raises:
            UsageError: this rank does not hold it.
        """
        if rank not in self.locked:
            raise UsageError(f"this rank does not hold the lock of rank {rank}")
        del self.open[rank]
        return self.locked.pop(rank)

    def check_unlock(self, rank: int) -> None:
        """Raise `UsageError` unless `unlock` of this rank is right."""
        if self.all_locked:
            raise UsageError("the locks come from lock_all(): call unlock_all()")
        if rank not in self.locked:
            raise UsageError(f"this rank does not hold the lock of rank {rank}")

    def check_start(self) -> None:
        """Raise `UsageError` if an epoch of `start` cannot begin now."""
        if self.locked:
            raise UsageError(f"this rank holds the lock of rank {next(iter(self.locked))}: unlock it before start()")
        if self.started is not None:
            raise UsageError("an epoch of start() is open: call complete() first")

    def start(self, ranks: tuple[int, ...]) -> None:
        """Begin an epoch for these targets."""
        self.end()
        self.started = ranks
        self.open.update((rank, self._targets[rank]) for rank in ranks)

    def complete(self) -> tuple[int, ...]:
        """End the epoch of `start`, and return its ranks.

        Raises:
            UsageError: there is none.
        """
        if self.started is None:
            raise UsageError("no epoch of start() is open")
        ranks, self.started = self.started, None
        self.open.clear()
        return ranks

    def end(self) -> None:
        """End the epoch of a fence, or all epochs when the window is closed."""
        self.is_fenced = False
        self.open.clear()
