"""The stores of torch.distributed: the TCPStore of torchrun's agent, at ``torch://host:port``, and stores of programs.

They have no authentication. Anybody who can reach the port of a TCPStore, or read the file of a FileStore, can read and
change its values. docs/security.md states that trust.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta
from functools import partial
from typing import Any

from unisono.errors import RendezvousError
from unisono.foundation.deadlines import LONGEST_WAIT_S
from unisono.transports.rendezvous.stores import already_set, check_value, encoded_key, poll

_ABSENT = b"unisono: absent"  # no key has this value


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
        self._keys: dict[str, None] = {}  # the keys that `clear` removes, in this order

    def set(self, key: str, value: bytes) -> None:
        encoded_key(key)
        check_value(value)
        if not self.claim(key, value):
            raise already_set(key)
        self._keys[key] = None

    def claim(self, key: str, value: bytes) -> bool:
        """Set `key`, which `clear` is not to remove, unless it has been set; return whether it has this value now.

        Raises:
            RendezvousError: the store cannot be reached.
        """
        try:
            # With an empty expected value, compare_set sets a new key, and returns the value of an existing one.
            return bool(self._store.compare_set(key, "", value) == value)
        except RuntimeError as error:
            raise _gone(error) from error

    def announce(self, key: str, value: bytes) -> None:
        """Set `key`, also if it has a value.

        Raises:
            RendezvousError: the store cannot be reached.
        """
        try:
            self._store.set(key, value)
        except RuntimeError as error:
            raise _gone(error) from error
        self._keys[key] = None

    def adopt(self, keys: Iterable[str]) -> None:
        """Make `clear` remove these keys too, which other clients have set."""
        self._keys.update(dict.fromkeys(keys))

    def get(self, key: str, timeout_s: float) -> bytes:
        encoded_key(key)
        # Ctrl-C cannot interrupt the wait of TCPStore, which also writes warnings to stderr when it times out.
        return poll(partial(self.look, key), key, timeout_s)

    def look(self, key: str) -> bytes | None:
        """Return the value of `key`, or None if it is not set.

        Raises:
            RendezvousError: the store cannot be reached.
        """
        try:
            # `get` of torch would wait for a key that another rank removes at this moment. compare_set never waits. It
            # returns the expected value if the key is not set, and otherwise its value.
            value = bytes(self._store.compare_set(key, _ABSENT, _ABSENT))
            return None if value == _ABSENT else value
        except RuntimeError as error:
            raise _gone(error) from error

    def remove(self, key: str) -> None:
        """Remove `key`, if the store can remove keys."""
        self._keys.pop(key, None)
        with contextlib.suppress(RuntimeError):  # the store cannot remove keys, or is gone
            self._store.delete_key(key)

    def clear(self) -> None:
        # The store of torch lives as long as the process that serves it, so the keys must be removed one by one.
        for key in list(self._keys):
            self.remove(key)

    def close(self) -> None:
        self._store = None


def _gone(error: RuntimeError) -> RendezvousError:
    return RendezvousError(f"the store of torch is gone: {error}")
