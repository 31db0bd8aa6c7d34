"""When the order of the buckets should be learned anew: when they become ready in another one, again and again."""

from __future__ import annotations

from collections.abc import Sequence

# How many steps in a row must have the same new order, so that chance does not change it all the time.
_STEADY = 3


class Order:
    """What rank 0 has seen of the order in which gradients become ready.

    Attributes:
        proposed: the names, in the order that should be learned; empty if the one that there is will do.
    """

    def __init__(self) -> None:
        self.proposed: tuple[str, ...] = ()
        self._seen: tuple[str, ...] = ()
        self._times = 0

    def see(self, full: Sequence[int], names: Sequence[str]) -> bool:
        """Take note of a step; return whether another order should be learned.

        Args:
            full: the buckets, in the order in which they have become full.
            names: the gradients, in the order in which they have become ready.
        """
        if list(full) == sorted(full):
            self._times = 0
            return False
        self._times = self._times + 1 if tuple(names) == self._seen else 1
        self._seen = tuple(names)
        if self._times < _STEADY:
            return False
        self.proposed = self._seen
        return True
