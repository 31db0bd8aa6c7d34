"""One call on one rank: made on arrays that lie as its case says, and compared with what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.contracts import Cut
from unisono.testing.cases import Case, arguments_of
from unisono.testing.differences import CheckError, difference
from unisono.testing.memory import Guarded, laid_out
from unisono.testing.oracles import inputs, most_ulps, result_of

_Array = NDArray[Any]


def check_case(comm: Any, case: Case) -> None:
    """Make a call twice, the second time as one that is known, and check what comes of it on this rank.

    Args:
        comm: this rank's communicator, or what has its methods; all ranks call this with the same case.
        case: the call.

    Raises:
        CheckError: this rank got something else than numpy says, `x` or memory outside the arrays was written, or an
            `out` that should not be. Other ranks know nothing of it: see `check_collectives`.
        UnisonoError: what the call raises.
    """
    if case.collective == "barrier":
        wrong = _twice(case, partial(comm.barrier, **arguments_of(case, comm.size, comm.rank)), lambda _: "")
    else:
        xs = inputs(case, comm.size)
        wanted = result_of(case, xs, comm.rank)
        arrays = _placed(case, comm.size, comm.rank, xs[comm.rank], wanted)
        wrong = _twice(
            case,
            _call(comm, case, arrays),
            lambda found: arrays.damage(found) or _difference(case, comm.size, comm.rank, found, wanted),
            arrays.prepare,
        )
    if wrong:
        raise CheckError(wrong, rank=comm.rank, operation=str(case))


def _twice(
    case: Case,
    call: Callable[..., Any],
    difference_of: Callable[[Any], str],
    prepare: Callable[[], None] = lambda: None,
) -> str:
    """Make both calls, whatever comes of the first, because other ranks do; return the first difference."""
    differences, errors = [], []
    for _ in range(2):
        prepare()
        try:
            differences.append(difference_of(call() if case.wait else call(wait=False).wait()))
        except Exception as error:  # noqa: BLE001  (raised below)
            errors.append(error)
    if errors:
        raise errors[0]
    return next(filter(None, differences), "")


@dataclass(frozen=True)
class _Arrays:
    """What a call is made on.

    Attributes:
        x, out: what is passed; `out` is None where a new array is to be made.
        values: what `x` holds before the call.
        is_apart: whether `x` and `out` lie in memory of their own.
        gets: whether the rank gets a result that is written.
        guards: the memory of both.
    """

    x: _Array
    out: _Array | None
    values: _Array
    is_apart: bool
    gets: bool
    guards: tuple[Guarded, ...]

    def prepare(self) -> None:
        """Fill the arrays as they must be before a call."""
        if self.out is not None and self.is_apart:
            self.out[...] = _unwritten(self.out)
        self.x[...] = self.values

    def damage(self, found: Any) -> str:
        """Return what has been written that must not be, or is not what was passed; nothing if all is well."""
        if self.is_apart and self.x.tobytes() != self.values.tobytes():
            return "x was written"
        if not all(guard.is_intact() for guard in self.guards):
            return "memory outside the arrays was written"
        if self.is_apart and self.out is not None and not self.gets:
            return difference(self.out, _unwritten(self.out)) and "an out that must be left as it is was written"
        if found is not None and self.out is not None and found is not self.out:
            return "the result is another array than out"
        return ""


def _unwritten(like: _Array) -> _Array:
    return np.ones(like.shape, like.dtype)


def _placed(case: Case, size: int, rank: int, values: _Array, wanted: _Array | None) -> _Arrays:
    """Return the arrays of a rank, where the case says that they lie."""
    shape = values.shape if wanted is None else wanted.shape
    # The result lies as x does, where it is like x.
    order = "F" if case.layout == "F" and case.contract.input is Cut.VECTOR else "C"
    out = Guarded(shape, case.dtype, case.offset, order)
    if case.way == "in place":
        return _in_place(case, size, rank, values, out, wanted is not None)
    layout = order if case.way == "plan" else case.layout
    x, guard = laid_out(values, layout, case.offset)
    # Only `out` tells who is not the root of a scatter what comes.
    makes_new = case.way == "new" and (case.name != "scatter" or rank == case.root % size)
    return _Arrays(x, None if makes_new else out.array, values, True, wanted is not None, (guard, out))


def _in_place(case: Case, size: int, rank: int, values: _Array, out: Guarded, gets: bool) -> _Arrays:
    """Return `x` and `out` in the same memory, where the rank has both."""
    start = sum(case.counts_of(size)[:rank])
    is_root = rank == case.root % size
    if case.name == "allgather" or (case.name == "gather" and is_root):
        return _Arrays(out.array[start : start + len(values)], out.array, values, False, gets, (out,))
    if case.contract.input is Cut.VECTOR:
        return _Arrays(out.array, out.array, values, False, gets, (out,))
    source = Guarded.of(values, case.offset)
    if case.name in ("gather", "scatter") and not is_root:
        return _Arrays(source.array, out.array, values, True, gets, (source, out))
    part = source.array[start : start + len(out.array)] if case.name != "alltoall" else source.array
    return _Arrays(source.array, part, values, False, gets, (source,))


def _call(comm: Any, case: Case, arrays: _Arrays) -> Callable[..., Any]:
    """Return what makes the call: a plan, or the method with its arguments."""
    arguments = arguments_of(case, comm.size, comm.rank)
    if arrays.out is not None:
        arguments["out"] = arrays.out
    if case.way == "plan":
        planned: Callable[..., Any] = comm.plan(case.collective, arrays.x, **arguments)
        return planned
    return partial(getattr(comm, case.collective), arrays.x, **arguments)


def _difference(case: Case, size: int, rank: int, found: Any, wanted: _Array | None) -> str:
    gets = wanted is not None or case.collective == "exscan"
    if (found is not None) != gets:
        return f"the result is {'nothing' if found is None else 'an array'}, on a rank that must get the other"
    return "" if wanted is None else difference(np.asarray(found), wanted, most_ulps(case, size))
