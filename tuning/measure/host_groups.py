"""Finds groups of hosts that are near each other, from how long messages take between all pairs of hosts.

Theory of operation. The two groups of hosts that are nearest to each other are joined first; the farthest pair of hosts
of the joined group counts (complete linkage). If the next groups are more than `_APART` times as far from each other as
the last ones, the groups so far are a level. All hosts together are the outermost level. The distance of two hosts is
the latency between them. If all latencies are alike, it is the time of a byte. The two are not mixed, because other
work on the hosts disturbs bandwidths more, and would hide the levels that latencies show.

Example: two hosts in each of two cities have latencies of 1 ms, 1 ms and, four times, 25 ms. The hosts of a city are a
group.

Other work on the hosts can only make a message slower, so the least time of several visits of a pair counts. A pair may
still have been disturbed at each visit. So two halves of the visits must show the same groups, each by its own least
times. If they do not, the difference between near and far is within the noise, and nothing is said about groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TypeAlias

Matrix: TypeAlias = Sequence[Sequence[float]]
# Hosts in groups; each group is ascending, and groups are in the order of their first hosts.
Groups: TypeAlias = tuple[tuple[int, ...], ...]

# Noise stays below this factor, and so do the hops of a small network, which need no level.
_APART = 2.0


def least(visits: Sequence[Matrix]) -> list[list[float]]:
    """Return the least value of several visits for each two hosts."""
    return [[min(values) for values in zip(*rows, strict=True)] for rows in zip(*visits, strict=True)]


def levels_of_visits(latency_s: Sequence[Matrix], per_byte_s: Sequence[Matrix]) -> tuple[Groups, ...] | None:
    """Return the groups of each level by the least times of all visits; None if half of the visits shows others.

    Args:
        latency_s: for each of at least two visits, the seconds of a short message between each two hosts.
        per_byte_s: the seconds of each further byte, likewise.
    """
    parts = (slice(None), slice(0, None, 2), slice(1, None, 2))
    shown = {levels_of_hosts(least(latency_s[part]), least(per_byte_s[part])) for part in parts}
    return shown.pop() if len(shown) == 1 else None


def levels_of_hosts(latency_s: Matrix, per_byte_s: Matrix) -> tuple[Groups, ...]:
    """Return the groups of each level, from the inside out; the outermost level has one group of all hosts.

    Args:
        latency_s: the seconds of a short message between each two hosts.
        per_byte_s: the seconds of each further byte.

    >>> levels_of_hosts([[0, 1, 9], [1, 0, 9], [9, 9, 0]], [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
    (((0, 1), (2,)), ((0, 1, 2),))
    """
    by_latency = _levels(latency_s)
    return by_latency if len(by_latency) > 1 else _levels(per_byte_s)


def _levels(distance: Matrix) -> tuple[Groups, ...]:
    """Return the groups of each level by one kind of distance."""
    groups: list[tuple[int, ...]] = [(host,) for host in range(len(distance))]
    levels, last = list[Groups](), None

    def farthest(pair: tuple[tuple[int, ...], tuple[int, ...]]) -> float:
        return max(distance[i][j] for i in pair[0] for j in pair[1])

    while len(groups) > 1:
        nearest = min(combinations(groups, 2), key=farthest)
        if last is not None and farthest(nearest) > _APART * last:
            levels.append(tuple(groups))
        last = farthest(nearest)
        groups = sorted([*(group for group in groups if group not in nearest), tuple(sorted(nearest[0] + nearest[1]))])
    return (*levels, tuple(groups))


def sizes_and_places(levels: Sequence[Groups]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the number of parts that each level joins, and the place of each host on such a machine.

    Levels of a machine have parts of equal size, so the largest group counts. A smaller group leaves places free.

    >>> sizes_and_places((((0, 2), (1, 3), (4,)), ((0, 1, 2, 3, 4),)))
    ((2, 3), (0, 2, 1, 3, 4))
    """
    inside: Groups = tuple((host,) for host in sorted(levels[-1][0]))
    places, width, sizes = [0] * len(inside), 1, list[int]()
    for groups in levels:
        size = 1
        for group in groups:
            parts = [part for part in inside if part[0] in group]
            size = max(size, len(parts))
            for number, part in enumerate(parts):
                for host in part:
                    places[host] += number * width
        inside, width = groups, width * size
        sizes.append(size)
    return tuple(sizes), tuple(places)


def pairs_between_parts(groups: Groups, inside: Groups) -> list[tuple[int, int]]:
    """Return pairs of hosts of two different parts of one group, each host once; the two parts with the most pairs.

    Args:
        groups: the groups of a level.
        inside: the groups of the level inside of it, which are its parts.

    >>> pairs_between_parts(((0, 1, 2, 3, 4),), ((0, 1), (2, 3), (4,)))
    [(0, 2), (1, 3)]
    """
    parts = [[part for part in inside if part[0] in group] for group in groups]
    choices = [pair for of_group in parts for pair in combinations(of_group, 2)]
    one, other = max(choices, key=lambda pair: min(map(len, pair)))
    return list(zip(one, other, strict=False))


def turns(hosts: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of hosts in turns. In a turn, each host is in at most one pair (the circle method).

    >>> turns(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    """
    even = hosts + hosts % 2
    circle, in_turns = list(range(1, even)), list[list[tuple[int, int]]]()
    for _ in range(even - 1):
        seats = [0, *circle]
        pairs = [(seats[at], seats[-1 - at]) for at in range(even // 2)]
        in_turns.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
        circle = circle[-1:] + circle[:-1]
    return in_turns
