"""UCX through the core interface of its Python package alone, for where the native core cannot enter the library.

Theory of operation. These are links for frames (`framed.py`): each rank has a worker of its own, and an endpoint to
each other rank, made from the address of its worker. A frame is two messages: its length, by one tag, and its bytes by
another; as messages of one tag from one rank keep their order, nothing else need be said. Room for one length is
posted for each peer; its frame is received into memory of its own, and then the next length. Who closes its links says
so by a length that no frame has. UCX has no error handling here, which would keep it from shared memory: of a rank that
dies the control links of the job tell, and where UCX fails a message because of that, its link has ended.

The packages close an endpoint when it is collected, and then wait, without a limit, until the other rank has taken what
is on its way; they likewise wait for what a worker has begun to receive. A rank that has died, or that does not look,
would keep its peers there for ever. So endpoints and workers are never given up: a worker that has served serves the
links that this process opens next, and what UCX may still read or write stays until the process has ended. Tags are
never used twice in a worker, and what comes late for links that were closed finds nobody.

A step costs some tens of microseconds of Python, and links between all ranks are opened at once.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from unisono.errors import TransportUnavailableError
from unisono.transports.message.framed import FramedTransport
from unisono.transports.message.plugin import Bootstrap
from unisono.transports.ucx.library import imported, settings, unusable, warning_of_doors

_LENGTH = struct.Struct("=Q")
# The first of the tags by which a rank is sent to; the address of its worker follows.
_FIRST_TAG = struct.Struct("=Q")
_GOODBYE = (1 << 64) - 1
_MOST_NBYTES = 1 << 40
# How long what has been sent may take to get out of reach when links are closed.
_CLOSING_S = 0.5
# A tag is a number that the receiver has for the link, and one of these.
_OF_LENGTH, _OF_BYTES = 0, 1


class _Pending(Protocol):
    """A posted message, as of the last `progress`."""

    def ended(self) -> bool:
        """Return whether UCX is through with it and its memory, well or not."""

    def done(self) -> bool:
        """Return whether it has been sent, or received."""


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
        self._worker = ucx.UCXWorker(ucx.UCXContext(settings(), feature_flags=(ucx.Feature.TAG,)))

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

    def ended(self) -> bool:
        return bool(self._request.completed)

    def done(self) -> bool:
        return self.ended() and self._request.status == 0


class _UcxPy:
    """The core interface of ucx-py, whose requests end by a callback, or at once."""

    def __init__(self, ucx: Any) -> None:
        from ucp._libs.arr import Array

        self._ucx, self._array = ucx, Array
        self._worker = ucx.UCXWorker(ucx.UCXContext(settings(), feature_flags=(ucx.Feature.TAG,)))

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
        if post(way, self._array(memory), len(memory), tag, cb_func=pending.end) is None:
            pending.end()
        return pending


class _OfUcxPy:
    """A request of ucx-py."""

    def __init__(self, memory: bytes | bytearray) -> None:
        self._memory = memory
        self._error: Exception | None = None
        self._ended = False

    def end(self, _: Any = None, error: Exception | None = None) -> None:
        """Have ended, by an error if there is one."""
        self._ended, self._error = True, error

    def ended(self) -> bool:
        return self._ended

    def done(self) -> bool:
        return self._ended and self._error is None


_CORES: dict[str, Callable[[Any], _Core]] = {"ucxx": _Ucxx, "ucp": _UcxPy}


class _Sent:
    """A frame on its way; those before it are done when it is."""

    def __init__(self, *parts: _Pending) -> None:
        self._parts = parts

    def ended(self) -> bool:
        """Return whether UCX is through with it."""
        return all(part.ended() for part in self._parts)

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class _Worker:
    """A worker of this process, which serves a set of links at a time."""

    def __init__(self, core: _Core) -> None:
        self.core = core
        self.links: list[_Link] = []  # also those that were closed, while UCX may read or write their memory
        self._endpoints: dict[bytes, Any] = {}
        self._next_tag = 0

    def reserve(self, count: int) -> int:
        """Return the first of so many tags that nobody has used."""
        first = self._next_tag
        self._next_tag += count
        return first

    def endpoint(self, address: bytes) -> Any:
        """Return the endpoint to another worker."""
        if address not in self._endpoints:
            self._endpoints[address] = self.core.connect(address)
        return self._endpoints[address]

    def forget_what_is_over(self) -> None:
        """Let go of links that were closed, and of which nothing is on its way any more."""
        self.core.progress()
        self.links = [link for link in self.links if not link.over()]


class _Workers:
    """The workers of a process."""

    def __init__(self) -> None:
        self._all: list[_Worker] = []
        self._idle: list[_Worker] = []

    def take(self, new: Callable[[], _Core]) -> _Worker:
        """Return a worker that serves nobody, if need be a new one."""
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker(new())
            self._all.append(worker)
        worker.forget_what_is_over()
        return worker

    def give_back(self, worker: _Worker) -> None:
        """Have a worker serve others."""
        worker.forget_what_is_over()
        self._idle.append(worker)


@functools.cache
def _workers(process: int) -> _Workers:
    """Return those of the process of this number: a forked child can use nothing of its parent's."""
    made = _Workers()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # it is not collected, not even when the interpreter ends
    return made


class _Link:
    """What goes to one peer and comes from it, by a tag of either side."""

    _length: bytearray
    _coming: _Pending

    def __init__(self, core: _Core, endpoint: Any, out_tag: int, in_tag: int) -> None:
        self._core, self._endpoint = core, endpoint
        self._out_tag, self._in_tag = out_tag << 1, in_tag << 1
        self._sending: deque[_Sent] = deque()
        self._frame: bytearray | None = None
        self.open = True
        self._expect()

    def send(self, parts: Sequence[memoryview]) -> _Sent:
        frame = b"".join(parts)
        return self._sent(self._post(_OF_LENGTH, _LENGTH.pack(len(frame))), self._post(_OF_BYTES, frame))

    def say_goodbye(self) -> None:
        self._sent(self._post(_OF_LENGTH, _LENGTH.pack(_GOODBYE)))

    def pending(self) -> bool:
        """Return whether something that was sent is still on its way."""
        while self._sending and self._sending[0].ended():
            self.open &= self._sending.popleft().done()
        return bool(self._sending)

    def over(self) -> bool:
        """Return whether UCX has nothing of the link any more."""
        return not self.pending() and self._coming.ended()

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
                self._coming = self._core.receive(self._in_tag | _OF_BYTES, self._frame)
        self.open &= self._coming.done() or not self._coming.ended()

    def _post(self, part: int, data: bytes) -> _Pending:
        return self._core.send(self._endpoint, self._out_tag | part, data)

    def _sent(self, *parts: _Pending) -> _Sent:
        sent = _Sent(*parts)
        self._sending.append(sent)
        return sent

    def _expect(self) -> None:
        self._length, self._frame = bytearray(_LENGTH.size), None
        self._coming = self._core.receive(self._in_tag | _OF_LENGTH, self._length)


class _Links:
    """`FrameLinks` over a worker, which they give back to `workers`.

    Args:
        workers: of this process.
        worker: the one that serves these links.
        ends: of each peer, the endpoint to it, the tag by which it is sent to, and the one by which it sends.
    """

    name = "ucx_core"

    def __init__(self, workers: _Workers, worker: _Worker, ends: Mapping[int, tuple[Any, int, int]]) -> None:
        self._workers, self._worker = workers, worker
        self._links = {peer: _Link(worker.core, *end) for peer, end in ends.items()}
        worker.links += self._links.values()

    def send(self, peer: int, parts: Sequence[memoryview]) -> _Sent:
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
        here = [link for link in self._links.values() if link.open]
        for link in here:
            link.say_goodbye()
        until = time.monotonic() + _CLOSING_S
        while any(link.pending() for link in here) and time.monotonic() < until:
            self._worker.core.progress()
        self._links.clear()
        self._workers.give_back(self._worker)


def open_links(bootstrap: Bootstrap) -> FramedTransport:
    """Return the transport of this rank; the factory of ``transports="ucx_core"``.

    Raises:
        TransportUnavailableError: there is no package of UCX here that can be used; it says what to do.
    """
    package, ucx = imported()
    workers = _workers(os.getpid())
    try:
        with warning_of_doors():
            worker = workers.take(lambda: _CORES[package](ucx))
    except Exception as error:  # of UCX, whatever its package makes of it
        raise unusable(error) from error
    try:
        ends = _ends(bootstrap, worker)
    except BaseException:
        workers.give_back(worker)
        raise
    return FramedTransport(_Links(workers, worker, ends), bootstrap)


def _ends(bootstrap: Bootstrap, worker: _Worker) -> dict[int, tuple[Any, int, int]]:
    """Return the ends of the links to all peers, which have been told the address of this worker."""
    first = worker.reserve(bootstrap.size)
    told = bootstrap.exchange(_FIRST_TAG.pack(first) + worker.core.address())
    ends = {}
    for peer, there in enumerate(told):
        if peer == bootstrap.rank:
            continue
        (its_first,) = _FIRST_TAG.unpack_from(there)
        try:
            endpoint = worker.endpoint(there[_FIRST_TAG.size :])
        except Exception as error:  # of UCX, whatever its package makes of it
            raise TransportUnavailableError(
                f"UCX does not reach rank {bootstrap.members[peer]} with the transports that UCX_TLS and the machines "
                f"allow ({error})"
            ) from error
        ends[peer] = endpoint, its_first + bootstrap.rank, first + peer
    return ends
