"""Hosts: how ranks are grouped, level by level, and which of them meet at which level.

`hosts` is a tuple of hosts, each a tuple of ranks, such as ((0, 1), (2, 3, 4)). Where there are more levels, what is in
a tuple are tuples again: racks of hosts of ranks. Levels are counted from the outermost one, which is level 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import isqrt
from typing import Any, TypeAlias

from unisono.errors import UsageError

# Ranks, or tuples of hosts; a type cannot say "any number of levels" where it is also to be hashed and unpacked.
Hosts: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Levels:
    """Who meets at each level.

    Attributes:
        groups: for each rank, its group at each level, from the outermost one; the groups of a level do not overlap. A
            rank takes part at a level if it is in that group.
        sizes: for each level, how many ranks its groups have, without duplicates.
    """

    groups: tuple[tuple[tuple[int, ...], ...], ...]
    sizes: tuple[frozenset[int], ...]

    def inwards(self) -> range:
        """Return the levels below the outermost one, from the outside."""
        return range(1, len(self.sizes))

    def group(self, rank: int, level: int) -> tuple[int, ...]:
        """Return the group of `rank` at `level`; none, if it has no place at that level."""
        of_rank = self.groups[rank]
        return of_rank[level] if level < len(of_rank) and rank in of_rank[level] else ()


@lru_cache(maxsize=16)
def equal_hosts(size: int) -> Hosts:
    """Return the grouping for want of a better one: equal runs of ranks, as many per host as divide √size best."""
    per_host = next(number for number in range(isqrt(size), 0, -1) if size % number == 0)
    return tuple(tuple(range(first, first + per_host)) for first in range(0, size, per_host))


def ranks_of(host: Hosts | int) -> tuple[int, ...]:
    """Return all ranks in a host, in the order in which they are named."""
    if isinstance(host, int):
        return (host,)
    return tuple(chain.from_iterable(map(ranks_of, host))) if _has_parts(host) else host


def _has_parts(host: Hosts) -> bool:
    """Return whether a host has parts that are hosts themselves."""
    return any(isinstance(part, tuple) for part in host)


@lru_cache(maxsize=16)
def unequal(hosts: Hosts) -> str | None:
    """Return None if all hosts of a level have the same number of parts, or what is said of those that have not."""
    parts: list[Hosts | int] = [hosts]
    while any(isinstance(part, tuple) for part in parts):
        numbers = {len(part) if isinstance(part, tuple) else 0 for part in parts}
        if len(numbers) > 1:
            return f"it needs equally many ranks on every host, not {' and '.join(map(str, sorted(numbers)))}"
        parts = [inner for part in parts if isinstance(part, tuple) for inner in part]
    return None


@lru_cache(maxsize=16)
def runs_of_ranks(hosts: Hosts, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host.

    Raises:
        UsageError: `hosts` does not name every rank once, or not in ascending order.
    """
    _check_hosts(hosts, size)
    if ranks_of(hosts) != tuple(range(size)):
        raise UsageError("it needs hosts of consecutive ranks, in ascending order")
    return tuple(ranks_of(host) for host in hosts)


@lru_cache(maxsize=16)
def led_by(hosts: Hosts, size: int, root: int | None = None) -> Levels:
    """Return the levels at which the leaders of the parts of a host meet: the root where it is, or the first ranks.

    Raises:
        UsageError: `hosts` does not name every rank once.
    """
    _check_hosts(hosts, size)
    groups: list[list[tuple[int, ...]]] = [[] for _ in range(size)]

    def leader(ranks: tuple[int, ...]) -> int:
        return root if root is not None and root in ranks else ranks[0]

    def enter(host: Hosts) -> None:
        members = tuple(leader(ranks_of(part)) for part in host)
        for rank in ranks_of(host):
            groups[rank].append(members)
        for part in host:
            if isinstance(part, tuple):
                enter(part)

    enter(hosts)
    return _levels(groups)


@lru_cache(maxsize=16)
def in_lanes(hosts: Hosts, size: int) -> Levels:
    """Return the levels at which the ranks meet that have the same place in each part of a host.

    Raises:
        UsageError: `hosts` does not name every rank once, or hosts are not equal.
    """
    _check_hosts(hosts, size)
    if refusal := unequal(hosts):
        raise UsageError(refusal)
    groups: list[list[tuple[int, ...]]] = [[] for _ in range(size)]

    def enter(host: Hosts) -> None:
        for members in zip(*(ranks_of(part) for part in host), strict=True):
            for rank in members:
                groups[rank].append(members)
        for part in host:
            if isinstance(part, tuple):
                enter(part)

    enter(hosts)
    return _levels(groups)


def _levels(groups: list[list[tuple[int, ...]]]) -> Levels:
    depth = max(len(of_rank) for of_rank in groups)
    sizes = tuple(
        frozenset(len(of_rank[level]) for of_rank in groups if level < len(of_rank)) for level in range(depth)
    )
    return Levels(tuple(map(tuple, groups)), sizes)


def _check_hosts(hosts: Hosts, size: int) -> None:
    """Check that `hosts` are hosts of the ranks 0 … size - 1.

    Raises:
        UsageError: they do not name every rank once, or one of them is empty.
    """
    ranks = ranks_of(hosts)
    if sorted(ranks) != list(range(size)) or _has_empty(hosts):
        raise UsageError(f"the hosts must name each of the ranks 0 to {size - 1} once, and none may be empty: {hosts}")


def _has_empty(host: Hosts | int) -> bool:
    return isinstance(host, tuple) and (not host or (_has_parts(host) and any(map(_has_empty, host))))
