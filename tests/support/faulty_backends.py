"""Communicators that are wrong in one way each, as functions of one that is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Broken:
    """A communicator on whose rank 1 `spoil` makes something else of what one method returns; all that users see else.

    What a plan or a work gives is spoilt too.
    """

    def __init__(self, inner: Any, method: str, spoil: Callable[[Any], Any]) -> None:
        self._inner, self._method, self._spoil = inner, method, spoil

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name == "plan":
            return lambda collective, *args, **given: self._wrapped(collective, method(collective, *args, **given))
        return self._wrapped(name, method) if callable(method) else method

    def _wrapped(self, name: str, method: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            result = method(*args, **given)
            if name != self._method or self._inner.rank != 1:
                return result
            return Late(result, self._spoil) if given.get("wait") is False else self._spoil(result)

        return call


class Late:
    """A work whose result is spoilt."""

    def __init__(self, work: Any, spoil: Any) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> Any:
        return self._spoil(self._work.wait())


def other_element(result: Any) -> Any:
    """Change the last element, also of what the ranks tell each other of their verdicts, and of the last in a list."""
    if isinstance(result, list):
        other_element(result[-1])
    elif result is not None and result.size and result.dtype.kind in "iuf":
        result.flat[-1] += 1
    return result


def other_element_of_many(result: Any) -> Any:
    """Change the last element of a result of three elements or more."""
    return other_element(result) if not isinstance(result, list) and result is not None and result.size > 2 else result


def sleep(result: Any) -> Any:
    """Keep everybody waiting, if there is a result of any elements."""
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


class Confused:
    """A communicator that mixes calls up: what waits has a spoilt result while something else is in flight."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._in_flight = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name in ("plan", "group", "split", "subgroup", "dup") or not callable(method):
            return method

        def call(*args: Any, **given: Any) -> Any:
            result = method(*args, **given)
            if given.get("wait", True):
                return other_element(result) if self._in_flight and isinstance(result, np.ndarray) else result
            self._in_flight += 1
            return Late(result, self._landed)

        return call

    def _landed(self, result: Any) -> Any:
        self._in_flight -= 1
        return result
