"""The generic executor: runs any plan for one rank over any message transport, in pure Python.

Theory of operation
-------------------
This is the living definition of what a plan means (`algorithms.plan`): whatever another executor does must look the
same from outside. A started collective holds one `_Lane` per lane of its plan. A lane posts its (group, segment)
instances strictly in canonical order, each when everything it depends on has ended, so that both ends of every channel
post in the same order. Groups are expanded from the plan when their first segment is posted and dropped after their
last, so a long `Repeat` is never unrolled whole.

The steps of an instance are posted together: local steps are carried out at once, messages become requests of the
transport, and `RecvReduce` receives into a stage of its own, which is combined when the message is there. Nothing
blocks; `poll` of any operation drives all operations of the executor, so that ranks may wait for them in different
orders.

The first error, wherever it is met, ends the communicator: it is handed to the transport, which raises it on every
rank.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import numpy as np

from unisono.algorithms.plan import (
    Copy,
    Group,
    Recv,
    RecvReduce,
    Reduce,
    Repeat,
    Send,
    Span,
    canonical_order,
)
from unisono.dtypes import DType
from unisono.errors import AbortedError, CollectiveTimeoutError, PlanError, UnisonoError, UsageError
from unisono.transports.base import AnyArray, Call, Identity, MessageTransport, Operation, Request, Signature, Traffic
from unisono.transports.memory import Memory, as_bytes, checked, flat, scatter
from unisono.transports.reductions import reduce_into

# Messages between two ranks outside collectives travel on a lane of their own: there, `group` is the tag and `sequence`
# numbers the messages of that tag and direction.
POINT_TO_POINT_LANE = -1


class GenericExecutor:
    """The `Executor` of one rank over `transport`. It is used by one thread at a time."""

    def __init__(self, transport: MessageTransport) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self._transport = transport
        self._active: list[_Running] = []
        self._sequence = 0
        self._messages: Counter[tuple[str, int, int]] = Counter()
        self._failure: UnisonoError | None = None
        self._closed = False

    def start(self, call: Call, source: AnyArray | None, target: AnyArray | None) -> Operation:
        """Start `call`; see `Executor.start`.

        Raises:
            AbortedError: the communicator has failed before.
            PlanError: the plan is not for this rank, or has a step that needs mapped memory.
            UsageError: an array does not fit the plan, or the communicator is closed.
        """
        self._check_usable(call.signature)
        self._check_plan(call)
        memory = Memory(call, source, target)
        sequence = self._sequence
        self._sequence += 1
        self._transport.announce(sequence, call.signature)
        return self._launch(_Collective(self, call, sequence, memory, self._transport))

    def send(self, array: AnyArray, dtype: DType, dest: int, tag: int) -> Operation:
        return self._start_message("send", array, dtype, dest, tag)

    def recv(self, array: AnyArray, dtype: DType, source: int, tag: int) -> Operation:
        return self._start_message("recv", array, dtype, source, tag)

    def traffic(self) -> Mapping[int, Traffic]:
        return self._transport.traffic()

    def abort(self, reason: str) -> None:
        self.fail(AbortedError(f"rank {self.rank} aborted the communicator: {reason}"))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._failure = self._failure or AbortedError(f"rank {self.rank} closed the communicator")
            self._active.clear()
            self._transport.close()

    def progress(self) -> None:
        """Drive every operation that has been started; remember the first error, and tell all ranks of it."""
        if self._failure is not None:
            return
        try:
            self._transport.progress()
            self._active = [operation for operation in self._active if not operation.advance()]
        except UnisonoError as error:
            self.fail(error)

    def fail(self, error: UnisonoError) -> None:
        """End the communicator on every rank with `error`, unless it has ended before."""
        if self._failure is None:
            self._failure = error
            self._active.clear()
            self._transport.abort(error)

    def failure(self) -> UnisonoError | None:
        """Return a new copy of the error that ended the communicator, or None."""
        return copy.copy(self._failure)

    def _launch(self, operation: _Running) -> Operation:
        self._active.append(operation)
        self.progress()
        return operation

    def _start_message(self, direction: str, array: AnyArray, dtype: DType, peer: int, tag: int) -> Operation:
        signature = Signature("send/recv", dtype.name, (array.size,), "C", None, None, "direct", 1)
        self._check_usable(signature)
        if not 0 <= peer < self.size:
            raise UsageError(f"rank {peer} does not exist: there are {self.size} ranks", operation=str(signature))
        array = checked("array", array, dtype, array.size)
        number = self._messages[direction, peer, tag]
        self._messages[direction, peer, tag] += 1
        request: Request | None = None
        if array.size:
            post = self._transport.post_send if direction == "send" else self._transport.post_recv
            request = post(peer, Identity(number, POINT_TO_POINT_LANE, tag, 0), signature, [as_bytes(array)])
        return self._launch(_Message(self, signature, number, peer, request))

    def _check_usable(self, signature: Signature) -> None:
        if self._closed:
            raise UsageError("the communicator is closed", rank=self.rank, operation=str(signature))
        if self._failure is not None:
            message = f"the communicator has failed before: {self._failure.message}"
            raise AbortedError(message, rank=self.rank, operation=str(signature), buffers="output untouched")

    def _check_plan(self, call: Call) -> None:
        plan = call.plan
        if (plan.rank, plan.size) != (self.rank, self.size):
            raise PlanError(
                f"the plan is for rank {plan.rank} of {plan.size}; this is rank {self.rank} of {self.size}",
                rank=self.rank,
            )
        groups = (group for lane in plan.lanes for item in lane for group in _groups_of(item))
        if any(type(step) not in _POST for group in groups for step in group.steps):
            raise PlanError(
                f"{plan.collective} by {plan.algorithm} needs mapped memory, "
                f"which transport {self._transport.name!r} does not offer",
                rank=self.rank,
            )


class _Running:
    """A started operation of `executor`: the parts of `Operation` that collectives and messages share."""

    def __init__(self, executor: GenericExecutor, signature: Signature, sequence: int) -> None:
        self._executor = executor
        self._signature = signature
        self._sequence = sequence
        self._finished = False

    def poll(self) -> bool:
        if not self._finished:
            self._executor.progress()
        if not self._finished and (error := self._executor.failure()) is not None:
            error.rank, error.operation, error.sequence = self._executor.rank, str(self._signature), self._sequence
            error.buffers = "output undefined" if self.has_written() else "output untouched"
            raise error
        return self._finished

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        pauses = _pauses()
        try:
            while not self.poll():
                if time.monotonic() >= deadline:
                    self._executor.fail(self._timeout(timeout_s))
                elif (pause := next(pauses)) is not None:
                    time.sleep(pause)
        except KeyboardInterrupt:
            self.abort("interrupted")
            raise

    def abort(self, reason: str) -> None:
        self._executor.abort(reason)

    def advance(self) -> bool:
        """Make progress; return whether the operation is finished."""
        raise NotImplementedError

    def waits_for(self) -> set[int]:
        """Return the peers whose messages the operation waits for."""
        raise NotImplementedError

    def has_written(self) -> bool:
        """Return whether the caller's output may have been written to."""
        raise NotImplementedError

    def _timeout(self, timeout_s: float) -> CollectiveTimeoutError:
        missing = sorted(self.waits_for())
        names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return CollectiveTimeoutError(
            f"rank {self._executor.rank} waited {timeout_s:g} s for {names} in {self._signature}",
            peer=missing[0] if len(missing) == 1 else None,
        )


class _Message(_Running):
    """A message outside collectives; `request` is None for one of zero bytes, which does not travel."""

    def __init__(
        self, executor: GenericExecutor, signature: Signature, number: int, peer: int, request: Request | None
    ) -> None:
        super().__init__(executor, signature, number)
        self._peer = peer
        self._request = request

    def advance(self) -> bool:
        self._finished = self._request is None or self._request.done()
        return self._finished

    def waits_for(self) -> set[int]:
        return {self._peer}

    def has_written(self) -> bool:
        return True


class _Collective(_Running):
    """A started collective: its lanes, and what each kind of step does."""

    def __init__(
        self, executor: GenericExecutor, call: Call, sequence: int, memory: Memory, transport: MessageTransport
    ) -> None:
        super().__init__(executor, call.signature, sequence)
        self._op = call.op
        self._size = call.plan.size
        self._memory = memory
        self._transport = transport
        self._lanes = [_Lane(index, call, self) for index in range(len(call.plan.lanes))]

    def advance(self) -> bool:
        while any(lane.advance(self._lanes) for lane in self._lanes):
            pass
        self._finished = all(lane.is_finished() for lane in self._lanes)
        return self._finished

    def waits_for(self) -> set[int]:
        return {posted.peer for lane in self._lanes for posted in lane.posted()}

    def has_written(self) -> bool:
        return self._memory.output_written

    def post(self, step: Any, lane: int, group: int, segment: int) -> _Posted | None:
        """Carry out a local step, or post the message of one; return what is to be waited for, if anything."""
        return _POST[type(step)](self, step, Identity(self._sequence, lane, group, segment))

    def post_send(self, step: Send, identity: Identity) -> _Posted | None:
        views = self._memory.views(step.src, identity.segment)
        if not views:
            return None
        request = self._transport.post_send(step.peer, identity, self._signature, [as_bytes(view) for view in views])
        return _Posted(step.peer, request)

    def post_recv(self, step: Recv, identity: Identity) -> _Posted | None:
        return self._post_recv(step.peer, identity, self._memory.views_to_write(step.dst, identity.segment))

    def post_recv_reduce(self, step: RecvReduce, identity: Identity) -> _Posted | None:
        views = self._memory.views(step.src, identity.segment)
        if not views:
            return None
        source = flat(views)
        stage = np.empty_like(source)
        operands = [stage, source] if step.received_first else [source, stage]
        finish = partial(self._combine, step.dst, operands, identity.segment, step.lower)
        return self._post_recv(step.peer, identity, [stage], finish)

    def post_copy(self, step: Copy, identity: Identity) -> None:
        if step.lower:
            self._reduce(step.dst, (step.src,), identity.segment, lower=True)
            return
        source = self._memory.views(step.src, identity.segment)
        target = self._memory.views_to_write(step.dst, identity.segment)
        if [view.ctypes.data for view in target] != [view.ctypes.data for view in source]:
            scatter(target, flat(source))

    def post_reduce(self, step: Reduce, identity: Identity) -> None:
        self._reduce(step.dst, step.sources, identity.segment, step.lower)

    def _post_recv(
        self, peer: int, identity: Identity, views: list[AnyArray], finish: Callable[[], None] | None = None
    ) -> _Posted | None:
        if not views:
            return None
        request = self._transport.post_recv(peer, identity, self._signature, [as_bytes(view) for view in views])
        return _Posted(peer, request, finish)

    def _reduce(self, dst: Span, sources: tuple[Span, ...], segment: int, lower: bool) -> None:
        operands = [self._memory.views(source, segment) for source in sources]
        if operands[0]:
            self._combine(dst, [flat(views) for views in operands], segment, lower)

    def _combine(self, dst: Span, sources: list[AnyArray], segment: int, lower: bool) -> None:
        if self._op is None:
            raise PlanError(f"the plan reduces, but {self._signature} has no operation")
        result = np.empty_like(sources[0])
        reduce_into(result, sources, self._op, self._size, lower)
        scatter(self._memory.views_to_write(dst, segment), result)


# What each kind of step does; a kind that is missing here needs mapped memory.
_POST: dict[type, Callable[[_Collective, Any, Identity], _Posted | None]] = {
    Send: _Collective.post_send,
    Recv: _Collective.post_recv,
    RecvReduce: _Collective.post_recv_reduce,
    Copy: _Collective.post_copy,
    Reduce: _Collective.post_reduce,
}


@dataclass(slots=True)
class _Posted:
    """A posted message and what is done, once, when it has arrived."""

    peer: int
    request: Request
    finish: Callable[[], None] | None = None

    def done(self) -> bool:
        if not self.request.done():
            return False
        if self.finish is not None:
            self.finish()
        return True


class _Lane:
    """One lane of a started collective.

    Attributes:
        ended: for each segment, the number of groups that have ended; they end in order.
    """

    def __init__(self, index: int, call: Call, collective: _Collective) -> None:
        self._index = index
        self._collective = collective
        self._segments = call.segments
        self._unexpanded = call.plan.groups(index)
        self._expanded: dict[int, Group] = {}
        self._order = canonical_order(call.plan.group_count(index), call.segments)
        self._next = next(self._order, None)
        self._running: dict[int, list[_Posted]] = {}
        self.ended = [0] * call.segments

    def advance(self, lanes: Sequence[_Lane]) -> bool:
        """End the instances that have ended and post those that may start; return whether there was any."""
        moved = False
        for segment, posted in list(self._running.items()):
            posted[:] = [message for message in posted if not message.done()]
            if not posted:
                del self._running[segment]
                self.ended[segment] += 1
                moved = True
        while self._next is not None and self._may_start(*self._next, lanes):
            self._post(*self._next)
            self._next = next(self._order, None)
            moved = True
        return moved

    def posted(self) -> Iterator[_Posted]:
        """Yield the messages that have been posted and have not ended."""
        return chain.from_iterable(self._running.values())

    def is_finished(self) -> bool:
        """Return whether every group of every segment has ended."""
        return self._next is None and not self._running

    def _may_start(self, group: int, segment: int, lanes: Sequence[_Lane]) -> bool:
        return (
            self.ended[segment] == group
            and (segment == 0 or self.ended[segment - 1] > group)
            and all(lanes[lane].ended[segment] > other for lane, other in self._group(group).after)
        )

    def _post(self, group: int, segment: int) -> None:
        posted = [self._collective.post(step, self._index, group, segment) for step in self._group(group).steps]
        self._running[segment] = [message for message in posted if message is not None]
        if segment == self._segments - 1:
            del self._expanded[group]

    def _group(self, group: int) -> Group:
        """Return a group as run. Canonical order asks for new ones in ascending order, so each is expanded once."""
        if group not in self._expanded:
            self._expanded[group] = next(self._unexpanded)
        return self._expanded[group]


def _groups_of(item: Group | Repeat) -> tuple[Group, ...]:
    return item.groups if isinstance(item, Repeat) else (item,)


def _pauses() -> Iterator[float | None]:
    """Yield how long to pause after each poll in vain: spin first, then yield the core, then sleep (seconds)."""
    return chain(repeat(None, 100), repeat(0.0, 100), repeat(0.0002))
