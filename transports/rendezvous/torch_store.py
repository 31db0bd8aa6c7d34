"""The store behind ``torch://host:port``: the TCPStore that torchrun's agent serves.

It has no authentication: who can reach its port can read and write it. docs/security.md states that trust.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from unisono.errors import RendezvousError
from unisono.transports.rendezvous.stores import already_set, check_value, encoded_key, poll


class TorchStore:
    """A client of the TCPStore at `host`:`port`, which must be served already; `Store` says what its methods do.

    Raises:
        RendezvousError: torch cannot be imported, or the store cannot be reached within `timeout_s` seconds.
    """

    def __init__(self, host: str, port: int, timeout_s: float) -> None:
        try:
            from torch.distributed import TCPStore
        except ImportError as error:
            raise RendezvousError(f"the store of torchrun needs torch, which cannot be imported: {error}") from error
        try:
            self._store: Any = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise RendezvousError(f"the store of torchrun at {host}:{port} cannot be reached: {error}") from error

    def set(self, key: str, value: bytes) -> None:
        """See `Store.set`."""
        encoded_key(key)
        check_value(value)
        try:
            # Keys are set once: compare_set with nothing expected sets a new key, and returns the value of an old one.
            if self._store.compare_set(key, "", value) != value:
                raise already_set(key)
        except RuntimeError as error:
            raise RendezvousError(f"the store of torchrun is gone: {error}") from error

    def get(self, key: str, timeout_s: float) -> bytes:
        """See `Store.get`."""
        encoded_key(key)
        # TCPStore's own wait cannot be interrupted by Ctrl-C, and writes warnings to stderr when it times out.
        value = poll(partial(self._look, key), key, timeout_s)
        check_value(value)
        return value

    def close(self) -> None:
        """See `Store.close`."""
        self._store = None

    def _look(self, key: str) -> bytes | None:
        try:
            return bytes(self._store.get(key)) if self._store.check([key]) else None
        except RuntimeError as error:
            raise RendezvousError(f"the store of torchrun is gone: {error}") from error
