"""Shrinking: the greedy search for a simpler call or program that also fails."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from unisono.testing.cases import Case, is_defined
from unisono.testing.programs import Again, Make, Program, Step, Wait

_Subject = TypeVar("_Subject")

# The most candidates that are tried, because each call that hangs takes its whole time limit.
MOST_TRIES = 100
_DTYPES = ("float32", "int32", "uint8", "complex64")
_SPECIAL = ("collective", "dtype", "rows", "counts")


def shrunk(case: Case, size: int, is_wrong: Callable[[Case, int], bool], sizes: Collection[int]) -> tuple[Case, int]:
    """Return a wrong case and number of ranks of which no simpler ones were found to be wrong.

    Args:
        case: a call that is wrong.
        size: the number of ranks on which it is wrong.
        is_wrong: returns whether a case is wrong on a number of ranks. A refused call does not count as wrong.
        sizes: other numbers of ranks to try if they are smaller.
    """
    return _descend((case, size), lambda each: _simpler(*each, sizes), lambda each: is_wrong(*each))


def shrunk_program(program: Program, is_wrong: Callable[[Program], bool]) -> Program:
    """Return a wrong program with fewer steps and simpler calls than a program that is wrong."""
    return _descend(program, _simpler_programs, is_wrong)


def _descend(
    start: _Subject, simpler: Callable[[_Subject], Iterable[_Subject]], is_wrong: Callable[[_Subject], bool]
) -> _Subject:
    """Replace the subject by the first simpler one that is wrong, until there is none."""
    tried = {start}
    best = start
    while True:
        for subject in simpler(best):
            if subject in tried:
                continue
            if len(tried) > MOST_TRIES:
                return best
            tried.add(subject)
            if is_wrong(subject):
                best = subject
                break
        else:
            return best


def _simpler_programs(program: Program) -> Iterator[Program]:
    """Yield programs without half, a quarter, … one of the steps, then programs with one simplified call."""
    length = len(program.steps)
    chunk = length // 2
    while chunk:
        for first in range(0, length, chunk):
            yield _without(program, range(first, min(first + chunk, length)))
        chunk //= 2
    for index, step in enumerate(program.steps):
        if isinstance(step, Make):
            plain = Make(replace(_plain(step.case), wait=step.case.wait))
            yield replace(program, steps=(*program.steps[:index], plain, *program.steps[index + 1 :]))


def _without(program: Program, dropped: range) -> Program:
    """Return a program without the dropped steps, and without the steps that refer to them."""
    kept: dict[int, Step] = {}
    places: dict[int, int] = {}
    for index, step in enumerate(program.steps):
        named = step.step if isinstance(step, Again | Wait) else index
        if index in dropped or (named != index and named not in kept):
            continue
        places[index] = len(kept)
        kept[index] = replace(step, step=places[named]) if isinstance(step, Again | Wait) else step
    return replace(program, steps=tuple(kept.values()))


def _plain(case: Case) -> Case:
    return Case(case.collective, rows=min(case.rows, 1), counts=tuple(min(count, 1) for count in case.counts))


def _simpler(case: Case, size: int, sizes: Collection[int]) -> Iterator[tuple[Case, int]]:
    """Yield simpler cases than `case` on `size` ranks, the greatest simplification first."""
    yield _plain(case), size
    yield from ((each, size) for each in _simpler_by_one(case))
    # Fewer ranks come last, because starting them takes longer than most calls.
    yield from ((case, each) for each in sorted(sizes) if each < size)


def _simpler_by_one(case: Case) -> Iterator[Case]:
    """Yield cases with one simpler field. Every case is closer to the plain one, so a search ends."""
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
    """Return whether the op of a case supports its dtype."""
    return not case.reduces or is_defined(case.op, case.dtype)


def _less(number: int) -> list[int]:
    return [less for less in dict.fromkeys((0, 1, number // 8, number // 2, number - 1)) if 0 <= less < number]
