"""`SupervisedTransport`: adds the failure detection of the job's control links to a plugin transport.

The control links detect a rank that dies or a host that falls silent. Every later call then raises that error, even if
the plugin has noticed nothing. They also carry an error of the plugin to all ranks, even if the plugin itself cannot.
"""

from __future__ import annotations

from unisono.errors import UnisonoError
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
        self._control.fail(kind_of(error), peer, text)
        super().abort(error)
