"""One call on one rank: made on arrays with the layout of its case, and compared with the expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono.algorithms.ir.contracts import Cut
from unisono.testing.cases import MESSAGES, OBJECTS, Case, arguments_of
from unisono.testing.differences import CheckError, difference
from unisono.testing.memory import Guarded, laid_out
from unisono.testing.oracles import inputs, most_ulps, result_of

_Array = NDArray[Any]


@dataclass(frozen=True)
class Call:
    """A case on one rank, ready to be called any number of times.

    Attributes:
        prepare: fills the arrays before a call.
        make: makes the call; takes `wait` if the method does.
        difference: takes the result of the call or of its work, and returns its error in words; empty if right.
    """

    prepare: Callable[[], None]
    make: Callable[..., Any]
    difference: Callable[[Any], str]


def check_case(comm: Any, case: Case) -> None:
    """Make a call twice, the second time from the call cache, and check both results on this rank.

    Args:
        comm: this rank's communicator, or an object with its methods; all ranks call this with the same case.
        case: the call.

    Raises:
        CheckError: the result of this rank differs from numpy's, or the call wrote `x`, memory outside the arrays, or
            an `out` that must stay unchanged. Other ranks do not hear of it: see `check_collectives`.
        UnisonoError: the call raised it.
    """
    wrong = _twice(prepared(comm, case), case.wait)
    if wrong:
        raise CheckError(wrong, rank=comm.rank, operation=str(case))


def prepared(comm: Any, case: Case) -> Call:
    """Return the call of this rank without any check; a persistent call is planned.

    Raises:
        UnisonoError: planning raised it.
    """
    if case.collective == "barrier":
        call = partial(comm.barrier, **arguments_of(case, comm.size, comm.rank))
        return Call(lambda: None, call, lambda result: "" if result is None else "a barrier returned a result")
    if case.collective in OBJECTS:
        return _of_objects(comm, case)
    if case.collective in MESSAGES:
        return _of_message(comm, case)
    return _of_list(comm, case) if case.arrays else _of_array(comm, case)


def _twice(call: Call, wait: bool) -> str:
    """Make both calls, even if the first fails, because the other ranks make both; return the first difference."""
    differences, errors = [], []
    for _ in range(2):
        call.prepare()
        try:
            differences.append(call.difference(call.make() if wait else call.make(wait=False).wait()))
        except Exception as error:  # noqa: BLE001  (raised below)
            errors.append(error)
    if errors:
        raise errors[0]
    return next(filter(None, differences), "")


def _of_array(comm: Any, case: Case) -> Call:
    arrays, differs = _on_array(comm, case)
    return Call(arrays.prepare, _calling(comm, case, arrays.x, arrays.out), differs)


def _of_list(comm: Any, case: Case) -> Call:
    """Return the call on a list; each result must equal that of a call on its array alone."""
    parts = [_on_array(comm, part) for part in case.parts()]
    outs = [arrays.out for arrays, _ in parts]

    def prepare() -> None:
        for arrays, _ in parts:
            arrays.prepare()

    def differs(result: Any) -> str:
        results = [None] * len(parts) if result is None else result
        if len(results) != len(parts):
            return f"the result is {len(results)} arrays, not {len(parts)}"
        return next(filter(None, (differs_(one) for (_, differs_), one in zip(parts, results, strict=True))), "")

    makes_new = any(out is None for out in outs)
    return Call(prepare, _calling(comm, case, [arrays.x for arrays, _ in parts], None if makes_new else outs), differs)


def _on_array(comm: Any, case: Case) -> tuple[_Arrays, Callable[[Any], str]]:
    """Return the arrays of a rank, and a function that takes the result and returns its error in words."""
    xs = inputs(case, comm.size)
    expected = result_of(case, xs, comm.rank)
    arrays = _placed(case, comm.size, comm.rank, xs[comm.rank], expected)
    size, gets = comm.size, expected is not None or case.collective == "exscan"
    return arrays, lambda result: arrays.damage(result) or _difference(result, gets, expected, most_ulps(case, size))


def _calling(comm: Any, case: Case, x: Any, out: Any) -> Callable[..., Any]:
    """Return a function that makes the call: a persistent call, or the method with its arguments."""
    arguments = arguments_of(case, comm.size, comm.rank)
    if out is not None:
        arguments["out"] = out
    if case.way == "plan":
        planned: Callable[..., Any] = comm.plan(case.collective, x, **arguments)
        return planned
    return partial(getattr(comm, case.collective), x, **arguments)


class _NoWork:
    """The work of a rank that takes no part in a message."""

    def wait(self) -> None:
        return


def _of_message(comm: Any, case: Case) -> Call:
    """Return a message from the root to another rank, or those of all ranks to the rank `shift` further on."""
    xs, size, shift = inputs(case, comm.size), comm.size, case.shift % comm.size
    dest, source, sender = (comm.rank + shift) % size, (comm.rank - shift) % size, case.root % size
    sends = case.collective == "sendrecv" or (shift > 0 and comm.rank == sender)
    receives = case.collective == "sendrecv" or (shift > 0 and source == sender)
    x, guard = laid_out(xs[comm.rank], case.layout, case.offset)
    out = Guarded(x.shape, case.dtype, case.offset)
    arrays = _Arrays(x, out.array if receives else None, xs[comm.rank], True, receives, (guard, out))
    expected = xs[source] if receives else None

    def make(wait: bool = True) -> Any:
        if case.collective == "sendrecv":
            return comm.sendrecv(x, dest, out.array, source, case.tag)
        if sends:
            return comm.send(x, dest, case.tag, wait=wait)
        if receives:
            return comm.recv(out.array, source, case.tag, wait=wait)
        return None if wait else _NoWork()

    def differs(result: Any) -> str:
        return arrays.damage(result) or _difference(result, expected is not None, expected, 0)

    return Call(arrays.prepare, make, differs)


def _of_objects(comm: Any, case: Case) -> Call:
    """Return the call of a method that takes objects. Each rank can compute the objects of all ranks."""
    objects = [_object(rank, x) for rank, x in enumerate(inputs(case, comm.size))]
    root, mine = case.root % comm.size, objects[comm.rank]
    is_root = comm.rank == root
    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "broadcast_object": (lambda: comm.broadcast_object(mine if is_root else None, root), objects[root]),
        "allgather_object": (lambda: comm.allgather_object(mine), objects),
        "gather_object": (lambda: comm.gather_object(mine, root), objects if is_root else None),
        "scatter_object": (lambda: comm.scatter_object(objects if is_root else None, root), mine),
        "send_object": (*_sent_object(comm, case, objects),),
    }
    make, expected = calls[case.collective]
    return Call(lambda: None, make, lambda result: _difference_of_objects(result, expected))


def _sent_object(comm: Any, case: Case, objects: list[Any]) -> tuple[Callable[[], Any], Any]:
    """Return this rank's part in the message of the root's object, and its expected result."""
    root, receiver = case.root % comm.size, (case.root + case.shift) % comm.size
    if root == receiver or comm.rank not in (root, receiver):
        return (lambda: None), None
    if comm.rank == root:
        return (lambda: comm.send_object(objects[root], receiver, case.tag)), None
    return (lambda: comm.recv_object(root, case.tag)), objects[root]


def _object(rank: int, x: _Array) -> dict[str, Any]:
    return {"rank": rank, "words": ["é"] * (len(x) % 5), "x": x}


def _difference_of_objects(result: Any, expected: Any) -> str:
    if isinstance(expected, list) and isinstance(result, list) and len(result) == len(expected):
        pairs = zip(result, expected, strict=True)
        return next(filter(None, (_difference_of_objects(one, other) for one, other in pairs)), "")
    if not isinstance(expected, dict) or not isinstance(result, dict) or result.keys() != expected.keys():
        return "" if result is None and expected is None else f"the result is {result!r}, not {expected!r}"
    if any(result[key] != expected[key] for key in ("rank", "words")):
        return f"the result is {result!r}, not {expected!r}"
    return difference(result["x"], expected["x"])


@dataclass(frozen=True)
class _Arrays:
    """The arrays of a call.

    Attributes:
        x, out: the arguments; `out` is None if the call is to create a new array.
        values: the content of `x` before the call.
        is_apart: whether `x` and `out` have separate memory.
        gets: whether the rank gets a result that is written.
        guards: the guarded memory of both.
    """

    x: _Array
    out: _Array | None
    values: _Array
    is_apart: bool
    gets: bool
    guards: tuple[Guarded, ...]

    def prepare(self) -> None:
        """Fill the arrays before a call."""
        if self.out is not None and self.is_apart:
            self.out[...] = _unwritten(self.out)
        self.x[...] = self.values

    def damage(self, result: Any) -> str:
        """Return the error if the call wrote the wrong memory or returned the wrong object; empty if not."""
        if self.is_apart and self.x.tobytes() != self.values.tobytes():
            return "x was written"
        if not all(guard.is_intact() for guard in self.guards):
            return "memory outside the arrays was written"
        if self.is_apart and self.out is not None and not self.gets:
            return difference(self.out, _unwritten(self.out)) and "an out that must be left as it is was written"
        if result is not None and self.out is not None and result is not self.out:
            return "the result is another array than out"
        return ""


def _unwritten(like: _Array) -> _Array:
    return np.ones(like.shape, like.dtype)


def _placed(case: Case, size: int, rank: int, values: _Array, expected: _Array | None) -> _Arrays:
    """Return the arrays of a rank with the layout of the case."""
    shape = values.shape if expected is None else expected.shape
    # If the result has the shape of x, it has its memory order too.
    order = "F" if case.layout == "F" and case.contract.input is Cut.VECTOR else "C"
    out = Guarded(shape, case.dtype, case.offset, order)
    if case.way == "in place":
        return _in_place(case, size, rank, values, out, expected is not None)
    layout = order if case.way == "plan" else case.layout
    x, guard = laid_out(values, layout, case.offset)
    # In a scatter, ranks other than the root learn the shape only from `out`.
    makes_new = case.way == "new" and (case.name != "scatter" or rank == case.root % size)
    return _Arrays(x, None if makes_new else out.array, values, True, expected is not None, (guard, out))


def _in_place(case: Case, size: int, rank: int, values: _Array, out: Guarded, gets: bool) -> _Arrays:
    """Return `x` and `out` in the same memory, if the rank has both."""
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


def _difference(result: Any, gets: bool, expected: _Array | None, ulps: int) -> str:
    if (result is not None) != gets:
        returned, needed = ("None", "an array") if result is None else ("an array", "None")
        return f"the result of this rank is {returned} instead of {needed}"
    return "" if expected is None else difference(np.asarray(result), expected, ulps)
