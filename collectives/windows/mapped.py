"""The target whose memory this rank maps: every operation is done when it returns."""

from __future__ import annotations

from unisono.collectives.windows.operations import Element, Selection
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import WindowExecutor


class MappedTarget:
    """A part whose memory this rank maps: every operation is done when it returns."""

    def __init__(self, executor: WindowExecutor, part: _core.WindowPart, rank: int) -> None:
        self._executor = executor
        self._part = part
        self._rank = rank

    def put(self, element: Element, where: Selection, source: AnyArray) -> None:
        if not element.is_plain:
            where, source = element.moved(where), element.raw(source)
        self._part.put(element.code, *where, source)

    def get(self, element: Element, where: Selection, target: AnyArray) -> None:
        if not element.is_plain:
            where, target = element.moved(where), element.raw(target)
        self._part.get(element.code, *where, target)

    def accumulate(self, element: Element, op: int, where: Selection, operand: AnyArray) -> None:
        if outcome := self._part.accumulate(element.code, op, *where, element.raw(operand), None):
            self._executor.end_access(outcome, f"window.accumulate on rank {self._rank}")

    def get_accumulate(self, element: Element, op: int, where: Selection, operand: AnyArray, result: AnyArray) -> None:
        if not element.is_plain:
            operand, result = element.raw(operand), element.raw(result)
        if outcome := self._part.accumulate(element.code, op, *where, operand, result):
            self._executor.end_access(outcome, f"window.get_accumulate on rank {self._rank}")

    def compare_and_swap(self, element: Element, at: int, compared: AnyArray, value: AnyArray) -> None:
        if outcome := self._part.compare_and_swap(element.code, at, element.raw(compared), element.raw(value)):
            self._executor.end_access(outcome, f"window.compare_and_swap on rank {self._rank}")

    def flush(self, limit_s: float) -> None:
        pass

    def lock(self, exclusive: bool, limit_s: float) -> None:
        self._executor.lock_part(self._part, exclusive, limit_s, f"window.lock({self._rank})")

    def unlock(self, exclusive: bool, limit_s: float) -> None:
        self._part.unlock(exclusive)
