"""A store: the one place that all ranks of a job know before they know each other.

It holds a few small values (addresses, the key where no launcher gave one, rank 0's settings) until all have read them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from unisono.deadlines import Deadline
from unisono.errors import RendezvousError, UsageError

KEY_LIMIT_NBYTES = 256
VALUE_LIMIT_NBYTES = 1 << 20

_PAUSE_S = (0.0005, 0.02)


class StoreTimeoutError(RendezvousError):
    """The key was not set in time."""


class Store(Protocol):
    """Values by key, seen by all ranks."""

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, which must not have been set before, to `value`.

        Args:
            key: text of at most `KEY_LIMIT_NBYTES` bytes.
            value: at most `VALUE_LIMIT_NBYTES` bytes.

        Raises:
            UsageError: the key or the value is too long.
            RendezvousError: the key has been set already, or the store is out of reach.
        """

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until `key` has been set, and return its value. A timeout of 0 looks once.

        Raises:
            UsageError: the key is too long.
            StoreTimeoutError: it was not set within `timeout_s` seconds.
            RendezvousError: the store has failed, or is out of reach.
        """

    def clear(self) -> None:
        """Remove what this client has set, as all have read it, where others could read it later."""

    def close(self) -> None:
        """Leave the store. May be called twice."""


class PrefixStore:
    """A part of another store: puts `prefix` before each key. Closing it closes the other."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        return self._store.get(self._prefix + key, timeout_s)

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        self._store.close()


def encoded_key(key: str) -> bytes:
    """Return `key` in UTF-8; raises `UsageError` if it is too long."""
    encoded = key.encode()
    if not 0 < len(encoded) <= KEY_LIMIT_NBYTES:
        raise UsageError(f"a key of a store has 1 to {KEY_LIMIT_NBYTES} bytes, this one has {len(encoded)}")
    return encoded


def check_value(value: bytes) -> None:
    """Raise `UsageError` if `value` is too long."""
    if len(value) > VALUE_LIMIT_NBYTES:
        raise UsageError(f"a value of a store has at most {VALUE_LIMIT_NBYTES} bytes, this one has {len(value)}")


def already_set(key: str) -> RendezvousError:
    """Return the error for a key that is set a second time."""
    return RendezvousError(
        f"{key!r} is in the store already: two processes have the same rank, or two jobs the same store; give each "
        "process a rank of its own, and each job a store"
    )


def poll(look: Callable[[], bytes | None], key: str, timeout_s: float) -> bytes:
    """Call `look` until it finds the value of `key`, and return that; for stores that cannot tell when one is set.

    Raises:
        StoreTimeoutError: it has not found one within `timeout_s` seconds; it has looked at least once.
    """
    deadline = Deadline(timeout_s)
    pause, longest = _PAUSE_S
    while (value := look()) is None:
        if deadline.has_passed():
            raise not_set(key, timeout_s)
        time.sleep(min(pause, deadline.left_s()))
        pause = min(2 * pause, longest)
    return value


def not_set(key: str, timeout_s: float) -> StoreTimeoutError:
    """Return the error for a key that was not set in time."""
    return StoreTimeoutError(f"{key!r} was not set within {timeout_s:g} s")
