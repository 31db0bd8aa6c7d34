"""`DelegatingTransport`: the base of message transports that wrap another one and change a part of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.transport import Identity, MessageTransport, Request, Traffic


class DelegatingTransport:
    """A `MessageTransport` that passes every call to `inner`, which it owns. Subclasses define `subgroup`."""

    def __init__(self, inner: MessageTransport) -> None:
        self.name, self.rank, self.size, self.members = inner.name, inner.rank, inner.size, inner.members
        self.capabilities, self.mapped = inner.capabilities, inner.mapped
        self._inner = inner

    def announce(self, sequence: int, signature: Signature) -> None:
        self._inner.announce(sequence, signature)

    def absent(self, sequence: int) -> Collection[int]:
        return self._inner.absent(sequence)

    def post_send(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        return self._inner.post_send(peer, identity, signature, pieces)

    def post_recv(self, peer: int, identity: Identity, signature: Signature, pieces: Sequence[memoryview]) -> Request:
        return self._inner.post_recv(peer, identity, signature, pieces)

    def arrived(self, peer: int, lane: int) -> Collection[tuple[Identity, Signature]]:
        return self._inner.arrived(peer, lane)

    def departed(self, peer: int) -> bool:
        return self._inner.departed(peer)

    def progress(self) -> None:
        self._inner.progress()

    def traffic(self) -> Mapping[int, Traffic]:
        return self._inner.traffic()

    def abort(self, error: Exception) -> None:
        self._inner.abort(error)

    def close(self) -> None:
        self._inner.close()
