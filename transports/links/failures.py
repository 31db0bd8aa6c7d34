"""Maps the failure numbers of the native core to error classes, and back."""

from __future__ import annotations

from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    CorruptionError,
    InternalError,
    MismatchError,
    PeerLostError,
    TransportUnavailableError,
    UnisonoError,
)
from unisono.transports import _core

# Numbered as in transports/native/core/control/failure.h.
MISMATCH, PEER_LOST, TIMEOUT, ABORTED, INTERNAL, UNAVAILABLE, CORRUPTION = 1, 2, 3, 4, 5, 6, 7
ERRORS: dict[int, type[UnisonoError]] = {
    MISMATCH: MismatchError,
    PEER_LOST: PeerLostError,
    TIMEOUT: CollectiveTimeoutError,
    ABORTED: AbortedError,
    INTERNAL: InternalError,
    UNAVAILABLE: TransportUnavailableError,
    CORRUPTION: CorruptionError,
}


def failure_of(control: _core.Control) -> UnisonoError:
    """Return the error that has ended the job of `control`."""
    kind, finder, peer, _, text = control.failure()
    return ERRORS[kind](text, peer=culprit(kind, finder, peer))


def culprit(kind: int, finder: int, peer: int) -> int | None:
    """Return the rank that an error is about: `peer`, or if that is -1, `finder`, the rank that detected the failure.

    A failure without a peer mostly has its cause on the rank that detected it. That is not so for corruption.
    """
    return peer if peer >= 0 else None if kind == CORRUPTION else finder


def kind_of(error: Exception) -> int:
    """Return the failure number of an error, for `Control.fail`; `INTERNAL` for an error of any other class."""
    return next((kind for kind, error_class in ERRORS.items() if isinstance(error, error_class)), INTERNAL)
