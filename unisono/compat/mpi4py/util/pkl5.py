"""Communicators that send objects without copying their large parts of memory: ``pkl5.Intracomm(MPI.COMM_WORLD)``.

Parts of at least `pickle.THRESHOLD` bytes, such as the elements of numpy arrays, travel beside the pickle (PEP 574).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono.compat.mpi4py import MPI
from unisono.compat.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, PROC_NULL, ROOT
from unisono.compat.mpi4py.base.errors import translating
from unisono.compat.mpi4py.calls.messages import OF_NOBODY, Envelope
from unisono.compat.mpi4py.calls.objects import _items
from unisono.compat.mpi4py.calls.parcels import Parcel
from unisono.compat.mpi4py.calls.point_to_point import MESSAGE_NO_PROC, _MessageState, _to
from unisono.compat.mpi4py.calls.request import RequestState
from unisono.compat.mpi4py.values.pickles import Pickle
from unisono.compat.mpi4py.values.status import Status

pickle = Pickle()


class Request(MPI.Request):  # type: ignore[name-defined, misc]
    """A started message of an object."""

    __slots__ = ()


class _ArrivingState(_MessageState):
    """A message whose header a probe has taken out, and whose parts are being received."""

    def __init__(self, port: Any, envelope: Envelope, header: Any, acknowledge: Any) -> None:
        parcel = Parcel.arriving(header)
        envelope = envelope._replace(nbytes=header.size + sum(part.size for part in parcel.parts))
        super().__init__(envelope, header, acknowledge)

        def received(status: Status) -> Any:
            envelope.tell(status)
            return parcel.unpacked(pickle)

        self.request = RequestState(parcel.receive(port, envelope.source, envelope.tag), received, port.limit_s)


class Message(MPI.Message):  # type: ignore[name-defined, misc]
    """A message of an object that a probe has taken out."""

    __slots__ = ()

    def recv(self, status: Any = None) -> Any:
        """Receive the object of the message."""
        return self.irecv().wait(status)

    def irecv(self) -> Any:
        """Start to receive the object of the message."""
        state = self._receive()
        return Request._of(state.request if isinstance(state, _ArrivingState) else RequestState((), OF_NOBODY.tell))


class Comm(MPI.Comm):  # type: ignore[name-defined, misc]
    """A communicator that sends large parts of objects without copying them."""

    __slots__ = ()

    def isend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        """Start to send an object."""
        return self._start_parcel(obj, dest, tag)

    ibsend = isend

    def issend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        """Start to send an object; the request ends when it is received."""
        return self._start_parcel(obj, dest, tag, synchronous=True)

    @translating
    def _start_parcel(self, obj: Any, dest: int, tag: int, *, synchronous: bool = False) -> Any:
        rank, number = _to(self._live, dest, tag)
        if rank is None:
            return Request._of(RequestState())
        port = self._live.object_port
        operations = Parcel.of(obj, pickle).send(port, rank, number, synchronous=synchronous)
        return Request._of(RequestState(operations, None, port.limit_s))

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        self.isend(obj, dest, tag).wait()

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and wait until it is received."""
        self.issend(obj, dest, tag).wait()

    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting."""
        self.isend(obj, dest, tag).Free()

    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Receive an object; `buf` is ignored."""
        return self.mprobe(source, tag).recv(status)

    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Raise `RuntimeError`: the sizes of the parts are not known yet, so use `mprobe` and `Message.irecv`."""
        raise RuntimeError("an object of several messages needs `mprobe` before `irecv`")

    @translating
    def _matched(self, source: int, tag: int, status: Any, *, once: bool, for_objects: bool) -> Any:
        message = super()._matched(source, tag, status, once=once, for_objects=for_objects)
        if message is None or not for_objects:
            return message
        if message == MESSAGE_NO_PROC:
            return Message._of(message._state)
        state = message._state
        return Message._of(_ArrivingState(self._live.object_port, state.envelope, state.data, state._acknowledge))

    # Collectives: the headers go as objects, and then the parts.

    def _exchanged(self, sends: Mapping[int, Parcel], headers: Mapping[int, Any]) -> list[Any]:
        """Send parts of parcels to ranks, receive those of parcels with these headers, and return their objects."""
        state = self._live
        across = state.bridge if self.Is_inter() else state
        places = state.places if self.Is_inter() else range(state.size)
        arriving = {rank: Parcel.arriving(header) for rank, header in headers.items()}
        x: list[Any] = [None] * across.size
        out: list[Any] = [None] * across.size
        for rank, parcel in sends.items():
            x[places[rank]] = parcel.joined()
        for rank, parcel in arriving.items():
            out[places[rank]] = parcel.memory if parcel.memory.size else None
        across.native.alltoallw(x, out)
        return [parcel.unpacked(pickle) for parcel in arriving.values()]

    @property
    def _others(self) -> range:
        """The ranks that get messages."""
        return range(self._live.peers)

    def _packed_by_root(self, obj: Any, root: int) -> Parcel | None:
        is_root = root == (ROOT if self.Is_inter() else self._live.rank)
        return Parcel.of(obj, pickle) if is_root else None

    @translating
    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Return the object of the root."""
        parcel = self._packed_by_root(obj, root)
        header = super().bcast(parcel and parcel.header, root)
        if self.Is_inter():
            sends = dict.fromkeys(self._others, parcel) if parcel else {}
            objects = self._exchanged(sends, {} if header is None else {root: header})
            return objects[0] if objects else None
        parcel = parcel or Parcel.arriving(header)
        for part in parcel.parts:
            self.Bcast(part, root)
        return parcel.unpacked(pickle)

    @translating
    def gather(self, sendobj: Any, root: int = 0) -> Any:
        """Return the objects of all ranks on the root, and None on other ranks."""
        parcel = Parcel.of(sendobj, pickle)
        headers = super().gather(parcel.header, root)
        sends = {} if root in {ROOT, PROC_NULL} else {root: parcel}
        objects = self._exchanged(sends, dict(enumerate(headers or ())))
        return None if headers is None else objects

    @translating
    def scatter(self, sendobj: Any, root: int = 0) -> Any:
        """Return this rank's object of a list of the root."""
        parcels = []
        if root == (ROOT if self.Is_inter() else self._live.rank):
            parcels = [Parcel.of(each, pickle) for each in _items(sendobj, self._live.peers)]
        header = super().scatter([parcel.header for parcel in parcels], root)
        objects = self._exchanged(dict(enumerate(parcels)), {} if header is None else {root: header})
        return objects[0] if objects else None

    @translating
    def allgather(self, sendobj: Any) -> list[Any]:
        """Return the objects of all ranks."""
        parcel = Parcel.of(sendobj, pickle)
        headers = super().allgather(parcel.header)
        return self._exchanged(dict.fromkeys(self._others, parcel), dict(enumerate(headers)))

    @translating
    def alltoall(self, sendobj: Any) -> list[Any]:
        """Send each rank an object, and return those of all ranks."""
        parcels = [Parcel.of(each, pickle) for each in _items(sendobj, self._live.peers)]
        headers = super().alltoall([parcel.header for parcel in parcels])
        return self._exchanged(dict(enumerate(parcels)), dict(enumerate(headers)))


class Intracomm(Comm, MPI.Intracomm):  # type: ignore[name-defined, misc]
    """A communicator of one group."""

    __slots__ = ()


class Intercomm(Comm, MPI.Intercomm):  # type: ignore[name-defined, misc]
    """A communicator between two groups."""

    __slots__ = ()
