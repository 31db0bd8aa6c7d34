"""What is to happen where something takes too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def after(timeout_s: float, tell: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Call ``tell(*args)``, in a thread of its own, if the block has not been left after `timeout_s` seconds."""
    timer = threading.Timer(timeout_s, tell, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
