"""Schedules of blocks on a circulant graph: in each round, every rank receives one block and sends one block.

The root of a broadcast has blocks 0, 1, 2, …, which all p ranks must get. The *skips* are p halved again and again,
rounded up, until 1: q = ⌈log2 p⌉ of them, in ascending order. Of 5 ranks they are 1, 2 and 3. In round i, with
k = i modulo q, each rank sends to the rank `skip[k]` after it, and receives from the rank `skip[k]` before it. Ranks
are counted from the root, modulo p. A *phase* is q rounds, one over each skip, and the root begins with another block
in each round.

In the first phase, a block spreads as in a binomial tree: the root sends block k to rank `skip[k]`, and then all ranks
that have a block pass it on over the next skips. So each rank other than the root gets one new block in a phase, its
*base*: the least k among the skips of which the rank is the sum, largest skips first. Rank 4 of 5 is 3 + 1, so its base
is 0. In the other q - 1 rounds of the phase it gets the blocks of the phase before that it lacks.

The *receive schedule* of a rank says which: entry k is the number of the block in the round over skip k, in a phase
whose first block is 0. It is the base, or a negative number for a block of the phase before. In the next phase all
entries are greater by q. Of 5 ranks:

    rank  base  k = 0  k = 1  k = 2
       1     0      0     -1     -2
       2     1     -3      1     -1
       3     2     -2     -3      2
       4     0     -1     -2      0

In each round, a rank receives a block that its sender has: rank 4 gets block -2 over skip 2 from rank 2, whose base in
the phase before was 1 - 3 = -2. And it gets its base from rank 1 over skip 3, two rounds after the root has sent it.

A rank finds its schedule alone, by a search backwards. Unroll the ring to a line: the rank stands at p + r, the
root at 0 and at p, and the positions up to p are ranks in the phase before. A base of a position reaches the rank in
round k if the position is at least `skip[k]` behind, because descending skips lead from there to the rank. So the
search visits positions in descending order. It gives round 0 the first base that the rank lacks, round 1 the next one,
and so on. It follows sums of descending skips. It leaves out a skip whose base has been given away, with all positions
behind it: the rank between them sends another block in that round. The base of the root at p stands for the rank's own.

References: Träff, arXiv 2205.10072 (2022), and arXiv 2312.11236 (2023), which also bounds the search by O(log p) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


@lru_cache(maxsize=64)
def skips(size: int) -> tuple[int, ...]:
    """Return the distances of the graph in ascending order, and the number of ranks after them.

    >>> skips(5), skips(12)
    ((1, 2, 3, 5), (1, 2, 3, 6, 12))
    """
    return (size,) if size == 1 else (*skips((size + 1) // 2), size)


def base_block(size: int, rank: int) -> int:
    """Return the block that a rank gets in the phase in which the root sends it; the number of skips for the root.

    >>> [base_block(5, rank) for rank in range(5)]
    [3, 0, 1, 2, 0]
    """
    base, rest = len(skips(size)) - 1, rank
    while rest:
        base -= 1
        if skips(size)[base] <= rest:
            rest -= skips(size)[base]
    return base


@lru_cache(maxsize=4096)
def receive_schedule(size: int, rank: int) -> tuple[int, ...]:
    """Return the block that a rank receives over each skip, in the phase whose first block is 0.

    The root receives nothing. Its entries are the blocks of the rounds in which other ranks could send to it.

    >>> receive_schedule(5, 4)
    (-1, -2, 0)
    """
    rounds, base = len(skips(size)) - 1, base_block(size, rank)
    bases = _Search(size, rank).bases()
    return tuple(base if each == rounds else each - rounds for each in bases)


def send_schedule(size: int, rank: int) -> tuple[int, ...]:
    """Return the block that a rank sends over each skip: the block that the receiver receives over it.

    >>> send_schedule(5, 0), send_schedule(5, 4)
    ((0, 1, 2), (-3, -1, -1))
    """
    if rank == 0:
        return tuple(range(len(skips(size)) - 1))
    return tuple(receive_schedule(size, (rank + skip) % size)[k] for k, skip in enumerate(skips(size)[:-1]))


class _Search:
    """The search for the bases that a rank receives in the rounds of a phase; see the theory above."""

    def __init__(self, size: int, rank: int) -> None:
        self._skips = skips(size)
        self._position = size + rank
        self._lowest = 2 * size  # the position whose base was given away last
        own = base_block(size, rank)
        self._lacking = [base for base in range(len(self._skips) - 1, -1, -1) if base != own]
        self._bases: list[int] = []

    def bases(self) -> Sequence[int]:
        """Return the base of each round."""
        self._visit(0, len(self._skips))
        return self._bases

    def _visit(self, start: int, above: int) -> None:
        """Give away the bases of positions to which descending skips below number `above` lead from `start`."""
        for base in [each for each in self._lacking if each < above]:
            position = start + self._skips[base]
            if base not in self._lacking or self._is_done or not self._is_before(position, self._round):
                continue
            if position <= self._reach(self._round + 1):
                self._visit(position, base)
            if self._is_done or start > self._reach(self._round + 1):
                return
            self._lowest = position
            self._lacking.remove(base)
            self._bases.append(base)

    @property
    def _round(self) -> int:
        return len(self._bases)

    @property
    def _is_done(self) -> bool:
        return self._round == len(self._skips) - 1

    def _reach(self, number: int) -> int:
        """Return the highest position whose block can reach the rank in a round."""
        return self._position - self._skips[number]

    def _is_before(self, position: int, number: int) -> bool:
        return position <= self._reach(number) and position < self._lowest
