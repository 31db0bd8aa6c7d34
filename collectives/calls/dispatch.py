"""Dispatches collective calls: checks the arguments, plans the call, runs it, and adds it to the call cache.

Used by: the methods of `Collectives`, `VectorCollectives`, groups of calls and `Communicator.plan`.

Theory of operation
-------------------
Most calls of a program repeat earlier ones, so each method of a communicator asks the native call cache first. On a hit
the native core runs the call, and nothing in this module runs. On a miss, `Dispatcher._dispatch` does the following:

1. It checks the arguments and makes a call spec (`CallSpec`) from them.
2. The planner returns the call of this spec: the tuner's algorithm, this rank's plan, and the signature.
3. The executor compiles the plan, if it is new, and runs it.
4. The call goes into the call cache under its arguments, so that the next equal call is a hit.

Ranks do not agree on a call before they communicate, because that would cost a round of messages. Instead every message
carries a digest of the call's signature, and the receiver compares it with its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono import log
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import parsed
from unisono.algorithms.catalogue.vendors import BY_NCCL
from unisono.algorithms.ir.contracts import CONTRACTS, Contract, Cut
from unisono.autograph import unconverted
from unisono.collectives.arrays import adapters, operands
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import HOST, LISTS, Memory, Operand, list_of
from unisono.collectives.calls.executable import CheckedCalls, CustomOpCall, DeviceCall, ExecutableCall, HostCall
from unisono.collectives.calls.planning import AlgorithmLike, CallPlanner, CallSpec, HostLayout, as_request
from unisono.collectives.calls.prepared import BoundArray, PreparedCall
from unisono.collectives.calls.shapes import Layout, checked_rows, layout_of, layout_of_share
from unisono.collectives.calls.wildcards import ANY_SOURCE, ANY_TAG
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.collectives.device.gateway import Devices
from unisono.deadlines import checked_timeout_s
from unisono.errors import TransportUnavailableError, UsageError
from unisono.operations import Op
from unisono.options import Options
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES, Executor
from unisono.transports.host.system_limits import is_refusal, unavailable
from unisono.tuning.decide.choice import NO_STATE, TunerState

if TYPE_CHECKING:
    from typing_extensions import TypedDict, TypeVar, Unpack

    from unisono.collectives.calls.group_recorder import Group
    from unisono.collectives.calls.verification import Verifier
    from unisono.collectives.custom_ops.reducer import Reducer
    from unisono.collectives.device.contracts import Counts, HostCalls

    class Arguments(TypedDict, total=False):
        """The fields of `CallArguments` except the collective and the arrays."""

        op: str | Op | None
        root: int | None
        counts: tuple[Sequence[int], ...] | None
        algorithm: AlgorithmLike
        timeout_s: float | None

    Method = TypeVar("Method", bound=Callable[..., Any])

    def cached_method(method: Method) -> Method:
        """Wrap a collective method: a call with an `out` that the call cache knows runs without a Python frame."""

    def fast_message(method: Method) -> Method:
        """Wrap a method of messages: the native core passes plain numpy arrays on without a Python frame."""
else:
    cached_method = _core.CachedMethod
    fast_message = partial(_core.CachedMethod, cache="_messages")

_log = log.get("calls")


class CallArguments(NamedTuple):
    """The arguments of a collective call as the user passed them; None stands for an argument that is missing.

    Attributes:
        collective: its name in the registry, for example "allgather" for `allgatherv` too.
        x, out: the arrays, or lists of arrays.
        op, root, algorithm, timeout_s: as in `Collectives`.
        counts: rows for each rank: ``(counts,)`` or ``(send_counts, recv_counts)``; None for equal shares.
    """

    collective: str
    x: Any
    out: Any
    op: str | Op | None = None
    root: int | None = None
    counts: tuple[Sequence[int], ...] | None = None
    algorithm: AlgorithmLike = None
    timeout_s: float | None = None


class Dispatcher:
    """The base class of everything that makes collective calls on a communicator: caches, planner and dispatch.

    Attributes:
        rank, size: this rank, and the number of ranks.
    """

    # `CachedMethod` reads the slots _cache and _messages at their offsets, because a look-up by name costs time.
    __slots__ = ("__dict__", "__weakref__", "_cache", "_messages")

    def __init_subclass__(cls) -> None:
        unconverted(cls)

    def __init__(
        self, executor: Executor, host_layout: HostLayout, options: Options, tuner_state: TunerState = NO_STATE
    ) -> None:
        self.rank = executor.rank
        self.size = executor.size
        self._executor = executor
        self._options = options
        self._planner = CallPlanner(self.rank, self.size, host_layout, options, executor.vendors, tuner_state)
        self._reducer_if_any: Reducer | None = None
        self._works = Works(executor)
        self._devices = Devices(executor, self._planner, self._works, options, self._host_calls)
        self._verifier: Verifier | None = None
        if options.verify_results and self.size > 1:
            from unisono.collectives.calls.verification import Verifier

            self._verifier = Verifier(executor, self._planner, self._works)
        self._refusal: str | None = None
        # If the log shows each call, every call must be dispatched, so the call cache and fast messages are off.
        are_logged = _log.shows("debug")
        self._cache = NO_CACHE if are_logged or self._verifier else executor.call_cache(options.timeout_s)
        self._messages = NO_MESSAGES if are_logged else executor.message_calls(ANY_SOURCE, ANY_TAG, options.timeout_s)
        self._group: Group | None = None

    @property
    def tuner_state(self) -> TunerState:
        """The decision table and the calibration by which the tuner chooses; rank 0 has read them for all ranks."""
        return self._planner.tuner_state

    @property
    def _reducer(self) -> Reducer:
        """The reducer for custom ops; it is made, and its module is imported, when the first call needs it."""
        if self._reducer_if_any is None:
            from unisono.collectives.custom_ops.reducer import Reducer

            self._reducer_if_any = Reducer(self._executor, self._planner)
        return self._reducer_if_any

    def _dispatch(
        self, collective: str, x: Any, out: Any, target: Any, *, wait: bool = True, **arguments: Unpack[Arguments]
    ) -> Any:
        """Check a call, run it, add it to the call cache if possible, and return its result.

        The arguments are those of `CallArguments`. `target` is the array that a cached call writes: `out`, or if `out`
        is None, the array that the method has made for the result, or None. With ``wait=False`` the call is started,
        and its `Work` is returned. In a group the call is only recorded, and its `Work` is returned.
        """
        if self._group is not None:
            return self._group.recorder.add(collective, x, out, target, **arguments)
        try:
            return self._make_call(CallArguments(collective, x, out, **arguments), wait)
        except (OSError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            raise self._refused_by_system(collective, error) from None

    def _make_call(self, arguments: CallArguments, wait: bool) -> Any:
        collective, x, out = arguments[:3]
        arrays = out if x is None else x
        if type(arrays) in LISTS and not arrays:
            if wait:
                return arrays
            return Work(self._works, None, arrays, self._limit_s(arguments.timeout_s), None)
        if wait and arguments.counts is None and type(arrays) not in LISTS and _is_of_other_library(x, out):
            return self._run_on_views(arguments)
        call = self._check_call(arguments)
        limit_s = self._limit_s(arguments.timeout_s)
        work = None if wait else call.start(limit_s)
        if work is None:
            call.run(limit_s)
        call.remember(collective, x, out, arguments.op, arguments.root, arguments.algorithm)
        return call.checked.finish() if work is None else work

    def _start(
        self,
        collective: str,
        x: Any,
        out: Any,
        target: Any,
        *,
        op: str | Op | None = None,
        root: int | None = None,
        algorithm: AlgorithmLike = None,
        timeout_s: float | None = None,
    ) -> Work[Any]:
        """Start a call from the call cache, or else by `_dispatch`, whose arguments it takes; return its work."""
        limit_s = self._limit_s(timeout_s)
        operation = self._cache.start(collective, x, target, op, root, algorithm, limit_s)
        if operation is None:
            work: Work[Any] = self._dispatch(
                collective, x, out, target, wait=False, op=op, root=root, algorithm=algorithm, timeout_s=timeout_s
            )
            return work
        has_result = CONTRACTS[collective].has_output(self.rank, root or 0)
        return self._works.add(operation, target if has_result else None, limit_s)

    def _refused_by_system(self, action: str, error: Exception) -> TransportUnavailableError:
        """Return the error of a call for which the system refused resources, and let the call fail on all ranks."""
        rank = self._executor.members[self.rank]
        refused = unavailable(f"rank {rank} cannot carry out {action}", error, self.rank)
        self._executor.fail(refused)
        return refused

    def _run_on_views(self, arguments: CallArguments) -> Any:
        """Call the method again on numpy views of `x` and `out`, so that the call cache can run the call."""
        contract, x, out = CONTRACTS[arguments.collective], arguments.x, arguments.out
        options: dict[str, Any] = {"algorithm": arguments.algorithm, "timeout_s": arguments.timeout_s}
        if contract.reduces:
            options["op"] = arguments.op
        if contract.input_at_root or contract.output_at_root:
            options["root"] = arguments.root
        source = None if x is None else adapters.view(x, "x")
        writes = out is not None and contract.has_output(self.rank, arguments.root or 0)
        target = adapters.view_to_write(out, "out") if writes else None
        result = getattr(self, arguments.collective)(source, out=target, **options)
        if writes or result is None:
            return out if writes else None
        return adapters.adapter_of(x, "x").wrap(result, x)

    def _call_of(self, spec: CallSpec, elements: int) -> Call:
        layout = layout_of(spec.collective, (elements,), size=self.size, rank=self.rank)
        return self._planner.find(spec._replace(layout=layout, algorithm="auto"))

    def _call_on_host(
        self, spec: CallSpec, x: AnyArray | None, out: AnyArray | None, counts: Counts, timeout_s: float
    ) -> None:
        self._dispatch(
            spec.collective,
            x,
            out,
            out,
            op=spec.op,
            root=spec.root,
            counts=counts,
            algorithm=spec.algorithm,
            timeout_s=timeout_s,
        )

    def _host_calls(self) -> HostCalls:
        """Return a communicator of the same ranks, for the parts of device calls that run on the host."""
        raise NotImplementedError

    # --- checking calls --------------------------------------------------------------------------------------------

    def _check_call(self, arguments: CallArguments) -> ExecutableCall:
        """Check a call and return it; raises the errors of `_check_calls`. Nothing is sent."""
        (call,) = self._check_calls([spread(arguments)], list_of(arguments.x, arguments.out)).calls
        return call

    def _check_calls(self, by_call: Sequence[Sequence[CallArguments]], gathered: type[Any] | None) -> CheckedCalls:
        """Check calls that differ only in arrays and ops, and choose their kinds. Nothing is sent.

        Calls on host memory without custom ops are fused into one `HostCall`. Other calls are not fused.

        Args:
            by_call: for each call of the user, one call for each of its arrays, as `spread` returns them.
            gathered: the type of the results of a call, list or tuple; None for the result of a single array.

        Raises:
            UsageError: a call is wrong, or the communicator is closed.
            NoAlgorithmError: no algorithm carries a call out.
        """
        self._check_usable()
        singles = by_call[0] if len(by_call) == 1 else list(chain.from_iterable(by_call))
        if any(
            not adapters.are_of_numpy(single.x, single.out) and on_device(single.x, single.out) for single in singles
        ):
            on_gpu = [self._check_on_device(of_call, gathered) for of_call in by_call]
            return CheckedCalls([array for call in on_gpu for array in call.checked.arrays], on_gpu)
        arrays = self._bind(singles)
        if not any(is_by_function(single.op) for single in singles):
            return CheckedCalls(arrays, [self._host_call(arrays, gathered)])
        remaining, fused, custom = iter(arrays), list[BoundArray](), list[ExecutableCall]()
        for of_call in by_call:
            own = list(islice(remaining, len(of_call)))
            if is_by_function(of_call[0].op):
                reductions = self._reducer.prepare(own, gathered)
                custom.append(self._verified(CustomOpCall(self._reducer, self._works, reductions)))
            else:
                fused += own
        return CheckedCalls(arrays, [self._host_call(fused, gathered), *custom] if fused else custom)

    def _host_call(self, arrays: Sequence[BoundArray], gathered: type[Any] | None) -> ExecutableCall:
        return self._verified(HostCall(self._executor, self._works, self._planned(arrays, gathered)))

    def _verified(self, call: ExecutableCall) -> ExecutableCall:
        """Return the call, with a comparison of its results if the option `verify_results` asks for one."""
        return call if self._verifier is None else self._verifier.verified(call)

    def _check_on_device(self, singles: Sequence[CallArguments], gathered: type[Any] | None) -> DeviceCall:
        prepare = self._reducer.prepare if is_by_function(singles[0].op) else self._planned_on_device
        calls = self._devices.calls
        checked = calls.prepared(lambda memory: prepare(self._bind(singles, memory), gathered))
        return DeviceCall(calls, checked, self._check_usable)

    def _bind(self, singles: Sequence[CallArguments], memory: Memory = HOST) -> list[BoundArray]:
        """Return the arrays of calls on one array each, which run together; they must not overlap."""
        arrays = [self._bind_array(single, memory) for single in singles]
        if len(arrays) > 1:
            operands.check_apart([(array.source, array.target) for array in arrays])
        return arrays

    def _planned_on_device(self, arrays: Sequence[BoundArray], gathered: type[Any] | None) -> PreparedCall:
        """Return the one call on these arrays. The plan of a call that NCCL carries out only serves to check it."""
        specs = [array.spec for array in arrays]
        is_by_nccl = as_request(specs[0].algorithm).algorithm in BY_NCCL
        return self._planned(
            arrays, gathered, [spec._replace(algorithm="auto") for spec in specs] if is_by_nccl else specs
        )

    def _planned(
        self, arrays: Sequence[BoundArray], gathered: type[Any] | None, specs: Sequence[CallSpec] | None = None
    ) -> PreparedCall:
        """Return the one call on these arrays, with its plan; `specs` replaces the specs of the arrays."""
        call = self._planner.find(*(specs or (array.spec for array in arrays)))
        if any(array.is_in_place for array in arrays):
            _check_in_place(call)
        return PreparedCall(arrays, gathered, call)

    def _bind_array(self, arguments: CallArguments, memory: Memory) -> BoundArray:
        """Return the array of a call on one array, with its call spec and the memory that the plan reads and writes."""
        collective, x, out, op, root, counts, algorithm, _ = arguments
        contract = CONTRACTS[collective]
        root = None if root is None else checked_integer(root, "root", 0, self.size - 1)
        if contract.input is Cut.TOKEN:
            return BoundArray(CallSpec(collective, algorithm=algorithm))
        any_order = contract.input is Cut.VECTOR
        rows = None if counts is None else _rows(counts, self.size)
        # In a scatter only the root has an x; the other ranks learn shape and dtype from their out.
        has_x = contract.input is not Cut.SHARES or contract.has_input(self.rank, root or 0)
        if has_x and x is None:
            raise UsageError(_missing_x(collective))
        source = memory.source(x, any_order=any_order) if has_x else None
        written = self._out_operand(memory, contract, out, root or 0, any_order)
        layout = self._layout(collective, source, written, rows)
        result, target = self._result(memory, collective, contract, root or 0, layout, source, out, written)
        like = source or target
        assert like is not None, "a rank without x has an out"
        is_in_place = bool(source and target and operands.share_memory(source, target, layout.offset))
        result, convert = (result, None) if result is out or result is None else memory.wrapped(result, x)
        reads = source is not None and contract.has_input(self.rank, root or 0)
        return BoundArray(
            CallSpec(collective, layout, like.dtype, like.order, op, root, algorithm),
            source.flat if source and reads else None,
            target.flat if target else None,
            result,
            source is not None and reads and source.is_packed,
            is_in_place,
            convert,
            op if isinstance(op, Op) and op.factor is not None else None,
        )

    def _out_operand(self, memory: Memory, contract: Contract, out: Any, root: int, any_order: bool) -> Operand | None:
        """Return the operand of the user's `out`; None if there is no `out`, or this rank gets no result."""
        if out is None or not contract.has_output(self.rank, root):
            return None
        operand = memory.target(out)
        if operand.order == "F" and not any_order:
            raise UsageError("out is in F order, where the parts of the ranks are not contiguous: pass one in C order")
        return operand

    def _layout(
        self,
        collective: str,
        source: Operand | None,
        written: Operand | None,
        rows: tuple[tuple[int, ...], ...] | None,
    ) -> Layout:
        if source is not None:
            return layout_of(collective, source.shape, size=self.size, rank=self.rank, rows=rows)
        if written is not None:
            return layout_of_share(written.shape, size=self.size, rank=self.rank, rows=rows)
        raise UsageError(
            f"{collective} needs an out on every rank but the root, because its shape and dtype say what the rank "
            "receives: pass an out"
        )

    def _result(
        self,
        memory: Memory,
        collective: str,
        contract: Contract,
        root: int,
        layout: Layout,
        source: Operand | None,
        out: Any,
        written: Operand | None,
    ) -> tuple[Any, Operand | None]:
        """Return the array that the user gets, and the operand to write it; both None if this rank gets no result."""
        if source is None:
            return out, written
        if written is not None:
            operands.check_fit(written, source, layout.results)
            return out, written
        if contract.has_output(self.rank, root):
            return memory.new(layout.results[0], source, zeros=collective == "exscan")
        return None, None

    def _rank_of(self, rank: int, name: str) -> int:
        return checked_integer(rank, name, 0, self.size - 1)

    def _peer_of(self, peer: int, name: str) -> int:
        self._check_usable()
        peer = self._rank_of(peer, name)
        if peer == self.rank:
            raise UsageError(f"{name} is this rank itself ({peer}): messages go between two ranks")
        return peer

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise UsageError(self._refusal)

    def _check_alone(self) -> None:
        """Check that a call that consists of several dependent messages can be made now.

        Raises:
            UsageError: the call is in a group, whose messages only start when the group ends; or the communicator is
                closed.
        """
        self._check_usable()
        if self._group is not None:
            raise UsageError("this call waits for messages of its own: make it outside of a group")

    def _limit_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._options.timeout_s
        return checked_timeout_s(timeout_s)


def spread(arguments: CallArguments) -> list[CallArguments]:
    """Return one call for each array of a call on a list of arrays; a call on a single array as it is.

    Raises:
        UsageError: `out` is not a list of as many arrays as `x`, or there are none.
    """
    x, out = arguments.x, arguments.out
    if arguments.counts is not None or CONTRACTS[arguments.collective].input is Cut.TOKEN or list_of(x, out) is None:
        return [arguments]
    sources = [None] * len(out) if x is None else x
    if not sources:
        raise UsageError("x is an empty list: there is nothing to be done")
    _check_elements(sources)
    targets = operands.outs_of(sources, out)
    return [arguments._replace(x=source, out=target) for source, target in zip(sources, targets, strict=True)]


def _missing_x(collective: str) -> str:
    """Return the error of a call without an x, such as that of a broadcast on a rank that does not know the values."""
    by_object = {
        "broadcast": "a value that only the root knows: broadcast_object(value, root=root)",
        "scatter": "values of any kind: scatter_object(values, root=root)",
        "gather": "values of any kind: gather_object(value, root=root)",
        "allgather": "values of any kind: allgather_object(value)",
    }
    of_root = (
        " of the root's shape and dtype, whose values are ignored off the root" if collective == "broadcast" else ""
    )
    text = f"x is None in {collective}: every rank passes an array{of_root}"
    return f"{text}; for {by_object[collective]}" if collective in by_object else text


def _is_of_other_library(x: Any, out: Any) -> bool:
    """Return whether an array in host memory is not numpy's."""
    return not adapters.are_of_numpy(x, out) and not on_device(x, out)


def _check_elements(x: Sequence[Any]) -> None:
    """Raise `UsageError` if a list that was passed as several arrays holds the elements of one array."""
    for index, element in enumerate(x):
        if isinstance(element, (complex, float, int, np.generic, list, tuple)):
            item = f"x[{index}] is of type {type(element).__name__}"
            raise UsageError(f"a list is several arrays, and {item}: pass numpy.asarray(x) as one array")


def _check_in_place(call: Call) -> None:
    name = call.signature.algorithm
    if not find(call.plan.collective, parsed(name).algorithm).in_place:
        raise UsageError(
            f"{call.signature.collective} by {name!r} cannot run in place: pass an out that shares no memory with x"
        )


def _rows(counts: tuple[Sequence[int], ...], size: int) -> tuple[tuple[int, ...], ...]:
    names = ("counts",) if len(counts) == 1 else ("send_counts", "recv_counts")
    return tuple(checked_rows(name, rows, size) for name, rows in zip(names, counts, strict=True))


def checked_integer(value: int, name: str, least: int, most: int) -> int:
    """Return `value` as an integer from `least` to `most`.

    Raises:
        UsageError: `value` is something else; the text calls it `name`.
    """
    try:
        integer = operator.index(value)
    except TypeError:
        integer = least - 1
    if isinstance(value, bool) or not least <= integer <= most:
        raise UsageError(f"{name} must be an integer, {least} to {most}, not {value!r}")
    return integer
