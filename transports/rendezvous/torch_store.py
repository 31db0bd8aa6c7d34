"""The store behind ``torch://host:port``: the TCPStore that torchrun's agent serves.

It has no authentication: who can reach its port can read and write it. docs/security.md states that trust.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from unisono.errors import RendezvousError
from unisono.transports.rendezvous.stores import already_set, check_value, encoded_key, not_set


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
        try:
            if timeout_s <= 0 and not self._store.check([key]):
                raise not_set(key, timeout_s)
            if timeout_s > 0:
                self._store.wait([key], timedelta(seconds=timeout_s))
            value = bytes(self._store.get(key))
        except RuntimeError as error:
            if "timeout" in str(error).lower():
                raise not_set(key, timeout_s) from None
            raise RendezvousError(f"the store of torchrun is gone: {error}") from error
        check_value(value)
        return value

    def close(self) -> None:
        """See `Store.close`."""
        self._store = None
