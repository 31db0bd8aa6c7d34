"""`Port`: the messages of one communicator, as `Comm` needs them.

A receive accepts a shorter message than its array, and messages of objects are pickles in messages of bytes, so that a
probe finds both.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from unisono import ANY_SOURCE, ANY_TAG, Communicator
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Message, Probe


class Port:
    """The messages of a communicator.

    Attributes:
        limit_s: seconds until a call fails.
    """

    def __init__(self, native: Communicator, *, for_objects: bool = False) -> None:
        carrier = native._for_objects() if for_objects else native
        self._carrier, self._executor, self._works = carrier, carrier._executor, carrier._works
        self.limit_s = native.timeout_s

    def send_quickly(self, array: Any, dest: int, tag: int) -> bool:
        """Send an array by the fast path, and return True; False if it has done nothing."""
        return self._carrier._messages.send_flat(array, dest, tag)

    def receive_quickly(self, array: Any, source: int | None, tag: int | None) -> tuple[int, int, int] | None:
        """Receive a message as `receive` does, by the fast path, and return its source, tag and size in bytes.

        None means that nothing has been done.
        """
        message = self._carrier._messages.receive_up_to(
            array, ANY_SOURCE if source is None else source, ANY_TAG if tag is None else tag
        )
        return None if message is None else (message[0], message[1], message[3])

    def send(self, array: Any, dest: int, tag: int, *, in_background: bool = False, synchronous: bool = False) -> Any:
        """Start to send a flat array, and return the operation."""
        operation = self._executor.send(array, DTYPES[array.dtype.name], dest, tag, synchronous=synchronous)
        if in_background:
            self._run(operation)
        return operation

    def _run(self, operation: Any) -> None:
        """Let an operation progress, and keep it until it has ended, also if the program drops its request."""
        operation.run_in_background(self.limit_s)
        self._works.add(operation, None, self.limit_s)

    def receive(self, array: Any, source: int | None, tag: int | None, *, in_background: bool = False) -> Any:
        """Start to receive a message of at most the length of a flat array; None stands for any source or tag."""
        operation = self._executor.recv(array, DTYPES[array.dtype.name], source, tag, up_to=True)
        if in_background:
            self._run(operation)
        return operation

    def probe(self, source: int | None, tag: int | None, *, once: bool) -> Message | None:
        """Return the description of a message that a receive would get; None if `once` and there is none."""
        return self._probed(source, tag, once=once).message()

    def take(self, source: int | None, tag: int | None, *, once: bool = False) -> tuple[Message, Any, Any] | None:
        """Take the next message of any length, as bytes; None if `once` and there is none.

        The third value is a function that ends its send, if that is synchronous. Call it when the message is received.
        """
        probe = self._probed(source, tag, once=once, takes=True)
        message = probe.message()
        if message is None:
            return None
        return message, np.frombuffer(probe.host_copy() or b"", np.uint8), partial(probe.acknowledge, self.limit_s)

    def _probed(self, source: int | None, tag: int | None, *, once: bool, takes: bool = False) -> Probe:
        probe = self._executor.probe(source, tag, once=once, takes=takes)
        probe.wait(self.limit_s)
        return probe
