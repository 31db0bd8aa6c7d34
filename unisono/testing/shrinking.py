"""The way from what goes wrong to the simplest that does: greedily, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

from unisono.testing.cases import Case, is_defined
from unisono.testing.programs import Again, Make, Program, Step, Wait

_Given = TypeVar("_Given")

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
    return _descend((case, size), lambda each: _simpler(*each, sizes), lambda each: is_wrong(*each))


def shrunk_program(program: Program, is_wrong: Callable[[Program], bool]) -> Program:
    """Return a program that is wrong, with fewer steps and simpler calls than one that is known to be."""
    return _descend(program, _simpler_programs, is_wrong)


def _descend(
    start: _Given, simpler: Callable[[_Given], Iterable[_Given]], is_wrong: Callable[[_Given], bool]
) -> _Given:
    """Go to the first that is simpler and wrong, again and again, as long as there is one."""
    tried = {start}
    best = start
    while True:
        for each in simpler(best):
            if each in tried:
                continue
            if len(tried) > MOST_TRIES:
                return best
            tried.add(each)
            if is_wrong(each):
                best = each
                break
        else:
            return best


def _simpler_programs(program: Program) -> Iterator[Program]:
    """Yield the programs without half, a quarter, ... one of the steps, and those of which one call is plain."""
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
    """Return a program without some steps, nor those that name one of them."""
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
    """Yield what is simpler than a case on `size` ranks, what saves most of the way first."""
    yield _plain(case), size
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
    return not case.reduces or is_defined(case.op, case.dtype)


def _less(number: int) -> list[int]:
    return [less for less in dict.fromkeys((0, 1, number // 8, number // 2, number - 1)) if 0 <= less < number]
