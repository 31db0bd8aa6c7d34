"""Groups: many calls, carried out together when their with-block ends, in as few messages as can be.

Theory of operation. In a group, a call is only taken note of. When the block ends, calls of one collective on whole
arrays are fused into one, each array an extent of it, whatever their dtypes and operations. A fused call stands where
the first of its calls does, so that all ranks, which make the same calls, fuse them alike. Everything is checked before
anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from unisono.algorithms.contracts import CONTRACTS, Cut
from unisono.collectives import arrays
from unisono.collectives.by_function import Reductions
from unisono.collectives.caller import LISTS, Caller, Given, checked_integer, spread
from unisono.collectives.calls import Wanted, selected_by
from unisono.collectives.functions import is_by_function
from unisono.collectives.prepared import Prepared
from unisono.collectives.work import Work, Works
from unisono.errors import InternalError, UnisonoError, UsageError
from unisono.operations import Op
from unisono.transports.base import NO_CACHE, AnyArray, Operation

# Collectives on whole arrays, of which any number is as good as one.
_WHOLE = frozenset(name for name, contract in CONTRACTS.items() if contract.input is Cut.VECTOR)
_Arguments: TypeAlias = tuple[str, list[Any], list[Any], tuple[str | Op | None, ...], int | None, Wanted]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a group: what starts it, what the user gets when it has ended, and its limit in seconds."""

    start: Callable[[], Operation]
    result: Any
    limit_s: float


class GroupWork(Work[Any]):
    """The work of a call in a group, which has ended when the with-block has; `what` is called.

    Before that it takes callbacks, and everything else raises `UsageError`, lest the block wait for its own end.
    """

    __slots__ = ("_callbacks", "_is_over", "what")

    def __init__(self, works: Works, what: Given | Message) -> None:
        super().__init__(works, None, None, 0.0, None)
        self.what = what
        self._callbacks: list[Callable[[Work[Any]], object]] = []
        self._is_over = False

    def done(self) -> bool:
        """See `Work.done`."""
        self._check_over()
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """See `Work.wait`."""
        self._check_over()
        return super().wait(timeout_s)

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        """See `Work.add_done_callback`; in the block, the callback is called at its end, by its thread."""
        if self._is_over:
            super().add_done_callback(callback)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[Any, None, Any]:
        """See `Work.__await__`."""
        self._check_over()
        return super().__await__()

    def end(self, result: Any, error: UnisonoError | None = None) -> None:
        """Let the call have ended, well or, if it has not before, with this error."""
        if not self._is_over:
            self._is_over, self._made, self._error = True, (result, None), error
            for callback in self._callbacks:
                super().add_done_callback(callback)

    def _check_over(self) -> None:
        if not self._is_over:
            raise UsageError("this call is carried out when the with-block of its group ends: ask for it after that")


class Fused:
    """Calls that are carried out as one.

    Attributes:
        parts: the calls of the single arrays.
        arguments: collective, x, out, op, root and algorithm of the whole, as the cache takes them.
        prepared, sources: the whole and its INPUT, if the cache does not know it.
        reductions: the whole, if it is a reduction by a function.
    """

    def __init__(self, works: Sequence[tuple[GroupWork, Given]]) -> None:
        """Take calls of one kind, each with its arguments.

        Raises:
            UsageError: one of them has an `out` that does not fit its list.
        """
        self.parts = [part for _, given in works if not _is_empty(given) for part in spread(given)]
        self.arguments: _Arguments = ("", [], [], (), None, None)
        self.prepared: Prepared | None = None
        self.reductions: Reductions | None = None
        self.sources: Sequence[AnyArray | None] = ()
        self._works = works

    def end(self, results: Sequence[Any]) -> None:
        """Give each work its results, of which there is one for each part."""
        first = 0
        for work, given in self._works:
            gathered = type(given.x)
            if gathered in LISTS:
                own = results[first : first + len(given.x)]
                first += len(own)
                work.end(gathered(own) if not own or own[0] is not None else None)
            else:
                work.end(results[first])
                first += 1


class Groups(Caller):
    """Calls together."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """Let the calls of a with-block be carried out together when it ends.

        In it, every call returns a `Work`, which has its result after the block; ``wait`` changes nothing. Calls of
        allreduce, reduce, broadcast, scan and exscan on any number of arrays, of any shapes, dtypes and operations, are
        sent as one for each collective, root and algorithm, at the place of the first. All others, and reductions by
        functions, keep their order. Messages are started before. What is written may not be in any other array of the
        group.

        All ranks must make the same calls in the same order. A group in a group belongs to the outer one. A plan is
        carried out at once, as if it stood before the block.

        Raises:
            UsageError, NoAlgorithmError: a call of the block is wrong; nothing has been sent. So it is if the block
                raises. The works then raise `UsageError`.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: a call failed, and so do the works of
                all that have not ended.

        >>> import numpy as np, unisono as un
        >>> def both(world):
        ...     with world.group():
        ...         total = world.allreduce(np.ones(2))
        ...         most = world.allreduce(np.array(world.rank), "max")
        ...     return total.result().tolist(), int(most.result())
        >>> un.launch(both, 2)
        [([2.0, 2.0], 1), ([2.0, 2.0], 1)]
        """
        if self._group is not None:
            yield
            return
        works: list[GroupWork] = []
        cache, self._cache, self._group = self._cache, NO_CACHE, works
        try:
            yield
        except BaseException as error:
            refusal = UsageError(f"this call was not made: the with-block of its group raised {error!r}")
            _fail(works, refusal)
            raise
        finally:
            self._group = None
            self._cache = cache if self._refusal is None else NO_CACHE
        try:
            self._carry_out(works)
        except UnisonoError as error:
            _fail(works, error)
            raise
        except BaseException as error:
            _fail(works, UsageError(f"this call was not made, or not to its end: its group raised {error!r}"))
            raise

    def _join(self, what: Given | Message) -> Work[Any]:
        self._check_usable()
        if isinstance(what, Given):
            if what.root is not None:
                checked_integer(what.root, "root", 0, self.size - 1)
            name = selected_by(what.algorithm).algorithm
            if name is not None and not isinstance(name, str):
                raise UsageError(f"algorithm must be a name, not {name!r}")
            self._limit_s(what.timeout_s)
        assert self._group is not None, "there is a group"
        work = GroupWork(self._works, what)
        self._group.append(work)
        return work

    def _carry_out(self, works: Sequence[GroupWork]) -> None:
        """Carry out a group: check everything, start the messages, run the collectives, wait for the messages."""
        if works:
            self._check_usable()
        fused = _fuse(works)
        for each in fused:
            self._look_up(each)
        messages = [(work, work.what) for work in works if isinstance(work.what, Message)]
        started = [(work, message, message.start()) for work, message in messages]
        for each in fused:
            each.end(self._run_fused(each))
        for work, message, operation in started:
            operation.wait(message.limit_s)
            work.end(message.result)

    def _look_up(self, fused: Fused) -> None:
        """Find the fused call in the cache, or prepare it. Nothing is sent."""
        if not fused.parts:
            return
        if is_by_function(fused.parts[0].op):
            fused.reductions = self._reducer.prepare(self._parts(fused.parts), list)
            return
        collective, _, _, _, root, counts, algorithm, _ = fused.parts[0]
        x = [part.x for part in fused.parts]
        op = tuple(part.op for part in fused.parts)
        new = arrays.zeros_like if collective == "exscan" else arrays.target_like
        has_out = CONTRACTS[collective].has_output(self.rank, root or 0)
        out = [new(part.x) if part.out is None and has_out else part.out for part in fused.parts]
        fused.arguments = (collective, x, out, op, root, algorithm)
        if counts is not None or not self._cache.knows(*fused.arguments):
            fused.prepared = self._prepared(self._parts(fused.parts), list)
            fused.sources = fused.prepared.sources()

    def _run_fused(self, fused: Fused) -> Sequence[Any]:
        """Run a call that has been looked up; return the results, one for each array."""
        if not fused.parts:
            return []
        prepared, (collective, _, out, _, root, _) = fused.prepared, fused.arguments
        limit_s = float(min(map(self._limit_s, {part.timeout_s for part in fused.parts})))
        if fused.reductions is not None:
            self._reducer.run(fused.reductions, limit_s)
            return [part.finish() for part in fused.reductions.parts]
        if prepared is not None:
            self._run(prepared, fused.sources, limit_s)
            self._remember(prepared, *fused.arguments)
            return [part.finish() for part in prepared.parts]
        if not self._cache.run(*fused.arguments, limit_s):
            raise InternalError("a call was forgotten", operation=collective)
        return out if CONTRACTS[collective].has_output(self.rank, root or 0) else [None] * len(out)


def _fuse(works: Sequence[GroupWork]) -> list[Fused]:
    """Return the collectives of a group, those together that can be, in the order of the first of each."""
    found: dict[Any, list[tuple[GroupWork, Given]]] = {}
    for index, work in enumerate(works):
        given = work.what
        if isinstance(given, Given):
            is_fused = given.collective in _WHOLE and not is_by_function(given.op)
            key = (given.collective, given.root, given.algorithm) if is_fused else index
            found.setdefault(key, []).append((work, given))
    return [Fused(alike) for alike in found.values()]


def _is_empty(given: Given) -> bool:
    return type(given.x) in LISTS and not given.x


def _fail(works: Sequence[GroupWork], error: UnisonoError) -> None:
    for work in works:
        work.end(None, error)
