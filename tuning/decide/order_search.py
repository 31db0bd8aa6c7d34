"""Improves orders by single changes: two of its members are swapped, one moves elsewhere, or a run is reversed.

These are 2-opt and or-opt (Croes 1958, Or 1976), whose value is any function of an order. All orders of the start are
improved side by side. Each step tries some changes that are drawn at random. At last, all changes of the best order are
tried, until none has a lower value. The draws are the same in every process, so all ranks find the same order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from unisono.tuning.machine.topology import Floats, Ranks

# A step of the search tries so many changes of each order. The search ends after so many steps without success.
_TRIED, _VAIN = 24, 3
_ROUNDING = 1e-9


def improved(orders: Ranks, values: Callable[[Ranks], Floats], fixed: int = 1) -> Ranks:
    """Return the best order to which changes of `orders` lead. No single change improves it.

    Args:
        orders: a permutation in each row, of the same members.
        values: returns the value of each row of an array of orders. Lower is better.
        fixed: the first members of an order that stay where they are.
    """
    changes = _changes(orders.shape[1], fixed)
    if not len(changes):
        return np.asarray(orders[values(orders).argmin()])
    chance, rows, found = random.Random(0), np.arange(len(orders)), values(orders)
    vain = 0
    while vain < _VAIN:
        tried = orders[:, changes[chance.sample(range(len(changes)), min(_TRIED, len(changes)))]]
        of_tried = values(tried.reshape(-1, orders.shape[1])).reshape(tried.shape[:2])
        at = of_tried.argmin(axis=1)
        is_better = of_tried[rows, at] < found * (1 - _ROUNDING)
        orders = np.where(is_better[:, None], tried[rows, at], orders)
        found = np.where(is_better, of_tried[rows, at], found)
        vain = 0 if is_better.any() else vain + 1
    order: Ranks = orders[found.argmin()]
    value = float(found.min())
    while True:
        neighbours = order[changes]
        found = values(neighbours)
        at_best = int(np.argmin(found))
        if found[at_best] >= value * (1 - _ROUNDING):
            return order
        order, value = neighbours[at_best], float(found[at_best])


@lru_cache(maxsize=32)
def _changes(size: int, fixed: int) -> Ranks:
    """Return the changes of an order, each as a row of positions. The first `fixed` ones stay."""
    order, rows = np.arange(size), list[Ranks]()
    for i in range(fixed, size):
        for j in range(i + 1, size):
            swapped, reversed_ = order.copy(), order.copy()
            swapped[[i, j]] = order[[j, i]]
            reversed_[i : j + 1] = order[i : j + 1][::-1]
            rolled = (np.roll(order[i : j + 1], step) for step in (1, -1))
            rows += [swapped, reversed_, *(np.concatenate((order[:i], run, order[j + 1 :])) for run in rolled)]
    return np.unique(np.array(rows, np.int64).reshape(-1, size), axis=0)
