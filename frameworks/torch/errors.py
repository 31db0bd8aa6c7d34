"""Unisono's errors as users of torch.distributed expect them: kinds of RuntimeError, with the words they look for."""

from __future__ import annotations

import torch.distributed as dist

from unisono import CollectiveTimeoutError, PeerLostError, UnisonoError, UsageError


class CallError(dist.DistBackendError, ValueError):  # type: ignore[misc]
    """A call cannot be carried out as written; nothing has been sent."""


# What torch's own backends say first, and programs look for.
_WORDS: tuple[tuple[type[UnisonoError], str], ...] = (
    (CollectiveTimeoutError, "Timed out waiting for the other ranks: "),
    (PeerLostError, "Connection closed by peer: "),
)


def translated(error: UnisonoError) -> Exception:
    """Return the error to raise instead of `error`, which is to be its cause: a `dist.DistBackendError`."""
    kind = CallError if isinstance(error, UsageError) else dist.DistBackendError
    words = next((words for cause, words in _WORDS if isinstance(error, cause)), "")
    found: Exception = kind(f"unisono: {words}{type(error).__name__}: {error}")
    return found
