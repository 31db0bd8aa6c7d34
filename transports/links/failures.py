"""Maps the failure numbers of the native core to error classes, and back."""

from __future__ import annotations

from unisono.errors import (
    AbortedError,
    CollectiveTimeoutError,
    InternalError,
    MismatchError,
    PeerLostError,
    TransportUnavailableError,
    UnisonoError,
)
from unisono.transports import _core

# Numbered as in transports/native/core/failure.h.
MISMATCH, PEER_LOST, TIMEOUT, ABORTED, INTERNAL, UNAVAILABLE = 1, 2, 3, 4, 5, 6
ERRORS: dict[int, type[UnisonoError]] = {
    MISMATCH: MismatchError,
    PEER_LOST: PeerLostError,
    TIMEOUT: CollectiveTimeoutError,
    ABORTED: AbortedError,
    INTERNAL: InternalError,
    UNAVAILABLE: TransportUnavailableError,
}


def failure_of(control: _core.Control) -> UnisonoError:
    """Return the error that has ended the job of `control`."""
    kind, finder, peer, _, text = control.failure()
    return ERRORS[kind](text, peer=peer if peer >= 0 else finder)


def kind_of(error: Exception) -> int:
    """Return the failure number of an error, for `Control.fail`; `INTERNAL` for an error of any other class."""
    return next((kind for kind, error_class in ERRORS.items() if isinstance(error, error_class)), INTERNAL)
