"""The messages of buffers and objects: `Send`, `Recv`, `send`, `recv`, their other forms, and probes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.compat.mpi4py.base.constants import ANY_SOURCE, ANY_TAG, MOST_TAG, PROC_NULL
from unisono.compat.mpi4py.base.errors import fail, translating
from unisono.compat.mpi4py.base.handles import Handle, State, constant
from unisono.compat.mpi4py.calls.messages import Port
from unisono.compat.mpi4py.calls.request import Buffering, PersistentState, Prequest, Request, RequestState, leave_alone
from unisono.compat.mpi4py.memory.access import memory_of
from unisono.compat.mpi4py.memory.buffers import Block, plain, simple
from unisono.compat.mpi4py.values.pickles import pickle
from unisono.compat.mpi4py.values.status import Status

# The buffer of `irecv` without one. Its pages are mapped only when a message fills them.
_IRECV_NBYTES = 1 << 20


def _to(state: Any, dest: int, tag: int) -> int | None:
    """Return the checked rank to send to; None for `PROC_NULL`."""
    if not 0 <= tag <= MOST_TAG:
        raise fail("ERR_TAG", f"tag {tag} is not from 0 to {MOST_TAG}")
    if dest == PROC_NULL:
        return None
    if not 0 <= dest < state.peers:
        raise fail("ERR_RANK", f"rank {dest} is not in a group of {state.peers}")
    return int(dest)


def _from(state: Any, source: int, tag: int) -> tuple[Any, Any]:
    """Return the checked source and tag, each None for any; the source is `PROC_NULL` for nobody."""
    if tag != ANY_TAG and not 0 <= tag <= MOST_TAG:
        raise fail("ERR_TAG", f"tag {tag} is not from 0 to {MOST_TAG}")
    if source not in {ANY_SOURCE, PROC_NULL} and not 0 <= source < state.peers:
        raise fail("ERR_RANK", f"rank {source} is not in a group of {state.peers}")
    return None if source == ANY_SOURCE else int(source), None if tag == ANY_TAG else tag


def _nobody(status: Any) -> None:
    if status is not None:
        status._set(PROC_NULL, ANY_TAG, 0)


def _describe(status: Any, message: Any) -> None:
    if status is not None:
        status._set(message.source, message.tag, message.nbytes)


def _bytes_of(data: Any) -> Any:
    return np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)


def _object_of(data: Any) -> Any:
    """Return the object of a message; None if the message is empty, as in mpi4py."""
    return pickle.loads(data) if len(data) else None


class Messages(Buffering):
    """The methods of `Comm` that send and receive."""

    __slots__ = ()
    _state: Any

    def _port(self, *, for_objects: bool = False) -> Port:
        port: Port = self._live.messages(for_objects=for_objects)
        return port

    # Buffers.

    def _start_send(
        self, buf: Any, dest: int, tag: int, *, copies: bool = False, synchronous: bool = False
    ) -> RequestState:
        rank = _to(self._live, dest, tag)
        if rank is None:
            return RequestState()
        array, port = simple(buf).array(), self._port()
        array = array.copy() if copies else array
        operation = port.send(array, rank, tag, in_background=True, synchronous=synchronous)
        return RequestState([operation], None, port.limit_s)

    def _start_receive(self, buf: Any, source: int, tag: int) -> RequestState:
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            return RequestState((), _nobody)
        block = simple(buf, writable=True)
        array, port = block.target(), self._port()
        operation = port.receive(array, rank, number, in_background=True)
        return RequestState(
            [operation], lambda status: _stored(block, array, operation, status), port.limit_s, can_be_cancelled=True
        )

    def _send(self, buf: Any, dest: int, tag: int, *, synchronous: bool = False) -> None:
        rank = _to(self._live, dest, tag)
        if rank is None:
            return
        port, array = self._port(), None if synchronous else plain(buf)
        if array is None or not port.send_quickly(array, rank, tag):
            port.send(simple(buf).array(), rank, tag, synchronous=synchronous).wait(port.limit_s)

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
        leave_alone(self._start_send(buf, dest, tag, copies=True))

    @translating
    def Recv(self, buf: Any, source: int = ANY_SOURCE, tag: int = ANY_TAG, status: Any = None) -> None:
        """Receive a message of at most the length of a buffer."""
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            _nobody(status)
            return
        port, array = self._port(), plain(buf)
        message = None if array is None else port.receive_quickly(array, rank, number)
        if message is not None:
            if status is not None:
                status._set(*message)
            return
        block = simple(buf, writable=True)
        array = block.target()
        operation = port.receive(array, rank, number)
        operation.wait(port.limit_s)
        _stored(block, array, operation, status)

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

    def Psend_init(self, *_: Any, **__: Any) -> Any:
        """Raise `NotImplementedError`: there are no partitioned messages."""
        raise NotImplementedError("Unisono has no partitioned messages: send each part as a message")

    Precv_init = Psend_init

    def _start_sendrecv(
        self, sendbuf: Any, dest: int, sendtag: int, recvbuf: Any, source: int, recvtag: int
    ) -> RequestState:
        receiving = self._start_receive(recvbuf, source, recvtag)
        sending = self._start_send(sendbuf, dest, sendtag)
        return _both(sending, receiving)

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
        _to(self._live, dest, sendtag)
        if dest != PROC_NULL:
            simple(sendbuf)  # errors of this buffer must be raised before a receive is posted
        both = self._start_sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag)
        both.complete()
        both.status._copy(status)

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
        return Request._of(self._start_sendrecv(sendbuf, dest, sendtag, recvbuf, source, recvtag))

    @translating
    def Isendrecv_replace(
        self, buf: Any, dest: int, sendtag: int = 0, source: int = ANY_SOURCE, recvtag: int = ANY_TAG
    ) -> Any:
        """Start to send a buffer, and receive into it."""
        sending = self._start_send(buf, dest, sendtag, copies=True)
        return Request._of(_both(sending, self._start_receive(buf, source, recvtag)))

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
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            _nobody(status)
            return True
        message = self._port(for_objects=for_objects).probe(rank, number, once=once)
        if message is None:
            return False
        _describe(status, message)
        return True

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
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            _nobody(status)
            return Message(MESSAGE_NO_PROC)
        found = self._port(for_objects=for_objects).take(rank, number, once=once)
        if found is None:
            return None
        _describe(status, found[0])
        return Message._of(_MessageState(*found))

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
        rank = _to(self._live, dest, tag)
        if rank is None:
            return RequestState()
        port = self._port(for_objects=True)
        data = _bytes_of(pickle.dumps(obj))
        operation = port.send(data, rank, tag, in_background=True, synchronous=synchronous)
        return RequestState([operation], None, port.limit_s)

    @translating
    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object."""
        rank = _to(self._live, dest, tag)
        if rank is not None:
            port = self._port(for_objects=True)
            port.send(_bytes_of(pickle.dumps(obj)), rank, tag).wait(port.limit_s)

    @translating
    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, and return when a receive has got it."""
        self._start_object(obj, dest, tag, synchronous=True).complete()

    @translating
    def bsend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object, without waiting."""
        leave_alone(self._start_object(obj, dest, tag))

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
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            _nobody(status)
            return None
        found = self._port(for_objects=True).take(rank, number)
        assert found is not None, "a receive that waits ends with a message"
        message, data, acknowledge = found
        acknowledge()
        _describe(status, message)
        return _object_of(data)

    @translating
    def irecv(self, buf: Any = None, source: int = ANY_SOURCE, tag: int = ANY_TAG) -> Any:
        """Start to receive an object of at most as many bytes as the buffer, by default 1 MiB."""
        rank, number = _from(self._live, source, tag)
        if rank == PROC_NULL:
            return Request._of(RequestState((), _nobody))
        if buf is None or isinstance(buf, int):
            array = np.empty(max(_IRECV_NBYTES, buf or 0), np.uint8)
        else:
            array = memory_of(buf, writable=True)
        port = self._port(for_objects=True)
        operation = port.receive(array, rank, number, in_background=True)

        def finish(status: Status) -> Any:
            _describe(status, operation.message())
            return _object_of(array[: status.nbytes])

        return Request._of(RequestState([operation], finish, port.limit_s, can_be_cancelled=True))

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


def _both(sending: RequestState, receiving: RequestState) -> RequestState:
    def finish(status: Status) -> None:
        sending.complete()
        receiving.complete()
        receiving.status._copy(status)

    return RequestState([*receiving.operations, *sending.operations], finish, max(sending._limit_s, receiving._limit_s))


def _stored(block: Block, array: Any, operation: Any, status: Any) -> None:
    message = operation.message()
    nbytes = message.nbytes
    block.store(array, nbytes)
    if status is not None:
        status._set(message.source, message.tag, nbytes)


class _MessageState(State):
    """A message that a probe has taken out."""

    def __init__(self, message: Any = None, data: Any = None, acknowledge: Any = None, constant: str = "") -> None:
        super().__init__(constant)
        self.message, self.data, self._acknowledge = message, data, acknowledge

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
        if state.message is None:
            _nobody(status)
            return
        block = simple(buf, writable=True)
        if state.data.size > block.nbytes:
            raise fail("ERR_TRUNCATE", f"the message has {state.data.size} bytes, and the buffer {block.nbytes}")
        block.store(state.data)
        _describe(status, state.message)

    def Irecv(self, buf: Any) -> Any:
        """Start to receive the message into a buffer."""
        message = Message(self)
        self._receive()
        return Request._of(RequestState((), lambda status: message.Recv(buf, status)))

    def recv(self, status: Any = None) -> Any:
        """Receive the object of the message."""
        state = self._receive()
        if state.message is None:
            _nobody(status)
            return None
        _describe(status, state.message)
        return _object_of(state.data)

    def irecv(self) -> Any:
        """Start to receive the object of the message."""
        message = Message(self)
        self._receive()
        return Request._of(RequestState((), message.recv))


MESSAGE_NULL = constant("MESSAGE_NULL", Message, None)
MESSAGE_NO_PROC = constant("MESSAGE_NO_PROC", Message, _MessageState(constant="MESSAGE_NO_PROC"))
