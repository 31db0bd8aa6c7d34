"""Reductions by functions of Python, between exchanges that the executor carries out.

Theory of operation. The native core calls no Python. A reduction by a function is therefore an exchange, after which a
rank has what all ranks contribute to its share of the elements, or of few elements to all of them; then it combines
them, in the thread of the call; and then a second exchange, if need be, takes the results to where they belong. All
contributions to an element so meet at one place, where they are combined in the order of ranks and always alike,
whatever else is chosen.

The first exchange has its turn among the calls of the communicator, and the signature of the call that the user made,
by which a disagreement is found as ever. The second is made on a communicator of the same ranks that has no other
calls: with ``wait=False``, calls that were made later may have begun on that of the user. Reductions by functions are
carried out one after the other, so that all ranks make the second exchanges in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from unisono import log
from unisono.collectives.calls.planning import CallPlanner, CallSpec
from unisono.collectives.calls.prepared import BoundArray, CheckedCall
from unisono.collectives.calls.serial_queue import SerialQueue, TurnOperation
from unisono.collectives.custom_ops.exchanges import PREFIXES, WHOLE, Draft, check, count_of, draft_shared, draft_whole
from unisono.collectives.custom_ops.functions import combine_all, combine_prefixes
from unisono.deadlines import Deadline
from unisono.errors import AbortedError, UnisonoError, UsageError
from unisono.operations import Op
from unisono.records import record
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.contracts.executor import Executor, Operation
from unisono.transports.contracts.transport import Traffic
from unisono.transports.reductions.definition import numpy_dtype

_log = log.get(log.NAME)

# What a call costs before it sends anything, and what it costs to combine a byte: priors, as those of the model.
_CALL_S = 10e-6
_COMBINE_PER_BYTE_S = 1 / 4e9
# Ways that are remembered.
_MOST_WAYS = 4096


@record
class Way:
    """How this rank takes its part in a kind of reduction: a draft, and its exchanges as calls.

    Attributes:
        draft: what the exchanges bring and take on.
        first: the exchange that brings contributions here.
        second: that which takes the results on; None if the last one is that of this rank.
        has_prefixes: whether results are those of all ranks up to each, or one of all.
    """

    draft: Draft
    first: Call
    second: Call | None
    has_prefixes: bool


@record
class Reductions(CheckedCall):
    """A call that is right as far as this rank can tell; `ways` has one for each array."""

    ways: Sequence[Way]


class Reducer:
    """The reductions by functions of one rank of a communicator."""

    def __init__(self, executor: Executor, calls: CallPlanner) -> None:
        self._rank = executor.rank
        self._size = executor.size
        self._executor = executor
        self._calls = calls
        self._ways: dict[CallSpec, Way] = {}
        self._turns = SerialQueue()
        self._returning: Executor | None = None
        self._thread: int | None = None  # that is in a function

    def prepare(self, parts: Sequence[BoundArray], gathered: type[Any] | None) -> Reductions:
        """Return the call on these arrays, all of which are reduced by one operation. Nothing is sent.

        Raises:
            UsageError: the operation is not defined for such a call.
            NoAlgorithmError: an algorithm is named, or no algorithm carries out an exchange.
        """
        return Reductions(parts, gathered, [self._way(part.kind) for part in parts])

    def run(self, reductions: Reductions, limit_s: float) -> None:
        """Carry out a call.

        Raises:
            UsageError: a function returned something else than it must; other ranks get `AbortedError`.
            AbortedError: a function raised, here or on another rank.
            MismatchError, PeerLostError, CollectiveTimeoutError: the call failed.
        """
        with self._guarded():
            deadline = Deadline(limit_s)
            self._get_ready()
            # What can be done here and now is done by the executor's quicker way.
            at_once = self._turns.are_over() and len(reductions.parts) == 1
            begun = None if at_once else self._begin(reductions, limit_s)
            turn = self._turns.take()
            turn.do(partial(self._finish, reductions, begun, deadline))
            turn.ended.result()

    def start(self, reductions: Reductions, limit_s: float) -> Operation:
        """Start a call, which goes on by itself; its end is none of those that the executor counts."""
        with self._guarded():
            deadline = Deadline(limit_s)
            self._get_ready()
            begun = self._begin(reductions, limit_s)
            turn = self._turns.take()
            self._turns.do_later(turn, partial(self._finish, reductions, begun, deadline))
        return TurnOperation(self._executor, turn.ended, str(reductions.ways[0].first.signature))

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the counters of the second exchanges, by peer."""
        return {} if self._returning is None else self._returning.traffic()

    def close(self) -> None:
        """End the calls that go on, after the executor has been closed."""
        if self._returning is not None:
            self._returning.close()
        self._turns.close()

    # --- how it is done --------------------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Check that this thread is in no function, which could wait for its own end; let there be what calls need."""
        if self._thread == threading.get_ident():
            raise UsageError("the function of an operation made a call on the communicator that has called it")
        if self._returning is None:
            self._returning = self._executor.subgroup(range(self._size))

    def _begin(self, reductions: Reductions, limit_s: float) -> list[_Begun]:
        """Start the first exchanges, and let them go on."""
        begun = []
        for part, way in zip(reductions.parts, reductions.ways, strict=True):
            stage = _stage(part, way)
            begun.append((self._executor.start(way.first, part.source, stage.reshape(-1)), stage))
            begun[-1][0].go_on(limit_s)
        return begun

    def _finish(self, reductions: Reductions, begun: Sequence[_Begun] | None, deadline: Deadline) -> None:
        """Wait for the first exchanges, or make them; combine, and make the second ones."""
        with self._guarded():
            for index, (part, way) in enumerate(zip(reductions.parts, reductions.ways, strict=True)):
                if begun is None:
                    stage = _stage(part, way)
                    self._executor.run(way.first, part.source, stage.reshape(-1), deadline.left_s())
                else:
                    operation, stage = begun[index]
                    operation.wait(deadline.left_s())
                self._take_on(part, way, self._combined(part, way, stage), deadline)

    def _take_on(self, part: BoundArray, way: Way, results: AnyArray, deadline: Deadline) -> None:
        """Bring results, in rows, to where they belong."""
        if way.second is not None:
            assert self._returning is not None, "it is made before the first exchange"
            source = results[: way.draft.sent].reshape(-1)
            self._returning.run(way.second, source, part.target, deadline.left_s())
        elif way.draft.rows:
            assert part.target is not None, "who combines has a result"
            part.target[...] = results[-1]

    def _combined(self, part: BoundArray, way: Way, stage: AnyArray) -> AnyArray:
        """Return the results, in rows: one, or those of all ranks up to each."""
        op, rows = part.kind.op, stage[: way.draft.rows]
        assert isinstance(op, Op), "no function has a name"
        self._thread = threading.get_ident()
        try:
            if way.has_prefixes:
                combine_prefixes(op, rows)
            elif way.draft.rows:
                rows = combine_all(op, rows)[np.newaxis]
        except UsageError as error:
            self._executor.abort(error.message)
            raise
        except Exception as error:
            text = f"{op.name} raised {type(error).__name__}: {error}"
            self._executor.abort(text)
            me = self._executor.members[self._rank]
            undefined = "the contents of the output are undefined"
            operation = str(way.first.signature)
            raise AbortedError(f"rank {me}: {text}", rank=me, operation=operation, buffers=undefined) from error
        finally:
            self._thread = None
        return rows

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the communicator if the block is interrupted, for then it stands between two exchanges."""
        try:
            yield
        except UnisonoError:
            raise
        except BaseException as error:
            self._executor.abort("interrupted" if isinstance(error, KeyboardInterrupt) else f"interrupted by {error!r}")
            raise

    # --- ways ------------------------------------------------------------------------------------------------------

    def _way(self, kind: CallSpec) -> Way:
        """Return how this rank takes its part in calls of this kind, whatever the function."""
        assert isinstance(kind.op, Op), "no function has a name"
        key = kind._replace(op=kind.op.name)
        found = self._ways.get(key)
        if found is None:
            if len(self._ways) >= _MOST_WAYS:
                self._ways.clear()
            check(kind)
            found = self._ways[key] = self._build(kind, self._cheapest(kind))
        return found

    def _cheapest(self, kind: CallSpec) -> Draft:
        """Return the way that is predicted to be fastest, which is the same on all ranks."""
        drafts = [draft_shared(kind, self._size, self._rank)]
        if kind.collective in WHOLE:
            drafts.insert(0, draft_whole(kind, self._size, self._rank))
        with _core.DefaultFloatEnvironment():  # costs must have the same bits on all ranks, because they decide
            costs = [self._cost_s(kind, draft) for draft in drafts]
        best = costs.index(min(costs))
        names = [" and ".join(each.collective for each in draft.exchanges) for draft in drafts]
        shown = ", ".join(f"{name} {cost * 1e6:.1f} us" for name, cost in zip(names, costs, strict=True))
        what = f"{kind.collective} by a function of {count_of(kind)} elements of each rank"
        _log.info("%s is carried out by %s; predicted: %s", what, names[best], shown)
        return drafts[best]

    def _cost_s(self, kind: CallSpec, draft: Draft) -> float:
        assert kind.dtype is not None, "a reduction has an array"
        elements = count_of(kind) / (1 if draft.is_whole else self._size)
        combined_nbytes = (self._size - 1) * elements * kind.dtype.itemsize
        exchanges_s = sum(_CALL_S + self._calls.predicted_s(each) for each in draft.exchanges)
        return exchanges_s + combined_nbytes * _COMBINE_PER_BYTE_S

    def _build(self, kind: CallSpec, draft: Draft) -> Way:
        first, *rest = [self._calls.carrying(kind, each) for each in draft.exchanges]
        return Way(draft, first, rest[0] if rest else None, kind.collective in PREFIXES)


# A first exchange that has been started, and what it brings.
_Begun: TypeAlias = tuple[Operation, AnyArray]


def _stage(part: BoundArray, way: Way) -> AnyArray:
    assert part.kind.dtype is not None, "an array has a dtype"
    return np.empty(way.draft.staged, numpy_dtype(part.kind.dtype))
