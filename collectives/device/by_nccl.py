"""The route of calls on GPU arrays by NCCL, for calls that ask for the algorithm `nccl.native`."""

from __future__ import annotations

from collections.abc import Sequence

from unisono.algorithms.catalogue.vendors import NCCL_NATIVE, NCCL_WITHIN_HOSTS
from unisono.collectives.calls.planning import CallPlanner
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.device.host_phases import refuses_hosts
from unisono.collectives.device.nccl_refusals import refusal_by_nccl
from unisono.collectives.device.routes import address_of
from unisono.collectives.device.work import CheckedDeviceCall
from unisono.errors import NoAlgorithmError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.executor import Executor
from unisono.transports.cuda.device import Device, Event
from unisono.transports.nccl.collectives import NcclCollectives


def check_for_nccl(call: CheckedDeviceCall, name: str, hosts: Sequence[Sequence[int]]) -> None:
    """Check a call by the algorithm `name` of NCCL, before any other rank hears of it.

    Raises:
        NoAlgorithmError: NCCL cannot carry it out as Unisono defines it.
        UsageError: it would overwrite its input before NCCL has read it.
    """
    for array in call.checked.arrays:
        spec = array.spec
        if name == NCCL_WITHIN_HOSTS and (reason := refuses_hosts(hosts, spec.collective)) is not None:
            raise NoAlgorithmError(f"{name} cannot run: {reason}")
        if (reason := refusal_by_nccl(spec)) is not None:
            raise NoAlgorithmError(f"{name} {reason}", operation=spec.collective)
        is_unable = name == NCCL_NATIVE and spec.collective == "alltoall"
        if is_unable and address_of(array.source) == address_of(array.target) != 0:
            raise UsageError(f"{NCCL_NATIVE} has no alltoall in place: pass another out", operation=spec.collective)


class ByNccl:
    """The route by NCCL. Every rank of the communicator creates it at the same point, where the ranks meet."""

    def __init__(self, executor: Executor, calls: CallPlanner, device: Device, deadline: Deadline) -> None:
        self._calls = calls
        self._device = device
        self._collectives = NcclCollectives(executor, device, deadline)
        self._stream = device.new_stream()

    def refuses(self, call: CheckedDeviceCall) -> str | None:
        reasons = (refusal_by_nccl(array.spec, self._collectives.version) for array in call.checked.arrays)
        return self._collectives.refusal or next((reason for reason in reasons if reason is not None), None)

    def issue(self, call: CheckedDeviceCall, ready: Sequence[Event], finished: Event, deadline: Deadline) -> None:
        for event in ready:
            self._device.wait(self._stream, event)
        try:
            for array in call.checked.arrays:
                self._issue_array(array, deadline)
        finally:
            self._device.record(finished, self._stream)

    def _issue_array(self, array: BoundArray, deadline: Deadline) -> None:
        planned = self._calls.find(array.spec._replace(algorithm="auto"))
        self._collectives.issue(
            planned.signature,
            planned.extents[0],
            address_of(array.source),
            address_of(array.target),
            self._stream,
            deadline,
        )

    def fail(self, error: UnisonoError) -> None:
        self._collectives.fail(error)

    def is_intact(self) -> bool:
        return self._collectives.is_intact()

    def close(self, deadline: Deadline) -> None:
        if self._collectives.close(deadline):
            self._device.end_stream(self._stream)
