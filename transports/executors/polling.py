"""Waiting for what is driven by whoever polls it: how long to pause between polls, and when to give up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

from unisono.transports.contracts.executor import Operation

LONGEST_PAUSE_S = 0.0002


def pauses_of_polling() -> Iterator[float | None]:
    """Yield how long to pause after each poll in vain: spin first, then yield the core, then sleep (seconds)."""
    return chain(repeat(None, 100), repeat(0.0, 100), repeat(LONGEST_PAUSE_S))


def wait_by_polling(operation: Operation, timeout_s: float, give_up: Callable[[], None]) -> None:
    """Poll an operation until it is done; see `Operation.wait`.

    Args:
        operation: what to wait for; Ctrl-C aborts it.
        timeout_s: how long until `give_up` is called.
        give_up: fails the operation, so that its `poll` raises.
    """
    deadline = time.monotonic() + timeout_s
    pauses = pauses_of_polling()
    try:
        while not operation.poll():
            if time.monotonic() >= deadline:
                give_up()
            elif (pause := next(pauses)) is not None:
                time.sleep(pause)
    except KeyboardInterrupt:
        operation.abort("interrupted")
        raise
