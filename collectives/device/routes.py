"""Two routes of a call between devices: over CUDA IPC, and staged through the host. Other modules have two more.

A route issues the work of a call to streams of its own. The work waits for events of the caller, and another event is
recorded behind it. One thread at a time issues the calls of a communicator, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from unisono.algorithms.catalogue.on_devices import ROUTES, STAGED
from unisono.algorithms.catalogue.vendors import NCCL_NATIVE
from unisono.collectives.calls.planning import CallPlanner, CallSpec, as_request
from unisono.collectives.calls.prepared import BoundArray, CheckedCall, PreparedCall
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.contracts import HostCalls
from unisono.collectives.device.nccl_refusals import refusal_by_nccl
from unisono.collectives.device.segments import PartialCall, Run, partial_calls
from unisono.collectives.device.work import CheckedDeviceCall
from unisono.dtypes import DType
from unisono.errors import UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Event
from unisono.transports.cuda.executors import staging
from unisono.transports.cuda.executors.replays import Replays
from unisono.transports.cuda.executors.staging import Piece
from unisono.transports.cuda.peers.collectives import DeviceCollectives
from unisono.transports.cuda.peers.shown_arrays import Shown
from unisono.transports.reductions.definition import numpy_dtype
from unisono.tuning.decide.choice import Explanation
from unisono.tuning.decide.device_routes import LINK, routes_of

# Bytes of the whole vector that are staged at once.
PART_NBYTES = 4 << 20
# The most calls of which something is known.
_MOST_KNOWN = 256


class _KnownRoutes(NamedTuple):
    """The facts about calls on an array that a route keeps.

    Attributes:
        refusal: why they cannot take the route; None if they can.
        choice: the algorithm that the tuner chooses, or the name of another route.
        route: the name of that route; "" for an algorithm.
    """

    refusal: str | None
    choice: str
    route: str


class ByIpc:
    """The route over CUDA IPC. Every rank of the communicator creates it at the same point, where the ranks meet."""

    def __init__(
        self, executor: Executor, calls: CallPlanner, device: Device, timeout_s: float, most_blocks: int = 0
    ) -> None:
        self._calls = calls
        self._device = device
        self._collectives = DeviceCollectives(executor, device, timeout_s=timeout_s, most_blocks=most_blocks)
        self._stream = device.new_stream(most_blocks)
        self._known: dict[CallSpec, _KnownRoutes] = {}
        self._latest: tuple[CallSpec, _KnownRoutes] | None = None  # a call asks several times about one spec
        self._refused: dict[str, str] = {}  # other routes

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        for array in call.checked.arrays:
            if (reason := self._of(array.spec).refusal) is not None:
                return reason
        return None

    def refuses_collective(self, collective: str) -> str | None:
        """Return the reason why no call of a collective can take this route, as text; None if some calls can."""
        return self._collectives.refuses(collective)

    def refuses_spec(self, spec: CallSpec) -> str | None:
        """Return the reason why a call on one array, with call spec `spec`, cannot take this route; None if it can."""
        request = as_request(spec.algorithm)
        reasons = (
            (is_by_function(spec.op), "reductions by functions of Python are done on the host"),
            (spec.layout is not None and spec.layout.rows is not None, "vector collectives are staged"),
            (
                request.reproducible or request.accumulate is not None,
                "only the host supports reproducible=True and accumulate",
            ),
        )
        refusal = next((reason for applies, reason in reasons if applies), None)
        return refusal or self._collectives.refuses(spec.collective, request.algorithm)

    def choice(self, call: CheckedDeviceCall) -> str:
        """Return the name in `ROUTES` of the route that the tuner chooses for a call, equal on all ranks; "" for this.

        The arrays of a call travel by one route, and are staged if the tuner chooses different ones.
        """
        chosen = {self._of(array.spec).route for array in call.checked.arrays}
        return chosen.pop() if len(chosen) == 1 else STAGED

    def refuse(self, route: str, reason: str) -> None:
        """Exclude `route` from all later calls, on all ranks."""
        self._refused[route] = reason
        self._known.clear()
        self._latest = None

    def explain(
        self,
        collective: str,
        nbytes: int,
        dtype: DType | None,
        algorithm: str | None = None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Explanation:
        """Return the routes of a call, and the tuner's choice; raises as `CallPlanner.explain_route` does.

        Args:
            collective: its name in the registry.
            nbytes: the bytes of the whole vector.
            dtype: the dtype of the elements.
            algorithm: the route that the call forces, if any.
            more: why this call cannot take some other routes.
        """
        refusals = {
            name: self._collectives.refuses(collective, name) if transport == LINK else self._refused.get(name)
            for name, transport in routes_of(collective).items()
        }
        return self._calls.explain_route(collective, nbytes, dtype, algorithm, {**refusals, **more})

    def _of(self, spec: CallSpec) -> _KnownRoutes:
        """Return the facts about calls on an array."""
        latest = self._latest
        if latest is not None and latest[0] is spec:  # takes less time than to compare the spec
            return latest[1]
        known = self._known.get(spec)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            refusal = self.refuses_spec(spec)
            choice = self._choice(spec) if refusal is None else STAGED
            known = self._known[spec] = _KnownRoutes(refusal, choice, choice if choice in ROUTES else "")
        self._latest = spec, known
        return known

    def _choice(self, spec: CallSpec) -> str:
        nbytes = spec.layout.whole * spec.dtype.itemsize if spec.layout and spec.dtype else 0
        forced = as_request(spec.algorithm).algorithm
        reason = refusal_by_nccl(spec)
        more = {} if reason is None else {NCCL_NATIVE: reason}
        return self.explain(spec.collective, nbytes, spec.dtype, forced, more).choice.algorithm

    def issue(self, call: CheckedDeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        for event in ready:
            self._device.wait(self._stream, event)
        try:
            shown = self._shown(call, deadline)
            replays = [None] * len(shown) if call.plan is None else call.plan.replays
            planned = self._planned(call.checked)
            for each in zip(call.checked.arrays, planned, shown, replays, strict=True):
                self._issue_array(*each, deadline)
        finally:
            self._device.record(finished, self._stream)

    def _shown(self, call: CheckedDeviceCall, deadline: Deadline) -> Sequence[Shown | None]:
        """Return for each array the addresses at which this rank reads the arrays of others.

        The first use of a plan exchanges them.
        """
        if call.plan is None:
            return [None] * len(call.checked.arrays)
        if call.plan.shown is None:
            pieces = [(_piece(array.source), _piece(array.target)) for array in call.checked.arrays]
            call.plan.shown = self._collectives.agree(pieces, deadline.remaining_s())
            call.plan.replays = [self._collectives.new_replays() for _ in pieces]
        return call.plan.shown

    def _planned(self, call: CheckedCall) -> Sequence[Call]:
        """Return the planned call of each array. A `PreparedCall` on one array holds the plan already."""
        if isinstance(call, PreparedCall) and len(call.arrays) == 1:
            return [call.call]
        return [self._calls.find(array.spec) for array in call.arrays]

    def _issue_array(
        self, array: BoundArray, planned: Call, shown: Shown | None, replays: Replays | None, deadline: Deadline
    ) -> None:
        operation = self._collectives.start(
            planned.signature,
            planned.extents[0],
            address_of(array.source),
            address_of(array.target),
            self._stream,
            self._of(array.spec).choice,
            shown,
            replays,
        )
        operation.wait(deadline.remaining_s())

    def fail(self, error: UnisonoError) -> None:
        self._collectives.fail(error)

    def is_intact(self) -> bool:
        return self._collectives.is_intact()

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the bytes moved over this route, by peer."""
        return self._collectives.traffic()

    def close(self, deadline: Deadline) -> None:
        if self._collectives.close(deadline.remaining_s()):
            self._device.end_stream(self._stream)


class Staged:
    """The route through the host, which takes every call.

    Args:
        executor: the executor of the communicator.
        host: a communicator of the same ranks that makes no other calls.
        device: the device of the arrays.
    """

    def __init__(self, executor: Executor, host: HostCalls, device: Device) -> None:
        self._rank, self._size = executor.rank, executor.size
        self._host = host
        self._staging = staging.Staging(device)

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        return None

    def issue(self, call: CheckedDeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        parts = [part for array in call.checked.arrays for part in self._parts(array, call, deadline)]
        self._staging.run(parts, ready, finished, deadline)

    def fail(self, error: UnisonoError) -> None:
        """Do nothing: no stream of this route waits for another rank."""

    def is_intact(self) -> bool:
        return True

    def copied_nbytes(self) -> tuple[int, int]:
        """Return how many bytes have been copied to the host, and from the host."""
        return self._staging.to_host_nbytes, self._staging.to_device_nbytes

    def close(self, deadline: Deadline) -> None:
        self._staging.close(deadline)

    def _parts(self, array: BoundArray, call: CheckedDeviceCall, deadline: Deadline) -> list[staging.StagedPart]:
        """Return the parts of one array."""
        spec = array.spec
        assert spec.layout is not None, "a call on a device has an array"
        assert spec.dtype is not None, "an array has a dtype"
        itemsize = spec.dtype.itemsize
        parts = partial_calls(spec.collective, spec.layout, self._size, max(1, PART_NBYTES // itemsize))
        # An exscan leaves `out` of rank 0 as it is, because no rank comes before. A new result gets zeros instead.
        is_kept = spec.collective == "exscan" and self._rank == 0 and not call.memory.is_new(array.result)
        return [
            staging.StagedPart(
                _pieces(array.source, part.reads, itemsize),
                _pieces(array.target, part.writes, itemsize, is_kept=is_kept),
                partial(self._exchange, array, part, deadline),
            )
            for part in parts
        ]

    def _exchange(
        self, array: BoundArray, part: PartialCall, deadline: Deadline, source: AnyArray, target: AnyArray
    ) -> None:
        """Make the host call of one part."""
        spec = array.spec
        assert spec.dtype is not None, "a call on a device has an array"
        dtype = numpy_dtype(spec.dtype)
        if spec.collective == "exscan":
            target[...] = 0
        out = target.view(dtype) if array.target is not None else None
        # A rank that only receives a broadcast passes the memory for it as `x`.
        x = source.view(dtype) if array.source is not None else out if spec.collective == "broadcast" else None
        self._host._call_on_host(spec, x, out, part.counts, deadline.remaining_s())


def address_of(array: AnyArray | None) -> int:
    """Return the address of an array on a device; 0 without an array."""
    if array is None:
        return 0
    address: int = array.__array_interface__["data"][0]  # takes less time than `ctypes`
    return address


def _piece(array: AnyArray | None) -> Piece:
    return address_of(array), 0 if array is None else array.nbytes


def _pieces(array: AnyArray | None, runs: Sequence[Run], itemsize: int, *, is_kept: bool = False) -> list[Piece]:
    """Return the address and bytes of each run of elements; no pieces without an array.

    With `is_kept` the addresses are 0, so that nothing is copied.
    """
    if array is None:
        return []
    address = array.ctypes.data
    return [(0 if is_kept else address + first * itemsize, count * itemsize) for first, count in runs]
