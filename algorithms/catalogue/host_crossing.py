"""Crossing: what part of what an algorithm costs lies between hosts, and how many ranks of a host send there at once.

A function here takes the number of ranks p, and how many of them, q, each of h hosts has, consecutive ones. Around a
ring, along a chain and in a tree one rank of a host at a time sends to another host. Where all exchange, all ranks of a
host do, and some of what they send stays on it.
"""

from __future__ import annotations

from math import log
from typing import NamedTuple


class Crossing(NamedTuple):
    """What leaves hosts.

    Attributes:
        rounds: the part of the rounds in which messages leave them.
        sent: the part that leaves them of what the busiest rank sends.
        at_once: how many ranks of a host send to other hosts at once.
    """

    rounds: float
    sent: float
    at_once: int


def along(size: int, per_host: int) -> Crossing:
    """In each round somebody sends to another host, and nobody sends more; of a host, it is one rank."""
    return Crossing(1, 1, 1)


def down_tree(size: int, per_host: int) -> Crossing:
    """The longest links come first, by which one rank of each host is told, which tells the others."""
    part = _far_rounds(size, per_host)
    return Crossing(part, part, 1)


def up_tree(size: int, per_host: int) -> Crossing:
    """The longest links come last, by which one rank of each host sends what it has of all."""
    return Crossing(_far_rounds(size, per_host), 1, 1)


def evenly(size: int, per_host: int) -> Crossing:
    """Everybody sends about as much to each of the others, and in each round somebody to another host."""
    return Crossing(1, _elsewhere(size, per_host), per_host)


def doubling(size: int, per_host: int) -> Crossing:
    """The distances double, and the messages are equally long: log h of the log p rounds are between hosts."""
    part = _far_rounds(size, per_host)
    return Crossing(part, part, per_host)


def far_most(size: int, per_host: int) -> Crossing:
    """The distances double, and messages are twice as long between ranks that are twice as far from each other."""
    return Crossing(_far_rounds(size, per_host), _elsewhere(size, per_host), per_host)


def near_most(size: int, per_host: int) -> Crossing:
    """The distances double, and messages are half as long between ranks that are twice as far from each other."""
    part = (size / per_host - 1) / (size - 1) if size > 1 else 1
    return Crossing(_far_rounds(size, per_host), part, per_host)


def _elsewhere(size: int, per_host: int) -> float:
    """Return which part of the others are on other hosts."""
    return (size - per_host) / (size - 1) if size > 1 else 1


def _far_rounds(size: int, per_host: int) -> float:
    return log(size / per_host) / log(size) if size > 1 else 1
