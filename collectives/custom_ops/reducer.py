"""Reductions by Python functions: `Reducer` combines arrays in Python, between exchanges that the executor runs.

Used by: `calls.checking`, for calls with an ``Op.from_function(fn)``.

Theory of operation
-------------------
The native core calls no Python, so a reduction by a function has three steps:

1. An exchange brings to this rank the contributions of all ranks to its share of the elements, or to all elements if
   there are few.
2. This rank combines them, in the thread of the call.
3. A second exchange, if needed, brings the results to the ranks that must have them.

All contributions to an element meet on one rank, which always combines them in the order of ranks and in the same way.
So the result does not depend on the exchanges that are chosen.

The first exchange takes its turn among the calls of the communicator. It carries the signature of the user's call, so
that ranks that disagree get a `MismatchError` about that call. The second exchange runs on an executor of the same
ranks that nothing else uses, because later calls with ``wait=False`` may already have started on the communicator.
Reductions by functions run one after the other, so all ranks make their second exchanges in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from unisono.collectives.calls.planning import CallPlanner, CallSpec
from unisono.collectives.calls.prepared import BoundArray, CheckedCall
from unisono.collectives.calls.serial_queue import QueuedOperation, SerialQueue, aborting_if_interrupted
from unisono.collectives.custom_ops.exchanges import PREFIXES, WHOLE, Draft, check, count_of, draft_shared, draft_whole
from unisono.collectives.custom_ops.functions import combine_all, combine_prefixes
from unisono.errors import AbortedError, UsageError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.foundation.records import record
from unisono.operations import Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.contracts.executor import Executor, Operation
from unisono.transports.contracts.transport import Traffic
from unisono.transports.reductions.definition import numpy_dtype

_log = log.get("tuning")

# Assumed costs, which are not measured: of a call before it sends anything, and of combining a byte.
_CALL_S = 10e-6
_COMBINE_PER_BYTE_S = 1 / 4e9
# The reducer keeps at most this many planned reductions.
_MOST_PLANNED = 4096


@record
class PlannedReduction:
    """A draft whose exchanges have been planned as calls.

    Attributes:
        draft: this rank's part in the reduction.
        first: the exchange that brings contributions to this rank.
        second: the exchange that sends the results on; None if each rank already has its result.
        has_prefixes: whether each row of results combines the ranks up to it; otherwise there is one row of results.
    """

    draft: Draft
    first: Call
    second: Call | None
    has_prefixes: bool


@record
class Reductions(CheckedCall):
    """A checked reduction by a Python function.

    Attributes:
        planned: the planned reduction of each array.
    """

    planned: Sequence[PlannedReduction]


class Reducer:
    """Carries out the reductions by Python functions of one rank of a communicator."""

    def __init__(self, executor: Executor, planner: CallPlanner) -> None:
        self._rank = executor.rank
        self._size = executor.size
        self._executor = executor
        self._planner = planner
        self._planned: dict[CallSpec, PlannedReduction] = {}
        self._queue = SerialQueue()
        self._second_executor: Executor | None = None
        self._thread: int | None = None  # the thread that is in a function of the user

    def prepare(self, arrays: Sequence[BoundArray], gathered: type[Any] | None) -> Reductions:
        """Return the checked reduction of these arrays by one custom op. Nothing is sent.

        Raises:
            UsageError: the op is not defined for such a call.
            NoAlgorithmError: the call names an algorithm, or no algorithm carries out an exchange.
        """
        return Reductions(arrays, gathered, [self._plan(array.spec) for array in arrays])

    def run(self, reductions: Reductions, limit_s: float) -> None:
        """Run a reduction, and return when it has ended.

        Raises:
            UsageError: the function returned a wrong value here; other ranks get `AbortedError`.
            AbortedError: the function raised, here or on another rank.
            MismatchError, PeerLostError, CollectiveTimeoutError: the call failed.
        """
        with aborting_if_interrupted(self._executor):
            deadline = Deadline(limit_s)
            self._get_ready()
            # If no other reduction is waiting, `_finish` runs the first exchange, because `run` is faster than `start`.
            at_once = self._queue.are_over() and len(reductions.arrays) == 1
            started = None if at_once else self._start_first(reductions, limit_s)
            ticket = self._queue.take()
            ticket.do(partial(self._finish, reductions, started, deadline))
            ticket.ended.result()

    def start(self, reductions: Reductions, limit_s: float) -> Operation:
        """Start a reduction, and return its operation; `Executor.wait_for_end` does not notice its end."""
        with aborting_if_interrupted(self._executor):
            deadline = Deadline(limit_s)
            self._get_ready()
            started = self._start_first(reductions, limit_s)
            ticket = self._queue.take()
            self._queue.do_later(ticket, partial(self._finish, reductions, started, deadline))
        return QueuedOperation(self._executor, ticket.ended, str(reductions.planned[0].first.signature))

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic of the second exchanges, by peer."""
        return {} if self._second_executor is None else self._second_executor.traffic()

    def close(self) -> None:
        """End the calls in progress; the executor of the communicator must have been closed before."""
        if self._second_executor is not None:
            self._second_executor.close()
        self._queue.close()

    # --- running -----------------------------------------------------------------------------------------------------

    def _get_ready(self) -> None:
        """Make the executor for second exchanges, if there is none.

        Raises:
            UsageError: this thread is in the function of a reduction, which would wait for its own end.
        """
        if self._thread == threading.get_ident():
            raise UsageError(
                "the function of an operation made a call on the communicator that has called it: it may only combine "
                "its two arguments"
            )
        if self._second_executor is None:
            self._second_executor = self._executor.subgroup(range(self._size))

    def _start_first(self, reductions: Reductions, limit_s: float) -> list[_Started]:
        """Start the first exchange of each array."""
        started = []
        for array, planned in zip(reductions.arrays, reductions.planned, strict=True):
            stage = _stage(array, planned)
            operation = self._executor.start(planned.first, array.source, stage.reshape(-1))
            started.append((operation, stage))
            operation.run_in_background(limit_s)
        return started

    def _finish(self, reductions: Reductions, started: Sequence[_Started] | None, deadline: Deadline) -> None:
        """Wait for the first exchanges, or run them if `started` is None; combine, and run the second exchanges."""
        with aborting_if_interrupted(self._executor):
            for index, (array, planned) in enumerate(zip(reductions.arrays, reductions.planned, strict=True)):
                if started is None:
                    stage = _stage(array, planned)
                    self._executor.run(planned.first, array.source, stage.reshape(-1), deadline.remaining_s())
                else:
                    operation, stage = started[index]
                    operation.wait(deadline.remaining_s())
                self._deliver(array, planned, self._combined(array, planned, stage), deadline)

    def _deliver(self, array: BoundArray, planned: PlannedReduction, results: AnyArray, deadline: Deadline) -> None:
        """Bring rows of results to the ranks that must have them."""
        if planned.second is not None:
            assert self._second_executor is not None, "it is made before the first exchange"
            source = results[: planned.draft.sent].reshape(-1)
            self._second_executor.run(planned.second, source, array.target, deadline.remaining_s())
        elif planned.draft.rows:
            assert array.target is not None, "a rank that combines has a result"
            array.target[...] = results[-1]

    def _combined(self, array: BoundArray, planned: PlannedReduction, stage: AnyArray) -> AnyArray:
        """Return the rows of results: a single row, or for prefixes a row for each rank."""
        op, rows = array.spec.op, stage[: planned.draft.rows]
        assert isinstance(op, Op), "a custom op is an Op, not a name"
        self._thread = threading.get_ident()
        try:
            if planned.has_prefixes:
                combine_prefixes(op, rows)
            elif planned.draft.rows:
                rows = combine_all(op, rows)[np.newaxis]
        except UsageError as error:
            self._executor.abort(error.message)
            raise
        except Exception as error:
            text = f"{op.name} raised {type(error).__name__}: {error}"
            self._executor.abort(text)
            me = self._executor.members[self._rank]
            undefined = "the contents of the output are undefined"
            operation = str(planned.first.signature)
            raise AbortedError(f"rank {me}: {text}", rank=me, operation=operation, buffers=undefined) from error
        finally:
            self._thread = None
        return rows

    # --- planning ----------------------------------------------------------------------------------------------------

    def _plan(self, spec: CallSpec) -> PlannedReduction:
        """Return the planned reduction of this spec, which is the same for all functions."""
        assert isinstance(spec.op, Op), "a custom op is an Op, not a name"
        key = spec._replace(op=spec.op.name)
        planned = self._planned.get(key)
        if planned is None:
            if len(self._planned) >= _MOST_PLANNED:
                self._planned.clear()
            check(spec)
            draft = self._cheapest(spec)
            first, *rest = [self._planner.carrying(spec, exchange) for exchange in draft.exchanges]
            has_prefixes = spec.collective in PREFIXES
            planned = self._planned[key] = PlannedReduction(draft, first, rest[0] if rest else None, has_prefixes)
        return planned

    def _cheapest(self, spec: CallSpec) -> Draft:
        """Return the draft with the lowest predicted cost, which is the same on all ranks."""
        drafts = [draft_shared(spec, self._size, self._rank)]
        if spec.collective in WHOLE:
            drafts.insert(0, draft_whole(spec, self._size, self._rank))
        # Costs decide the choice, so they must have the same bits on all ranks.
        with _core.DefaultFloatEnvironment():
            costs = [self._cost_s(spec, draft) for draft in drafts]
        best = costs.index(min(costs))
        names = [" and ".join(each.collective for each in draft.exchanges) for draft in drafts]
        shown = ", ".join(f"{name} {cost * 1e6:.1f} us" for name, cost in zip(names, costs, strict=True))
        reduction = f"{spec.collective} by a function of {count_of(spec)} elements of each rank"
        _log.debug("%s is carried out by %s; predicted: %s", reduction, names[best], shown)
        return drafts[best]

    def _cost_s(self, spec: CallSpec, draft: Draft) -> float:
        assert spec.dtype is not None, "a reduction has an array"
        elements = count_of(spec) / (1 if draft.is_whole else self._size)
        combined_nbytes = (self._size - 1) * elements * spec.dtype.itemsize
        exchanges_s = sum(_CALL_S + self._planner.predicted_s(each) for each in draft.exchanges)
        return exchanges_s + combined_nbytes * _COMBINE_PER_BYTE_S


# A first exchange that has been started, and the memory that it fills.
_Started: TypeAlias = tuple[Operation, AnyArray]


def _stage(array: BoundArray, planned: PlannedReduction) -> AnyArray:
    """Return new memory for the contributions of all ranks."""
    assert array.spec.dtype is not None, "an array has a dtype"
    return np.empty(planned.draft.staged, numpy_dtype(array.spec.dtype))
