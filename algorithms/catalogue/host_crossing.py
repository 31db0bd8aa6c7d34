"""The part of an algorithm's cost that lies between hosts, and how many ranks of a host send to other hosts at once.

Each function here takes the number of ranks on each host, in the order of ranks: ``(1, 2, 1)`` for rank 0 alone, ranks
1 and 2 together, and rank 3 alone. A round lies between hosts if any of its messages crosses hosts, because the ranks
that wait for that message wait as long as it takes. Roots are rank 0.

Around a ring, along a chain and in a tree, one rank of a host sends to another host at a time. In a neighbour exchange,
two ranks of a host do. In an exchange among all ranks, every rank does, and part of its data stays on the host.

>>> doubling((2, 2)).rounds, doubling((1, 2, 1)).rounds  # 4 ranks, whose distances are 1 and 2
(0.5, 1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from unisono.algorithms.builders.folding import fold
from unisono.algorithms.builders.lane_pieces import distances

RanksPerHost: TypeAlias = tuple[int, ...]


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


def along(ranks_per_host: RanksPerHost) -> Crossing:
    """A ring or a chain: every round and all data cross hosts, and one rank of a host sends to another host."""
    return Crossing(1, 1, 1)


def down_tree(ranks_per_host: RanksPerHost, radix: int = 2) -> Crossing:
    """A k-nomial tree from the root: in each round across hosts, one rank of each host receives."""
    part = _ratio(*_tree(ranks_per_host, radix))
    return Crossing(part, part, 1)


def up_tree(ranks_per_host: RanksPerHost, radix: int = 2) -> Crossing:
    """A k-nomial tree towards the root: one rank of each host sends the result of its host."""
    return Crossing(_ratio(*_tree(ranks_per_host, radix)), 1, 1)


def evenly(ranks_per_host: RanksPerHost) -> Crossing:
    """All-to-all pattern: every round crosses hosts, and (p − q)/(p − 1) of the data does, for hosts of q ranks."""
    size, widest = sum(ranks_per_host), max(ranks_per_host)
    return Crossing(1, _ratio(size - widest, size - 1), widest)


def after_one_shift(ranks_per_host: RanksPerHost) -> Crossing:
    """A round in which each rank sends to the next one, and then `evenly` among all ranks but the first."""
    first, *others = ranks_per_host
    if first == len(others) == 1:  # rank 0 alone sends to the other host
        part = _ratio(1, 1 + len(list(distances(others[0], 2))))
        return Crossing(part, part, 1)
    return evenly(ranks_per_host)


def neighbours(ranks_per_host: RanksPerHost) -> Crossing:
    """Ranks 2i and 2i + 1 exchange, then ranks 2i − 1 and 2i, in turn.

    If hosts have an even number of ranks, the first pairs do not cross hosts. In the second pairs, the first and the
    last rank of a host send to other hosts at once.
    """
    outside, inside = divmod(sum(ranks_per_host) // 2, 2)
    if any(first % 2 for first in _later_hosts(ranks_per_host)):
        return Crossing(1, 1, 1)
    return Crossing(_ratio(outside, 2 * outside + inside), _ratio(2 * outside, sum(ranks_per_host) - 1), 2)


def doubling(ranks_per_host: RanksPerHost, radix: int = 2) -> Crossing:
    """Distances grow k-fold and all messages are equally long: where ranks are folded, two rounds more."""
    of = _exchanges(ranks_per_host, radix)
    part = _ratio(of.far * (radix - 1) + of.far_folds, of.rounds * (radix - 1) + of.folds)
    return Crossing(_ratio(of.far + 2 * of.far_folds, of.rounds + 2 * of.folds), part, max(ranks_per_host))


def far_most(ranks_per_host: RanksPerHost) -> Crossing:
    """Distances double, and messages become twice as long when the distance doubles. A folded rank sends all."""
    of = _exchanges(ranks_per_host)
    part = 1 if of.far_folds else _ratio(of.positions - of.near, of.positions - 1)
    return Crossing(_ratio(of.far + 2 * of.far_folds, of.rounds + 2 * of.folds), part, max(ranks_per_host))


def near_most(ranks_per_host: RanksPerHost) -> Crossing:
    """Distances double and messages become half as long when the distance doubles; then the same backwards."""
    of = _exchanges(ranks_per_host)
    sent, sent_far = 1 - 1 / of.positions, 1 / of.near - 1 / of.positions
    part = _ratio(2 * sent_far + of.far_folds, 2 * sent + of.folds)
    return Crossing(_ratio(of.far + of.far_folds, of.rounds + of.folds), part, max(ranks_per_host))


def near_most_to_root(ranks_per_host: RanksPerHost) -> Crossing:
    """`near_most` whose second half is a gather up a binomial tree to the root.

    In each of its rounds, half of the ranks that still hold data send it to a partner.
    """
    of = _exchanges(ranks_per_host, root=0)
    near_gathers = of.with_root.bit_length() - 1
    far_gathers = of.rounds - near_gathers
    sent = 1 - 1 / of.positions + 1 / 2
    sent_far = 1 / of.near - 1 / of.positions + (0.5 ** (near_gathers + 1) if far_gathers else 0)
    rounds = _ratio(of.far + far_gathers + of.far_folds, 2 * of.rounds + of.folds)
    return Crossing(rounds, _ratio(sent_far, sent), max(ranks_per_host))


class _Exchanges(NamedTuple):
    """The rounds of an algorithm in which groups of positions exchange data at distances that grow k-fold.

    A position is a rank with those that are folded onto it, if there are such ranks.

    Attributes:
        rounds, far: the rounds of exchanges, and those of them in which messages cross hosts.
        folds, far_folds: the rounds in which folded ranks send to their leaders, 0 or 1, and those across hosts.
        positions: the number of positions.
        near: how many neighbouring positions have exchanged everything before a message crosses hosts.
        with_root: how many positions are on the host of the first one.
    """

    rounds: int
    far: int
    folds: int
    far_folds: int
    positions: int
    near: int
    with_root: int


@lru_cache(maxsize=64)
def _exchanges(ranks_per_host: RanksPerHost, radix: int = 2, root: int | None = None) -> _Exchanges:
    size = sum(ranks_per_host)
    folding = fold(size, max(2, min(radix, size)), root)
    firsts: list[int] = []  # the positions whose leader is on another host than the leader of the position before
    far_folds = False
    for first in _later_hosts(ranks_per_host):
        position = folding.position(first)
        far_folds = far_folds or folding.position(first - 1) == position
        position += folding.leader(position) < first
        if 0 < position < folding.positions:
            firsts.append(position)
    near_rounds, near = 0, 1
    while near_rounds < folding.rounds and not any(first % (near * folding.radix) for first in firsts):
        near_rounds, near = near_rounds + 1, near * folding.radix
    return _Exchanges(
        folding.rounds,
        folding.rounds - near_rounds,
        int(not folding.is_exact),
        int(far_folds),
        folding.positions,
        near,
        min(firsts, default=folding.positions),
    )


@lru_cache(maxsize=64)
def _tree(ranks_per_host: RanksPerHost, radix: int) -> tuple[int, int]:
    """Return the rounds of a k-nomial tree in which messages cross hosts, and all of them."""
    size, later_hosts = sum(ranks_per_host), _later_hosts(ranks_per_host)
    rounds = list(distances(size, radix))
    return sum(any(_is_crossed(first, size, radix, distance) for first in later_hosts) for distance in rounds), len(
        rounds
    )


def _is_crossed(first: int, size: int, radix: int, distance: int) -> bool:
    """Return whether a message of a k-nomial tree goes from below rank `first` to it or beyond, over this distance."""
    sender = (first - 1) // (radix * distance) * radix * distance
    farthest = min(radix - 1, (size - 1 - sender) // distance)
    return first <= sender + farthest * distance


def _later_hosts(ranks_per_host: RanksPerHost) -> Sequence[int]:
    """Return the first rank of each host but the first one."""
    return list(accumulate(ranks_per_host[:-1]))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 1
