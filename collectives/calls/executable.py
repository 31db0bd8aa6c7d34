"""The three kinds of checked calls: on host memory, on a device, and with a custom op.

`CallChecker` checks the arguments of calls and chooses the kind of each. Its callers treat all kinds alike:
they run a call, start it, or make a persistent call of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from unisono.collectives.calls.planning import AlgorithmLike
from unisono.collectives.calls.prepared import BoundArray, CheckedCall, PreparedCall
from unisono.collectives.calls.work import Work, Works
from unisono.foundation import log
from unisono.operations import Op
from unisono.transports.contracts.call import Signature
from unisono.transports.contracts.executor import Executor

if TYPE_CHECKING:
    from unisono.collectives.custom_ops.reducer import Reducer, Reductions
    from unisono.collectives.device.calls import DeviceCalls
    from unisono.collectives.device.work import CheckedDeviceCall

_log = log.get("calls")

OpLike: TypeAlias = "str | Op | tuple[str | Op | None, ...] | None"


class ExecutableCall:
    """A call that this rank has checked, and the object that carries it out. Nothing has been sent yet.

    Attributes:
        checked: the arrays of the call; its `finish` returns the result when the call has ended.
    """

    def __init__(self, checked: CheckedCall) -> None:
        self.checked = checked

    def run(self, limit_s: float) -> None:
        """Run the call, and return when it has ended.

        Raises:
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: the call failed.
        """
        if not _log.shows("debug"):
            self._run(limit_s)
            return
        began = time.perf_counter()
        _log.debug("%s begins", self)
        self._run(limit_s)
        _log.debug("%s took %.1f us", self, (time.perf_counter() - began) * 1e6)

    def start(self, limit_s: float) -> Work[Any]:
        """Start the call, and return its work without waiting for other ranks."""
        _log.debug("%s starts", self)
        return self._start(limit_s)

    @property
    def signature(self) -> Signature:
        """The facts of the call on which all ranks must agree."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Return the call as the user wrote it, such as ``allreduce(float32[8], op=sum)``."""
        return str(self.signature)

    def _run(self, limit_s: float) -> None:
        raise NotImplementedError

    def _start(self, limit_s: float) -> Work[Any]:
        raise NotImplementedError

    def persist(self, limit_s: float) -> Callable[..., Any]:
        """Return the persistent call: each ``again(wait=True)`` makes the call on the same arrays."""
        raise NotImplementedError

    def remember(
        self, collective: str, x: Any, out: Any, op: OpLike, root: int | None, algorithm: AlgorithmLike
    ) -> None:
        """Add the call to the call cache under these arguments, if the cache can run an equal call."""


class HostCall(ExecutableCall):
    """A call on host memory, which the executor runs by a plan.

    Args:
        executor, works: those of the communicator.
        prepared: the call and its arrays.

    Raises:
        UsageError: the factor of a premul_sum is not in the range of the dtype.
    """

    def __init__(self, executor: Executor, works: Works, prepared: PreparedCall) -> None:
        super().__init__(prepared)
        self._executor = executor
        self._works = works
        self._prepared = prepared
        self._sources = prepared.sources()

    @property
    def prepared(self) -> PreparedCall:
        """The call and its arrays."""
        return self._prepared

    @property
    def signature(self) -> Signature:
        return self._prepared.call.signature

    def _run(self, limit_s: float) -> None:
        self._executor.run(self._prepared.call, self._sources, self._prepared.targets, limit_s)

    def _start(self, limit_s: float) -> Work[Any]:
        prepared = self._prepared
        operation = self._executor.start(prepared.call, self._sources, prepared.targets)
        operation.run_in_background(limit_s)
        return self._works.add(operation, None, limit_s, lambda _: prepared.finish())

    def persist(self, limit_s: float) -> Callable[..., Any]:
        prepared, sources = self._prepared, self._sources
        on_start = partial(self._works.add, limit_s=limit_s)
        again = self._executor.persistent(
            prepared.call, sources, prepared.targets, limit_s, prepared.finish(), on_start
        )
        if all(array.lifting is None for array in prepared.arrays):
            return again
        # The factor is applied to the current elements before each call, into the memory that the plan reads.
        return lambda wait=True: (prepared.sources(sources), again(wait))[1]

    def remember(
        self, collective: str, x: Any, out: Any, op: OpLike, root: int | None, algorithm: AlgorithmLike
    ) -> None:
        prepared = self._prepared
        if prepared.can_be_cached:
            results = [array.result for array in prepared.arrays]
            written = out if results[0] is None else results if prepared.gathered else results[0]
            self._executor.cache(prepared.call, collective, x, written, op, root, algorithm)


class DeviceCall(ExecutableCall):
    """A call on arrays of a GPU, which is issued to the device.

    Args:
        calls: the calls of the communicator on arrays of a GPU.
        call: the call and its arrays.
        check_usable: raises `UsageError` if the communicator has been closed.
    """

    def __init__(self, calls: DeviceCalls, call: CheckedDeviceCall, check_usable: Callable[[], None]) -> None:
        super().__init__(call.checked)
        self._calls = calls
        self._call = call
        self._check_usable = check_usable

    def __str__(self) -> str:
        return f"{self.checked.arrays[0].spec.collective} on a GPU"

    def _run(self, limit_s: float) -> None:
        self._calls.run(self._call, limit_s)

    def _start(self, limit_s: float) -> Work[Any]:
        return self._calls.start(self._call, limit_s, here=False)

    def persist(self, limit_s: float) -> Callable[..., Any]:
        call = self._calls.lasting(self._call)

        def again(wait: bool = True) -> Any:
            self._check_usable()
            if wait:
                return self._calls.run(call, limit_s)
            return self._calls.start(call, limit_s, here=False)

        return again


class CustomOpCall(ExecutableCall):
    """A reduction by a Python function, which the reducer carries out.

    Args:
        reducer: the reducer of the communicator.
        works: those of the communicator.
        reductions: the call and its arrays.
    """

    def __init__(self, reducer: Reducer, works: Works, reductions: Reductions) -> None:
        super().__init__(reductions)
        self._reducer = reducer
        self._works = works
        self._reductions = reductions

    @property
    def signature(self) -> Signature:
        return self._reductions.planned[0].first.signature

    def _run(self, limit_s: float) -> None:
        self._reducer.run(self._reductions, limit_s)

    def _start(self, limit_s: float) -> Work[Any]:
        return self._start_with(limit_s, None, lambda _: self.checked.finish())

    def persist(self, limit_s: float) -> Callable[..., Any]:
        result = self.checked.finish()

        def again(wait: bool = True) -> Any:
            if not wait:
                return self._start_with(limit_s, result)
            self._reducer.run(self._reductions, limit_s)
            return result

        return again

    def _start_with(self, limit_s: float, result: Any, convert: Callable[[Any], Any] | None = None) -> Work[Any]:
        operation = self._reducer.start(self._reductions, limit_s)
        return self._works.add(operation, result, limit_s, convert, is_counted=False)


class CheckedCalls(NamedTuple):
    """Calls of one collective, checked together.

    Attributes:
        arrays: the arrays of all calls, in the order of the calls.
        calls: the calls that carry them out, in the order in which they must run.
    """

    arrays: Sequence[BoundArray]
    calls: Sequence[ExecutableCall]
