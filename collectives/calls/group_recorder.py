"""The calls of a group, as they are taken note of.

Theory of operation. A call in a group costs a look into a dictionary, which has the batch of those that are carried out
together, and what it is given is put into the batch's lists: just those that the executor's cache takes. Nothing is
checked before the group ends, for what is known by its arguments has been right before.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.collectives.arrays.operands import LISTS, list_of, outs_of
from unisono.collectives.calls.planning import AlgorithmLike
from unisono.collectives.calls.work import Work, call_back
from unisono.errors import UnisonoError, UsageError
from unisono.operations import Op
from unisono.transports import _core
from unisono.transports.contracts.executor import Message as MessageFacts, Operation

# Collectives on arrays, of which any number is as good as one.
FUSED = frozenset(name for name, contract in CONTRACTS.items() if contract.input is not Cut.TOKEN)


class Outcome:
    """What has become of calls of a group that end together.

    Attributes:
        is_over: whether they have ended, well or not.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._results: Sequence[Any] = ()
        self._error: UnisonoError | None = None
        self._callbacks: list[tuple[Callable[[Work[Any]], object], Work[Any]]] = []

    def end(self, results: Sequence[Any], error: UnisonoError | None = None) -> None:
        """Let the calls have ended, well with a result for each or, if they have not before, with this error."""
        if self.is_over:
            return
        self.is_over, self._results, self._error = True, results, error
        for callback, work in self._callbacks:
            call_back(callback, work)

    def result(self, index: int) -> Any:
        """Return the result of a call that has ended, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._results[index]

    def message(self) -> MessageFacts | None:
        """Return which message a receive that has ended has got; None of any other call. Raises as `result` does."""
        if self._error is not None:
            raise self._error
        return None

    def await_end(self, callback: Callable[[Work[Any]], object], work: Work[Any]) -> None:
        """Call ``callback(work)`` when the calls end; at once, if they have."""
        if self.is_over:
            call_back(callback, work)
        else:
            self._callbacks.append((callback, work))


class GroupWork(Work[Any]):
    """The work of a call in a group, which has ended when the with-block has.

    Before that it takes callbacks, and everything else raises `UsageError`, lest the block wait for its own end.
    """

    __slots__ = ("_index", "_outcome")

    # It has nothing of what other works have: a group makes many of them.
    def __init__(self, outcome: Outcome, index: int) -> None:
        self._outcome = outcome
        self._index = index

    def done(self) -> bool:
        """See `Work.done`."""
        self._check_over()
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        """See `Work.wait`."""
        self._check_over()
        return self._outcome.result(self._index)

    def message(self) -> MessageFacts | None:
        """See `Work.message`."""
        self._check_over()
        return self._outcome.message()

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        """See `Work.add_done_callback`; in the block, the callback is called at its end, by its thread."""
        self._outcome.await_end(callback, self)

    def __await__(self) -> Generator[Any, None, Any]:
        """See `Work.__await__`."""
        self._check_over()
        return super().__await__()

    def _check_over(self) -> None:
        if not self._outcome.is_over:
            raise UsageError("this call is carried out when the with-block of its group ends: ask for it after that")


class Message(Outcome):
    """A message of a group: what starts it, what makes of it what the user gets then, and its limit in seconds."""

    def __init__(self, start: Callable[[], Any], finish: Callable[[Any], Any], limit_s: float) -> None:
        super().__init__()
        self._start = start
        self._finish = finish
        self._limit_s = limit_s
        self._operation: Operation | None = None

    def start(self) -> None:
        """Start it."""
        self._operation = self._start()

    def message(self) -> MessageFacts | None:
        """See `Outcome.message`."""
        super().message()
        found: Callable[[], MessageFacts | None] = getattr(self._operation, "found", lambda: None)
        return found()

    def wait(self) -> None:
        """Wait until it has ended; raises as `Operation.wait`."""
        if self._operation is not None:
            self._operation.wait(self._limit_s)
            self.end([self._finish(self._operation)])


class Batch(Outcome):
    """Calls of a group that are carried out as one.

    Attributes:
        collective, root, counts, algorithm: what they have in common.
        x, outs, targets, ops: what they have not, an item for each: of `_dispatch` in `Dispatcher`.
        timeouts_s: the limits that were given.
    """

    def __init__(
        self, collective: str, root: int | None, counts: tuple[Sequence[int], ...] | None, algorithm: AlgorithmLike
    ) -> None:
        super().__init__()
        self.collective = collective
        self.root = root
        self.counts = counts
        self.algorithm = algorithm
        self.x: list[Any] = []
        self.outs: list[Any] = []
        self.targets: list[Any] = []
        self.ops: list[str | Op | None] = []
        self.timeouts_s: list[float] = []
        self._lists: list[tuple[type[Any] | None, int]] = []

    def arguments(self) -> tuple[str, list[Any], list[Any], tuple[str | Op | None, ...], int | None, AlgorithmLike]:
        """Return collective, x, out, op, root and algorithm of the whole, as the cache takes them."""
        return self.collective, self.x, self.targets, tuple(self.ops), self.root, self.algorithm

    def limit_s(self, default_s: float) -> float | None:
        """Return the shortest limit of the calls, in seconds; None if all of them have the default."""
        if not self.timeouts_s:
            return None
        calls = len(self._lists) or len(self.x)
        return float(min(self.timeouts_s if len(self.timeouts_s) == calls else [*self.timeouts_s, default_s]))

    def spread(self) -> bool:
        """Put the arrays of lists into the place of the lists; return whether there were any.

        Raises:
            UsageError: an `out` is no list of as many arrays as its `x`.
        """
        if LISTS.isdisjoint(map(type, self.x)) and LISTS.isdisjoint(map(type, self.outs)):
            return False
        calls = list(zip(self.x, self.outs, self.targets, self.ops, strict=True))
        self.x, self.outs, self.targets, self.ops = [], [], [], []
        for x, out, target, op in calls:
            gathered = list_of(x, out)
            several = [x] if gathered is None else [None] * len(out) if x is None else x
            self.x += several
            self.outs += outs_of(several, out) if gathered else [out]
            self.targets += outs_of(several, target) if gathered else [target]
            self.ops += [op] * len(several)
            self._lists.append((gathered, len(several)))
        return True

    def end(self, results: Sequence[Any], error: UnisonoError | None = None) -> None:
        """See `Outcome.end`. The arrays are kept no longer, but for those that are results."""
        super().end(results, error)
        self.x, self.outs, self.targets = [], [], []

    def end_well(self, results: Sequence[Any]) -> None:
        """Let the calls have ended; there is a result of each array, None where this rank gets nothing."""
        self.end(list(self._gathered(results)) if self._lists else results)

    def _gathered(self, results: Sequence[Any]) -> Iterator[Any]:
        rest = iter(results)
        for gathered, count in self._lists:
            own = list(islice(rest, count))
            if gathered is None:
                yield own[0]
            else:
                yield gathered(own) if not own or own[0] is not None else None


class Group:
    """The calls of a with-block, those together that are carried out as one, in the order of the first of each.

    Attributes:
        outcomes: the batches and messages.
        notes: what takes note of collective calls, in the place of the cache and of `Dispatcher._dispatch`.
    """

    def __init__(self, check: Callable[[int | None, AlgorithmLike], None]) -> None:
        """Begin a group in which each new pair of a root and an algorithm is checked."""
        self.outcomes: list[Outcome] = []
        # The notes must know nothing of what knows them, for the collector of garbage does not see into them.
        self.notes = _core.GroupRecorder(partial(_open, self.outcomes, {}, check), GroupWork)

    def batches(self) -> list[Batch]:
        """Return the collective calls, those together that are carried out as one."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Batch)]

    def messages(self) -> list[Message]:
        """Return the messages."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Message)]

    def add(self, start: Callable[[], Any], finish: Callable[[Any], Any], limit_s: float) -> GroupWork:
        """Take note of a message, as `Message` is made; return its work."""
        message = Message(start, finish, limit_s)
        self.outcomes.append(message)
        return GroupWork(message, 0)

    def fail(self, error: UnisonoError) -> None:
        """Let all that have not ended have failed."""
        for outcome in self.outcomes:
            outcome.end((), error)


def _open(
    outcomes: list[Outcome],
    known: dict[tuple[str, int | None, AlgorithmLike], Batch],
    check: Callable[[int | None, AlgorithmLike], None],
    collective: str,
    root: int | None,
    counts: tuple[Sequence[int], ...] | None,
    algorithm: AlgorithmLike,
) -> tuple[Batch, bool]:
    """Return the batch of a call, an old or a new one, and whether further calls of its kind belong to it."""
    check(root, algorithm)
    takes_more = counts is None and collective in FUSED
    key = (collective, root, algorithm)
    batch = known.get(key) if takes_more else None
    if batch is None:
        batch = Batch(collective, root, counts, algorithm)
        outcomes.append(batch)
        if takes_more:
            known[key] = batch
    return batch, takes_more
