"""The transport `ucx_core`: UCX through its Python package alone, where the native core cannot use the library.

Theory of operation. These are `FrameLinks`. Each rank has a worker, and an endpoint to each other rank, made from the
address of its worker. A frame is two messages: its length under one tag, and its bytes under another. UCX keeps the
order of messages of one tag from one rank, so nothing else is needed. For each peer a receive for one length is posted.
Then its frame is received into new memory, and then the next length. A rank that closes its links sends a length that
no frame has. UCX runs without its error handling, which would keep it from using shared memory. The control links of
the job detect a dead rank. If UCX fails a message because of it, the link has ended.

The packages close an endpoint when it is garbage-collected. They then wait, without a limit, until the other rank has
received all pending messages, and also for receives that a worker has begun. A rank that has died, or does not poll,
would block its peers for ever. So endpoints and workers are never closed. A worker is reused for the next links of this
process, and memory that UCX may still read or write is kept until the process ends. A worker never uses a tag twice, so
a late message for closed links matches no receive.

A step costs some tens of microseconds of Python. The links between all ranks are opened at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from unisono.errors import TransportUnavailableError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.once import once_per_process
from unisono.transports.message.framed import FramedTransport
from unisono.transports.message.plugin import Bootstrap
from unisono.transports.ucx.library import imported, settings, unusable, warning_of_listeners

_LENGTH = struct.Struct("=Q")
# The first of the tags on which a rank receives; the address of its worker follows.
_FIRST_TAG = struct.Struct("=Q")
_GOODBYE = (1 << 64) - 1
_MOST_NBYTES = 1 << 40
# When links are closed, the longest wait until UCX has sent all messages.
_CLOSING_S = 0.5
# The lowest bit of a tag; the other bits are the receiver's number of the link.
_OF_LENGTH, _OF_BYTES = 0, 1


class _Pending(Protocol):
    """A posted message; its state is that of the last `progress`."""

    def ended(self) -> bool:
        """Return whether UCX has ended the message, with or without an error, and no longer uses its memory."""

    def done(self) -> bool:
        """Return whether the message has been sent or received without an error."""


class _Core(Protocol):
    """The functions of a package's core interface that are used here. Messages keep their memory alive."""

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
        self._worker = ucx.UCXWorker(ucx.UCXContext(settings(), feature_flags=(ucx.Feature.TAG,)))

    def address(self) -> bytes:
        return bytes(self._worker.address.tobytes())

    def connect(self, address: bytes) -> Any:
        peer = self._ucx.UCXAddress.create_from_buffer(bytearray(address))
        return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, endpoint_error_handling=False)

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

    def ended(self) -> bool:
        return bool(self._request.completed)

    def done(self) -> bool:
        return self.ended() and self._request.status == 0


class _UcxPy:
    """The core interface of ucx-py, whose requests end at once or by a callback."""

    def __init__(self, ucx: Any) -> None:
        from ucp._libs.arr import Array

        self._ucx, self._array = ucx, Array
        self._worker = ucx.UCXWorker(ucx.UCXContext(settings(), feature_flags=(ucx.Feature.TAG,)))

    def address(self) -> bytes:
        return bytes(self._worker.get_address())

    def connect(self, address: bytes) -> Any:
        peer = self._ucx.UCXAddress.from_buffer(bytearray(address))
        return self._ucx.UCXEndpoint.create_from_worker_address(self._worker, peer, endpoint_error_handling=False)

    def progress(self) -> None:
        self._worker.progress()

    def send(self, endpoint: Any, tag: int, data: bytes) -> _Pending:
        return self._posted(self._ucx.tag_send_nb, endpoint, data, tag)

    def receive(self, tag: int, room: bytearray) -> _Pending:
        return self._posted(self._ucx.tag_recv_nb, self._worker, room, tag)

    def _posted(self, post: Callable[..., Any], handle: Any, memory: bytes | bytearray, tag: int) -> _Pending:
        pending = _OfUcxPy(memory)
        if post(handle, self._array(memory), len(memory), tag, cb_func=pending.end) is None:
            pending.end()
        return pending


class _OfUcxPy:
    """A request of ucx-py."""

    def __init__(self, memory: bytes | bytearray) -> None:
        self._memory = memory
        self._error: Exception | None = None
        self._ended = False

    def end(self, _: Any = None, error: Exception | None = None) -> None:
        """Mark the request as ended, with an error if there is one."""
        self._ended, self._error = True, error

    def ended(self) -> bool:
        return self._ended

    def done(self) -> bool:
        return self._ended and self._error is None


_CORES: dict[str, Callable[[Any], _Core]] = {"ucxx": _Ucxx, "ucp": _UcxPy}


class _Send:
    """A frame that is being sent. When it is done, so are the frames before it."""

    def __init__(self, *parts: _Pending) -> None:
        self._parts = parts

    def ended(self) -> bool:
        """Return whether UCX has ended all its messages."""
        return all(part.ended() for part in self._parts)

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class _Worker:
    """A worker of this process. It serves one set of links at a time."""

    def __init__(self, core: _Core) -> None:
        self.core = core
        self.links: list[_Link] = []  # including closed links whose memory UCX may still use
        self._endpoints: dict[bytes, Any] = {}
        self._next_tag = 0

    def reserve(self, count: int) -> int:
        """Return the first of `count` unused tags."""
        first = self._next_tag
        self._next_tag += count
        return first

    def endpoint(self, address: bytes) -> Any:
        """Return the endpoint to the worker at `address`."""
        if address not in self._endpoints:
            self._endpoints[address] = self.core.connect(address)
        return self._endpoints[address]

    def drop_ended_links(self) -> None:
        """Drop the links whose memory UCX no longer uses."""
        self.core.progress()
        self.links = [link for link in self.links if not link.is_over()]


class _Workers:
    """The workers of a process."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []

    def take(self, new: Callable[[], _Core]) -> _Worker:
        """Return an idle worker, or a new one if there is none."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(new())
            self._all.append(worker)
        worker.drop_ended_links()
        return worker

    def give_back(self, worker: _Worker) -> None:
        """Make a worker available for other links."""
        worker.drop_ended_links()
        self._idle.append(worker)


@once_per_process
def _workers() -> _Workers:
    """Return the workers of this process: a forked child must not use its parent's."""
    workers = _Workers()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(workers))  # never collected, not even when the interpreter ends
    return workers


class _Link:
    """The frames to and from one peer, with a tag for each direction."""

    _length: bytearray
    _coming: _Pending

    def __init__(self, core: _Core, endpoint: Any, out_tag: int, in_tag: int) -> None:
        self._core, self._endpoint = core, endpoint
        self._out_tag, self._in_tag = out_tag << 1, in_tag << 1
        self._sending: deque[_Send] = deque()
        self._frame: bytearray | None = None
        self.open = True
        self._expect()

    def send(self, parts: Sequence[memoryview]) -> _Send:
        frame = b"".join(parts)
        return self._sent(self._post(_OF_LENGTH, _LENGTH.pack(len(frame))), self._post(_OF_BYTES, frame))

    def say_goodbye(self) -> None:
        self._sent(self._post(_OF_LENGTH, _LENGTH.pack(_GOODBYE)))

    def pending(self) -> bool:
        """Return whether UCX still sends a frame."""
        while self._sending and self._sending[0].ended():
            self.open &= self._sending.popleft().done()
        return bool(self._sending)

    def is_over(self) -> bool:
        """Return whether UCX no longer uses any memory of the link."""
        return not self.pending() and self._coming.ended()

    def received(self) -> Iterable[memoryview]:
        """Yield the frames that have arrived completely."""
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
                raise ValueError(f"a peer announced a frame of {nbytes} bytes, and at most {_MOST_NBYTES} are allowed")
            else:
                self._frame = bytearray(nbytes)
                self._coming = self._core.receive(self._in_tag | _OF_BYTES, self._frame)
        self.open &= self._coming.done() or not self._coming.ended()

    def _post(self, part: int, data: bytes) -> _Pending:
        return self._core.send(self._endpoint, self._out_tag | part, data)

    def _sent(self, *parts: _Pending) -> _Send:
        sent = _Send(*parts)
        self._sending.append(sent)
        return sent

    def _expect(self) -> None:
        self._length, self._frame = bytearray(_LENGTH.size), None
        self._coming = self._core.receive(self._in_tag | _OF_LENGTH, self._length)


class _Links:
    """`FrameLinks` over a worker, which returns to `workers` when they are closed.

    Args:
        workers: the workers of this process.
        worker: the worker that serves these links.
        ends: for each peer, its endpoint, the tag for sending to it, and the tag for receiving from it.
    """

    name = "ucx_core"

    def __init__(self, workers: _Workers, worker: _Worker, ends: Mapping[int, tuple[Any, int, int]]) -> None:
        self._workers, self._worker = workers, worker
        self._links = {peer: _Link(worker.core, *end) for peer, end in ends.items()}
        worker.links += self._links.values()

    def send(self, peer: int, parts: Sequence[memoryview]) -> _Send:
        return self._links[peer].send(parts)

    def receive(self) -> Iterable[tuple[int, memoryview]]:
        self._worker.core.progress()
        for peer, link in self._links.items():
            link.pending()
            for frame in link.received():
                yield peer, frame

    def ended(self, peer: int) -> bool:
        return peer in self._links and not self._links[peer].open

    def close(self) -> None:
        open_links = [link for link in self._links.values() if link.open]
        for link in open_links:
            link.say_goodbye()
        deadline = Deadline(_CLOSING_S)
        while any(link.pending() for link in open_links) and not deadline.has_passed():
            self._worker.core.progress()
        self._links.clear()
        self._workers.give_back(self._worker)


def open_links(bootstrap: Bootstrap) -> FramedTransport:
    """Return the transport of this rank; the factory of ``transports="ucx_core"``.

    Raises:
        TransportUnavailableError: no package of UCX can be used here; the message says what to do.
    """
    package, ucx = imported()
    workers = _workers()
    try:
        with warning_of_listeners():
            worker = workers.take(lambda: _CORES[package](ucx))
    except Exception as error:  # any error of UCX or its package
        raise unusable(error) from error
    try:
        ends = _ends(bootstrap, worker)
    except BaseException:
        workers.give_back(worker)
        raise
    return FramedTransport(_Links(workers, worker, ends), bootstrap)


def _ends(bootstrap: Bootstrap, worker: _Worker) -> dict[int, tuple[Any, int, int]]:
    """Exchange the addresses of the workers of all ranks, and return this rank's end of the link to each peer."""
    first = worker.reserve(bootstrap.size)
    messages = bootstrap.exchange(_FIRST_TAG.pack(first) + worker.core.address())
    ends = {}
    for peer, message in enumerate(messages):
        if peer == bootstrap.rank:
            continue
        (first_of_peer,) = _FIRST_TAG.unpack_from(message)
        try:
            endpoint = worker.endpoint(message[_FIRST_TAG.size :])
        except Exception as error:  # any error of UCX or its package
            raise TransportUnavailableError(
                f"UCX does not reach rank {bootstrap.members[peer]} with the transports that UCX_TLS and the machines "
                f"allow ({error})"
            ) from error
        ends[peer] = endpoint, first_of_peer + bootstrap.rank, first + peer
    return ends
