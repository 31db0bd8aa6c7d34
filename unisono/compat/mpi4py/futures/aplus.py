"""`ThenableFuture`, whose `then` chains futures as promises of the standard Promises/A+ are chained."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from unisono.compat.mpi4py.futures.util import compose, end_as

_Hook = Callable[[Any], Any]


class ThenableFuture(Future[Any]):
    """A future with the methods `then` and `catch`."""

    def then(self, on_success: _Hook | None = None, on_failure: _Hook | None = None) -> Future[Any]:
        """Return the future of `then`."""
        return then(self, on_success, on_failure)

    def catch(self, on_failure: _Hook | None = None) -> Future[Any]:
        """Return the future of `catch`."""
        return catch(self, on_failure)


def then(future: Future[Any], on_success: _Hook | None = None, on_failure: _Hook | None = None) -> Future[Any]:
    """Return a future of what a function returns for the result of another future, or for its exception.

    If the function returns a future, the new one ends as that one does.
    """
    new = type(future)()
    composed = compose(future, on_success, on_failure)
    composed.add_done_callback(lambda _: _follow(new, composed, [new]))
    return new


def catch(future: Future[Any], on_failure: _Hook | None = None) -> Future[Any]:
    """Return a future that ends as another one, or with what a function returns for its exception, by default None."""
    return then(future, None, on_failure or (lambda _: None))


def _follow(new: Future[Any], future: Future[Any], chain: list[Future[Any]]) -> None:
    """End a future as the last one of a chain of futures, each of which is the result of the one before."""
    result = None if future.cancelled() or future.exception() else future.result()
    if not isinstance(result, Future):
        end_as(new, future)
    elif any(result is each for each in chain):
        new.set_exception(RuntimeError(f"chain cycle detected: {result!r}"))
    else:
        result.add_done_callback(lambda _: _follow(new, result, [*chain, result]))
