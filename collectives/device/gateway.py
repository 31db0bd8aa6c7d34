"""Arrays on a GPU: which ones are, and what a communicator has for them.

Most processes never see one. So what recognises them is here, and all else is imported and made at the first.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

import numpy as np

from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.operands import LISTS
from unisono.collectives.calls.planning import CallPlanner
from unisono.collectives.calls.work import Works
from unisono.options import Options
from unisono.records import record
from unisono.transports.contracts.executor import Executor

if TYPE_CHECKING:
    from unisono.collectives.calls.statistics import DeviceStatistics
    from unisono.collectives.device.calls import DeviceCalls
    from unisono.collectives.device.point_to_point import DeviceMessages
    from unisono.collectives.device.routes import HostCalls

_CUDA = (2, 13)  # DLPack's numbers of CUDA's device memory and managed memory


@record
class _Made:
    """What there is for arrays of a GPU."""

    calls: DeviceCalls
    messages: DeviceMessages


class Devices:
    """What one rank of a communicator has for arrays of a GPU: nothing, until it is asked for.

    Args:
        executor, calls, works, options: those of the communicator.
        spare: makes a communicator of the same ranks.
    """

    def __init__(
        self, executor: Executor, calls: CallPlanner, works: Works, options: Options, spare: Callable[[], HostCalls]
    ) -> None:
        # Weakly: a communicator that nobody holds any more is freed at once.
        self._common = executor, calls, works, options, WeakMethod(spare)
        self._made: _Made | None = None
        self._lock = threading.Lock()  # of making it once

    @property
    def calls(self) -> DeviceCalls:
        """The collective calls."""
        return self._all().calls

    @property
    def messages(self) -> DeviceMessages:
        """The messages."""
        return self._all().messages

    def route(self, collective: str) -> str:
        """See `DeviceCalls.route`; makes nothing."""
        return "" if self._made is None else self._made.calls.route(collective)

    def statistics(self) -> DeviceStatistics:
        """Return what the calls have moved so far; makes nothing."""
        from unisono.collectives.calls.statistics import DeviceStatistics

        if self._made is None:
            return DeviceStatistics({}, 0, 0)
        calls, messages = self._made.calls, self._made.messages
        to_host, to_device = calls.staged_nbytes()
        return DeviceStatistics(
            calls.traffic(), to_host + messages.to_host_nbytes, to_device + messages.to_device_nbytes
        )

    def stop(self) -> None:
        """See `DeviceCalls.stop`; makes nothing."""
        if self._made is not None:
            self._made.calls.stop()

    def close(self) -> None:
        """See `DeviceCalls.close` and `DeviceMessages.close`; makes nothing."""
        if self._made is not None:
            self._made.calls.close()
            self._made.messages.close()

    def _all(self) -> _Made:
        if self._made is None:
            from unisono.collectives.device.calls import DeviceCalls
            from unisono.collectives.device.point_to_point import DeviceMessages

            with self._lock:
                self._made = self._made or _Made(DeviceCalls(*self._common), DeviceMessages(self._common[0]))
        return self._made


def on_device(*given: Any) -> bool:
    """Return whether any of these arrays, or lists of arrays, is on a GPU."""
    return any(described_by(each) is not None for each in _flattened(given))


def described_by(x: Any) -> str | None:
    """Return what describes an array that is on a GPU, its library or an attribute; None of anything else."""
    if x is None or type(x) is np.ndarray or isinstance(x, type):
        return None
    cls: type = type(x)
    library = _library_of(cls)
    if library is not None:
        return library if _LIBRARIES[library][1](x) else None
    if adapters.of_class(cls) is not None:  # of a library whose arrays are only taken on the host
        return None
    if hasattr(x, "__cuda_array_interface__"):
        return "__cuda_array_interface__"
    return "__dlpack__" if hasattr(x, "__dlpack_device__") and x.__dlpack_device__()[0] in _CUDA else None


def _flattened(given: Any) -> Iterator[Any]:
    for each in given:
        if type(each) in LISTS:
            yield from each
        else:
            yield each


# By library: the name of a class there, and whether an array of it is on a GPU.
_LIBRARIES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "torch": ("Tensor", lambda x: x.is_cuda),
    "cupy": ("ndarray", lambda x: True),
}


@lru_cache(maxsize=256)
def _library_of(cls: type) -> str | None:
    """Return the library of a class, if that is in the table and has been imported."""
    for module, (name, _) in _LIBRARIES.items():
        known = getattr(sys.modules.get(module), name, None)
        if known is not None and issubclass(cls, known):
            return module
    return None
