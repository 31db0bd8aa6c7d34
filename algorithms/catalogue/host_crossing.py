"""The part of an algorithm's cost that lies between hosts, and how many ranks of a host send to other hosts at once.

The functions here assume p ranks on h hosts, each with q consecutive ranks. They take `size` = p and `per_host` = q.
Around a ring, along a chain and in a tree, one rank of a host sends to another host at a time. In an exchange among all
ranks, every rank of a host does, and part of its data stays on the host.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple


class Crossing(NamedTuple):
    """The part of a cost that lies between hosts.

    Attributes:
        rounds: the fraction of the rounds in which messages cross hosts.
        sent: the fraction of the busiest rank's data that crosses hosts.
        at_once: how many ranks of a host send to other hosts at once.
    """

    rounds: float
    sent: float
    at_once: int


def along(size: int, per_host: int) -> Crossing:
    """A ring or a chain: every round and all data cross hosts, and one rank of a host sends to another host."""
    return Crossing(1, 1, 1)


def down_tree(size: int, per_host: int) -> Crossing:
    """A tree from the root: the longest links come first, over which one rank of each host receives."""
    part = _far_rounds(size, per_host)
    return Crossing(part, part, 1)


def up_tree(size: int, per_host: int) -> Crossing:
    """A tree towards the root: the longest links come last, when one rank of each host sends the result of its host."""
    return Crossing(_far_rounds(size, per_host), 1, 1)


def evenly(size: int, per_host: int) -> Crossing:
    """All-to-all pattern: every round crosses hosts, and (p − q)/(p − 1) of the data does."""
    return Crossing(1, _elsewhere(size, per_host), per_host)


def doubling(size: int, per_host: int) -> Crossing:
    """Distances double and all messages are equally long: log h of the log p rounds cross hosts."""
    part = _far_rounds(size, per_host)
    return Crossing(part, part, per_host)


def far_most(size: int, per_host: int) -> Crossing:
    """Distances double, and messages become twice as long when the distance doubles."""
    return Crossing(_far_rounds(size, per_host), _elsewhere(size, per_host), per_host)


def near_most(size: int, per_host: int) -> Crossing:
    """Distances double, and messages become half as long when the distance doubles."""
    part = (size / per_host - 1) / (size - 1) if size > 1 else 1
    return Crossing(_far_rounds(size, per_host), part, per_host)


def _elsewhere(size: int, per_host: int) -> float:
    """Return the fraction of the other ranks that are on other hosts."""
    return (size - per_host) / (size - 1) if size > 1 else 1


def _far_rounds(size: int, per_host: int) -> float:
    return log(size / per_host) / log(size) if size > 1 else 1
