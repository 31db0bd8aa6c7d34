"""Which ranks share a host, level by level, and which ranks form the group of ranks of a phase at each level.

`hosts` is a tuple of hosts, each a tuple of ranks, such as ((0, 1), (2, 3, 4)). With more levels, the tuples are nested
deeper: racks of hosts of ranks. Then each tuple counts as a host of its level: a rack is a host that contains hosts.
The *parts* of a host are the items of its tuple. Level 0 is the outermost level: its one host is `hosts` itself.

There may be many thousands of ranks. Facts about all ranks are therefore computed once for each `hosts` and cached. The
groups of one rank are computed without those of the other ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import chain
from math import isqrt
from typing import Any, TypeAlias

from unisono.algorithms.builders.arguments import check_supported
from unisono.errors import UsageError
from unisono.foundation.records import record

# A tuple of ranks, or of tuples that are hosts themselves. The type is `Any` because the nesting has any depth.
Hosts: TypeAlias = tuple[Any, ...]

# For each level, the group of ranks to which a rank belongs at that level; empty if it belongs to none.
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@record
class Levels:
    """Facts about `hosts` in which every rank occurs once, for each level.

    A part of a host is a host of the next level or, on the innermost level, a rank.

    Attributes:
        hosts: the tuple of hosts.
        size: number of ranks.
        sizes: for each level, the numbers of parts of its hosts, without duplicates.
        widest: for each level, the number of ranks in the largest part of its hosts.
        ranks_per_host: the number of ranks on each of `hosts`.
        is_ascending: whether every host has consecutive ranks and all ranks are named in ascending order.
        unequal: None if all hosts of a level have the same number of parts, else the reason to refuse the hosts in an
            algorithm that needs this.
    """

    hosts: Hosts
    size: int
    sizes: tuple[frozenset[int], ...]
    widest: tuple[int, ...]
    ranks_per_host: tuple[int, ...]
    is_ascending: bool
    unequal: str | None


@lru_cache(maxsize=16)
def equal_hosts(size: int) -> Hosts:
    """Return the default grouping: equal runs of consecutive ranks.

    The number of ranks per host is the largest divisor of `size` that is at most √size.
    """
    per_host = next(number for number in range(isqrt(size), 0, -1) if size % number == 0)
    return tuple(tuple(range(first, first + per_host)) for first in range(0, size, per_host))


def ranks_of(host: Hosts | int) -> tuple[int, ...]:
    """Return all ranks in a host, in the order in which the host names them."""
    if not isinstance(host, tuple):
        return (host,)
    return tuple(chain.from_iterable(map(ranks_of, host))) if _has_parts(host) else host


@lru_cache(maxsize=16)
def levels_of(hosts: Hosts | None, size: int) -> Levels:
    """Return the levels of `hosts`. None stands for `equal_hosts`.

    Raises:
        UsageError: `hosts` does not name every rank once, or a host is empty.
    """
    outermost = equal_hosts(size) if hosts is None else hosts
    nodes: list[Hosts] = [(outermost,)]  # the hosts of each level
    parts: Hosts = outermost
    unequal: str | None = None
    are_mixed = False
    while nodes[-1]:
        parts = tuple(chain.from_iterable(nodes[-1]))
        inner = tuple(part for part in parts if isinstance(part, tuple)) if _has_parts(parts) else ()
        are_mixed = are_mixed or 0 < len(inner) < len(parts)
        # A rank beside hosts counts as a host without parts.
        numbers = {*map(len, nodes[-1]), *((0,) if are_mixed else ())}
        if len(numbers) > 1 and unequal is None:
            unequal = f"it needs equally many ranks on every host, not {' and '.join(map(str, sorted(numbers)))}"
        nodes.append(inner)
    sizes = tuple(frozenset(map(len, hosts_of_level)) for hosts_of_level in nodes[:-1])
    # Unless some ranks stand beside hosts, the parts of the innermost level are all ranks.
    ranks = ranks_of(outermost) if are_mixed else parts
    is_ascending = ranks == tuple(range(size))
    if any(0 in numbers for numbers in sizes) or not (is_ascending or _names_every_rank(ranks, size)):
        raise UsageError(
            f"the hosts must name each of the ranks 0 to {size - 1} once, and none may be empty: {outermost}"
        )
    ranks_per_host = tuple([len(ranks_of(host)) for host in outermost])
    return Levels(outermost, size, sizes, _widest(nodes), ranks_per_host, is_ascending, unequal)


def _widest(nodes: list[Hosts]) -> tuple[int, ...]:
    """Return, for the hosts of each level, the number of ranks in their largest part; on the innermost level, 1."""
    innermost = max(map(len, nodes[-2]))
    outer = [max(len(ranks_of(host)) for host in hosts_of_level) for hosts_of_level in nodes[1:-2]]
    return (*outer, innermost, 1)[-len(nodes) + 1 :]


def _has_parts(host: Hosts) -> bool:
    """Return whether a host has parts that are hosts themselves."""
    return tuple in set(map(type, host))


def _names_every_rank(ranks: tuple[int, ...], size: int) -> bool:
    return set(map(type, ranks)) == {int} and sorted(ranks) == list(range(size))


@lru_cache(maxsize=16)
def runs_of_ranks(hosts: Hosts | None, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each outermost host. None stands for `equal_hosts`.

    Raises:
        UsageError: `hosts` does not name every rank once, or not in ascending order.
    """
    levels = levels_of(hosts, size)
    check_supported(needs_runs(levels))
    return tuple(map(ranks_of, levels.hosts))


def two_levels_of(hosts: Hosts | None, size: int) -> Levels:
    """Return the levels of the outermost hosts alone, without the hosts inside them; raises as `runs_of_ranks`."""
    return levels_of(runs_of_ranks(hosts, size), size)


def needs_runs(levels: Levels) -> str | None:
    """Return None if each host has consecutive ranks, else the reason to refuse these hosts, as text."""
    return None if levels.is_ascending else "it needs hosts of consecutive ranks, in ascending order"


def needs_equal(levels: Levels) -> str | None:
    """Return None if all hosts of a level have equally many ranks, else the reason to refuse these hosts, as text."""
    return levels.unequal


def led_by(levels: Levels, rank: int, root: int | None = None) -> Groups:
    """Return the groups of leaders to which `rank` belongs, one for each level; empty where `rank` is no leader.

    The leaders of a host are one rank for each of its parts: the root if the part contains it, else the first rank of
    the part.
    """
    above_root = () if root is None else _path(levels, root)
    groups: list[tuple[int, ...]] = []
    for level, (host, _) in enumerate(_path(levels, rank)):
        leaders = [*map(_first_rank, host)]
        if root is not None and level < len(above_root) and above_root[level][0] is host:
            leaders[above_root[level][1]] = root
        groups.append(tuple(leaders) if rank in leaders else ())
    return _for_all_levels(groups, levels)


def in_lanes(levels: Levels, rank: int) -> Groups:
    """Return the groups of ranks to which `rank` belongs, one for each level, in the algorithm `full_lane`.

    At a level, the group has one rank of each part of the host of `rank`: the one at the position that `rank` has in
    its own part. So every rank of a part works with others, and all lanes between the parts are full.

    Raises:
        UsageError: hosts are not equal.
    """
    check_supported(needs_equal(levels))
    path = _path(levels, rank)
    groups: list[tuple[int, ...]] = []
    for level, (host, _) in enumerate(path):
        members = host
        for _, number in path[level + 1 :]:
            members = tuple(part[number] for part in members)
        groups.append(members)
    return _for_all_levels(groups, levels)


def end_of(levels: Levels, rank: int, level: int) -> int:
    """Return the last rank + 1 of the host that contains `rank` at `level`. Hosts must be runs of consecutive ranks."""
    last: Hosts | int = _path(levels, rank)[level][0]
    while isinstance(last, tuple):
        last = last[-1]
    return last + 1


def _for_all_levels(groups: list[tuple[int, ...]], levels: Levels) -> Groups:
    return (*groups, *((),) * (len(levels.sizes) - len(groups)))


def _first_rank(host: Hosts | int) -> int:
    while isinstance(host, tuple):
        host = host[0]
    return host


def _path(levels: Levels, rank: int) -> list[tuple[Hosts, int]]:
    """Return, for each level from the outermost, the host that contains `rank` and the number of its part that does.

    For hosts ((0, 1), (2, 3, 4)) and rank 3, this is [(((0, 1), (2, 3, 4)), 1), ((2, 3, 4), 1)].
    """
    path: list[tuple[Hosts, int]] = []
    part: Hosts | int = levels.hosts
    while isinstance(part, tuple):
        if levels.is_ascending:
            number = bisect_right(part, rank, key=_first_rank) - 1
        else:
            number = next(number for number, inner in enumerate(part) if rank in ranks_of(inner))
        path.append((part, number))
        part = part[number]
    return path
