"""Covering arrays: few combinations of parameters in which every pair of values occurs.

A fault that needs one value, or two values together, shows in these rows as it does in the product of all parameters,
which is several times as large. ``pytest --product`` runs the products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, TypeAlias

Row: TypeAlias = tuple[Any, ...]
# Two of (number of a parameter, number of its value).
_Pair: TypeAlias = tuple[tuple[int, int], tuple[int, int]]

# Set by ``pytest --product``, before tests are collected.
is_product_wanted = False


def pairwise(*parameters: Sequence[Any], allowed: Callable[..., bool] = lambda *_: True) -> list[Row]:
    """Return rows with one value of each parameter. Every allowed pair of values occurs in at least one row.

    The rows are the same in every process, because the search is greedy and not random. Each step takes the first
    missing pair, and adds the row that contains this pair and the most other missing pairs.

    Args:
        parameters: the values of each parameter.
        allowed: returns whether a row is allowed; it is called with one value of each parameter.

    Returns:
        All allowed rows if there are fewer than three parameters, or if ``pytest --product`` runs.

    >>> pairwise("ab", [1, 2], [True, False])
    [('a', 1, True), ('a', 2, False), ('b', 1, False), ('b', 2, True)]
    """
    numbered = product(*(range(len(values)) for values in parameters))
    rows = [row for row in numbered if allowed(*_values(parameters, row))]
    if len(parameters) < 3 or is_product_wanted:
        return [_values(parameters, row) for row in rows]
    missing = dict.fromkeys(pair for row in rows for pair in _pairs(row))
    selected = []
    while missing:
        (first, value), (second, other) = next(iter(missing))
        candidates = (row for row in rows if row[first] == value and row[second] == other)
        best = max(candidates, key=lambda row: sum(pair in missing for pair in _pairs(row)))
        for pair in _pairs(best):
            missing.pop(pair, None)
        selected.append(best)
    return [_values(parameters, row) for row in sorted(selected)]


def beyond_each_value(rows: Sequence[Mapping[str, object]]) -> list[int]:
    """Return the positions of the rows that are not needed for every value of every parameter to occur.

    Each row has the values of the parameters by name. The search is greedy: it keeps the row with the most values that
    no earlier one has, and of several the first.

    >>> rows = [{"op": op, "size": size} for op in ("sum", "max") for size in (2, 3)]
    >>> beyond_each_value(rows)
    [1, 2]
    """
    values = [{(name, id(value)) for name, value in row.items()} for row in rows]
    missing = set().union(*values)
    beyond = list(range(len(rows)))
    while missing:
        best = max(beyond, key=lambda row: len(values[row] & missing))
        missing -= values[best]
        beyond.remove(best)
    return beyond


def _values(parameters: Sequence[Sequence[Any]], row: Sequence[int]) -> Row:
    return tuple(values[number] for values, number in zip(parameters, row, strict=True))


def _pairs(row: Sequence[int]) -> Iterator[_Pair]:
    return combinations(enumerate(row), 2)
