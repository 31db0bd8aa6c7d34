"""``redis://host:port/db``: a Redis server as store, through redis-py.

Each value is a key of the server, with a time to live, so that a job that dies leaves nothing for long. Redis sets a
key only if it does not exist (``SET`` with ``NX``), so two processes of one rank are noticed.

URL: ``redis://[user:password@]host[:port][/database][?prefix=text]``, or ``rediss://`` for TLS. Jobs that use one
server at the same time have ids of their own, or a prefix of their own.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit, urlunsplit

from unisono.errors import RendezvousError, UsageError
from unisono.foundation.installing import install_command
from unisono.transports.rendezvous.stores import already_set, check_value, encoded_key, poll

# A value may be read until all ranks have met, for which they have the time of the rendezvous.
_MARGIN_S = 60
_CONNECT_S = 5.0
# How long the values of a client live that has not cleared them.
_FAREWELL_S = 3
_Result = TypeVar("_Result")


class RedisStore:
    """A `Store` in a Redis server.

    Args:
        url: the URL.
        timeout_s: the time limit of the rendezvous. Values live one minute longer.

    Raises:
        UsageError: redis-py is not installed, or the URL cannot be used.
        RendezvousError: the server cannot be reached, or refuses this client.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        try:
            import redis
        except ImportError:
            raise UsageError(f"the store {hidden(url)!r} needs redis-py: {install_command('redis')}") from None
        self._shown = hidden(url)
        self._lifetime_s = math.ceil(timeout_s) + _MARGIN_S
        self._own: set[bytes] = set()
        self._errors = (redis.RedisError, OSError)
        server, self._prefix = _parts(url)
        try:
            self._client: Any = redis.Redis.from_url(
                server, socket_timeout=_CONNECT_S, socket_connect_timeout=_CONNECT_S, health_check_interval=30
            )
        except ValueError as error:
            raise UsageError(f"the store {self._shown!r} cannot be used: {error}") from None
        self._asked(self._client.ping)

    def set(self, key: str, value: bytes) -> None:
        check_value(value)
        name = self._name(key)
        is_set = self._asked(partial(self._client.set, name, value, nx=True, ex=self._lifetime_s))
        # redis-py repeats a request whose answer was lost. Then this client itself has set the value.
        if not is_set and self._asked(partial(self._client.get, name)) != value:
            raise RendezvousError(
                f"{already_set(key).message}. A job that died leaves its values for at most {self._lifetime_s} s"
            )
        self._own.add(name)

    def get(self, key: str, timeout_s: float) -> bytes:
        look = partial(self._client.get, self._name(key))
        return poll(lambda: self._asked(look), key, timeout_s)

    def clear(self) -> None:
        if self._own:
            own, self._own = self._own, set()
            self._asked(partial(self._client.delete, *own))

    def close(self) -> None:
        # Other ranks of a rendezvous that has failed may still read why.
        with contextlib.suppress(RendezvousError):
            for name in self._own:
                self._asked(partial(self._client.expire, name, _FAREWELL_S))
        self._own.clear()
        self._client.close()

    def _name(self, key: str) -> bytes:
        return self._prefix + encoded_key(key)

    def _asked(self, question: Callable[[], _Result]) -> _Result:
        try:
            return question()
        except self._errors as error:
            raise RendezvousError(f"the store {self._shown} cannot be used: {_reason(error)}") from error


def hidden(url: str) -> str:
    """Return the URL without its password, as it may be shown."""
    parts = urlsplit(url)
    return url.replace(f":{parts.password}@", ":***@") if parts.password else url


def _parts(url: str) -> tuple[str, bytes]:
    """Return the URL for redis-py, and the prefix of all keys."""
    parts = urlsplit(url)
    options = parse_qs(parts.query, keep_blank_values=True)
    prefix = options.pop("prefix", ["unisono:"])[-1]
    if options:
        raise UsageError(f"the store {hidden(url)!r} has the option {next(iter(options))!r}, and only 'prefix' exists")
    if not parts.hostname:
        raise UsageError(f"the store {hidden(url)!r} cannot be used: write redis://host:port/database")
    return urlunsplit(parts._replace(query="")), prefix.encode()


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
