"""Lower bounds on the cost of each collective, in the terms of `Cost`.

Rounds: in every collective, the contribution of one rank must reach all p ranks, or the contributions of all ranks must
reach one rank. If no rank sends or receives more than k messages at a time, each round multiplies the number of ranks
reached by at most k + 1. Hence at least ⌈log_(k+1) p⌉ rounds are needed.

Volume: the busiest rank sends and combines at least the average over all ranks. All ranks together send, for example,
2(p - 1) vectors in an allreduce and combine p - 1 (Patarasuk and Yuan, JPDC 69(2), 2009; Chan et al., 2007). Reading or
writing a peer's memory counts as sending, and the number of flags is not limited.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple


class LowerBound(NamedTuple):
    """The least volume that the busiest of p ranks sends and combines, as functions of p."""

    sent: Callable[[int], Fraction]
    reduced: Callable[[int], Fraction]


def _nothing(size: int) -> Fraction:
    return Fraction(0)


def _share(size: int) -> Fraction:
    return Fraction(min(1, size - 1), size)


def _all_but_own_share(size: int) -> Fraction:
    return Fraction(size - 1, size)


BOUNDS: dict[str, LowerBound] = {
    "allreduce": LowerBound(lambda size: Fraction(2 * (size - 1), size), _all_but_own_share),
    "reduce": LowerBound(_all_but_own_share, _all_but_own_share),
    "reduce_scatter": LowerBound(_all_but_own_share, _all_but_own_share),
    "scan": LowerBound(_all_but_own_share, _all_but_own_share),
    "exscan": LowerBound(_all_but_own_share, lambda size: Fraction(max(0, size - 2), size)),
    "broadcast": LowerBound(_all_but_own_share, _nothing),
    "scatter": LowerBound(_share, _nothing),
    "gather": LowerBound(_share, _nothing),
    "allgather": LowerBound(_all_but_own_share, _nothing),
    "alltoall": LowerBound(_all_but_own_share, _nothing),
    "barrier": LowerBound(_nothing, _nothing),
}


def least_rounds(size: int, ports: int) -> int:
    """Return the least number of rounds if a rank sends, and receives, at most `ports` messages at a time."""
    power, reached = 0, 1
    while reached < size:
        power, reached = power + 1, reached * (ports + 1)
    return power
