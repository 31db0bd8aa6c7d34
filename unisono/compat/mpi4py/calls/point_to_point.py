"""The messages of buffers and objects: `Send`, `Recv`, `send`, `recv`, their other forms, and probes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.arguments import whole
from unisono.compat.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, MOST_TAG, PROC_NULL
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.handles import Handle, State, constant
from unisono.compat.mpi4py.calls.messages import OF_NOBODY, Envelope, Port
from unisono.compat.mpi4py.calls.partitioned import FIRST_TAG, ReceivedParts, SentParts, check_parts
from unisono.compat.mpi4py.calls.request import (
    Buffering,
    PersistentState,
    Prequest,
    Request,
    RequestState,
    buffer_until_sent,
)
from unisono.compat.mpi4py.memory.access import memory_of
from unisono.compat.mpi4py.memory.buffers import elements_of, no_store, plain, simple, target_in
from unisono.compat.mpi4py.values.pickles import pickle
from unisono.compat.mpi4py.values.status import Status

# The buffer of `irecv` without one. Its pages are mapped only when a message fills them.
_IRECV_NBYTES = 1 << 20


def _to(state: Any, dest: int, tag: int) -> tuple[int | None, int]:
    """Return the checked rank to send to, None for `PROC_NULL`, and the checked tag."""
    rank, number = whole(dest), whole(tag)
    if not 0 <= number <= MOST_TAG:
        raise fail("ERR_TAG", f"tag {number} is not from 0 to {MOST_TAG}")
    if rank == PROC_NULL:
        return None, number
    if not 0 <= rank < state.peers:
        raise fail("ERR_RANK", f"rank {rank} is not in a group of {state.peers}")
    return rank, number


def _from(state: Any, source: int, tag: int) -> tuple[Any, Any]:
    """Return the checked source and tag, each None for any; the source is `PROC_NULL` for nobody."""
    rank, number = whole(source), whole(tag)
    if number != ANY_TAG and not 0 <= number <= MOST_TAG:
        raise fail("ERR_TAG", f"tag {number} is not from 0 to {MOST_TAG}")
    if rank not in {ANY_SOURCE, PROC_NULL} and not 0 <= rank < state.peers:
        raise fail("ERR_RANK", f"rank {rank} is not in a group of {state.peers}")
    return None if rank == ANY_SOURCE else rank, None if number == ANY_TAG else number


def _bytes_of(data: Any) -> Any:
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def _object_of(data: Any) -> Any:
    """Return the object of a message; None if the message is empty, as in mpi4py."""
    return pickle.loads(data) if len(data) else None


class Messages(Buffering):
    """The methods of `Comm` that send and receive."""

    __slots__ = ()
    _state: Any

    # Buffers.

    def _start_send(
        self, buf: Any, dest: int, tag: int, *, copies: bool = False, synchronous: bool = False, first_tag: int = 0
    ) -> RequestState:
        rank, number = _to(self._live, dest, tag)
        if rank is None:
            return RequestState()
        array, port = elements_of(buf), self._live.port
        array = array.copy() if copies else array
        operation = port.start_send(array, rank, first_tag + number, synchronous=synchronous)
        return RequestState((operation,), None, port.limit_s)

    def _start_receive(self, buf: Any, source: int, tag: int, *, first_tag: int = 0) -> RequestState:
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            return RequestState((), OF_NOBODY.tell)
        (array, store), port = target_in(buf), self._live.port
        operation = port.start_receive(array, rank, number if number is None else first_tag + number)

        def finish(status: Status) -> None:
            envelope = port.envelope_of(operation)
            envelope._replace(tag=envelope.tag - first_tag).tell(status)
            store(envelope.nbytes)

        return RequestState((operation,), finish, port.limit_s, can_be_cancelled=True)

    def _send(self, buf: Any, dest: int, tag: int, *, synchronous: bool = False) -> None:
        rank, number = _to(self._live, dest, tag)
        if rank is not None:
            self._live.port.send(elements_of(buf), rank, number, synchronous=synchronous)

    @translating
    def Send(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer, and return when it may be changed."""
        self._send(buf, dest, tag)

    Rsend = Send

    @translating
    def Ssend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a buffer, and return when a receive has got it."""
        self._send(buf, dest, tag, synchronous=True)

    @translating
    def Bsend(self, buf: Any, dest: int, tag: int = 0) -> None:
        """Send a copy of a buffer, without waiting."""
        buffer_until_sent(self._start_send(buf, dest, tag, copies=True))

    @translating
    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        """Receive a message of at most the length of a buffer."""
        rank, number = _from(self._live, source, tag)
        array, store = (None, no_store) if rank == PROC_NULL else target_in(buf)
        envelope = self._live.port.receive(array, rank, number)
        store(envelope.nbytes)
        envelope.tell(status)

    @translating
    def Isend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Start to send a buffer."""
        return Request._of(self._start_send(buf, dest, tag))

    Irsend = Isend

    @translating
    def Issend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Start to send a buffer; the request ends when a receive has got it."""
        return Request._of(self._start_send(buf, dest, tag, synchronous=True))

    @translating
    def Ibsend(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Start to send a copy of a buffer."""
        return Request._of(self._start_send(buf, dest, tag, copies=True))

    @translating
    def Irecv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Start to receive a message of at most the length of a buffer."""
        return Request._of(self._start_receive(buf, source, tag))

    def _lasting(self, start: Callable[[], RequestState]) -> Any:
        return Prequest._of(PersistentState(translating(start)))

    def Send_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Return a persistent request that sends a buffer."""
        _to(self._live, dest, tag)
        return self._lasting(lambda: self._start_send(buf, dest, tag))

    Bsend_init = Rsend_init = Send_init

    def Ssend_init(self, buf: Any, dest: int, tag: int = 0) -> Any:
        """Return a persistent request that sends a buffer, and ends when a receive has got it."""
        _to(self._live, dest, tag)
        return self._lasting(lambda: self._start_send(buf, dest, tag, synchronous=True))

    def Recv_init(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Return a persistent request that receives into a buffer."""
        _from(self._live, source, tag)
        return self._lasting(lambda: self._start_receive(buf, source, tag))

    @translating
    def Psend_init(self, buf: Any, partitions: int, dest: int, tag: int = 0, info: Any = None) -> Any:
        """Return a persistent request that sends a buffer when all of its partitions are ready."""
        _to(self._live, dest, tag)
        check_parts(simple(buf).count, partitions, tag)
        start = translating(lambda: self._start_send(buf, dest, tag, first_tag=FIRST_TAG))
        return Prequest._of(SentParts(start, partitions, self._live.port.limit_s))

    @translating
    def Precv_init(self, buf: Any, partitions: int, source: int, tag: int = 0, info: Any = None) -> Any:
        """Return a persistent request that receives a buffer in partitions."""
        _to(self._live, source, tag)  # MPI allows no wildcards here
        check_parts(simple(buf, writable=True).count, partitions, tag)
        start = translating(lambda: self._start_receive(buf, source, tag, first_tag=FIRST_TAG))
        return Prequest._of(ReceivedParts(start, partitions))

    @translating
    def Sendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> None:
        """Send a buffer and receive into another one at the same time."""
        (rank, tag), origin = _to(self._live, dest, sendtag), _from(self._live, source, recvtag)
        x, out = plain(sendbuf), plain(recvbuf)
        if x is not None and out is not None and rank is not None and origin[0] != PROC_NULL:
            envelope = self._live.port.exchange(x, rank, tag, out, *origin)
            if envelope is not None:
                envelope.tell(status)
                return
        both = self._start_both(sendbuf, dest, sendtag, recvbuf, source, recvtag)
        both.complete()
        if status is not None:
            both.status._copy(status)

    def _start_both(
        self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int, *, copies: bool = False
    ) -> RequestState:
        """Start a receive, and then a send, so that an error of the send buffer must be raised before."""
        array = None if _to(self._live, dest, sendtag)[0] is None else elements_of(sendbuf)
        array = array.copy() if copies and array is not None else array
        receiving = self._start_receive(recvbuf, source, recvtag)
        return receiving.with_other(self._start_send(array, dest, sendtag))

    @translating
    def Isendrecv(
        self,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
    ) -> Any:
        """Start to send a buffer and receive into another one."""
        return Request._of(self._start_both(sendbuf, dest, sendtag, recvbuf, source, recvtag))

    @translating
    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Any:
        """Start to send a buffer, and receive into it."""
        return Request._of(self._start_both(buf, dest, sendtag, buf, source, recvtag, copies=True))

    @translating
    def Sendrecv_replace(
        self,
        buf: Any,
        dest: int,
        sendtag: int = 0,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> None:
        """Send a buffer, and receive into it."""
        self.Isendrecv_replace(buf, dest, sendtag, source, recvtag).Wait(status)

    # Probes.

    def _probe(self, source: int, tag: int, status: Any, *, once: bool, for_objects: bool = False) -> bool:
        envelope = self._messages(for_objects).probe(*_from(self._live, source, tag), once=once)
        if envelope is not None:
            envelope.tell(status)
        return envelope is not None

    def _messages(self, for_objects: bool) -> Port:
        port: Port = self._live.object_port if for_objects else self._live.port
        return port

    @translating
    def Probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        """Wait for a message, without receiving it."""
        return self._probe(source, tag, status, once=False)

    @translating
    def Iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        """Return whether there is a message."""
        return self._probe(source, tag, status, once=True)

    @translating
    def probe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        """Wait for a message of an object, without receiving it."""
        return self._probe(source, tag, status, once=False, for_objects=True)

    @translating
    def iprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> bool:
        """Return whether there is a message of an object."""
        return self._probe(source, tag, status, once=True, for_objects=True)

    @translating
    def _matched(self, source: int, tag: int, status: Any, *, once: bool, for_objects: bool) -> Any:
        taken = self._messages(for_objects).take(*_from(self._live, source, tag), once=once)
        if taken is None:
            return None
        taken[0].tell(status)
        return Message(MESSAGE_NO_PROC) if taken[0] is OF_NOBODY else Message._of(_MessageState(*taken))

    def Mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message, and take it out; no other receive gets it."""
        return self._matched(source, tag, status, once=False, for_objects=False)

    def Improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Take a message out, or return None if there is none."""
        return self._matched(source, tag, status, once=True, for_objects=False)

    def mprobe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message of an object, and take it out; no other receive gets it."""
        return self._matched(source, tag, status, once=False, for_objects=True)

    def improbe(self, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Take a message of an object out, or return None if there is none."""
        return self._matched(source, tag, status, once=True, for_objects=True)

    # Objects.

    def _start_object(self, obj: Any, dest: int, tag: int, *, synchronous: bool = False) -> RequestState:
        rank, number = _to(self._live, dest, tag)
        if rank is None:
            return RequestState()
        port = self._live.object_port
        operation = port.start_send(_bytes_of(pickle.dumps(obj)), rank, number, synchronous=synchronous)
        return RequestState((operation,), None, port.limit_s)

    @translating
    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        rank, number = _to(self._live, dest, tag)
        if rank is not None:
            self._live.object_port.send(_bytes_of(pickle.dumps(obj)), rank, number)

    @translating
    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and return when a receive has got it."""
        self._start_object(obj, dest, tag, synchronous=True).complete()

    @translating
    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting."""
        buffer_until_sent(self._start_object(obj, dest, tag))

    @translating
    def isend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        """Start to send an object."""
        return Request._of(self._start_object(obj, dest, tag))

    ibsend = isend

    @translating
    def issend(self, obj: Any, dest: int, tag: int = 0) -> Any:
        """Start to send an object; the request ends when a receive has got it."""
        return Request._of(self._start_object(obj, dest, tag, synchronous=True))

    @translating
    def recv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Receive an object."""
        if buf is not None:
            warnings.warn("the buffer of recv is ignored", UserWarning, stacklevel=3)
        envelope, data, acknowledge = self._live.object_port.take(*_from(self._live, source, tag))
        acknowledge()
        envelope.tell(status)
        return _object_of(data)

    @translating
    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Start to receive an object of at most as many bytes as the buffer, by default 1 MiB."""
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            return Request._of(RequestState((), OF_NOBODY.tell))
        if buf is None or isinstance(buf, int):
            array = np.empty(max(_IRECV_NBYTES, buf or 0), np.uint8)
        else:
            array = memory_of(buf, writable=True)
        port = self._live.object_port
        operation = port.start_receive(array, rank, number)

        def finish(status: Status) -> Any:
            port.envelope_of(operation).tell(status)
            return _object_of(array[: status.nbytes])

        return Request._of(RequestState((operation,), finish, port.limit_s, can_be_cancelled=True))

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = ANY_SOURCE,
        recvtag: int = ANY_TAG,
        status: Any = None,
    ) -> Any:
        """Send an object and receive another one at the same time."""
        sending = self.isend(sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        sending.wait()
        return received


class _MessageState(State):
    """A message that a probe has taken out."""

    def __init__(self, envelope: Envelope, data: Any, acknowledge: Any, constant: str = "") -> None:
        super().__init__(constant)
        self.envelope, self.data, self._acknowledge = envelope, data, acknowledge

    def receive(self) -> None:
        """End the send of the message, once."""
        acknowledge, self._acknowledge = self._acknowledge, None
        if acknowledge is not None:
            acknowledge()


class Message(Handle):
    """A message that a probe has taken out."""

    __slots__ = ()
    _null, _error = "MESSAGE_NULL", "ERR_REQUEST"

    @classmethod
    def Probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message, and take it out."""
        return comm.Mprobe(source, tag, status)

    @classmethod
    def Iprobe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Take a message out, or return None if there is none."""
        return comm.Improbe(source, tag, status)

    @classmethod
    def probe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Wait for a message of an object, and take it out."""
        return comm.mprobe(source, tag, status)

    @classmethod
    def iprobe(cls, comm: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> Any:
        """Take a message of an object out, or return None if there is none."""
        return comm.improbe(source, tag, status)

    def _receive(self) -> Any:
        """Return the state, and make the handle null."""
        state = self._live
        if not self._constant:
            self._state = None
        state.receive()
        return state

    @translating
    def Recv(self, buf: Any, status: Any = None) -> None:
        """Receive the message into a buffer."""
        state = self._receive()
        if state.data.size:
            block = simple(buf, writable=True)
            if state.data.size > block.nbytes:
                raise fail("ERR_TRUNCATE", f"the message has {state.data.size} bytes, and the buffer {block.nbytes}")
            block.store(state.data)
        state.envelope.tell(status)

    def Irecv(self, buf: Any) -> Any:
        """Start to receive the message into a buffer."""
        message = Message(self)
        self._receive()
        return Request._of(RequestState((), lambda status: message.Recv(buf, status)))

    def recv(self, status: Any = None) -> Any:
        """Receive the object of the message."""
        state = self._receive()
        state.envelope.tell(status)
        return _object_of(state.data)

    def irecv(self) -> Any:
        """Start to receive the object of the message."""
        message = Message(self)
        self._receive()
        return Request._of(RequestState((), message.recv))


MESSAGE_NULL = constant("MESSAGE_NULL", Message, None)
MESSAGE_NO_PROC = constant(
    "MESSAGE_NO_PROC", Message, _MessageState(OF_NOBODY, np.empty(0, np.uint8), None, "MESSAGE_NO_PROC")
)
