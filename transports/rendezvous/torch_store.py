"""The stores of torch.distributed: behind ``torch://host:port`` the TCPStore that torchrun's agent serves, and others.

They have no authentication: who can reach a TCPStore's port, or read a FileStore's file, can read and write what is in
it. docs/security.md states that trust.
"""

from __future__ import annotations

import contextlib
from datetime import timedelta
from functools import partial
from typing import Any

from unisono.deadlines import LONGEST_WAIT_S
from unisono.errors import RendezvousError
from unisono.transports.rendezvous.stores import already_set, check_value, encoded_key, poll


def connect(host: str, port: int, timeout_s: float) -> Any:
    """Return a client of the TCPStore at `host`:`port`, which must be served already.

    Raises:
        RendezvousError: torch cannot be imported, or the store cannot be reached within `timeout_s` seconds.
    """
    try:
        from torch.distributed import TCPStore
    except ImportError as error:
        raise RendezvousError(f"the store of torchrun needs torch, which cannot be imported: {error}") from error
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=min(timeout_s, LONGEST_WAIT_S)))
    except RuntimeError as error:
        raise RendezvousError(f"the store of torchrun at {host}:{port} cannot be reached: {error}") from error


class TorchStore:
    """A store of torch.distributed as one of ours; `Store` says what its methods do."""

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._keys: set[str] = set()  # that this client has set

    def count(self, key: str) -> int:
        """Return how often this has been called for `key`, by whomever, now included.

        Raises:
            RendezvousError: the store is out of reach.
        """
        try:
            return int(self._store.add(key, 1))
        except RuntimeError as error:
            raise _gone(error) from error

    def set(self, key: str, value: bytes) -> None:
        encoded_key(key)
        check_value(value)
        try:
            # Keys are set once: compare_set with nothing expected sets a new key, and returns the value of an old one.
            if self._store.compare_set(key, "", value) != value:
                raise already_set(key)
        except RuntimeError as error:
            raise _gone(error) from error
        self._keys.add(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        encoded_key(key)
        # TCPStore's own wait cannot be interrupted by Ctrl-C, and writes warnings to stderr when it times out.
        value = poll(partial(self._look, key), key, timeout_s)
        check_value(value)
        return value

    def clear(self) -> None:
        """See `Store.clear`; torch's store lives on for as long as whoever serves it."""
        for key in self._keys:
            with contextlib.suppress(RuntimeError):  # it cannot remove keys, or is gone
                self._store.delete_key(key)
        self._keys.clear()

    def close(self) -> None:
        self._store = None

    def _look(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise _gone(error) from error


def _gone(error: RuntimeError) -> RendezvousError:
    return RendezvousError(f"the store of torch is gone: {error}")
