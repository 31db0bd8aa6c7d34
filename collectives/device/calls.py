"""Collective calls on GPU arrays: ordered with the caller's streams, and issued one after the other.

Used by: `gateway`. Not imported before the first call on a GPU array.

Theory of operation
-------------------
The host never waits for work that the caller has issued before a call. The call and the caller's streams are ordered by
events, in these steps:

1. The call records an event on each stream that its arrays are used on. Its own streams wait for these events.
2. The call issues its work to its own streams, and records one more event behind all of it.
3. `Work.wait` makes the caller's current streams wait for that last event. `Work.done` asks whether it has happened.

Issuing needs other ranks, so a thread must wait for them: the caller's, or with ``wait=False`` a thread of the
communicator. Calls on GPU arrays are issued one after the other, over links of their own. The reason is that calls on
host arrays which the program makes later may already run on the links of the user's communicator.

On the user's communicator, a call on GPU arrays appears as a barrier with the signature of the call. So ranks that
disagree get the same errors as for host arrays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakMethod, finalize

from unisono.algorithms.catalogue.on_devices import STAGED
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE
from unisono.collectives.calls.planning import CallPlanner
from unisono.collectives.calls.prepared import CheckedCall
from unisono.collectives.calls.serial_queue import QueuedOperation, SerialQueue
from unisono.collectives.calls.work import Works
from unisono.collectives.device.across_hosts import AcrossHosts
from unisono.collectives.device.adapters import DeviceArrays
from unisono.collectives.device.by_nccl import ByNccl, check_for_nccl
from unisono.collectives.device.contracts import HostCalls, Route
from unisono.collectives.device.events import Events
from unisono.collectives.device.host_phases import Rails, refuses_hosts
from unisono.collectives.device.routes import ByIpc, Staged
from unisono.collectives.device.within_hosts import ByMappedMemory
from unisono.collectives.device.work import Arrival, CheckedDeviceCall, DevicePlan, DeviceWork, keep_late
from unisono.dtypes import DType
from unisono.errors import TransportUnavailableError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.options import Options
from unisono.transports.contracts.executor import Executor, Operation
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.executors.staging import await_event
from unisono.transports.nccl.collectives import NcclCollectives

# How long `close` waits for the device.
_FAREWELL_S = 2.0


class DeviceCalls:
    """The collective calls on GPU arrays of one rank of a communicator. All use the device of the first call.

    Args:
        executor, calls, works, options: those of the communicator.
        make_spare: a weak reference to a method that makes a communicator of the same ranks. It is alive during calls.
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
        self._allows_cuda_ipc = options.allows_cuda_ipc
        self._make_spare = make_spare
        self._queue = SerialQueue()
        self._device: Device | None = None
        self._events: Events | None = None
        self._links: Executor | None = None
        self._staged: Staged | None = None
        self._by_ipc: ByIpc | None = None
        self._local: Executor | None = None
        self._rail: HostCalls | None = None
        self._rail_links: Executor | None = None
        self._rails: Rails | None = None
        self._make_across: Callable[..., AcrossHosts] | None = None
        self._across: AcrossHosts | None = None
        self._across_by_nccl: AcrossHosts | None = None
        self._nccl_links: Executor | None = None
        self._by_nccl: ByNccl | None = None
        self._arriving: deque[Arrival] = deque()
        self._is_stopped = False
        self._plans = 0  # the number of persistent calls that have been used
        # If the program never closes the communicator, arrays that the device still uses must not be freed either.
        finalize(self, keep_late, self._arriving).atexit = False

    def prepared(self, prepare: Callable[[DeviceArrays], CheckedCall]) -> CheckedDeviceCall:
        """Return the call that ``prepare(arrays)`` makes on new `DeviceArrays`; raises the errors of `prepare`."""
        memory = DeviceArrays()
        return CheckedDeviceCall(prepare(memory), memory)

    def run(self, call: CheckedDeviceCall, limit_s: float) -> Any:
        """Make a call, let the streams of its arrays wait for its end, and return its result; raises as `start`."""
        device = call.memory.device
        with device.current():
            return self._started(call, device, limit_s, here=True, at_once=True).wait()

    def start(self, call: CheckedDeviceCall, limit_s: float, *, here: bool) -> DeviceWork[Any]:
        """Start a call and return its work. If `here`, the calling thread issues the call before this method returns.

        Raises:
            UsageError: an array is on another device than those of earlier calls, or a stream is being captured.
            NoAlgorithmError: the call names `nccl.native`, and NCCL cannot carry it out.
        """
        device = call.memory.device
        with device.current():
            return self._started(call, device, limit_s, here=here, at_once=False)

    def _started(
        self, call: CheckedDeviceCall, device: Device, limit_s: float, *, here: bool, at_once: bool
    ) -> DeviceWork[Any]:
        streams = call.memory.streams()
        named = self._of_nccl(call)
        if named is not None:
            check_for_nccl(call, named, self._calls.hosts)
        self._set_up(device, with_nccl=named == NCCL_NATIVE)
        announced = self._calls.announcing(*(array.spec for array in call.checked.arrays), plan=self._number_of(call))
        announcement = self._executor.start(announced, None, None)
        announcement.run_in_background(limit_s)
        events = self._events
        assert events is not None, "`_set_up` has run"
        arrival = Arrival(device, call, events, streams if at_once else None)
        ready = [arrival.recorded(stream) for stream in streams]
        self._keep(arrival)
        ticket = self._queue.take()
        job = partial(self._issue, call, named, ready, arrival, announcement, Deadline(limit_s))
        name = str(announced.signature)
        operation = QueuedOperation(self._executor, ticket.ended, name)
        if here:
            ticket.do(job)
        else:
            self._queue.do_later(ticket, job)
        check = partial(self._executor.check, name)
        work = DeviceWork(self._works, operation, limit_s, call.checked.finish, arrival, check, self._is_intact)
        return self._works.keep(work)

    def lasting(self, call: CheckedDeviceCall) -> CheckedDeviceCall:
        """Return a call that can be started again and again on the same arrays, as all ranks do."""
        return replace(call, plan=DevicePlan())

    def route(self, collective: str, nbytes: int, dtype: DType) -> str:
        """Describe, for `explain`, how GPU arrays travel in a call; an empty text before the first call."""
        if self._staged is None:
            return ""
        if self._across is not None and (reason := self._across.refuses_collective(collective)) is None:
            return self._across.explain()
        if self._across is not None:
            return f"staged through the host, as {reason}"
        if self._by_ipc is None:  # only calls that name NCCL, or none, have met yet
            return "" if (reason := self._no_links()) is None else f"staged through the host, as {reason}"
        refusal = self._by_ipc.refuses_collective(collective)
        if refusal is not None:
            return f"staged through the host, as {refusal}"
        explanation = self._by_ipc.explain(collective, nbytes, dtype)
        choice, candidates = explanation.choice, explanation.candidates
        times = [f"{each.algorithm} {each.measured_s * 1e6:.1f} us" for each in candidates if each.measured_s]
        ways = {STAGED: "staged through the host", NCCL_NATIVE: "NCCL"}
        way = ways.get(choice.algorithm, f"cuda_ipc by {choice.algorithm}")
        return f"{way}, chosen by tier {choice.tier!r}{(times and ', measured: ' + ', '.join(times)) or ''}"

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes moved over CUDA IPC, by peer."""
        route = self._across or self._by_ipc
        return {} if route is None else route.traffic()

    def between_hosts(self) -> Mapping[int, Traffic]:
        """Return the bytes that ranks of rails have exchanged, by peer."""
        if self._rail is None or self._rail_links is None or self._rails is None:
            return {}
        total: dict[int, Traffic] = {}
        for traffic in (self._rail.stats(), self._rail_links.traffic()):
            for peer, more in traffic.items():
                rank = self._rails.rail[peer]
                total[rank] = total[rank] + more if rank in total else more
        return total

    def staged_nbytes(self) -> tuple[int, int]:
        """Return how many bytes have been copied to the host, and from the host."""
        to_host, to_device = (0, 0) if self._staged is None else self._staged.copied_nbytes()
        for route in (self._across, self._across_by_nccl):
            if route is not None:
                to_host, to_device = to_host + route.to_host_nbytes, to_device + route.to_device_nbytes
        return to_host, to_device

    def stop(self) -> None:
        """Note that the communicator is being closed: a call that fails from now on no longer fails the other ranks."""
        self._is_stopped = True

    def close(self) -> None:
        """End running calls and release all memory and streams; call this after the executor has been closed."""
        self._queue.close()
        deadline = Deadline(_FAREWELL_S)
        with suppress(UnisonoError):  # late work, or a device that has failed
            while self._arriving:
                await_event(self._arriving[0].device, self._arriving[0].event, deadline)
                self._arriving.popleft()
        keep_late(self._arriving)
        self._works.drop_ended()
        for route in self._routes():
            route.close(deadline)
        for links in (self._links, self._local, self._rail_links, self._nccl_links):
            if links is not None:
                links.close()
        self._by_ipc = self._across = self._across_by_nccl = self._by_nccl = self._staged = None
        self._make_across = None
        if self._events is not None:
            self._events.close()
        self._links = self._local = self._rail_links = self._nccl_links = None

    def _routes(self) -> list[Route]:
        routes = (self._by_ipc, self._across, self._across_by_nccl, self._by_nccl, self._staged)
        return [route for route in routes if route is not None]

    def _set_up(self, device: Device, *, with_nccl: bool) -> None:
        """Create the links and the staged route at the first call that needs them; sends nothing."""
        if self._device is None:
            self._device, self._events = device, Events(device)
            make_spare = self._make_spare()
            assert make_spare is not None, "the communicator is making a call"
            spare = make_spare()
            self._staged = Staged(self._executor, spare, device)
            self._links = self._executor.subgroup(range(self._executor.size))
            if refuses_hosts(self._calls.hosts) is None:
                rails = Rails(self._calls.hosts, self._executor.rank)
                self._local = self._executor.subgroup(rails.local)
                self._rails = rails
                if rails.rail:
                    self._rail = spare.subgroup(rails.rail)
                    self._rail_links = self._executor.subgroup(rails.rail)
                groups = self._links, self._local, spare, self._rail, self._rail_links
                self._make_across = partial(AcrossHosts, *groups, rails, device)
        if self._device is not device:
            raise UsageError(
                f"the arrays are on cuda:{device.ordinal}, but this communicator uses cuda:{self._device.ordinal}: "
                "pass arrays on that device, or make another communicator by dup()"
            )
        if (with_nccl or self._calls.tuner_state.table is not None) and self._nccl_links is None:
            self._nccl_links = self._executor.subgroup(range(self._executor.size))

    def _number_of(self, call: CheckedDeviceCall) -> int:
        """Return the number of a persistent call, which has a new one at its first use; 0 for any other call."""
        if call.plan is None:
            return 0
        if not call.plan.number:
            self._plans += 1
            call.plan.number = self._plans
        return call.plan.number

    def _keep(self, arrival: Arrival) -> None:
        """Keep the arrays of a call alive until the device has done the call."""
        while self._arriving and self._arriving[0].is_over():
            self._arriving.popleft()
        self._arriving.append(arrival)

    def _issue(
        self,
        call: CheckedDeviceCall,
        named: str | None,
        ready: Sequence[Event],
        arrival: Arrival,
        announcement: Operation,
        deadline: Deadline,
    ) -> None:
        """Issue all work of a call; blocks while other ranks are needed."""
        try:
            route = self._route_of(call, named, announcement, deadline)
            refusal = route.refuses(call)
            if refusal is None:
                with arrival.device.current():
                    route.issue(call, ready, arrival.event, deadline)
                announcement.wait(deadline.remaining_s())
        except UnisonoError as error:
            for route in self._routes():
                route.fail(error)
            if not self._is_stopped:
                self._executor.fail(error)
            raise
        except BaseException as error:
            self._executor.abort(f"a call on arrays of a device was interrupted by {error!r}")
            raise
        finally:
            arrival.is_issued = True
        if refusal is not None:  # on all ranks, so the communicator can be used
            raise TransportUnavailableError(f"{named} cannot be used here: {refusal}")

    def _is_intact(self) -> bool:
        return all(route.is_intact() for route in self._routes())

    def _route_of(
        self, call: CheckedDeviceCall, named: str | None, announcement: Operation, deadline: Deadline
    ) -> Route:
        """Return the route of a call, the same on all ranks. At its first call, they find out if a route works."""
        assert self._staged is not None, "`_set_up` has run"
        assert self._device is not None, "`_set_up` has run"
        if named == NCCL_NATIVE:
            return self._nccl(announcement, deadline)
        if named is not None:
            assert self._make_across is not None, "`check_for_nccl` has run"
            announcement.wait(deadline.remaining_s())  # NCCL hangs if a rank makes another call
            self._across_by_nccl = self._across_by_nccl or self._make_across(NcclCollectives, named, deadline)
            return self._across_by_nccl
        if self._no_links() is not None:
            return self._staged
        if self._make_across is not None:
            self._across = self._across or self._make_across(ByMappedMemory, None, deadline)
            return self._across if self._across.refuses(call) is None else self._staged
        assert self._links is not None, "`_set_up` has run"
        if self._by_ipc is None:
            self._by_ipc = ByIpc(
                self._links, self._calls, self._device, deadline.remaining_s(), self._options.gpu_blocks
            )
        by_ipc = self._by_ipc
        if by_ipc.refuses(call) is not None:
            return self._staged
        choice = by_ipc.choice(call)
        if choice == NCCL_NATIVE:
            by_nccl = self._nccl(announcement, deadline)
            if (reason := by_nccl.refuses(call)) is None:
                return by_nccl
            by_ipc.refuse(NCCL_NATIVE, reason)
            choice = by_ipc.choice(call)
        return self._staged if choice else by_ipc

    def _of_nccl(self, call: CheckedDeviceCall) -> str | None:
        return self._calls.of_nccl(call.checked.arrays[0].spec)

    def _nccl(self, announcement: Operation, deadline: Deadline) -> ByNccl:
        """Return the route by NCCL, where the ranks meet at its first call."""
        assert self._device is not None, "`_set_up` has run"
        assert self._nccl_links is not None, "`_set_up` has run"
        announcement.wait(deadline.remaining_s())  # NCCL hangs if a rank makes another call
        self._by_nccl = self._by_nccl or ByNccl(self._nccl_links, self._calls, self._device, deadline)
        return self._by_nccl

    def _no_links(self) -> str | None:
        """Return the reason why no ranks of this communicator use each other's device memory; None if they try."""
        if not self._allows_cuda_ipc:
            return "cuda_ipc is not among the transports"
        return refuses_hosts(self._calls.hosts) if len(self._calls.hosts) > 1 else None
