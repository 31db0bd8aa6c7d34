"""The errors that Unisono raises, one class for each way in which a collective can fail.

Every error derives from `UnisonoError` and carries, where they are known, the rank that raises, the peer concerned,
the operation and its sequence number on the communicator, and what is left of the caller's buffers. Errors travel
between processes (launchers hand them back, survivors raise the first one), so each can be pickled.
"""

from __future__ import annotations

from typing import Any


class UnisonoError(Exception):
    """Base of all errors of this library.

    Attributes:
        rank: the rank that raises, or None outside a communicator.
        peer: the rank that the error is about, or None.
        operation: the call, for example ``"allreduce(float32[8], op=sum)"``, or None.
        sequence: the number of the call on its communicator, from 0, or None.
        buffers: what is left of the caller's output, for example ``"output untouched"``, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        peer: int | None = None,
        operation: str | None = None,
        sequence: int | None = None,
        buffers: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.peer = peer
        self.operation = operation
        self.sequence = sequence
        self.buffers = buffers

    def __str__(self) -> str:
        shown = "; ".join(fact for fact in self._facts() if fact)
        return f"{self.message} [{shown}]" if shown else self.message

    def _facts(self) -> list[str]:
        """Return what the error shows behind its message."""
        return [
            f"rank {self.rank}" if self.rank is not None else "",
            f"#{self.sequence} {self.operation}" if self.operation and self.sequence is not None else "",
            self.operation if self.operation and self.sequence is None else "",
            self.buffers or "",
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(kind: type[UnisonoError], message: str, state: dict[str, Any]) -> UnisonoError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class UsageError(UnisonoError, ValueError):
    """The call cannot be carried out as written; raised on the calling rank before a byte is sent."""


class MismatchError(UnisonoError):
    """Ranks disagree on the call; names the divergent rank and both calls. Raised on every rank."""


class PeerLostError(UnisonoError):
    """A rank that is needed has died, or has left the communicator.

    Attributes:
        host: the name of the host of `peer`, or None.
        pid: its process id there, or None.
    """

    host: str | None = None
    pid: int | None = None

    def _facts(self) -> list[str]:
        where = f"rank {self.peer} was process {self.pid} on {self.host}" if self.pid is not None else ""
        return [*super()._facts(), where]


class CollectiveTimeoutError(UnisonoError, TimeoutError):
    """The call did not complete in time; names the ranks that had not called it."""


class AbortedError(UnisonoError):
    """The communicator was aborted, by another rank or by an interrupt, or had failed before this call."""


class RendezvousError(UnisonoError):
    """The ranks could not find each other; names those that did not arrive, or what is wrong with the store."""


class TransportUnavailableError(UnisonoError):
    """The requested transport cannot be used here; says why and what would make it usable."""


class NoAlgorithmError(UnisonoError):
    """No registered algorithm can carry out the call; says why each was refused."""


class PlanError(UnisonoError):
    """A plan is wrong; names the first rank, step and contribution at fault, or the ranks that wait in a cycle."""


class InternalError(UnisonoError):
    """An invariant of Unisono itself is broken; please report it."""
