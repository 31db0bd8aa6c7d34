"""Functions that wrap a right communicator into one with a single fault, for tests of `unisono.testing`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Broken:
    """A communicator whose rank 1 passes the results of one method through `spoil`.

    That includes the results of a persistent call and of a `Work` of this method.
    """

    def __init__(self, inner: Any, method: str, spoil: Callable[[Any], Any]) -> None:
        self._inner, self._method, self._spoil = inner, method, spoil

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "plan":
            return lambda collective, *args, **options: self._wrapped(collective, method(collective, *args, **options))
        return self._wrapped(name, method) if callable(method) else method

    def _wrapped(self, name: str, method: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if name != self._method or self._inner.rank != 1:
                return result
            return SpoiltWork(result, self._spoil) if options.get("wait") is False else self._spoil(result)

        return call


class SpoiltWork:
    """A work whose `wait` passes the result through `spoil`."""

    def __init__(self, work: Any, spoil: Any) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> Any:
        return self._spoil(self._work.wait())


def other_element(result: Any) -> Any:
    """Change the last element of a result, or of the last result of a list.

    The ranks exchange their verdicts by collectives as well, so a verdict is changed too.
    """
    if isinstance(result, list):
        other_element(result[-1])
    elif result is not None and result.size and result.dtype.kind in "iuf":
        result.flat[-1] += 1
    return result


def other_element_of_many(result: Any) -> Any:
    """Change the last element of a result of three elements or more."""
    return other_element(result) if not isinstance(result, list) and result is not None and result.size > 2 else result


def sleep(result: Any) -> Any:
    """Sleep far beyond every deadline if the result has elements."""
    if result is not None and result.size:
        time.sleep(1000)
    return result


def wrong_allreduce(world: Any) -> Any:
    """Return a communicator whose allreduce is wrong."""
    return Broken(world, "allreduce", other_element)


def wrong_scan(world: Any) -> Any:
    """Return a communicator whose scan of three elements or more is wrong."""
    return Broken(world, "scan", other_element_of_many)


def hanging_alltoall(world: Any) -> Any:
    """Return a communicator whose alltoall never returns on rank 1."""
    return Broken(world, "alltoall", sleep)


class MixesCalls:
    """A communicator with wrong results of blocking calls while a background call is in flight.

    Communicators that it makes do the same, and count their background calls together.
    """

    def __init__(self, inner: Any, in_flight: list[Any] | None = None) -> None:
        self._inner = inner
        self._in_flight = [] if in_flight is None else in_flight

    def __enter__(self) -> MixesCalls:
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("split", "subgroup", "dup"):
            return lambda *args, **options: self._mixed(method(*args, **options))
        if name in ("plan", "group") or not callable(method):
            return method

        def call(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            if options.get("wait", True):
                return other_element(result) if self._in_flight and isinstance(result, np.ndarray) else result
            self._in_flight.append(result)
            return SpoiltWork(result, self._ended)

        return call

    def _mixed(self, made: Any) -> Any:
        return None if made is None else MixesCalls(made, self._in_flight)

    def _ended(self, result: Any) -> Any:
        self._in_flight.pop()
        return result
