"""The contract of a store: the place where ranks exchange values before they know each other's addresses.

A store holds a few small values until all ranks have read them: addresses, the settings of rank 0, and the key if no
launcher has passed one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from unisono.errors import RendezvousError, UsageError
from unisono.foundation.deadlines import Deadline

KEY_LIMIT_NBYTES = 256
VALUE_LIMIT_NBYTES = 1 << 20

_PAUSE_S = (0.0005, 0.02)


class StoreTimeoutError(RendezvousError):
    """A key was not set in time."""


class Store(Protocol):
    """A table of values by key, which all ranks share. Each key is set at most once."""

    def set(self, key: str, value: bytes) -> None:
        """Set `key`, which must not have been set before, to `value`.

        Args:
            key: text of at most `KEY_LIMIT_NBYTES` bytes.
            value: at most `VALUE_LIMIT_NBYTES` bytes.

        Raises:
            UsageError: the key or the value is too long.
            RendezvousError: the key has been set already, or the store cannot be reached.
        """

    def get(self, key: str, timeout_s: float) -> bytes:
        """Wait until `key` is set and return its value. With a timeout of 0, look once.

        Raises:
            UsageError: the key is too long.
            StoreTimeoutError: the key was not set within `timeout_s` seconds.
            RendezvousError: the store has failed, or cannot be reached.
        """

    def clear(self) -> None:
        """Remove the values of this client if others could read them later. Call it when all ranks have read them."""

    def close(self) -> None:
        """Leave the store. May be called twice."""


class PrefixStore:
    """The part of another store whose keys begin with `prefix`. Closing it closes the other store."""

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
        raise UsageError(f"a key of a store must have 1 to {KEY_LIMIT_NBYTES} bytes; this one has {len(encoded)}")
    return encoded


def check_value(value: bytes) -> None:
    """Raise `UsageError` if `value` is too long."""
    if len(value) > VALUE_LIMIT_NBYTES:
        raise UsageError(f"a value of a store must have at most {VALUE_LIMIT_NBYTES} bytes; this one has {len(value)}")


def already_set(key: str) -> RendezvousError:
    """Return the error for a key that is set a second time."""
    return RendezvousError(
        f"{key!r} is in the store already: two processes have the same rank, or two jobs use the same store; give each "
        "process a rank of its own, and each job a store of its own"
    )


def poll(look: Callable[[], bytes | None], key: str, timeout_s: float) -> bytes:
    """Call `look` until it returns the value of `key`, and return that. For stores that cannot notify their clients.

    Raises:
        StoreTimeoutError: `look` returned None for `timeout_s` seconds. It was called at least once.
        RendezvousError: the value is longer than a rank may set, so another program has set it.
    """
    deadline = Deadline(timeout_s)
    pause, longest = _PAUSE_S
    while (value := look()) is None:
        if deadline.has_passed():
            raise not_set(key, timeout_s)
        time.sleep(min(pause, deadline.remaining_s()))
        pause = min(2 * pause, longest)
    if len(value) > VALUE_LIMIT_NBYTES:
        raise RendezvousError(
            f"{key!r} in the store has more than {VALUE_LIMIT_NBYTES} bytes, so another program has set it: use a "
            "store that no other program uses"
        )
    return value


def not_set(key: str, timeout_s: float) -> StoreTimeoutError:
    """Return the error for a key that was not set in time."""
    return StoreTimeoutError(f"{key!r} was not set within {timeout_s:g} s")
