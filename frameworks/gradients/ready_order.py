"""The order in which gradients become ready, as rank 0 sees it, and when the ranks should adopt another one."""

from __future__ import annotations

from collections.abc import Sequence

# How many steps in a row must have the same new order. A single step may differ by chance.
_STEADY_STEPS = 3


class ReadyOrder:
    """The order in which gradients became ready in the last steps.

    Attributes:
        proposed: the names in the order that the ranks should adopt; empty if the present order stays.
    """

    def __init__(self) -> None:
        self.proposed: tuple[str, ...] = ()
        self._seen: tuple[str, ...] = ()
        self._repetitions = 0

    def see(self, full: Sequence[int], names: Sequence[str]) -> bool:
        """Record the order of one training step. Return whether the ranks should adopt another order.

        Args:
            full: the buckets, in the order in which they became full.
            names: the gradients, in the order in which they became ready.
        """
        if list(full) == sorted(full):
            self._repetitions = 0
            return False
        self._repetitions = self._repetitions + 1 if tuple(names) == self._seen else 1
        self._seen = tuple(names)
        if self._repetitions < _STEADY_STEPS:
            return False
        self.proposed = self._seen
        return True
