"""The way from a call that goes wrong to the simplest one that does: greedily, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import fields, replace
from typing import Any

from unisono.dtypes import DTYPES
from unisono.operations import operation
from unisono.testing.cases import Case

# How many are tried at most: a call that hangs takes its whole time each time.
MOST_TRIES = 100
_DTYPES = ("float32", "int32", "uint8", "complex64")
_SPECIAL = ("collective", "dtype", "rows", "counts")


def shrunk(case: Case, size: int, is_wrong: Callable[[Case, int], bool], sizes: Collection[int]) -> tuple[Case, int]:
    """Return a case and a number of ranks that are wrong, and of which no simpler ones have been found that are.

    Args:
        case: the call that is known to be wrong.
        size: on how many ranks.
        is_wrong: says whether another case is, on so many ranks; what is refused does not count as wrong.
        sizes: other numbers of ranks to try, if they are less.
    """
    tried = {(case, size)}
    while True:
        untried = (each for each in _simpler(case, size, sizes) if each not in tried)
        for simpler in untried:
            if len(tried) > MOST_TRIES:
                return case, size
            tried.add(simpler)
            if is_wrong(*simpler):
                case, size = simpler
                break
        else:
            return case, size


def _simpler(case: Case, size: int, sizes: Collection[int]) -> Iterator[tuple[Case, int]]:
    """Yield what is simpler than a case on `size` ranks, what saves most of the way first."""
    plain = Case(case.collective, rows=min(case.rows, 1), counts=tuple(min(count, 1) for count in case.counts))
    yield plain, size
    yield from ((each, size) for each in _simpler_by_one(case))
    # Other ranks take longer to start than most calls.
    yield from ((case, each) for each in sorted(sizes) if each < size)


def _simpler_by_one(case: Case) -> Iterator[Case]:
    """Yield the cases of which one field is simpler; each leads down, so that a search ends."""
    for field in fields(case):
        plain: dict[str, Any] = {field.name: field.default}
        if field.name not in _SPECIAL and _is_defined(simpler := replace(case, **plain)):
            yield simpler
    for dtype in _DTYPES[: _DTYPES.index(case.dtype) if case.dtype in _DTYPES else None]:
        if _is_defined(simpler := replace(case, dtype=dtype)):
            yield simpler
    yield from (replace(case, rows=rows) for rows in _less(case.rows))
    for index, count in enumerate(case.counts):
        yield from (
            replace(case, counts=(*case.counts[:index], less, *case.counts[index + 1 :])) for less in _less(count)
        )


def _is_defined(case: Case) -> bool:
    """Return whether the operation is one for the dtype."""
    sums = "sum" if case.op == "premul_sum" else case.op
    return not case.reduces or DTYPES[case.dtype].kind in operation(sums).kinds


def _less(number: int) -> list[int]:
    return [less for less in dict.fromkeys((0, 1, number // 8, number // 2, number - 1)) if 0 <= less < number]
