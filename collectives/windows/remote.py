"""The target whose memory this rank does not map: it sends requests to the server of that rank.

The server is a thread of the native core (`transports/native/core/windows/window_server.h`, with the layout of requests
and answers). Requests and answers between two ranks keep their order, so a flush is one request: its answer says that
everything before it is done. Only locks are answered out of order, and have a tag of their own.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator

import numpy as np

from unisono.collectives.windows.operations import Element, Selection
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import Operation, WindowExecutor

# Action, dtype, op, whether positions follow, start, count, step.
_REQUEST = struct.Struct("=BBBB4xqqq")
# Status, and the start, count and total of the request that was refused.
_REPLY = struct.Struct("=qqqq")
_PUT, _GET, _ACCUMULATE, _GET_ACCUMULATE, _COMPARE_AND_SWAP, _FLUSH, _LOCK, _UNLOCK = range(8)
_DONE, _OUT_OF_RANGE, _WRONG_OPERATION, _NOT_LOCKED = range(4)
_REASONS = {
    _OUT_OF_RANGE: "{count} elements from element {start} on are not all in its window, which has {total} elements",
    _WRONG_OPERATION: "the operation on {count} elements from element {start} on is not defined for their dtype",
    _NOT_LOCKED: "this rank does not hold its lock",
}
_BYTE = DTYPES["uint8"]
# The most bytes of operand, and the most elements, of one request.
_CHUNK_NBYTES, _CHUNK_ELEMENTS = 1 << 20, 1 << 17
# An operation waits while this many bytes of earlier requests have not been sent.
_MOST_UNSENT_NBYTES = 8 << 20


class _Answer:
    """The `Operation` of a request with an answer. Its end writes the result to the array of the user."""

    def __init__(self, receive: Operation, reply: AnyArray, result: AnyArray | None, rank: int) -> None:
        self._receive, self._reply, self._result, self._rank = receive, reply, result, rank
        self._lock = threading.Lock()
        self._is_taken = False
        self._refusal: UsageError | None = None
        self._is_raised = False

    def poll(self) -> bool:
        if not self._receive.poll():
            return False
        self._raise_refusal()
        return True

    def wait(self, timeout_s: float) -> None:
        self._receive.wait(timeout_s)
        self._raise_refusal()

    def finish(self, timeout_s: float) -> UsageError | None:
        """Wait for the answer; return the refusal, unless the program has seen it."""
        self._receive.wait(timeout_s)
        self._take()
        return None if self._is_raised else self._refusal

    def run_in_background(self, timeout_s: float) -> None:
        self._receive.run_in_background(timeout_s)

    def ended(self) -> bool:
        return self._receive.ended()

    def abort(self, reason: str) -> None:
        self._receive.abort(reason)

    def _take(self) -> None:
        """Write the result or note the refusal, once."""
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                status, start, count, total = _REPLY.unpack(self._reply[: _REPLY.size].tobytes())
                if status != _DONE:
                    reason = _REASONS.get(status, f"for the reason {status}").format(
                        start=start, count=count, total=total
                    )
                    self._refusal = UsageError(f"rank {self._rank} refused an operation: {reason}", peer=self._rank)
                elif self._result is not None:
                    self._result.view(np.uint8)[:] = self._reply[_REPLY.size :]

    def _raise_refusal(self) -> None:
        self._take()
        if self._refusal is not None:
            self._is_raised = True
            raise self._refusal


class _Several:
    """The `Operation` of several requests."""

    def __init__(self, answers: list[_Answer]) -> None:
        self._answers = answers

    def poll(self) -> bool:
        return all(answer.poll() for answer in self._answers)

    def wait(self, timeout_s: float) -> None:
        for answer in self._answers:
            answer.wait(timeout_s)

    def run_in_background(self, timeout_s: float) -> None:
        for answer in self._answers:
            answer.run_in_background(timeout_s)

    def ended(self) -> bool:
        return all(answer.ended() for answer in self._answers)

    def abort(self, reason: str) -> None:
        self._answers[0].abort(reason)


class RemoteTarget:
    """A part that the server of its rank accesses. Any thread may use it.

    Args:
        executor: the executor of the window's communicator.
        rank: the rank.
        timeout_s: how long an operation waits until earlier requests have been sent.
    """

    def __init__(self, executor: WindowExecutor, rank: int, timeout_s: float) -> None:
        self._executor, self._rank, self._timeout_s = executor, rank, timeout_s
        self._lock = threading.Lock()  # a request and its receive are started together, in one order
        self._unsent: deque[tuple[Operation, int]] = deque()
        self._unsent_nbytes = 0
        self._unanswered: deque[_Answer] = deque()
        self._is_unflushed = False
        self._refusal: UsageError | None = None  # of an answer that has been dropped

    def put(self, element: Element, where: Selection, source: AnyArray) -> None:
        if not element.is_plain:
            where, source = element.moved(where), element.raw(source)
        for part, begin, end in _chunks(where, element.moved_nbytes):
            self._send(_PUT, element, 0, part, [source[begin:end]])

    def get(self, element: Element, where: Selection, target: AnyArray) -> Operation | None:
        if not element.is_plain:
            where, target = element.moved(where), element.raw(target)
        return _joined(
            [
                self._ask(_GET, element, 0, part, [], target[begin:end])
                for part, begin, end in _chunks(where, element.moved_nbytes)
            ]
        )

    def accumulate(self, element: Element, op: int, where: Selection, operand: AnyArray) -> None:
        for part, begin, end in _chunks(where, element.itemsize):
            self._send(_ACCUMULATE, element, op, part, [operand[begin:end]])

    def get_accumulate(
        self, element: Element, op: int, where: Selection, operand: AnyArray, result: AnyArray
    ) -> Operation | None:
        operand, result = operand.reshape(-1), result.reshape(-1)
        return _joined(
            [
                self._ask(_GET_ACCUMULATE, element, op, part, [operand[begin:end]], result[begin:end])
                for part, begin, end in _chunks(where, element.itemsize)
            ]
        )

    def compare_and_swap(self, element: Element, at: int, compared: AnyArray, value: AnyArray) -> Operation | None:
        cell = value.reshape(-1)
        return self._ask(_COMPARE_AND_SWAP, element, 0, Selection(at, 1), [compared.reshape(-1), cell], cell)

    def flush(self, limit_s: float) -> None:
        if self._is_unflushed:
            self._command(_FLUSH, 0)
        self._take_answers(limit_s)

    def lock(self, exclusive: bool, limit_s: float) -> None:
        reply = np.empty(_REPLY.size, np.uint8)
        with self._lock:
            granted = self._executor.recv(reply, _BYTE, self._rank, _core.WINDOW_GRANT_TAG)
            self._start(_message(_LOCK, None, int(exclusive), Selection(0, 0), []))
        granted.wait(limit_s)

    def unlock(self, exclusive: bool, limit_s: float) -> None:
        self._command(_UNLOCK, int(exclusive))
        self._take_answers(limit_s)

    def _send(self, action: int, element: Element, op: int, where: Selection, arrays: list[AnyArray]) -> None:
        message = _message(action, element, op, where, arrays)
        with self._lock:
            self._is_unflushed = True
            self._start(message)

    def _ask(
        self,
        action: int,
        element: Element | None,
        op: int,
        where: Selection,
        arrays: list[AnyArray],
        result: AnyArray | None,
    ) -> _Answer:
        message = _message(action, element, op, where, arrays)
        reply = np.empty(_REPLY.size + (0 if result is None else result.nbytes), np.uint8)
        with self._lock:
            receive = self._executor.recv(reply, _BYTE, self._rank, _core.WINDOW_REPLY_TAG)
            answer = _Answer(receive, reply, result, self._rank)
            self._unanswered.append(answer)
            self._start(message)
        return answer

    def _command(self, action: int, op: int) -> None:
        self._is_unflushed = False
        self._ask(action, None, op, Selection(0, 0), [], None)

    def _take_answers(self, limit_s: float) -> None:
        """Wait for all answers; raise a refusal that the program has not seen when all have come."""
        with self._lock:
            answers, self._unanswered = self._unanswered, deque()
            refusal, self._refusal = self._refusal, None
        for answer in answers:
            refusal = answer.finish(limit_s) or refusal
        if refusal is not None:
            raise refusal

    def _start(self, message: AnyArray) -> None:
        """Start sending a request, while few earlier ones are under way."""
        while self._unsent and (self._unsent_nbytes > _MOST_UNSENT_NBYTES or self._unsent[0][0].ended()):
            operation, nbytes = self._unsent.popleft()
            self._unsent_nbytes -= nbytes
            operation.wait(self._timeout_s)
        while len(self._unanswered) > 1 and self._unanswered[0].ended():
            self._refusal = self._unanswered.popleft().finish(self._timeout_s) or self._refusal
        self._unsent.append((self._executor.send(message, _BYTE, self._rank, _core.WINDOW_REQUEST_TAG), message.nbytes))
        self._unsent_nbytes += message.nbytes


def _joined(answers: list[_Answer]) -> Operation | None:
    if not answers:
        return None
    return answers[0] if len(answers) == 1 else _Several(answers)


def _message(action: int, element: Element | None, op: int, where: Selection, arrays: list[AnyArray]) -> AnyArray:
    """Return the bytes of a request."""
    code = _BYTE.code if element is None else element.code
    head = _REQUEST.pack(action, code, op, where.indices is not None, where.start, where.elements, where.step)
    positions = [] if where.indices is None else [where.indices]
    parts = [np.frombuffer(head, np.uint8), *(array.view(np.uint8) for array in (*positions, *arrays))]
    return np.concatenate(parts)


def _chunks(where: Selection, itemsize: int) -> Iterator[tuple[Selection, int, int]]:
    """Cut a selection into those of single requests; yield each with its begin and end in the array of the user."""
    most = min(_CHUNK_NBYTES // itemsize, _CHUNK_ELEMENTS if where.indices is not None else _CHUNK_NBYTES)
    for begin in range(0, where.elements, most):
        end = min(begin + most, where.elements)
        indices = None if where.indices is None else where.indices[begin:end]
        yield Selection(where.start + begin * where.step, end - begin, where.step, indices), begin, end
