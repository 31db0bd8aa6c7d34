"""Messages that a probe has taken, so that only their holder receives them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono.collectives.calls.message_handoff import ReceiveOperand
from unisono.errors import UsageError
from unisono.foundation.uncopyable import uncopyable
from unisono.transports.contracts.executor import OF_NOBODY, Message, Probe

if TYPE_CHECKING:
    from unisono.collectives.arrays.typing import Target


@uncopyable("it can be received once only")
class TakenMessage:
    """A message that ``probe(take=True)`` has taken. No other receive or probe of this rank gets it.

    It has arrived, and lies in memory of the library until `recv` or until it is dropped. It follows `MPI_Mprobe` and
    `MPI_Mrecv` (MPI 4.1, section 3.8.2). Any thread may receive it. A synchronous send of it ends with `recv`.

    Attributes:
        source, tag, dtype, count: as in `Message`.
    """

    def __init__(self, probe: Probe | None, operand_of: Callable[[Any], ReceiveOperand], limit_s: float) -> None:
        message = OF_NOBODY if probe is None else probe.message()
        assert message is not None, "a probe that takes a message has found it"
        self.source, self.tag, self.dtype, self.count = message.source, message.tag, message.dtype, message.count
        self._probe = probe
        self._operand_of = operand_of
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._is_received = False

    def __repr__(self) -> str:
        return f"<unisono.TakenMessage source={self.source}, tag={self.tag}, {self.dtype}[{self.count}]>"

    def recv(self, out: Target) -> Target:
        """Receive the message into `out`, and return `out`; the message has arrived, so it does not wait for it.

        Args:
            out: as in `Communicator.recv`. The message of `NOBODY` leaves it as it is.

        Raises:
            UsageError: `out` has another dtype, number of elements or shape. The message can still be received. Or it
                has been received before.
            PeerLostError, CollectiveTimeoutError, AbortedError: the sender of a synchronous message cannot be told.
        """
        with self._lock:
            if self._is_received:
                raise UsageError("this message has been received: a message is received once only")
            operand = self._operand_of(out)
            if self._probe is not None:
                self._fill(operand, self._probe)
            self._is_received = True
            if self._probe is not None:
                self._probe.acknowledge(self._limit_s)
        received: Target = operand.finish(None)
        return received

    def _fill(self, operand: ReceiveOperand, probe: Probe) -> None:
        target = operand.operand
        if not probe.fits(target.dtype, target.flat.size, target.shape):
            raise UsageError(
                f"out is {target}, and the message is {self.dtype}[{self.count}]: pass an array of its dtype, "
                "number of elements and shape, or a flat one"
            )
        payload = probe.host_copy()
        if payload is not None:
            target.flat.view(np.uint8)[:] = np.frombuffer(payload, np.uint8)

    def message(self) -> Message:
        """Return source, tag, dtype and count."""
        return Message(self.source, self.tag, self.dtype, self.count)
