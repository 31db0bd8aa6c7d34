"""Folding: how algorithms for a power of some radix run on any number of ranks.

Let P be the largest power of the radix that is at most the number of ranks. The ranks are split into P nearly equal
runs of consecutive ranks, one for each *position*. With radix 2, for example, 6 ranks are split into the runs 0–1, 2–3,
4 and 5. The last rank of a run *leads* it. The other ranks of the run send their contributions to the leader, stand
aside, and receive the result from it. Because runs are consecutive, contributions can be combined in the order of
ranks.
"""

from __future__ import annotations

from unisono.algorithms.ir.binding import split
from unisono.foundation.records import record


@record
class Folding:
    """The folding of `size` ranks onto ``radix ** rounds`` positions, one run of neighbouring ranks for each position.

    Attributes:
        root: if not None, the root takes the position of its run, so that the result arrives without another message.
    """

    size: int
    radix: int
    rounds: int
    positions: int
    root: int | None

    @property
    def is_exact(self) -> bool:
        """Whether every rank has a place in the rounds, because the number of ranks is a power of the radix."""
        return self.positions == self.size

    def run(self, position: int) -> range:
        """Return the ranks at a position."""
        first, length = split(self.size, self.positions, position)
        return range(first, first + length)

    def position(self, rank: int) -> int:
        """Return the position of a rank."""
        length, longer = divmod(self.size, self.positions)
        beyond = rank - longer * (length + 1)
        return rank // (length + 1) if beyond < 0 else longer + beyond // length

    def leader(self, position: int) -> int:
        """Return the rank that takes part in the rounds for a position."""
        run = self.run(position)
        return self.root if self.root is not None and self.root in run else run[-1]

    def leads(self, rank: int) -> bool:
        """Return whether a rank takes part in the rounds."""
        return self.leader(self.position(rank)) == rank

    def folded_onto(self, rank: int) -> list[int]:
        """Return the ranks whose contributions the leader `rank` takes into the rounds, in ascending order."""
        return [other for other in self.run(self.position(rank)) if other != rank]


def fold(size: int, radix: int = 2, root: int | None = None) -> Folding:
    """Return the folding of `size` ranks onto the largest power of `radix` that is at most `size`."""
    rounds, positions = 0, 1
    while positions * radix <= size:
        rounds, positions = rounds + 1, positions * radix
    return Folding(size, radix, rounds, positions, root)
