"""A message transport of a third party in a job: with the job's control links, which know what it may not notice.

A rank that dies, or a host that falls silent, is found by the control links, and then is an error of every call; and an
error that this transport meets is told by them to all ranks, whether or not the transport itself gets it across.
"""

from __future__ import annotations

from unisono.errors import UnisonoError
from unisono.transports import _core
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.links.failures import failure_of, kind_of
from unisono.transports.message.delegating import ForwardedTransport


class WatchedTransport(ForwardedTransport):
    """A `MessageTransport` that carries messages by `inner`, which it owns, and hears of failures by `control`."""

    def __init__(self, inner: MessageTransport, control: _core.Control) -> None:
        super().__init__(inner)
        self._control = control

    def subgroup(self, ranks: tuple[int, ...], number: int) -> WatchedTransport:
        return WatchedTransport(self._inner.subgroup(ranks, number), self._control)

    def progress(self) -> None:
        super().progress()
        if self._control.failed():
            raise failure_of(self._control)

    def abort(self, error: Exception) -> None:
        peer = error.peer if isinstance(error, UnisonoError) and error.peer is not None else -1
        text = error.message if isinstance(error, UnisonoError) else str(error)
        self._control.fail(kind_of(error), peer, text)
        super().abort(error)
