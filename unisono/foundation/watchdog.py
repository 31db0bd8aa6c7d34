"""A watchdog for a block of code: it calls a function if the block takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def call_if_overdue(timeout_s: float, function: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Call ``function(*args)`` in another thread if the block still runs after `timeout_s` seconds."""
    timer = threading.Timer(timeout_s, function, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
