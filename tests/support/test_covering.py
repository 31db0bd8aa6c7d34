"""Covering arrays have every allowed pair of values, in few rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from support import covering
from support.covering import beyond_each_value, pairwise

SIZES = [(2, 2, 2), (3, 4, 2, 2), (15, 4, 2, 2), (5, 1, 3), (6, 6, 6, 6, 6)]


def pairs(rows: Sequence[tuple[Any, ...]]) -> set[Any]:
    return {pair for row in rows for pair in combinations(enumerate(row), 2)}


def parameters_of(sizes: Sequence[int]) -> list[range]:
    return [range(size) for size in sizes]


@pytest.mark.parametrize("sizes", SIZES)
def test_pairwise_has_every_pair_once_or_more(sizes: Sequence[int]) -> None:
    parameters = parameters_of(sizes)
    assert pairs(pairwise(*parameters)) == pairs(list(product(*parameters)))


@pytest.mark.parametrize("sizes", SIZES)
def test_pairwise_has_few_rows(sizes: Sequence[int]) -> None:
    first, second, *_ = sorted(sizes, reverse=True)
    rows = pairwise(*parameters_of(sizes))
    assert len(set(rows)) == len(rows)
    assert first * second <= len(rows) <= 2 * first * second


def test_pairwise_has_only_rows_that_are_allowed_and_every_pair_of_those() -> None:
    def allowed(a: int, b: int, c: int) -> bool:
        return a != b and (a + b + c) % 5 != 0

    parameters = parameters_of((5, 5, 4))
    rows = pairwise(*parameters, allowed=allowed)
    assert all(allowed(*row) for row in rows)
    assert pairs(rows) == pairs([row for row in product(*parameters) if allowed(*row)])


def test_pairwise_is_the_product_of_two_parameters() -> None:
    assert pairwise("ab", [1, 2]) == [("a", 1), ("a", 2), ("b", 1), ("b", 2)]


def test_pairwise_is_the_product_of_all_parameters_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(covering, "is_product_wanted", True)
    assert pairwise("ab", [1, 2], [True, False]) == list(product("ab", [1, 2], [True, False]))


def test_pairwise_gives_the_same_rows_again() -> None:
    parameters = parameters_of((7, 3, 2, 4))
    assert pairwise(*map(list, parameters)) == pairwise(*parameters)


def test_rows_beyond_each_value_are_those_without_which_every_value_still_occurs() -> None:
    rows = [{"op": op, "size": size, "root": 0} for op in ("sum", "max", "min") for size in (2, 3)]
    beyond = beyond_each_value(rows)
    kept = [row for position, row in enumerate(rows) if position not in beyond]
    assert len(kept) == 3
    for name in ("op", "size", "root"):
        assert {row[name] for row in kept} == {row[name] for row in rows}
    assert beyond_each_value([{"op": "sum"}, {"op": "max"}]) == []
