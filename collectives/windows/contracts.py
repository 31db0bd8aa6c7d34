"""The contracts of windows: a target, which is the part of one rank as an origin accesses it, and the communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from unisono.collectives.windows.operations import Element, Selection
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import Operation


class WindowComm(Protocol):
    """A communicator for one window alone: the methods of `Communicator` that a window uses."""

    rank: int
    size: int
    world_ranks: tuple[int, ...]

    @property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks of each host."""

    @property
    def timeout_s(self) -> float:
        """Seconds after which a call without a limit of its own fails."""

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""

    def allgather(self, x: Any, *, timeout_s: float | None = None) -> Any:
        """Return the rows of all ranks."""

    def barrier(self, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks have called it."""

    def close(self) -> None:
        """Close the communicator and its executor."""


class WindowTarget(Protocol):
    """The part of one rank. Arguments have been checked, arrays are contiguous, and nothing here checks epochs.

    An operation returns None if it is done, and otherwise an `Operation` that ends when its result has been written.
    """

    def put(self, element: Element, where: Selection, source: AnyArray) -> None:
        """Copy `source` to the elements. The caller may change `source` as soon as it returns."""

    def get(self, element: Element, where: Selection, target: AnyArray) -> Operation | None:
        """Copy the elements to `target`."""

    def accumulate(self, element: Element, op: int, where: Selection, operand: AnyArray) -> None:
        """Combine the elements with `operand`. The caller may change `operand` as soon as it returns."""

    def get_accumulate(
        self, element: Element, op: int, where: Selection, operand: AnyArray, result: AnyArray
    ) -> Operation | None:
        """Combine the elements with `operand`, and write their values before to `result`, which may be `operand`."""

    def compare_and_swap(self, element: Element, at: int, compared: AnyArray, value: AnyArray) -> Operation | None:
        """Replace the element by `value` if it is `compared`, and write its value before to `value`."""

    def flush(self, limit_s: float) -> None:
        """Wait until all operations on this target are done.

        Raises:
            UsageError: the target has refused an operation.
            PeerLostError, CollectiveTimeoutError, AbortedError: the job has failed.
        """

    def lock(self, exclusive: bool, limit_s: float) -> None:
        """Wait for the lock of the part; raises the last three errors of `flush`."""

    def unlock(self, exclusive: bool, limit_s: float) -> None:
        """Complete all operations on this target, and give up its lock; raises as `flush`."""
