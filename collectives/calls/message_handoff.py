"""Operands of messages: the memory that `send` and `recv` hand to an executor.

A message is the elements of an array in C order, whatever the memory order of the array at either end. So a source in
Fortran order is packed, and the elements for a target in Fortran order are received in memory of their own and then
copied. A message to or from `NOBODY` has operands of its own, which check the array and start nothing.

Used by: `api/point_to_point.py`. Arrays on a GPU have operands of their own in `device/point_to_point.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from unisono.collectives.arrays import adapters, operands
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.work import Work, Works
from unisono.dtypes import DTYPES, DType
from unisono.errors import UnisonoError
from unisono.foundation import log
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import MemoryType
from unisono.transports.contracts.executor import OF_NOBODY, Executor, Message, Operation, Probe

_log = log.get("calls")

# The number that stands for `NOBODY` where ranks are numbers.
NO_RANK = -1
# Threads of the library make no calls by themselves, but for those that run the callbacks of the program.
_OWN_THREADS, _CALLBACKS = "unisono-", "unisono-callbacks"
_NO_ELEMENTS = Operand(np.empty(0, np.uint8), DTYPES["uint8"], (0,), "C")


class SendOperand:
    """The array of a `send`.

    Attributes:
        operand: the array as an executor takes it.
        memory: the type of memory that the array is in.
    """

    def __init__(self, operand: Operand, memory: MemoryType = MemoryType.HOST) -> None:
        self.operand = operand
        self.memory = memory

    def start(self, executor: Executor, dest: int, tag: int, *, synchronous: bool = False) -> Operation:
        """Start to send the array; `synchronous` is as in `Executor.send`."""
        _log.debug("send of %s to rank %d with tag %d starts", self.operand, dest, tag)
        array, dtype, shape = self.operand.flat, self.operand.dtype, self.operand.shape
        return executor.send(array, dtype, dest, tag, self.memory, shape, synchronous=synchronous)


class ReceiveOperand:
    """The array of a `recv`.

    Attributes:
        operand: the array as an executor takes it.
        memory: the type of memory that the array is in.
    """

    def __init__(self, operand: Operand, out: Any, memory: MemoryType = MemoryType.HOST) -> None:
        self.operand = operand
        self.memory = memory
        self._out = out

    def start(self, executor: Executor, source: int | None, tag: int | None) -> Probe:
        """Start to receive into the array."""
        _log.debug("recv of %s from %s with %s starts", self.operand, _named("rank", source), _named("tag", tag))
        return executor.recv(self.operand.flat, self.operand.dtype, source, tag, self.memory, self.operand.shape)

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        """Return the `Work` of `received`, a receive that has been started."""
        return works.add(received, None, limit_s, lambda _: self.finish(received), message=received.message)

    def finish(self, received: Probe | None) -> Any:
        """Return the user's array after the receive has ended; `received` is None if a probe has taken the message."""
        return self._out


class _Nothing:
    """The operation of a message to or from `NOBODY`, which has ended when it starts."""

    def poll(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once."""

    def run_in_background(self, timeout_s: float) -> None:
        """Do nothing."""

    def ended(self) -> bool:
        return True

    def abort(self, reason: str) -> None:
        """Do nothing."""

    def message(self) -> Message | None:
        return OF_NOBODY

    def host_copy(self) -> bytes | None:
        return None

    def acknowledge(self, timeout_s: float) -> None:
        """Do nothing."""

    def fits(self, dtype: DType, count: int, shape: Sequence[int]) -> bool:
        return True


class SendToNobody(SendOperand):
    """The array of a `send` to `NOBODY`, which nobody reads.

    Raises:
        UsageError: the array cannot be sent.
    """

    def __init__(self, x: Any) -> None:
        if not on_device(x):
            operands.dtype_of(adapters.view(x, "x"), "x")
        super().__init__(_NO_ELEMENTS)

    def start(self, executor: Executor, dest: int, tag: int, *, synchronous: bool = False) -> Operation:
        return _Nothing()


class ReceiveFromNobody(ReceiveOperand):
    """The array of a `recv` from `NOBODY`, which stays as it is.

    Raises:
        UsageError: a message cannot be received into the array.
    """

    def __init__(self, out: Any) -> None:
        if not on_device(out):
            operands.target(out)
        super().__init__(_NO_ELEMENTS, out)

    def start(self, executor: Executor, source: int | None, tag: int | None) -> Probe:
        return _Nothing()


class AllOperations:
    """The operation of several messages, which ends when all of them have ended."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._operations = operations

    def poll(self) -> bool:
        return all(operation.poll() for operation in self._operations)

    def wait(self, timeout_s: float) -> None:
        deadline = Deadline(timeout_s)
        for operation in self._operations:
            operation.wait(deadline.remaining_s())

    def run_in_background(self, timeout_s: float) -> None:
        for operation in self._operations:
            operation.run_in_background(timeout_s)

    def ended(self) -> bool:
        return all(operation.ended() for operation in self._operations)

    def abort(self, reason: str) -> None:
        for operation in self._operations:
            operation.abort(reason)


class BesideReceive(ReceiveOperand):
    """A `recv` into an array in Fortran order, by a second array in C order, from which the elements are copied."""

    def __init__(self, target: Operand, out: Any) -> None:
        super().__init__(operands.in_c_order(target, np.empty_like(target.flat)), out)
        self._target = target

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        return works.keep(
            _BesideWork(works, received, None, limit_s, lambda _: self.finish(received), received.message)
        )

    def finish(self, received: Probe | None) -> Any:
        """Copy the elements to the array, and return it."""
        operands.to_memory_order(self.operand.flat, self._target)
        return super().finish(received)


class _BesideWork(Work[Any]):
    """The work of a `BesideReceive`. The array holds the elements when `done` says that the call has ended."""

    __slots__ = ()

    def done(self) -> bool:
        if not super().done():
            return False
        with suppress(UnisonoError):  # `wait` raises it again
            self.wait()
        return True


def waits_for_itself(executor: Executor, tag: int, nbytes: int) -> bool:
    """Return whether a message of a rank to itself would wait for a receive that no thread can make.

    It is so if the buffer for such messages has no room, no receive is posted, and the program has only this thread.
    """
    if executor.takes_from_itself(tag, nbytes):
        return False
    others = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    return all(name.startswith(_OWN_THREADS) and name != _CALLBACKS for name in others)


def _named(name: str, number: int | None) -> str:
    return f"any {name}" if number is None else f"{name} {number}"
