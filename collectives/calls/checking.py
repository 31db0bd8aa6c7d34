"""Checks calls: their arguments are bound and planned, and each becomes a call that can be carried out.

Used by: the dispatcher. Nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import parsed
from unisono.algorithms.catalogue.vendors import BY_NCCL
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import LISTS, list_of
from unisono.collectives.calls.arguments import CallArguments, spread
from unisono.collectives.calls.binding import Binder
from unisono.collectives.calls.executable import CheckedCalls, CustomOpCall, DeviceCall, ExecutableCall, HostCall
from unisono.collectives.calls.planning import CallPlanner, CallSpec, as_request
from unisono.collectives.calls.prepared import BoundArray, CheckedCall, PreparedCall
from unisono.collectives.calls.work import Works
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.gateway import Devices
from unisono.errors import UsageError
from unisono.options import Options
from unisono.transports.contracts.call import Call
from unisono.transports.contracts.executor import Executor

if TYPE_CHECKING:
    from unisono.collectives.calls.job_trials import JobTrials
    from unisono.collectives.calls.verification import Verifier
    from unisono.collectives.custom_ops.reducer import Reducer


class CallChecker:
    """Checks the calls of one rank of a communicator, and chooses their kinds.

    Attributes:
        verifier: compares the results of the ranks; None unless the option `verify_results` asks for it.
        reducer_if_any: the reducer for custom ops; None before the first call that needs it.
        trials: tries algorithms in the calls; None unless the option `tune` asks for it.

    Args:
        executor, planner, works, devices, options: those of the communicator.
    """

    def __init__(
        self, executor: Executor, planner: CallPlanner, works: Works, devices: Devices, options: Options
    ) -> None:
        self._executor, self._planner, self._works, self._devices = executor, planner, works, devices
        self._binder = Binder(executor.rank, executor.size)
        self.reducer_if_any: Reducer | None = None
        self.verifier: Verifier | None = None
        self.trials: JobTrials | None = None
        if options.verify_results and executor.size > 1:
            from unisono.collectives.calls.verification import Verifier

            self.verifier = Verifier(executor, planner, works)

    @property
    def reducer(self) -> Reducer:
        """The reducer for custom ops; it is made, and its module is imported, when the first call needs it."""
        if self.reducer_if_any is None:
            from unisono.collectives.custom_ops.reducer import Reducer

            self.reducer_if_any = Reducer(self._executor, self._planner)
        return self.reducer_if_any

    def check_one(self, arguments: CallArguments, check_usable: Callable[[], None]) -> ExecutableCall:
        """Check the call of these arguments, and return it; raises the errors of `check`."""
        gathered = list_of(arguments.x, arguments.out)
        (call,) = self.check([spread(arguments)], gathered, check_usable).calls
        return call

    def check(
        self,
        by_call: Sequence[Sequence[CallArguments]],
        gathered: type[Any] | None,
        check_usable: Callable[[], None],
    ) -> CheckedCalls:
        """Check calls that differ only in arrays and ops, and choose their kinds.

        Calls on host memory without custom ops are fused into one `HostCall`. Other calls are not fused.

        Args:
            by_call: for each call of the user, one call for each of its arrays, as `spread` returns them.
            gathered: the type of the results of a call, list or tuple; None for the result of a single array.
            check_usable: raises `UsageError` if the communicator has been closed.

        Raises:
            UsageError: a call is wrong, or the communicator is closed.
            NoAlgorithmError: no algorithm carries a call out.
        """
        check_usable()
        singles = by_call[0] if len(by_call) == 1 else list(chain.from_iterable(by_call))
        if any(
            not adapters.are_of_numpy(single.x, single.out) and on_device(single.x, single.out) for single in singles
        ):
            on_gpu = [self._device_call(of_call, gathered, check_usable) for of_call in by_call]
            return CheckedCalls([array for call in on_gpu for array in call.checked.arrays], on_gpu)
        arrays = self._binder.bind_all(singles)
        if not any(is_by_function(single.op) for single in singles):
            return CheckedCalls(arrays, [self._host_call(arrays, gathered)])
        remaining, fused, custom = iter(arrays), list[BoundArray](), list[ExecutableCall]()
        for of_call in by_call:
            own = list(islice(remaining, len(of_call)))
            if is_by_function(of_call[0].op):
                reductions = self.reducer.prepare(own, gathered)
                custom.append(self._verified(CustomOpCall(self.reducer, self._works, reductions)))
            else:
                fused += own
        return CheckedCalls(arrays, [self._host_call(fused, gathered), *custom] if fused else custom)

    def _host_call(self, arrays: Sequence[BoundArray], gathered: type[Any] | None) -> ExecutableCall:
        specs = [array.spec for array in arrays]
        call = HostCall(self._executor, self._works, self._planned(specs, arrays, gathered))
        return self._verified(call) if self.trials is None else self.trials.tried(call)

    def _device_call(
        self, singles: Sequence[CallArguments], gathered: type[Any] | None, check_usable: Callable[[], None]
    ) -> DeviceCall:
        prepare = self.reducer.prepare if is_by_function(singles[0].op) else self._planned_on_device
        calls, bind_all = self._devices.calls, partial(self._binder.bind_all, singles)
        return DeviceCall(calls, calls.prepared(lambda memory: prepare(bind_all(memory), gathered)), check_usable)

    def _verified(self, call: ExecutableCall) -> ExecutableCall:
        """Return the call, with a comparison of its results if the option `verify_results` asks for one."""
        return call if self.verifier is None else self.verifier.verified(call)

    def _planned_on_device(self, arrays: Sequence[BoundArray], gathered: type[Any] | None) -> PreparedCall:
        """Return the one call on these arrays. The plan of a call that NCCL carries out only serves to check it."""
        specs = [array.spec for array in arrays]
        if as_request(specs[0].algorithm).algorithm in BY_NCCL:
            specs = [spec._replace(algorithm="auto") for spec in specs]
        return self._planned(specs, arrays, gathered)

    def _planned(
        self, specs: Sequence[CallSpec], arrays: Sequence[BoundArray], gathered: type[Any] | None
    ) -> PreparedCall:
        """Return the one call of these specs on these arrays, with its plan."""
        call = self._planner.find(*specs)
        if any(array.is_in_place for array in arrays):
            _check_in_place(call)
        return PreparedCall(arrays, gathered, call)


def _check_in_place(call: Call) -> None:
    name = call.signature.algorithm
    if not find(call.plan.collective, parsed(name).algorithm).in_place:
        raise UsageError(
            f"{call.signature.collective} by {name!r} cannot run in place: pass an out that shares no memory with x"
        )


def check_lasting(call: CheckedCall, x: Any) -> None:
    """Check that each use of a persistent call can read the current elements of `x` and write an array of the user.

    Raises:
        UsageError: the call would read a copy of an array, or would have to make a new result each time.
    """
    if any(array.is_packed for array in call.arrays):
        raise UsageError("x is not contiguous, and a plan would keep a copy of it: pass a contiguous array")
    if any(array.convert is not None for array in call.arrays):
        raise UsageError(
            f"a plan overwrites its result each time, and an array of type {type(x).__name__} cannot be written: "
            "pass an array that can be written as out"
        )
    for source in x if type(x) in LISTS else (x,):
        if source is not None and not adapters.adapter_of(source, "x").lasts:
            raise UsageError(
                f"a plan reads the same memory each time, and assigning to a {type(source).__name__} replaces its "
                "memory: copy it to a numpy array, and pass that as x"
            )
