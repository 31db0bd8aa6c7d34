"""The identity of this process among those that share memory of a GPU, because containers reuse process ids."""

from __future__ import annotations

import secrets

from unisono.foundation.once import once_per_process

TOKEN_NBYTES = 16


@once_per_process
def process_token() -> bytes:
    """Return a token that no other process has, not even a forked child. It is the same in all threads."""
    return secrets.token_bytes(TOKEN_NBYTES)
