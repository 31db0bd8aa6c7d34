"""Records the calls of a group until its with-block ends.

Used by: `groups.py`, which runs the recorded calls.

Theory of operation
-------------------
The native `GroupRecorder` records a collective call: it looks up the batch for the triple (collective, root, algorithm)
and appends the arrays to the lists of the batch. It calls Python only for the first call of a triple, which makes the
batch (`_open`). The lists have the form that the call cache takes. Arguments are checked when the group ends. A call
that is in the cache needs no check, because an equal call has passed it before.
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
from unisono.foundation.uncopyable import uncopyable
from unisono.operations import Op
from unisono.transports import _core
from unisono.transports.contracts.executor import Message as MessageFacts, Operation

# The collectives whose calls are fused: all except the barrier, which has no arrays.
FUSED = frozenset(name for name, contract in CONTRACTS.items() if contract.input is not Cut.TOKEN)


class GroupResult:
    """The results or the error of calls in a group that end together.

    Attributes:
        is_over: whether the calls have ended, with results or an error.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._results: Sequence[Any] = ()
        self._error: UnisonoError | None = None
        self._callbacks: list[tuple[Callable[[Work[Any]], object], Work[Any]]] = []

    def end(self, results: Sequence[Any], error: UnisonoError | None = None) -> None:
        """Set a result for each call, or an error for all of them, and run the callbacks; only the first use counts."""
        if self.is_over:
            return
        self.is_over, self._results, self._error = True, results, error
        for callback, work in self._callbacks:
            call_back(callback, work)

    def result(self, index: int) -> Any:
        """Return the result of the call with this index, or raise the error of the calls."""
        if self._error is not None:
            raise self._error
        return self._results[index]

    def message(self) -> MessageFacts | None:
        """Return the message that a receive has got; None for other calls. It raises the error of the calls."""
        if self._error is not None:
            raise self._error
        return None

    def await_end(self, callback: Callable[[Work[Any]], object], work: Work[Any]) -> None:
        """Call ``callback(work)`` when the calls end, or at once if they have ended."""
        if self.is_over:
            call_back(callback, work)
        else:
            self._callbacks.append((callback, work))


class GroupWork(Work[Any]):
    """The work of a call in a group, which ends together with the with-block.

    Inside the block only `add_done_callback` works. Every other method raises `UsageError`, because a block that waits
    for its own call would wait forever.
    """

    __slots__ = ("_index", "_outcome")

    # It does not call the initialiser of `Work`, because a group makes many works and needs none of those attributes.
    def __init__(self, outcome: GroupResult, index: int) -> None:
        self._outcome = outcome
        self._index = index

    def done(self) -> bool:
        self._check_over()
        return True

    def wait(self, timeout_s: float | None = None) -> Any:
        self._check_over()
        return self._outcome.result(self._index)

    def message(self) -> MessageFacts | None:
        self._check_over()
        return self._outcome.message()

    def add_done_callback(self, callback: Callable[[Work[Any]], object]) -> None:
        """Call ``callback(self)`` in the thread of the block at its end, or at once if the block has ended."""
        self._outcome.await_end(callback, self)

    def __await__(self) -> Generator[Any, None, Any]:
        self._check_over()
        return super().__await__()

    def _check_over(self) -> None:
        if not self._outcome.is_over:
            raise UsageError("this call runs when the with-block of its group ends: use its work after the block")


class Message(GroupResult):
    """A `send` or `recv` in a group.

    Args:
        start: starts the message, and returns its operation.
        finish: returns the user's result for the operation that has ended.
        limit_s: the time limit in seconds.
    """

    def __init__(self, start: Callable[[], Any], finish: Callable[[Any], Any], limit_s: float) -> None:
        super().__init__()
        self._start = start
        self._finish = finish
        self._limit_s = limit_s
        self._operation: Operation | None = None

    def start(self) -> None:
        """Start the message, without waiting for the peer."""
        self._operation = self._start()

    def message(self) -> MessageFacts | None:
        super().message()
        facts: Callable[[], MessageFacts | None] = getattr(self._operation, "message", lambda: None)
        return facts()

    def wait(self) -> None:
        """Wait until the message has ended; raises the errors of `Operation.wait`."""
        if self._operation is not None:
            self._operation.wait(self._limit_s)
            self.end([self._finish(self._operation)])


class Batch(GroupResult):
    """The calls of a group that run as one call.

    Attributes:
        collective, root, counts, algorithm: the arguments that all calls share.
        x, outs, targets, ops: the arguments of `Dispatcher._dispatch` that differ, with an item for each call.
        timeouts_s: the time limits of the calls that have one.
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
        """Return collective, x, out, op, root and algorithm of the fused call, as the call cache takes them."""
        return self.collective, self.x, self.targets, tuple(self.ops), self.root, self.algorithm

    def limit_s(self, default_s: float) -> float | None:
        """Return the shortest time limit of the calls, in seconds; None if all calls have the default."""
        if not self.timeouts_s:
            return None
        calls = len(self._lists) or len(self.x)
        return float(min(self.timeouts_s if len(self.timeouts_s) == calls else [*self.timeouts_s, default_s]))

    def spread(self) -> bool:
        """Replace each list of arrays by its arrays, and return whether there was a list.

        Raises:
            UsageError: an `out` is not a list of as many arrays as its `x`.
        """
        if LISTS.isdisjoint(map(type, self.x)) and LISTS.isdisjoint(map(type, self.outs)):
            return False
        calls = list(zip(self.x, self.outs, self.targets, self.ops, strict=True))
        self.x, self.outs, self.targets, self.ops = [], [], [], []
        for x, out, target, op in calls:
            gathered = list_of(x, out)
            arrays = [x] if gathered is None else [None] * len(out) if x is None else x
            self.x += arrays
            self.outs += outs_of(arrays, out) if gathered else [out]
            self.targets += outs_of(arrays, target) if gathered else [target]
            self.ops += [op] * len(arrays)
            self._lists.append((gathered, len(arrays)))
        return True

    def end(self, results: Sequence[Any], error: UnisonoError | None = None) -> None:
        """Do what `GroupResult.end` does, and drop the arrays that are no results, so that they can be freed."""
        super().end(results, error)
        self.x, self.outs, self.targets = [], [], []

    def end_well(self, results: Sequence[Any]) -> None:
        """End the calls with one result for each array, which is None for an array without a result on this rank."""
        self.end(list(self._gathered(results)) if self._lists else results)

    def _gathered(self, results: Sequence[Any]) -> Iterator[Any]:
        remaining = iter(results)
        for gathered, count in self._lists:
            of_call = list(islice(remaining, count))
            if gathered is None:
                yield of_call[0]
            else:
                yield gathered(of_call) if not of_call or of_call[0] is not None else None


@uncopyable("make the calls in one group")
class Group:
    """The calls of one ``with world.group()`` block, which are recorded and run together when the block ends.

    Attributes:
        outcomes: what ends with a result or an error: batches of collective calls that run as one call, and messages.
            Their order is that of their first calls.
        recorder: records collective calls; the dispatcher uses it instead of the call cache inside the block.
    """

    def __init__(self, check: Callable[[int | None, AlgorithmLike], None]) -> None:
        """Begin a group, in which ``check(root, algorithm)`` is called for each new batch."""
        self.outcomes: list[GroupResult] = []
        # The recorder must hold no reference to this group: the garbage collector cannot see native references.
        self.recorder = _core.GroupRecorder(partial(_open, self.outcomes, {}, check), GroupWork)

    def batches(self) -> list[Batch]:
        """Return the batches of collective calls."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Batch)]

    def messages(self) -> list[Message]:
        """Return the messages of the group, in the order in which they were recorded."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Message)]

    def add(self, start: Callable[[], Any], finish: Callable[[Any], Any], limit_s: float) -> GroupWork:
        """Record a message, which `Message` describes, and return its work."""
        message = Message(start, finish, limit_s)
        self.outcomes.append(message)
        return GroupWork(message, 0)

    def fail(self, error: UnisonoError) -> None:
        """End all calls that have not ended with this error."""
        for outcome in self.outcomes:
            outcome.end((), error)


def _open(
    outcomes: list[GroupResult],
    open_batches: dict[tuple[str, int | None, AlgorithmLike], Batch],
    check: Callable[[int | None, AlgorithmLike], None],
    collective: str,
    root: int | None,
    counts: tuple[Sequence[int], ...] | None,
    algorithm: AlgorithmLike,
) -> tuple[Batch, bool]:
    """Return the batch that a call joins or opens, and whether later calls with the same triple join it too."""
    check(root, algorithm)
    takes_more = counts is None and collective in FUSED
    key = (collective, root, algorithm)
    batch = open_batches.get(key) if takes_more else None
    if batch is None:
        batch = Batch(collective, root, counts, algorithm)
        outcomes.append(batch)
        if takes_more:
            open_batches[key] = batch
    return batch, takes_more
