"""The failures of a job, which the native core numbers, and the errors that they are raised as."""

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
    """Return the number of the kind of an error, for `Control.fail`; one that has none is an internal one."""
    return next((kind for kind, known in ERRORS.items() if isinstance(error, known)), INTERNAL)
