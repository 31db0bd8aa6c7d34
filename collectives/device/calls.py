"""Calls on arrays of a GPU: ordered with the caller's streams, and issued one after the other.

Theory of operation. The host never waits for the work that the caller has issued before. A call records an event behind
that work, on each stream that its arrays are used on, and has streams of its own wait for these; when all of its work
has been issued it records another one, for which the caller's streams then wait. `Work.wait` lets the streams wait that
are current where it is called; `Work.done` asks whether the event has happened.

What is issued depends on other ranks, so somebody has to look out for them: the caller, or with ``wait=False`` a thread
of the communicator. Calls are carried out one after the other, on links of their own: calls on arrays of the host that
were made later may have begun on those of the user. There, a call on a device is a barrier with the signature of the
call, by which a disagreement is found as ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

from unisono.collectives.calls.planning import CallPlanner
from unisono.collectives.calls.prepared import CheckedCall
from unisono.collectives.calls.serial_queue import SerialQueue, TurnOperation
from unisono.collectives.calls.work import Works
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.routes import ByIpc, HostCalls, Route, Staged
from unisono.collectives.device.work import Arrival, DeviceCall, DeviceWork, keep_late
from unisono.deadlines import Deadline
from unisono.errors import CollectiveTimeoutError, UnisonoError, UsageError
from unisono.options import Options
from unisono.transports.contracts.executor import Executor, Operation
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Event, Stream
from unisono.transports.cuda.staging import await_event

# How long closing waits for the device.
_FAREWELL_S = 2.0


class DeviceCalls:
    """The calls on arrays of a GPU of one rank of a communicator; on one device, that of the first call.

    Args:
        executor, calls, works, options: those of the communicator.
        make_spare: ``make_spare()`` makes a communicator of the same ranks, while there is that of the calls.
    """

    def __init__(
        self,
        executor: Executor,
        calls: CallPlanner,
        works: Works,
        options: Options,
        make_spare: WeakMethod[Callable[[], HostCalls]],
    ) -> None:
        self._executor = executor
        self._calls = calls
        self._works = works
        self._options = options
        self._make_spare = make_spare
        self._turns = SerialQueue()
        self._device: Device | None = None
        self._links: Executor | None = None
        self._staged: Staged | None = None
        self._by_ipc: ByIpc | None = None
        self._arriving: deque[Arrival] = deque()
        self._is_stopped = False
        # Also where nobody closes the communicator, arrays are not freed while they are in use.
        finalize(self, keep_late, self._arriving).atexit = False

    def prepared(self, prepare: Callable[[DeviceArrays], CheckedCall]) -> DeviceCall:
        """Return the call that `prepare` makes on arrays of its own; raises what that does."""
        memory = DeviceArrays()
        return DeviceCall(prepare(memory), memory)

    def start(self, call: DeviceCall, limit_s: float, *, here: bool) -> DeviceWork[Any]:
        """Start a call, and return its work; or do it `here`, and return its work when all has been issued.

        Raises:
            UsageError: an array is on another device than those of earlier calls, or a stream is being captured.
        """
        memory, device = call.memory, call.memory.device
        streams = memory.streams()
        self._get_ready(device)
        announced = self._calls.announcing(*(part.kind for part in call.checked.parts))
        announcement = self._executor.start(announced, None, None)
        announcement.go_on(limit_s)
        ready = [_recorded(device, stream) for stream in streams]
        arrival = Arrival(device, call, device.new_event())
        self._keep(arrival)
        turn = self._turns.take()
        job = partial(self._carry_out, call, ready, arrival, announcement, Deadline(limit_s))
        name = str(announced.signature)
        operation = TurnOperation(self._executor, turn.ended, name)
        if here:
            turn.do(job)
        else:
            self._turns.do_later(turn, job)
        check = partial(self._executor.check, name)
        return self._works.keep(DeviceWork(self._works, operation, limit_s, call.checked.finish, arrival, check))

    def route(self, collective: str) -> str:
        """Return for people how arrays of a device get to other ranks; nothing before the first call has found out."""
        if self._staged is None:
            return ""
        if self._by_ipc is None:
            return "staged through the host, as cuda_ipc is not among the transports"
        refusal = self._by_ipc.refuses_collective(collective)
        return "cuda_ipc" if refusal is None else f"staged through the host, as {refusal}"

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes that have gone by CUDA IPC, by peer."""
        return {} if self._by_ipc is None else self._by_ipc.traffic()

    def staged_nbytes(self) -> tuple[int, int]:
        """Return how many bytes have been copied to the host, and from there."""
        return (0, 0) if self._staged is None else self._staged.copied_nbytes()

    def stop(self) -> None:
        """Let calls that go on fail by themselves from now on, and not on other ranks: the communicator is closed."""
        self._is_stopped = True

    def close(self) -> None:
        """End what goes on, after the executor has been closed, and give everything back that was taken."""
        self._turns.close()
        deadline = Deadline(_FAREWELL_S)
        with suppress(CollectiveTimeoutError):
            while self._arriving:
                await_event(self._arriving[0].device, self._arriving[0].event, deadline)
                self._arriving.popleft()
        keep_late(self._arriving)
        self._works.drop_ended()
        for route in (self._by_ipc, self._staged):
            if route is not None:
                route.close(deadline)
        if self._links is not None:
            self._links.close()
        self._by_ipc = self._staged = self._links = None

    def _get_ready(self, device: Device) -> None:
        """Let there be what calls need; nothing is sent."""
        if self._device is None:
            self._device = device
            make_spare = self._make_spare()
            assert make_spare is not None, "the communicator is calling"
            self._staged = Staged(self._executor, make_spare(), device)
            if self._options.allows_cuda_ipc:
                self._links = self._executor.subgroup(range(self._executor.size))
        if self._device is not device:
            raise UsageError(
                f"the arrays of a communicator are on one device of each rank: here on cuda:{self._device.ordinal} so "
                f"far, and now on cuda:{device.ordinal}; make another communicator by dup()"
            )

    def _keep(self, arrival: Arrival) -> None:
        """Keep the arrays of a call alive until the device is done with them."""
        while self._arriving and self._arriving[0].is_over():
            self._arriving.popleft()
        self._arriving.append(arrival)

    def _carry_out(
        self, call: DeviceCall, ready: Sequence[Event], arrival: Arrival, announcement: Operation, deadline: Deadline
    ) -> None:
        """Issue all of a call, which waits for other ranks."""
        try:
            self._route_of(call, deadline).issue(call, ready, arrival.event, deadline)
            announcement.wait(deadline.left_s())
        except UnisonoError as error:
            if not self._is_stopped:
                self._executor.fail(error)
            raise
        except BaseException as error:
            self._executor.abort(f"a call on arrays of a device was interrupted by {error!r}")
            raise
        finally:
            arrival.is_issued = True
            for event in ready:
                arrival.device.end_event(event)

    def _route_of(self, call: DeviceCall, deadline: Deadline) -> Route:
        """Return the way that a call takes, the same on all ranks, which find it out at their first call."""
        assert self._staged is not None, "it is made before the first call"
        assert self._device is not None, "it is known before the first call"
        if self._links is not None and self._by_ipc is None:
            self._by_ipc = ByIpc(self._links, self._calls, self._device, deadline.left_s())
        return self._by_ipc if self._by_ipc is not None and self._by_ipc.refuses(call) is None else self._staged


def _recorded(device: Device, stream: Stream) -> Event:
    event = device.new_event()
    device.record(event, stream)
    return event
