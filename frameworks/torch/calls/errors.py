"""The errors of Unisono as errors of torch.distributed, with the words that programs look for."""

from __future__ import annotations

import torch.distributed as dist

from unisono import CollectiveTimeoutError, PeerLostError, UnisonoError, UsageError


class CallError(dist.DistBackendError, ValueError):  # type: ignore[misc]
    """The arguments of a call are wrong; nothing has been sent."""


# The first words of such errors of torch's own backends. Programs look for them.
_WORDS: tuple[tuple[type[UnisonoError], str], ...] = (
    (CollectiveTimeoutError, "Timed out waiting for the other ranks: "),
    (PeerLostError, "Connection closed by peer: "),
)


def torch_error(error: UnisonoError) -> Exception:
    """Return the `dist.DistBackendError` to raise from `error`."""
    error_class = CallError if isinstance(error, UsageError) else dist.DistBackendError
    words = next((words for cause, words in _WORDS if isinstance(error, cause)), "")
    raised: Exception = error_class(f"unisono: {words}{type(error).__name__}: {error}")
    return raised
