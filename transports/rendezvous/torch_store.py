"""The stores of torch.distributed: the TCPStore of torchrun's agent, at ``torch://host:port``, and stores of programs.

They have no authentication. Anybody who can reach the port of a TCPStore, or read the file of a FileStore, can read and
change its values. docs/security.md states that trust.
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
    """Adapts a store of torch.distributed to the protocol `Store`."""

    def __init__(self, store: Any) -> None:
        self._store: Any = store
        self._keys: set[str] = set()  # the keys that this client has set

    def count(self, key: str) -> int:
        """Return the number of calls for `key` on all clients, including this one.

        Raises:
            RendezvousError: the store cannot be reached.
        """
        try:
            return int(self._store.add(key, 1))
        except RuntimeError as error:
            raise _gone(error) from error

    def set(self, key: str, value: bytes) -> None:
        encoded_key(key)
        check_value(value)
        try:
            # With an empty expected value, compare_set sets a new key, and returns the value of an existing one.
            if self._store.compare_set(key, "", value) != value:
                raise already_set(key)
        except RuntimeError as error:
            raise _gone(error) from error
        self._keys.add(key)

    def get(self, key: str, timeout_s: float) -> bytes:
        encoded_key(key)
        # Ctrl-C cannot interrupt the wait of TCPStore, which also writes warnings to stderr when it times out.
        value = poll(partial(self._look, key), key, timeout_s)
        check_value(value)
        return value

    def clear(self) -> None:
        # The store of torch lives as long as the process that serves it, so the keys must be removed one by one.
        for key in self._keys:
            with contextlib.suppress(RuntimeError):  # the store cannot remove keys, or is gone
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
