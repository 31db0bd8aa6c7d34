"""`Port`: the messages of one communicator, as `Comm` needs them.

A receive accepts a shorter message than its array, and messages of objects are pickles in messages of bytes, so that a
probe finds both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono import ANY_SOURCE, ANY_TAG, Communicator
from unisono.compat.mpi4py.base.constants import ANY_TAG as _ANY_TAG, PROC_NULL
from unisono.compat.mpi4py.values.status import Status
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Probe


class Envelope(NamedTuple):
    """The source, the tag and the size in bytes of a message."""

    source: int
    tag: int
    nbytes: int

    def tell(self, status: Any) -> None:
        """Set a status; None stands for no status."""
        if status is not None:
            if not isinstance(status, Status):
                raise TypeError(f"expected a Status, got {type(status).__name__}")
            status._set(*self)


OF_NOBODY = Envelope(PROC_NULL, _ANY_TAG, 0)


class Port:
    """The messages of a communicator. A source or tag that is None stands for any.

    A receive or a probe from `PROC_NULL` ends at once.

    A message of a plain array takes the fast path of the native core, which refuses all others.

    Args:
        native: the communicator.
        places: the rank in `native` of each rank that messages go to or come from; None if they are the same.

    Attributes:
        limit_s: seconds until a call fails.
    """

    def __init__(self, native: Communicator, places: Sequence[int] | None = None) -> None:
        self._native, self._executor, self._places = native, native._executor, places
        self.limit_s = native.timeout_s

    def _place(self, rank: Any) -> Any:
        return rank if self._places is None or rank is None else self._places[rank]

    def _envelope(self, place: int, tag: int, nbytes: int) -> Envelope:
        return Envelope(place if self._places is None else self._places.index(place), tag, nbytes)

    def send(self, array: Any, dest: int, tag: int, *, synchronous: bool = False) -> None:
        """Send a flat array, and return when it may be changed."""
        dest = self._place(dest)
        if synchronous or not self._native._messages.send_flat(array, dest, tag):
            self._sending(array, dest, tag, synchronous).wait(self.limit_s)

    def start_send(self, array: Any, dest: int, tag: int, *, synchronous: bool = False) -> Any:
        """Start to send a flat array, and return the operation. Dropping it ends the send."""
        dest = self._place(dest)
        operation = None if synchronous else self._native._messages.start_send(array, dest, tag, self.limit_s)
        if operation is None:
            operation = self._sending(array, dest, tag, synchronous)
            operation.run_in_background(self.limit_s)
        return operation

    def _sending(self, array: Any, dest: int, tag: int, synchronous: bool) -> Any:
        return self._executor.send(array, DTYPES[array.dtype.name], dest, tag, synchronous=synchronous)

    def receive(self, array: Any, source: int | None, tag: int | None) -> Envelope:
        """Receive a message of at most the length of a flat array, and return its envelope."""
        if source == PROC_NULL:
            return OF_NOBODY
        source = self._place(source)
        message = self._native._messages.receive_up_to(array, *_wild(source, tag))
        if message is not None:
            return self._envelope(message[0], message[1], message[3])
        operation = self._receiving(array, source, tag)
        operation.wait(self.limit_s)
        return self.envelope_of(operation) or OF_NOBODY

    def start_receive(self, array: Any, source: int | None, tag: int | None) -> Any:
        """Start to receive as `receive` does, and return the operation. Dropping it ends the receive."""
        source = self._place(source)
        operation = self._native._messages.start_receive_up_to(array, *_wild(source, tag), self.limit_s)
        if operation is None:
            operation = self._receiving(array, source, tag)
            operation.run_in_background(self.limit_s)
        return operation

    def exchange(
        self, array: Any, dest: int, tag: int, out: Any, source: int | None, tag_received: int | None
    ) -> Envelope | None:
        """Send a plain array and receive another one at the same time; None if nothing has been done."""
        message = self._native._messages.exchange_up_to(
            array, self._place(dest), tag, out, *_wild(self._place(source), tag_received)
        )
        return None if message is None else self._envelope(message[0], message[1], message[3])

    def _receiving(self, array: Any, source: int | None, tag: int | None) -> Any:
        return self._executor.recv(array, DTYPES[array.dtype.name], source, tag, up_to=True)

    def envelope_of(self, operation: Any) -> Envelope | None:
        """Return the envelope of the message of a receive or a probe that has ended; None if there is none."""
        message = operation.message()
        return None if message is None else self._envelope(message.source, message.tag, message.nbytes)

    def probe(self, source: int | None, tag: int | None, *, once: bool) -> Envelope | None:
        """Return the envelope of a message that a receive would get; None if `once` and there is none."""
        return OF_NOBODY if source == PROC_NULL else self.envelope_of(self._probed(source, tag, once=once))

    def take(self, source: int | None, tag: int | None, *, once: bool = False) -> tuple[Envelope, Any, Any] | None:
        """Take the next message of any length, as bytes; None if `once` and there is none.

        The third value is a function that ends its send, if that is synchronous. Call it when the message is received.
        """
        if source == PROC_NULL:
            return OF_NOBODY, np.empty(0, np.uint8), lambda: None
        probe = self._probed(source, tag, once=once, takes=True)
        envelope = self.envelope_of(probe)
        if envelope is None:
            return None
        return envelope, np.frombuffer(probe.host_copy() or b"", np.uint8), partial(probe.acknowledge, self.limit_s)

    def _probed(self, source: int | None, tag: int | None, *, once: bool, takes: bool = False) -> Probe:
        probe = self._executor.probe(self._place(source), tag, once=once, takes=takes)
        probe.wait(self.limit_s)
        return probe


def _wild(source: int | None, tag: int | None) -> tuple[Any, Any]:
    """Return a source and a tag, in which the wildcards of Unisono stand for None."""
    return ANY_SOURCE if source is None else source, ANY_TAG if tag is None else tag
