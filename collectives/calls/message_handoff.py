"""Messages as they are handed to an executor: what is sent, and what is received for whom."""

from __future__ import annotations

from typing import Any

from unisono.collectives.arrays.operands import Operand
from unisono.collectives.calls.work import Work, Works
from unisono.transports.contracts.call import MemoryType
from unisono.transports.contracts.executor import Executor, Operation, Probe


class SendOperand:
    """A message to be sent.

    Attributes:
        operand: what is sent.
        memory: where that lies.
    """

    def __init__(self, operand: Operand, memory: MemoryType = MemoryType.HOST) -> None:
        self.operand = operand
        self.memory = memory

    def start(self, executor: Executor, dest: int, tag: int) -> Operation:
        """Start sending it."""
        return executor.send(self.operand.flat, self.operand.dtype, dest, tag, self.memory)


class ReceiveOperand:
    """A message on its way to an array.

    Attributes:
        operand: where it is received.
        memory: where that lies.
    """

    def __init__(self, operand: Operand, out: Any, memory: MemoryType = MemoryType.HOST) -> None:
        self.operand = operand
        self.memory = memory
        self._out = out

    def start(self, executor: Executor, source: int | None, tag: int | None) -> Probe:
        """Start receiving it."""
        return executor.recv(self.operand.flat, self.operand.dtype, source, tag, self.memory)

    def work(self, works: Works, received: Probe, limit_s: float) -> Work[Any]:
        """Return the work of receiving it, which goes on by itself."""
        return works.add(received, None, limit_s, lambda _: self.finish(received), found=received.found)

    def finish(self, received: Probe | None) -> Any:
        """Return the array, once it has been received; None stands for what was copied from this rank itself."""
        return self._out
