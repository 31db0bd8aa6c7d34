"""Operands of messages: the memory that `send` and `recv` hand to an executor.

Used by: `api/point_to_point.py`. Arrays on a GPU have operands of their own in `device/point_to_point.py`.
"""

from __future__ import annotations

from typing import Any

from unisono import log
from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.work import Work, Works
from unisono.transports.contracts.call import MemoryType
from unisono.transports.contracts.executor import Executor, Operation, Probe

_log = log.get("calls")


class SendOperand:
    """The array of a `send`.

    Attributes:
        operand: the array as an executor takes it.
        memory: the type of memory that the array is in.
    """

    def __init__(self, operand: Operand, memory: MemoryType = MemoryType.HOST) -> None:
        self.operand = operand
        self.memory = memory

    def start(self, executor: Executor, dest: int, tag: int) -> Operation:
        """Start to send the array."""
        _log.debug("send of %s to rank %d with tag %d starts", self.operand, dest, tag)
        return executor.send(self.operand.flat, self.operand.dtype, dest, tag, self.memory)


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
        return executor.recv(self.operand.flat, self.operand.dtype, source, tag, self.memory)

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        """Return the `Work` of `received`, a receive that has been started."""
        return works.add(received, None, limit_s, lambda _: self.finish(received), message=received.message)

    def finish(self, received: Probe | None) -> Any:
        """Return the user's array after the receive has ended; `received` is None if this rank sent to itself."""
        return self._out


def _named(name: str, number: int | None) -> str:
    return f"any {name}" if number is None else f"{name} {number}"
