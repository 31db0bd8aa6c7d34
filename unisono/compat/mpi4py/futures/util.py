"""`collect`, which makes one future of several, and `compose`, which makes a future of another one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any

__all__ = ["collect", "compose"]


def collect(fs: Collection[Future[Any]]) -> Future[list[Any]]:
    """Return a future of the list of the results of futures.

    If one of them fails or is cancelled, the new future ends so too, and the others are cancelled. If the new future is
    cancelled, all others are.
    """
    items = list(fs)
    collected: Future[list[Any]] = type(items[0])() if items else Future()
    if not items:
        collected.set_result([])
    lock = threading.RLock()

    def end_item(item: Future[Any]) -> None:
        with lock:
            if collected.done() or not (item.cancelled() or item.exception() or all(each.done() for each in items)):
                return
            end_as(collected, item, lambda _: [each.result() for each in items])

    def end_items(_: Future[Any]) -> None:
        for item in items:
            if not item.done():
                item.cancel()

    collected.add_done_callback(end_items)
    for item in items:
        item.add_done_callback(end_item)
    return collected


def compose(
    future: Future[Any],
    resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> Future[Any]:
    """Return a future of the result of another one.

    Args:
        future: the other one. If one of the two is cancelled, so is the other.
        resulthook: called with the result, and returns the result of the new future.
        excepthook: called with the exception, and returns the exception or the result of the new future.
    """
    new = type(future)()
    new.add_done_callback(lambda _: future.cancel() if new.cancelled() else None)
    future.add_done_callback(lambda _: end_as(new, future, resulthook, excepthook))
    return new


def end_as(
    new: Future[Any],
    future: Future[Any],
    resulthook: Callable[[Any], Any] | None = None,
    excepthook: Callable[[BaseException], Any] | None = None,
) -> None:
    """End a future as another one has ended, by way of the hooks."""
    if future.cancelled():
        new.cancel()
    if not new.set_running_or_notify_cancel():
        return
    try:
        error = future.exception()
        hook: Any = resulthook if error is None else excepthook
        value = future.result() if error is None else error
        value = value if hook is None else hook(value)
    except BaseException as raised:  # noqa: BLE001 - functions of the program raise any error
        value = raised
        error = raised
    if isinstance(value, BaseException) and error is not None:
        new.set_exception(value)
    else:
        new.set_result(value)
