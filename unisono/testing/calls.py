"""One call on one rank: made on arrays that lie as its case says, and compared with what must come of it."""

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
    """A case on one rank, ready to be made, any number of times.

    Attributes:
        prepare: fills the arrays, as they must be before each call.
        make: makes the call; takes `wait`, where the method does.
        difference: says what is wrong, given what the call returned or its work did; nothing if nothing is.
    """

    prepare: Callable[[], None]
    make: Callable[..., Any]
    difference: Callable[[Any], str]


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
    wrong = _twice(prepared(comm, case), case.wait)
    if wrong:
        raise CheckError(wrong, rank=comm.rank, operation=str(case))


def prepared(comm: Any, case: Case) -> Call:
    """Return the call of this rank, and check nothing yet; a persistent one is planned.

    Raises:
        UnisonoError: what planning raises.
    """
    if case.collective == "barrier":
        call = partial(comm.barrier, **arguments_of(case, comm.size, comm.rank))
        return Call(lambda: None, call, lambda found: "" if found is None else "the result of a barrier is something")
    if case.collective in OBJECTS:
        return _of_objects(comm, case)
    if case.collective in MESSAGES:
        return _of_message(comm, case)
    return _of_list(comm, case) if case.arrays else _of_array(comm, case)


def _twice(call: Call, wait: bool) -> str:
    """Make both calls, whatever comes of the first, because other ranks do; return the first difference."""
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
    """Return the call on a list, each of whose results must be that of a call on its array alone."""
    parts = [_on_array(comm, part) for part in case.parts()]
    outs = [arrays.out for arrays, _ in parts]

    def prepare() -> None:
        for arrays, _ in parts:
            arrays.prepare()

    def differs(found: Any) -> str:
        each = [None] * len(parts) if found is None else found
        if len(each) != len(parts):
            return f"the result is {len(each)} arrays, not {len(parts)}"
        return next(filter(None, (differs_(one) for (_, differs_), one in zip(parts, each, strict=True))), "")

    makes_new = any(out is None for out in outs)
    return Call(prepare, _calling(comm, case, [arrays.x for arrays, _ in parts], None if makes_new else outs), differs)


def _on_array(comm: Any, case: Case) -> tuple[_Arrays, Callable[[Any], str]]:
    """Return where the arrays of a rank lie, and what tells what is wrong with what it gets."""
    xs = inputs(case, comm.size)
    wanted = result_of(case, xs, comm.rank)
    arrays = _placed(case, comm.size, comm.rank, xs[comm.rank], wanted)
    size, gets = comm.size, wanted is not None or case.collective == "exscan"
    return arrays, lambda found: arrays.damage(found) or _difference(found, gets, wanted, most_ulps(case, size))


def _calling(comm: Any, case: Case, x: Any, out: Any) -> Callable[..., Any]:
    """Return what makes the call: a plan, or the method with its arguments."""
    arguments = arguments_of(case, comm.size, comm.rank)
    if out is not None:
        arguments["out"] = out
    if case.way == "plan":
        planned: Callable[..., Any] = comm.plan(case.collective, x, **arguments)
        return planned
    return partial(getattr(comm, case.collective), x, **arguments)


class _Nothing:
    """The work of a rank that takes no part in a message."""

    def wait(self) -> None:
        return


def _of_message(comm: Any, case: Case) -> Call:
    """Return a message from the root to another rank, or those of all ranks, each to the one `shift` further on."""
    xs, size, shift = inputs(case, comm.size), comm.size, case.shift % comm.size
    dest, source, sender = (comm.rank + shift) % size, (comm.rank - shift) % size, case.root % size
    sends = case.collective == "sendrecv" or (shift > 0 and comm.rank == sender)
    receives = case.collective == "sendrecv" or (shift > 0 and source == sender)
    x, guard = laid_out(xs[comm.rank], case.layout, case.offset)
    out = Guarded(x.shape, case.dtype, case.offset)
    arrays = _Arrays(x, out.array if receives else None, xs[comm.rank], True, receives, (guard, out))
    wanted = xs[source] if receives else None

    def make(wait: bool = True) -> Any:
        if case.collective == "sendrecv":
            return comm.sendrecv(x, dest, out.array, source, case.tag)
        if sends:
            return comm.send(x, dest, case.tag, wait=wait)
        if receives:
            return comm.recv(out.array, source, case.tag, wait=wait)
        return None if wait else _Nothing()

    return Call(
        arrays.prepare, make, lambda found: arrays.damage(found) or _difference(found, wanted is not None, wanted, 0)
    )


def _of_objects(comm: Any, case: Case) -> Call:
    """Return the call of a method that takes objects, of which each rank can make all others'."""
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
    make, wanted = calls[case.collective]
    return Call(lambda: None, make, lambda found: _difference_of_objects(found, wanted))


def _sent_object(comm: Any, case: Case, objects: list[Any]) -> tuple[Callable[[], Any], Any]:
    """Return the message of the root's object for this rank, and what it must get."""
    root, receiver = case.root % comm.size, (case.root + case.shift) % comm.size
    if root == receiver or comm.rank not in (root, receiver):
        return (lambda: None), None
    if comm.rank == root:
        return (lambda: comm.send_object(objects[root], receiver, case.tag)), None
    return (lambda: comm.recv_object(root, case.tag)), objects[root]


def _object(rank: int, x: _Array) -> dict[str, Any]:
    return {"rank": rank, "words": ["é"] * (len(x) % 5), "x": x}


def _difference_of_objects(found: Any, wanted: Any) -> str:
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = zip(found, wanted, strict=True)
        return next(filter(None, (_difference_of_objects(one, other) for one, other in pairs)), "")
    if not isinstance(wanted, dict) or not isinstance(found, dict) or found.keys() != wanted.keys():
        return "" if found is None and wanted is None else f"the result is {found!r}, not {wanted!r}"
    if any(found[key] != wanted[key] for key in ("rank", "words")):
        return f"the result is {found!r}, not {wanted!r}"
    return difference(found["x"], wanted["x"])


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


def _difference(found: Any, gets: bool, wanted: _Array | None, ulps: int) -> str:
    if (found is not None) != gets:
        return f"the result is {'nothing' if found is None else 'an array'}, on a rank that must get the other"
    return "" if wanted is None else difference(np.asarray(found), wanted, ulps)
