"""`SupervisedTransport`: adds the failure detection of the job's control links to a plugin transport.

The control links detect a rank that dies or a host that falls silent. Every later call then raises that error, even if
the plugin has noticed nothing. They also carry an error of the plugin to all ranks, even if the plugin itself cannot.

A plugin may notice that a rank has left before the control links say why it has. So the transport waits a moment for
them. Example: rank 1 is killed, and rank 0 raises the error and ends. Rank 2, whose link to rank 0 has ended, raises
that rank 1 is lost, too.
"""

from __future__ import annotations

from unisono.errors import PeerLostError, UnisonoError
from unisono.transports import _core
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.links.failures import failure_of, kind_of
from unisono.transports.message.delegating import DelegatingTransport


class SupervisedTransport(DelegatingTransport):
    """A `MessageTransport` that carries messages over `inner`, which it owns, and learns of failures from `control`."""

    def __init__(self, inner: MessageTransport, control: _core.Control) -> None:
        super().__init__(inner)
        self._control = control

    def subgroup(self, ranks: tuple[int, ...], number: int) -> SupervisedTransport:
        return SupervisedTransport(self._inner.subgroup(ranks, number), self._control)

    def progress(self) -> None:
        super().progress()
        if self._control.failed():
            raise failure_of(self._control)

    def abort(self, error: Exception) -> None:
        peer = error.peer if isinstance(error, UnisonoError) and error.peer is not None else -1
        text = error.message if isinstance(error, UnisonoError) else str(error)
        if isinstance(error, PeerLostError) and peer >= 0:
            self._control.lose(peer, text)
        self._control.fail(kind_of(error), peer, text)  # unless it has failed by now
        super().abort(failure_of(self._control) if isinstance(error, PeerLostError) else error)
