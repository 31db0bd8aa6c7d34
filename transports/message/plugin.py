"""The contract of a plugin transport: the argument of its factory, and the result.

`plugin_loading.py` finds the factory of an installed package and calls it. docs/writing-transports.md shows how to
write one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from unisono.transports.contracts.transport import MessageTransport


class Bootstrap(NamedTuple):
    """The argument of a factory: the rank whose transport it opens, and the means to reach the other factories.

    Attributes:
        rank, size: this rank, and the number of ranks.
        members: the number in the job of each rank.
        exchange: sends some bytes to every rank, and returns the bytes of all ranks, by rank. It blocks until all
            ranks have called it, and raises at the deadline. All ranks must call it equally often. Its messages are
            authenticated.
        deadline: when the transport must be open, in seconds of `time.monotonic`.
    """

    rank: int
    size: int
    members: tuple[int, ...]
    exchange: Callable[[bytes], list[bytes]]
    deadline: float

    @property
    def remaining_s(self) -> float:
        """The seconds until the deadline; 0 once it has passed."""
        return max(0.0, self.deadline - time.monotonic())


Factory = Callable[[Bootstrap], MessageTransport]
"""Opens the transport of one rank."""
