"""`Request`, `Prequest` and `Grequest`: calls that have been started, and functions that wait for several."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import unisono
from unisono.compat.mpi4py.base.constants import UNDEFINED
from unisono.compat.mpi4py.base.errors import called_back, fail, translating
from unisono.compat.mpi4py.base.handles import Handle, State, constant
from unisono.compat.mpi4py.memory.access import BUFFER_AUTOMATIC, memory_of
from unisono.compat.mpi4py.values.status import Status, empty_status

# A wait for one of several requests sleeps this long between two checks.
_POLL_S = 0.0002


class RequestState(State):
    """A started call.

    Attributes:
        operations: what it consists of; each has `ended` and `wait`.
        status: the status, once it is done.
        result: the object that `wait` returns.
        is_persistent: whether the handle outlives the call.
    """

    is_persistent = is_done = False
    result: Any = None

    def __init__(
        self,
        operations: Sequence[Any] = (),
        finish: Callable[[Status], Any] | None = None,
        limit_s: float | None = 0.0,
        *,
        can_be_cancelled: bool = False,
    ) -> None:
        self.operations, self._finish, self._limit_s = operations, finish, limit_s
        self._can_be_cancelled = can_be_cancelled

    def __del__(self) -> None:
        if self.operations and not self.is_done:
            leave_alone(self)

    @cached_property
    def status(self) -> Status:
        return empty_status()

    @property
    def is_active(self) -> bool:
        """Whether there is something to wait for."""
        return True

    def done(self) -> bool:
        """Make progress; return whether the call is done."""
        if not self.is_done and all(operation.ended() for operation in self.operations):
            self.complete()
        return self.is_done

    def with_other(self, other: RequestState) -> RequestState:
        """Return the state of this receive together with a send; the status is that of the receive."""
        if not self.operations:  # a receive from nobody has no time limit of its own
            self._limit_s = other._limit_s
        self.operations = (*self.operations, *other.operations)
        self._can_be_cancelled, other.operations = False, ()
        return self

    def has_ended(self) -> bool:
        """Make progress; return whether the call is done, or has failed."""
        with suppress(Exception):
            return self.done()
        return True

    def complete(self) -> None:
        """Wait until the call is done."""
        if self.is_done:
            return
        for operation in self.operations:
            operation.wait(self._limit_s)
        self.operations, finish, self._finish = (), self._finish, None
        self.is_done = True
        if finish is not None:
            self.result = finish(self.status)

    def cancel(self) -> None:
        """End the call without a message, if none has been matched."""
        if not self._can_be_cancelled or self.done():
            return
        (receive,) = self.operations
        receive.cancel()
        receive.wait(self._limit_s)
        if receive.message() is None:
            self.operations, self.is_done = (), True
            self.status.cancelled = True


class PersistentState(State):
    """A call that is started again and again."""

    is_persistent = True

    def __init__(self, start: Callable[[], RequestState]) -> None:
        super().__init__()
        self._start = start
        self.active: RequestState | None = None

    @property
    def is_active(self) -> bool:
        """Whether it has been started, and not waited for."""
        return self.active is not None

    def start(self) -> None:
        """Start the call."""
        if self.active is not None:
            raise fail("ERR_REQUEST", "the request has been started already: wait for it first")
        self.active = self._start()

    def done(self) -> bool:
        """Make progress; return whether the call is done."""
        return self.active is None or self.active.done()

    def complete(self) -> None:
        """Wait until the call is done."""
        if self.active is not None:
            self.active.complete()

    def cancel(self) -> None:
        """End the call without a message, if none has been matched."""
        if self.active is not None:
            self.active.cancel()

    def are_ready(self, parts: Iterable[int]) -> None:
        """Let parts of the message be sent, if it has parts."""
        raise fail("ERR_REQUEST", "this request has no partitions to send: make it by Psend_init")

    def arrived(self, part: int) -> bool:
        """Return whether a part of the message is there, if it has parts."""
        raise fail("ERR_REQUEST", "this request has no partitions to receive: make it by Precv_init")

    @property
    def status(self) -> Status:
        """The status of the call."""
        return self.active.status if self.active is not None else empty_status()

    @property
    def result(self) -> Any:
        """The object that the call has received."""
        return None if self.active is None else self.active.result


class _GeneralState(RequestState):
    """A request that the program completes."""

    def __init__(self, query: Any, free: Any, cancel: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self._query, self._free, self._on_cancel = query, free, cancel
        self._args, self._kwargs = args or (), kwargs or {}
        self._completed = threading.Event()

    @property
    def has_completed(self) -> bool:
        """Whether the program has completed it."""
        return self._completed.is_set()

    def finish_by_program(self, obj: Any) -> None:
        """Complete it with an object."""
        self.result = obj
        self._completed.set()

    def done(self) -> bool:
        if self.has_completed and not self.is_done:
            self.complete()
        return self.is_done

    def complete(self) -> None:
        self._completed.wait()
        if not self.is_done:
            self.is_done = True
            self._call(self._query, self.status)

    def release(self) -> None:
        self._call(self._free)

    def cancel(self) -> None:
        self._call(self._on_cancel, self.has_completed)

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call a function of the program, if there is one."""
        if function is not None:
            called_back(function, *arguments, *self._args, **self._kwargs)


class Request(Handle):
    """A started call; null once it has been waited for."""

    __slots__ = ()
    _null, _error = "REQUEST_NULL", "ERR_REQUEST"

    def _is_active(self) -> bool:
        return self._state is not None and self._state.is_active

    def _take(self, status: Any) -> Any:
        """Return the result of a call that is done, and make the handle null or inactive."""
        state = self._state
        if state is None:
            empty_status()._copy(status)
            return None
        if status is not None:
            state.status._copy(status)
        result = state.result
        if state.is_persistent:
            state.active = None
        else:
            self._state = None
            if isinstance(state, _GeneralState):
                state.release()
        return result

    def _wait(self, status: Any = None) -> Any:
        if self._state is not None:
            self._state.complete()
        return self._take(status)

    @translating
    def wait(self, status: Any = None) -> Any:
        """Wait until the call is done, and return the object that it has received."""
        return self._wait(status)

    @translating
    def test(self, status: Any = None) -> tuple[bool, Any]:
        """Return whether the call is done, and the object that it has received."""
        if self._state is not None and not self._state.done():
            return False, None
        return True, self._take(status)

    @translating
    def Wait(self, status: Any = None) -> bool:
        """Wait until the call is done."""
        self._wait(status)
        return True

    def Test(self, status: Any = None) -> bool:
        """Return whether the call is done."""
        return bool(Request.test(self, status)[0])

    @translating
    def Get_status(self, status: Any = None) -> bool:
        """Return whether the call is done; the request stays as it is."""
        if self._state is None:
            empty_status()._copy(status)
            return True
        if not self._state.done():
            return False
        self._state.status._copy(status)
        return True

    get_status = Get_status

    def Cancel(self) -> None:
        """End a receive without a message, if none has been matched; a send is not cancelled."""
        self._live.cancel()

    cancel = Cancel

    def Free(self) -> None:
        """Make the handle null; the call continues."""
        self._free()

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, Any]:
        """Wait until a call is done; return its index, `UNDEFINED` if none is active, and the object."""
        _await(requests)
        index, _, obj = cls.testany(requests, status)
        return index, obj

    @classmethod
    @translating
    def testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool, Any]:
        """Return the index of a call that is done, whether there is one or none is active, and the object."""
        places, states = _active(requests)
        first = unisono.test_any(states)
        if first is not None:
            return places[first], True, requests[places[first]]._take(status)
        if not places:
            empty_status()._copy(status)
        return UNDEFINED, not places, None

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Any = None) -> int:
        """Wait until a call is done, and return its index; `UNDEFINED` if none is active."""
        return cls.waitany(requests, status)[0]

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """Return the index of a call that is done, and whether there is one or none is active."""
        return cls.testany(requests, status)[:2]

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[Any]:
        """Wait until all calls are done, and return their objects."""
        all_statuses = _extended(statuses, len(requests))
        return [request.wait(status) for request, status in zip(requests, all_statuses, strict=True)]

    @classmethod
    @translating
    def testall(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[bool, Any]:
        """Return whether all calls are done, and their objects."""
        all_statuses = _extended(statuses, len(requests))
        if not unisono.test_all(_active(requests)[1]):
            return False, None
        return True, [request._take(status) for request, status in zip(requests, all_statuses, strict=True)]

    @classmethod
    def Waitall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Wait until all calls are done."""
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return whether all calls are done."""
        return cls.testall(requests, statuses)[0]

    @classmethod
    @translating
    def testsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        """Return the indices of calls that are done, and their objects; None if no call is active."""
        places, states = _active(requests)
        if not places:
            return None, None
        done = [places[index] for index in unisono.test_some(states)]
        some = _extended(statuses, len(done))
        return done, [requests[index]._take(status) for index, status in zip(done, some, strict=True)]

    @classmethod
    def waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> tuple[Any, Any]:
        """Wait until a call is done; return the indices of those that are, and their objects."""
        _await(requests)
        return cls.testsome(requests, statuses)

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> Any:
        """Wait until a call is done, and return the indices of those that are; None if no call is active."""
        return cls.waitsome(requests, statuses)[0]

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> Any:
        """Return the indices of calls that are done; None if no call is active."""
        return cls.testsome(requests, statuses)[0]

    @classmethod
    @translating
    def Get_status_any(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """Return as `Testany` does; the requests stay as they are."""
        places, states = _active(requests)
        first = unisono.test_any(states)
        if first is not None:
            states[first].status._copy(status)
            return places[first], True
        if not places:
            empty_status()._copy(status)
        return UNDEFINED, not places

    @classmethod
    def Get_status_all(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Return as `Testall` does; the requests stay as they are."""
        all_statuses = _extended(statuses, len(requests))
        done = [request.Get_status(status) for request, status in zip(requests, all_statuses, strict=True)]
        return all(done)

    @classmethod
    @translating
    def Get_status_some(cls, requests: Sequence[Request], statuses: Any = None) -> Any:
        """Return as `Testsome` does; the requests stay as they are."""
        places, states = _active(requests)
        if not places:
            return None
        done = unisono.test_some(states)
        for index, status in zip(done, _extended(statuses, len(done)), strict=True):
            states[index].status._copy(status)
        return [places[index] for index in done]

    get_status_any, get_status_all, get_status_some = Get_status_any, Get_status_all, Get_status_some


# Started calls that the program does not wait for, the oldest first. They keep their arrays alive.
_unattended: dict[RequestState, None] = {}
# Buffered messages.
_buffered: dict[RequestState, None] = {}


def leave_alone(state: RequestState, among: dict[RequestState, None] = _unattended) -> None:
    """Keep a started call until it has ended; of the calls that are kept, drop the two oldest ones if they have."""
    for oldest in list(itertools.islice(among, 2)):
        among.pop(oldest, None)
        if not oldest.has_ended():
            among[oldest] = None
    among[state] = None


def buffer_until_sent(state: RequestState) -> None:
    """Keep a buffered message until it has been sent."""
    leave_alone(state, _buffered)


def _active(requests: Sequence[Request]) -> tuple[list[int], list[Any]]:
    """Return the indices and the states of the requests that are active."""
    places = [index for index, request in enumerate(requests) if request._is_active()]
    return places, [requests[index]._state for index in places]


def _await(requests: Sequence[Request]) -> None:
    """Wait until a call of the active requests is done, if there are any."""
    _, states = _active(requests)
    while states and not unisono.test_some(states):
        time.sleep(_POLL_S)


def _extended(statuses: Any, number: int) -> list[Any]:
    """Return as many statuses as requests; a list of the caller gets those that it lacks."""
    if statuses is None:
        return [None] * number
    if isinstance(statuses, list):
        statuses += [Status() for _ in range(number - len(statuses))]
    return [*statuses, *([None] * number)][:number]


class Prequest(Request):
    """A call that can be started again and again."""

    __slots__ = ()

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        return bool(state.is_persistent)

    @translating
    def Start(self) -> None:
        """Start the call."""
        self._live.start()

    @classmethod
    def Startall(cls, requests: Sequence[Prequest]) -> None:
        """Start several calls."""
        for request in requests:
            request.Start()

    @translating
    def Pready(self, partition: int) -> None:
        """Let a part of a partitioned message be sent."""
        self._live.are_ready((partition,))

    @translating
    def Pready_range(self, partition_low: int, partition_high: int) -> None:
        """Let parts be sent, of which `partition_high` is the last one."""
        self._live.are_ready(range(partition_low, partition_high + 1))

    @translating
    def Pready_list(self, partitions: Sequence[int]) -> None:
        """Let the parts in a list be sent."""
        self._live.are_ready(partitions)

    @translating
    def Parrived(self, partition: int) -> bool:
        """Return whether a part of a partitioned message has been received."""
        return self._live.arrived(partition)


class Grequest(Request):
    """A request that the program completes."""

    __slots__ = ()

    @classmethod
    def _accepts(cls, state: Any) -> bool:
        return isinstance(state, _GeneralState)

    @classmethod
    def Start(
        cls, query_fn: Any = None, free_fn: Any = None, cancel_fn: Any = None, args: Any = None, kwargs: Any = None
    ) -> Any:
        """Return a request that `Complete` completes."""
        return cls._of(_GeneralState(query_fn, free_fn, cancel_fn, args, kwargs))

    def complete(self, obj: Any = None) -> None:
        """Complete the request with an object."""
        if self._live.has_completed:
            raise fail("ERR_REQUEST", "the request has been completed already")
        self._state.finish_by_program(obj)

    def Complete(self) -> None:
        """Complete the request."""
        self.complete()


REQUEST_NULL = constant("REQUEST_NULL", Request, None)


class Buffering:
    """The methods of objects that keep a buffer for `Bsend`, which needs none."""

    __slots__ = ()
    _live: Any

    def Attach_buffer(self, buf: Any) -> None:
        """Keep a buffer for `Detach_buffer`; buffered messages take memory of their own."""
        if buf is not None and buf is not BUFFER_AUTOMATIC:
            memory_of(buf, writable=True)
        self._live.buffer = buf

    def Detach_buffer(self) -> Any:
        """Return the attached buffer."""
        buf, self._live.buffer = self._live.buffer, None
        return buf

    def Flush_buffer(self) -> None:
        """Wait until the buffered messages have been sent."""
        flush()

    def Iflush_buffer(self) -> Any:
        """Start to wait until the buffered messages have been sent."""
        return Request._of(RequestState())


def flush() -> None:
    """Wait until the buffered messages have been sent."""
    while _buffered:
        _buffered.popitem()[0].complete()
