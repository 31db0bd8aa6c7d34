"""Hosts: how ranks are grouped, level by level, and which of them meet at which level.

`hosts` is a tuple of hosts, each a tuple of ranks, such as ((0, 1), (2, 3, 4)). Where there are more levels, what is in
a tuple are tuples again: racks of hosts of ranks. Levels are counted from the outermost one, which is level 0.

What is the same for all ranks is found out once for each `hosts`, by operations on whole tuples, because there may be
many thousands of ranks; the groups of one rank are found without looking at those of others.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import chain
from math import isqrt
from typing import Any, TypeAlias

from unisono.algorithms.builders.arguments import check_supported
from unisono.errors import UsageError
from unisono.records import record

# Ranks, or tuples of hosts; a type cannot say "any number of levels" where it is also to be hashed and unpacked.
Hosts: TypeAlias = tuple[Any, ...]

# For each level, the group in which a rank meets others there; an empty one where it has no place.
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@record
class Levels:
    """Hosts that name every rank once.

    Attributes:
        hosts: as they were given.
        size: number of ranks.
        sizes: for each level, how many parts its hosts have, without duplicates.
        widest: for each level, how many ranks the largest part of a host has.
        is_ascending: whether every host has consecutive ranks and all are named in ascending order.
        unequal: None if all hosts of a level have equally many parts, or what is said of those that have not.
    """

    hosts: Hosts
    size: int
    sizes: tuple[frozenset[int], ...]
    widest: tuple[int, ...]
    is_ascending: bool
    unequal: str | None


@lru_cache(maxsize=16)
def equal_hosts(size: int) -> Hosts:
    """Return the grouping for want of a better one: equal runs of ranks, as many per host as divide √size best."""
    per_host = next(number for number in range(isqrt(size), 0, -1) if size % number == 0)
    return tuple(tuple(range(first, first + per_host)) for first in range(0, size, per_host))


def ranks_of(host: Hosts | int) -> tuple[int, ...]:
    """Return all ranks in a host, in the order in which they are named."""
    if not isinstance(host, tuple):
        return (host,)
    return tuple(chain.from_iterable(map(ranks_of, host))) if _has_parts(host) else host


@lru_cache(maxsize=16)
def levels_of(hosts: Hosts | None, size: int) -> Levels:
    """Return the levels of `hosts`, by default of `equal_hosts`.

    Raises:
        UsageError: `hosts` does not name every rank once, or one of them is empty.
    """
    found = equal_hosts(size) if hosts is None else hosts
    nodes: list[Hosts] = [(found,)]  # the hosts of each level
    parts: Hosts = found
    unequal: str | None = None
    are_mixed = False
    while nodes[-1]:
        parts = tuple(chain.from_iterable(nodes[-1]))
        inner = tuple(part for part in parts if isinstance(part, tuple)) if _has_parts(parts) else ()
        are_mixed = are_mixed or 0 < len(inner) < len(parts)
        # A rank beside hosts is a host of no parts.
        numbers = {*map(len, nodes[-1]), *((0,) if are_mixed else ())}
        if len(numbers) > 1 and unequal is None:
            unequal = f"it needs equally many ranks on every host, not {' and '.join(map(str, sorted(numbers)))}"
        nodes.append(inner)
    sizes = tuple(frozenset(map(len, hosts_of_level)) for hosts_of_level in nodes[:-1])
    # Unless some ranks stand beside hosts, the parts of the innermost level are all of them.
    ranks = ranks_of(found) if are_mixed else parts
    is_ascending = ranks == tuple(range(size))
    if any(0 in numbers for numbers in sizes) or not (is_ascending or _names_every_rank(ranks, size)):
        raise UsageError(f"the hosts must name each of the ranks 0 to {size - 1} once, and none may be empty: {found}")
    return Levels(found, size, sizes, _widest(nodes), is_ascending, unequal)


def _widest(nodes: list[Hosts]) -> tuple[int, ...]:
    """Return, for the hosts of each level, how many ranks their largest part has; in the innermost ones, one."""
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
    """Return the ranks of each host, by default of `equal_hosts`.

    Raises:
        UsageError: `hosts` does not name every rank once, or not in ascending order.
    """
    levels = levels_of(hosts, size)
    check_supported(needs_runs(levels))
    return tuple(map(ranks_of, levels.hosts))


def two_levels_of(hosts: Hosts | None, size: int) -> Levels:
    """Return the levels of the outermost hosts alone, whatever is in them; raises as `runs_of_ranks`."""
    return levels_of(runs_of_ranks(hosts, size), size)


def needs_runs(levels: Levels) -> str | None:
    """Return None if hosts have consecutive ranks, or what is said if they have not."""
    return None if levels.is_ascending else "it needs hosts of consecutive ranks, in ascending order"


def needs_equal(levels: Levels) -> str | None:
    """Return None if hosts have equally many ranks, or what is said if they have not."""
    return levels.unequal


def led_by(levels: Levels, rank: int, root: int | None = None) -> Groups:
    """Return the groups in which the leaders of the parts of a host meet: the root where it is, or the first ranks."""
    above_root = () if root is None else _path(levels, root)
    groups: list[tuple[int, ...]] = []
    for level, (host, _) in enumerate(_path(levels, rank)):
        leaders = [*map(_first_rank, host)]
        if root is not None and level < len(above_root) and above_root[level][0] is host:
            leaders[above_root[level][1]] = root
        groups.append(tuple(leaders) if rank in leaders else ())
    return _for_all_levels(groups, levels)


def in_lanes(levels: Levels, rank: int) -> Groups:
    """Return the groups in which the ranks meet that have the same place in each part of a host.

    Raises:
        UsageError: hosts are not equal.
    """
    check_supported(needs_equal(levels))
    path = _path(levels, rank)
    groups: list[tuple[int, ...]] = []
    for level, (host, _) in enumerate(path):
        members = host
        for _, place in path[level + 1 :]:
            members = tuple(part[place] for part in members)
        groups.append(members)
    return _for_all_levels(groups, levels)


def end_of(levels: Levels, rank: int, level: int) -> int:
    """Return what comes after the last rank of the host that a rank is in at a level; hosts are runs of ranks."""
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
    """Return the hosts that a rank is in, from the outermost one, each with the number of the part that it is in."""
    found: list[tuple[Hosts, int]] = []
    part: Hosts | int = levels.hosts
    while isinstance(part, tuple):
        if levels.is_ascending:
            number = bisect_right(part, rank, key=_first_rank) - 1
        else:
            number = next(number for number, inner in enumerate(part) if rank in ranks_of(inner))
        found.append((part, number))
        part = part[number]
    return found
