"""UCX through the core interface of its Python package alone, for where the native core cannot enter the library.

Theory of operation. These are links for frames (`framed.py`): each rank has a worker of its own, and an endpoint to
each other rank, made from the address of its worker. A frame is two messages: its length, by one tag, and its bytes by
another; as messages of one tag from one rank keep their order, nothing else need be said. Room for one length is
posted for each peer; its frame is received into memory of its own, and then the next length. Who closes its links says
so by a length that no frame has. UCX has no error handling here, which would keep it from shared memory: of a rank that
dies the control links of the job tell.

A step costs some tens of microseconds of Python, and links between all ranks are opened at once.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from unisono.errors import TransportUnavailableError
from unisono.transports.bootstrap import Bootstrap
from unisono.transports.framed import FramedTransport
from unisono.transports.ucx import imported

_LENGTH = struct.Struct("=Q")
_GOODBYE = (1 << 64) - 1
_MOST_NBYTES = 1 << 40
# How long what has been sent may take to get out of reach when links are closed.
_CLOSING_S = 0.5
# A tag is the number of the rank that sends, and one of these.
_OF_LENGTH, _OF_BYTES = 0, 1


class _Pending(Protocol):
    """A posted message."""

    def done(self) -> bool:
        """Return whether it has been sent, or received; after `progress`. Raises what UCX says if it has failed."""


class _Core(Protocol):
    """What is used of a package's core interface. Messages keep their memory until they are done."""

    def address(self) -> bytes: ...

    def connect(self, address: bytes) -> Any: ...

    def progress(self) -> None: ...

    def send(self, endpoint: Any, tag: int, data: bytes) -> _Pending: ...

    def receive(self, tag: int, room: bytearray) -> _Pending: ...


class _Ucxx:
    """The core interface of ucxx."""

    def __init__(self, ucx: Any) -> None:
        from ucxx._lib.arr import Array

        self._ucx, self._array = ucx, Array
        self._worker = ucx.UCXWorker(ucx.UCXContext({}, feature_flags=(ucx.Feature.TAG,)))

    def address(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> Any:
        there = self._ucx.UCXAddress.create_from_buffer(bytearray(address))
        return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, there, endpoint_error_handling=False)

    def progress(self) -> None:
        self._worker.progress()

    def send(self, endpoint: Any, tag: int, data: bytes) -> _Pending:
        return _OfUcxx(endpoint.tag_send(self._array(data), self._ucx.UCXXTag(tag)), data)

    def receive(self, tag: int, room: bytearray) -> _Pending:
        full = self._ucx.UCXXTagMaskFull
        return _OfUcxx(self._worker.tag_recv(self._array(room), self._ucx.UCXXTag(tag), full), room)


class _OfUcxx:
    """A request of ucxx."""

    def __init__(self, request: Any, memory: bytes | bytearray) -> None:
        self._request, self._memory = request, memory

    def done(self) -> bool:
        if not self._request.completed:
            return False
        self._request.check_error()
        return True


class _UcxPy:
    """The core interface of ucx-py, whose requests end by a callback, or at once."""

    def __init__(self, ucx: Any) -> None:
        from ucp._libs.arr import Array

        self._ucx, self._array = ucx, Array
        self._worker = ucx.UCXWorker(ucx.UCXContext({}, feature_flags=(ucx.Feature.TAG,)))

    def address(self) -> bytes:
        return bytes(self._worker.get_address())

    def connect(self, address: bytes) -> Any:
        there = self._ucx.UCXAddress.from_buffer(bytearray(address))
        return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, there, endpoint_error_handling=False)

    def progress(self) -> None:
        self._worker.progress()

    def send(self, endpoint: Any, tag: int, data: bytes) -> _Pending:
        return self._posted(self._ucx.tag_send_nb, endpoint, data, tag)

    def receive(self, tag: int, room: bytearray) -> _Pending:
        return self._posted(self._ucx.tag_recv_nb, self._worker, room, tag)

    def _posted(self, post: Callable[..., Any], way: Any, memory: bytes | bytearray, tag: int) -> _Pending:
        pending = _OfUcxPy(memory)
        request = post(way, self._array(memory), len(memory), tag, cb_func=pending.end)
        pending.ended |= request is None
        return pending


class _OfUcxPy:
    """A request of ucx-py."""

    def __init__(self, memory: bytes | bytearray) -> None:
        self._memory = memory
        self._error: Exception | None = None
        self.ended = False

    def end(self, _: Any, error: Exception | None) -> None:
        self.ended, self._error = True, error

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        return self.ended


_CORES: dict[str, Callable[[Any], _Core]] = {"ucxx": _Ucxx, "ucp": _UcxPy}


class _Sent:
    """A frame on its way; those before it are done when it is."""

    def __init__(self, *parts: _Pending) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class _Link:
    """What goes to one peer and comes from it."""

    _length: bytearray
    _coming: _Pending

    def __init__(self, core: _Core, rank: int, peer: int, address: bytes) -> None:
        self._core, self._peer = core, peer
        self._tag = rank << 1
        self._endpoint = core.connect(address)
        self._sending: deque[_Sent] = deque()
        self._frame: bytearray | None = None
        self.open = True
        self._expect()

    def send(self, parts: Sequence[memoryview]) -> _Sent:
        frame = b"".join(parts)
        head = self._core.send(self._endpoint, self._tag | _OF_LENGTH, _LENGTH.pack(len(frame)))
        sent = _Sent(head, self._core.send(self._endpoint, self._tag | _OF_BYTES, frame))
        self._sending.append(sent)
        return sent

    def say_goodbye(self) -> None:
        self._sending.append(_Sent(self._core.send(self._endpoint, self._tag | _OF_LENGTH, _LENGTH.pack(_GOODBYE))))

    def pending(self) -> bool:
        """Return whether something that was sent is still on its way."""
        while self._sending and self._sending[0].done():
            self._sending.popleft()
        return bool(self._sending)

    def received(self) -> Iterable[memoryview]:
        """Yield the frames that have come in whole."""
        while self.open and self._coming.done():
            if self._frame is not None:
                frame = self._frame
                self._expect()
                yield memoryview(frame)
                continue
            (nbytes,) = _LENGTH.unpack(self._length)
            if nbytes == _GOODBYE:
                self.open = False
            elif not 0 < nbytes <= _MOST_NBYTES:
                raise ValueError(f"a frame of {nbytes} bytes cannot be")
            else:
                self._frame = bytearray(nbytes)
                self._coming = self._core.receive(self._peer << 1 | _OF_BYTES, self._frame)

    def _expect(self) -> None:
        self._length, self._frame = bytearray(_LENGTH.size), None
        self._coming = self._core.receive(self._peer << 1 | _OF_LENGTH, self._length)


class _Links:
    """`FrameLinks` over a worker of UCX."""

    name = "ucx_core"

    def __init__(self, core: _Core, rank: int, addresses: Sequence[bytes]) -> None:
        self._core = core
        peers = (peer for peer in range(len(addresses)) if peer != rank)
        self._links = {peer: _Link(core, rank, peer, addresses[peer]) for peer in peers}

    def send(self, peer: int, parts: Sequence[memoryview]) -> _Sent:
        return self._links[peer].send(parts)

    def receive(self) -> Iterable[tuple[int, memoryview]]:
        self._core.progress()
        for peer, link in self._links.items():
            link.pending()
            for frame in link.received():
                yield peer, frame

    def ended(self, peer: int) -> bool:
        return peer in self._links and not self._links[peer].open

    def close(self) -> None:
        here = [link for link in self._links.values() if link.open]
        for link in here:
            link.say_goodbye()
        until = time.monotonic() + _CLOSING_S
        while any(link.pending() for link in here) and time.monotonic() < until:
            self._core.progress()
        self._links.clear()


def open_links(bootstrap: Bootstrap) -> FramedTransport:
    """Return the transport of this rank; the factory of ``transports="ucx_core"``.

    Raises:
        TransportUnavailableError: there is no package of UCX here that can be used; it says what to do.
    """
    package, ucx = imported()
    try:
        core = _CORES[package](ucx)
    except Exception as error:  # of UCX, whatever its package makes of it
        raise TransportUnavailableError(f"UCX cannot be used: {error}") from error
    return FramedTransport(_Links(core, bootstrap.rank, bootstrap.exchange(core.address())), bootstrap)
