"""Partitioned messages: buffers whose parts the program reports as ready one by one (MPI-4.1, section 4.2).

The message goes when the last part is ready, as a whole. MPI leaves open when parts go. `Parrived` is True for all
parts once the message is there. Threads of the sender may call `Pready` at the same time.

Partitioned messages match each other alone, so they have tags that no other receive accepts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from unisono.compat.mpi4py.base.arguments import whole
from unisono.compat.mpi4py.base.errors import fail
from unisono.compat.mpi4py.calls.request import PersistentState, RequestState
from unisono.transports.contracts.transport import ANY_OBJECT_TAG, FIRST_RESERVED_TAG

# A partitioned message has the tag of the program plus this number.
FIRST_TAG = FIRST_RESERVED_TAG
_MOST_TAG = ANY_OBJECT_TAG - FIRST_TAG - 1


def check_parts(count: int, parts: int, tag: int) -> None:
    """Check that a message of `count` elements can have so many equal parts, and this tag.

    Raises:
        ValueError: the parts have different lengths.
        Exception: there cannot be so many parts, or the tag is too high.
    """
    if whole(parts) < 1:
        raise fail("ERR_ARG", f"a message cannot have {parts} partitions: pass 1 or more")
    if count % parts:
        raise ValueError(f"message: {count} elements cannot be shared out to {parts} partitions")
    if not 0 <= whole(tag) <= _MOST_TAG:
        raise fail("ERR_TAG", f"tag {tag} of a partitioned message is not from 0 to {_MOST_TAG}")


class Parts(PersistentState):
    """A message in parts that is started again and again."""

    def __init__(self, start: Callable[[], RequestState], parts: int) -> None:
        super().__init__(start)
        self._parts = whole(parts)

    def checked(self, part: int) -> int:
        """Return the number of a part; raises `Exception` if there is none of this number."""
        if not 0 <= whole(part) < self._parts:
            raise fail("ERR_ARG", f"partition {part} is not one of the {self._parts} of the message")
        return whole(part)


class ReceivedParts(Parts):
    """A message that is received."""

    def arrived(self, part: int) -> bool:
        """Return whether a part is there."""
        self.checked(part)
        return self.done()


class SentParts(Parts):
    """A message that is sent when all of its parts are ready."""

    def __init__(self, start: Callable[[], RequestState], parts: int, limit_s: float) -> None:
        super().__init__(start, parts)
        self._limit_s = limit_s
        self._lacking: set[int] = set()
        self._ready = threading.Condition()

    @property
    def is_active(self) -> bool:
        return bool(self._lacking) or super().is_active

    def start(self) -> None:
        """Let the program report parts."""
        if self.is_active:
            raise fail("ERR_REQUEST", "the request has been started already: wait for it first")
        self._lacking = set(range(self._parts))

    def are_ready(self, parts: Iterable[int]) -> None:
        """Note that parts may be sent, and send the message if they are the last ones."""
        with self._ready:
            for part in parts:
                if self.checked(part) not in self._lacking:
                    raise fail("ERR_ARG", f"partition {part} is ready already, or the request has not been started")
                self._lacking.remove(part)
                if not self._lacking:
                    self.active = self._start()
                    self._ready.notify_all()

    def done(self) -> bool:
        return not self._lacking and super().done()

    def complete(self) -> None:
        with self._ready:
            if not self._ready.wait_for(lambda: not self._lacking, self._limit_s):
                raise fail("ERR_PENDING", f"partitions {sorted(self._lacking)} were not ready in {self._limit_s:g} s")
        super().complete()
