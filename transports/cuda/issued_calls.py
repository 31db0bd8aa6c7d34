"""Calls that issue work to a device, as data, so that the same work is issued again without the plan that it is of.

`issue` is the definition: it makes each call by Python. A device may compile the calls to something quicker
(`Device.compile`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

Method: TypeAlias = Literal["copy", "reduce", "lift", "record", "wait", "raise_flag", "await_flag"]


class Counters:
    """Numbers that grow by 1 each time that they are used, all 0 at first. One thread at a time uses them.

    Attributes:
        numbers: the numbers used last, as memory of unsigned 64-bit words.
    """

    def __init__(self, count: int) -> None:
        self.numbers = memoryview(bytearray(8 * count)).cast("Q")

    def next(self, index: int) -> int:
        """Return the next number of one of the counters."""
        self.numbers[index] += 1
        return self.numbers[index]


@dataclass(frozen=True, slots=True)
class NextNumber:
    """Stands for the next number of a counter in the arguments of a call."""

    counters: Counters
    index: int


class IssuedCall(NamedTuple):
    """A call of a method of a device.

    Attributes:
        method: the name of the method.
        arguments: its arguments. A `NextNumber` is replaced by another number each time that the call is made.
    """

    method: Method
    arguments: tuple[Any, ...]

    def issue(self, device: object) -> None:
        """Make the call on a `Device`."""
        getattr(device, self.method)(*map(_valued, self.arguments))


def issue(device: object, calls: Sequence[IssuedCall]) -> None:
    """Make calls on a `Device` in order, up to the first one that fails."""
    for call in calls:
        call.issue(device)


def _valued(argument: Any) -> Any:
    return argument.counters.next(argument.index) if isinstance(argument, NextNumber) else argument
