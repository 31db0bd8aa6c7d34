"""Entrance to calls and messages on GPU arrays: imports modules and creates objects for them at the first such array.

Most processes never use a GPU. So this module imports no CUDA code, and a communicator creates a `Devices` at no cost.
`arrays.device_detection` recognises the arrays.

Used by: `calls.checking` and `api.point_to_point`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING
from weakref import WeakMethod

from unisono.collectives.calls.planning import CallPlanner
from unisono.collectives.calls.work import Works
from unisono.dtypes import DType
from unisono.foundation.records import record
from unisono.options import Options
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic

if TYPE_CHECKING:
    from unisono.collectives.calls.statistics import DeviceStatistics
    from unisono.collectives.device.calls import DeviceCalls
    from unisono.collectives.device.contracts import HostCalls
    from unisono.collectives.device.point_to_point import DeviceMessages


@record
class _Parts:
    """The objects that make calls and pass messages on GPU arrays, of one rank of a communicator."""

    calls: DeviceCalls
    messages: DeviceMessages


class Devices:
    """Support for GPU arrays on one rank of a communicator; empty until the first such array.

    Args:
        executor, calls, works, options: those of the communicator.
        make_spare: a method that makes a communicator of the same ranks, for calls on host memory.
    """

    def __init__(
        self,
        executor: Executor,
        calls: CallPlanner,
        works: Works,
        options: Options,
        make_spare: Callable[[], HostCalls],
    ) -> None:
        # A weak reference, because the communicator holds this object: a cycle would delay its end.
        self._arguments = executor, calls, works, options, WeakMethod(make_spare)
        self._parts_if_any: _Parts | None = None
        self._lock = threading.Lock()  # only one thread creates the parts

    @property
    def calls(self) -> DeviceCalls:
        """The object that makes collective calls on GPU arrays."""
        return self._parts().calls

    @property
    def messages(self) -> DeviceMessages:
        """The object that sends and receives GPU arrays."""
        return self._parts().messages

    def route(self, collective: str, nbytes: int, dtype: DType) -> str:
        """Return `DeviceCalls.route`, or an empty text before the first call on a GPU array."""
        return "" if self._parts_if_any is None else self._parts_if_any.calls.route(collective, nbytes, dtype)

    def statistics(self) -> DeviceStatistics:
        """Return how many bytes calls and messages on GPU arrays have moved so far."""
        from unisono.collectives.calls.statistics import DeviceStatistics

        if self._parts_if_any is None:
            return DeviceStatistics({}, 0, 0)
        calls, messages = self._parts_if_any.calls, self._parts_if_any.messages
        to_host, to_device = calls.staged_nbytes()
        return DeviceStatistics(
            calls.traffic(), to_host + messages.to_host_nbytes, to_device + messages.to_device_nbytes
        )

    def between_hosts(self) -> Mapping[int, Traffic]:
        """Return `DeviceCalls.between_hosts`, or nothing before the first call on a GPU array."""
        return {} if self._parts_if_any is None else self._parts_if_any.calls.between_hosts()

    def stop(self) -> None:
        """Call `DeviceCalls.stop` if there has been a GPU array."""
        if self._parts_if_any is not None:
            self._parts_if_any.calls.stop()

    def close(self) -> None:
        """Close the calls and the messages if there has been a GPU array."""
        if self._parts_if_any is not None:
            self._parts_if_any.calls.close()
            self._parts_if_any.messages.close()

    def _parts(self) -> _Parts:
        if self._parts_if_any is None:
            from unisono.collectives.device.calls import DeviceCalls
            from unisono.collectives.device.point_to_point import DeviceMessages

            with self._lock:
                self._parts_if_any = self._parts_if_any or _Parts(
                    DeviceCalls(*self._arguments), DeviceMessages(self._arguments[0])
                )
        return self._parts_if_any
