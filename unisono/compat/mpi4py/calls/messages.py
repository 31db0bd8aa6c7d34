"""`Port`: the messages of one communicator, as `Comm` needs them.

A receive accepts a shorter message than its array, and messages of objects are pickles in messages of bytes, so that a
probe finds both.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from unisono import Communicator
from unisono.dtypes import DTYPES
from unisono.transports.contracts.executor import Message


class Port:
    """The messages of a communicator.

    Attributes:
        limit_s: seconds until a call fails.
    """

    def __init__(self, native: Communicator, *, for_objects: bool = False) -> None:
        carrier = native._for_objects() if for_objects else native
        self._executor, self._works = carrier._executor, carrier._works
        self.limit_s = native.timeout_s
        self._lock = threading.Lock()

    def send(self, array: Any, dest: int, tag: int, *, in_background: bool = False) -> Any:
        """Start to send a flat array, and return the operation."""
        operation = self._executor.send(array, DTYPES[array.dtype.name], dest, tag)
        if in_background:
            self._run(operation)
        return operation

    def _run(self, operation: Any) -> None:
        """Let an operation progress, and keep it until it has ended, also if the program drops its request."""
        operation.run_in_background(self.limit_s)
        self._works.add(operation, None, self.limit_s)

    def receive(self, array: Any, source: int | None, tag: int | None, *, in_background: bool = False) -> Any:
        """Start to receive a message of at most the length of a flat array; None stands for any source or tag."""
        with self._lock:
            return self._receive(array, source, tag, in_background=in_background)

    def _receive(self, array: Any, source: int | None, tag: int | None, *, in_background: bool = False) -> Any:
        operation = self._executor.recv(array, DTYPES[array.dtype.name], source, tag, up_to=True)
        if in_background:
            self._run(operation)
        return operation

    def probe(self, source: int | None, tag: int | None, *, once: bool) -> Message | None:
        """Return the description of a message that a receive would get; None if `once` and there is none."""
        probe = self._executor.probe(source, tag, once=once)
        probe.wait(self.limit_s)
        message: Message | None = probe.message()
        return message

    def take(self, source: int | None, tag: int | None, *, once: bool = False) -> tuple[Message, Any] | None:
        """Receive the next message of any length, as bytes; None if `once` and there is none."""
        while True:
            if self.probe(source, tag, once=once) is None:
                return None
            with self._lock:  # another thread may have received the message
                message = self.probe(source, tag, once=True)
                if message is not None:
                    data = np.empty(nbytes_of(message), np.uint8)
                    operation = self._receive(data, message.source, message.tag)
                    break
            if once:
                return None
        operation.wait(self.limit_s)
        return message, data


def nbytes_of(message: Message) -> int:
    """Return the number of bytes of a message."""
    return message.count * DTYPES[message.dtype].itemsize
