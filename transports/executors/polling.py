"""Waits for an operation by polling it: the pauses between polls, and the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import chain, repeat

from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import Operation

LONGEST_PAUSE_S = 0.0002


def pauses_of_polling() -> Iterator[float | None]:
    """Yield the pause after each poll, in seconds: None to spin at first, then 0 to yield the core, then a sleep."""
    return chain(repeat(None, 100), repeat(0.0, 100), repeat(LONGEST_PAUSE_S))


def wait_by_polling(operation: Operation, timeout_s: float, give_up: Callable[[], None]) -> None:
    """Poll an operation until it is done, as `Operation.wait` promises.

    Args:
        operation: the operation; Ctrl-C aborts it.
        timeout_s: seconds until `give_up` is called.
        give_up: fails the operation, so that its next `poll` raises.
    """
    deadline = Deadline(timeout_s)
    pauses = pauses_of_polling()
    try:
        while not operation.poll():
            if deadline.has_passed():
                give_up()
            elif (pause := next(pauses)) is not None:
                time.sleep(pause)
    except KeyboardInterrupt:
        operation.abort("interrupted")
        raise
