"""How a collective call is made: checked and prepared, run, and known from then on.

Theory of operation. A call is looked up by what all ranks must agree on; the first of its kind is planned by the
tuner's choice and compiled by the executor, and later ones go straight to it. Ranks need not agree before they
communicate: every message carries a digest of the call, so a disagreement is found by whoever receives it.

The first call of a kind takes the long way through this module, where everything is checked. It is then known to the
executor's cache by its very arguments, and each method of a communicator asks the cache first.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono import log
from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.variants import parsed
from unisono.algorithms.ir.contracts import CONTRACTS, Contract, Cut
from unisono.autograph import unconverted
from unisono.collectives.arrays import adapters, operands
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import HOST, LISTS, Memory, Operand, list_of
from unisono.collectives.calls.planning import AlgorithmLike, CallPlanner, CallSpec, HostLayout
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
from unisono.transports.contracts.executor import NO_CACHE, Executor
from unisono.transports.host.system_limits import is_refusal, unavailable
from unisono.tuning.decide.choice import NO_STATE, TunerState

if TYPE_CHECKING:
    from typing_extensions import TypedDict, TypeVar, Unpack

    from unisono.collectives.calls.group_recorder import Group
    from unisono.collectives.custom_ops.reducer import Reducer, Reductions
    from unisono.collectives.device.contracts import Counts, HostCalls
    from unisono.collectives.device.work import CheckedDeviceCall

    class Arguments(TypedDict, total=False):
        """What `CallArguments` has beside the collective and the arrays."""

        op: str | Op | None
        root: int | None
        counts: tuple[Sequence[int], ...] | None
        algorithm: AlgorithmLike
        timeout_s: float | None

    Method = TypeVar("Method", bound=Callable[..., Any])

    def cached_method(method: Method) -> Method:
        """Let the executor's cache be asked before a collective method is, where the call has an `out` to ask for."""

    def fast_message(method: Method) -> Method:
        """Let the executor pass a message on, if it is plain, before a method of messages is asked."""
else:
    cached_method = _core.CachedMethod
    fast_message = partial(_core.CachedMethod, cache="_messages")

_log = log.get(log.NAME)


class CallArguments(NamedTuple):
    """The arguments of a collective call, as the user gave them; None if not given, and where the call has no such.

    The collective is called by its name in the registry; `counts` are rows for each rank, ``(counts,)`` or
    ``(send_counts, recv_counts)``, and None for equal shares.
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
    """What the collectives of a communicator have in common."""

    # The caches are where `CachedMethod` finds them without looking them up.
    __slots__ = ("__dict__", "__weakref__", "_cache", "_messages")

    def __init_subclass__(cls) -> None:
        unconverted(cls)

    def __init__(self, executor: Executor, place: HostLayout, options: Options, known: TunerState = NO_STATE) -> None:
        self.rank = executor.rank
        self.size = executor.size
        self._executor = executor
        self._options = options
        self._calls = CallPlanner(self.rank, self.size, place, options, executor.vendors, known)
        self._reducer_if_any: Reducer | None = None
        self._works = Works(executor)
        self._devices = Devices(executor, self._calls, self._works, options, self._spare)
        self._refusal: str | None = None
        # With debugging messages every call takes the long way, where it is timed.
        debugging = _log.shows("debug")
        self._cache = NO_CACHE if debugging else executor.call_cache(options.timeout_s)
        self._messages = executor.message_calls(ANY_SOURCE, ANY_TAG, options.timeout_s)
        self._group: Group | None = None

    @property
    def known(self) -> TunerState:
        """What the tuner knows of this machine: the table and the calibration that rank 0 has found."""
        return self._calls.known

    @property
    def _reducer(self) -> Reducer:
        """What carries out reductions by functions, made for the first of them."""
        if self._reducer_if_any is None:
            from unisono.collectives.custom_ops.reducer import Reducer

            self._reducer_if_any = Reducer(self._executor, self._calls)
        return self._reducer_if_any

    def _dispatch(self, collective: str, x: Any, out: Any, target: Any, **arguments: Unpack[Arguments]) -> Any:
        """Prepare a call, run it, and let it be known by its arguments from then on, if it can be; return its result.

        The arguments are those of `CallArguments`. `target` is the array that a cached call writes: `out`, or, if that
        None, another array or None. In a group, the call is only taken note of, and its `Work` returned.
        """
        if self._group is not None:
            return self._group.notes.add(collective, x, out, target, **arguments)
        try:
            return self._anew(CallArguments(collective, x, out, **arguments))
        except (OSError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            raise self._refused_by_system(collective, error) from None

    def _anew(self, given: CallArguments) -> Any:
        collective, x, out = given[:3]
        several = out if x is None else x
        if type(several) in LISTS and not several:
            return several
        if not adapters.are_of_numpy(x, out) and on_device(x, out):
            limit_s = self._limit_s(given.timeout_s)
            return self._devices.calls.start(self._on_device(given), limit_s, here=True).wait()
        if given.counts is None and type(several) not in LISTS and not adapters.are_of_numpy(x, out):
            return self._by_views(given)
        if is_by_function(given.op):
            reductions = self._reductions(given)
            self._reducer.run(reductions, self._limit_s(given.timeout_s))
            return reductions.finish()
        prepared = self._prepare(given)
        limit_s = self._limit_s(given.timeout_s)
        self._run(prepared, prepared.sources(), limit_s)
        self._remember(prepared, collective, x, out, given.op, given.root, given.algorithm)
        return prepared.finish()

    def _run(self, prepared: PreparedCall, sources: Sequence[AnyArray | None], limit_s: float) -> None:
        began = time.perf_counter()
        self._executor.run(prepared.call, sources, prepared.targets, limit_s)
        _log.debug("%s took %.1f us", prepared.call.signature, (time.perf_counter() - began) * 1e6)

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
        """Start a call, which goes on by itself; the arguments are those of `_dispatch`."""
        limit_s = self._limit_s(timeout_s)
        operation = self._cache.start(collective, x, target, op, root, algorithm, limit_s)
        if operation is None:
            return self._dispatch_async(
                collective, x, out, target, op=op, root=root, algorithm=algorithm, timeout_s=timeout_s
            )
        has_result = CONTRACTS[collective].has_output(self.rank, root or 0)
        return self._works.add(operation, target if has_result else None, limit_s)

    def _dispatch_async(
        self, collective: str, x: Any, out: Any, target: Any, **arguments: Unpack[Arguments]
    ) -> Work[Any]:
        """The same as `_dispatch`, for a call that goes on by itself."""
        if self._group is not None:
            work: Work[Any] = self._group.notes.add(collective, x, out, target, **arguments)
            return work
        try:
            return self._start_anew(CallArguments(collective, x, out, **arguments))
        except (OSError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            raise self._refused_by_system(collective, error) from None

    def _start_anew(self, given: CallArguments) -> Work[Any]:
        collective, x, out = given[:3]
        limit_s = self._limit_s(given.timeout_s)
        several = out if x is None else x
        if type(several) in LISTS and not several:
            return Work(self._works, None, several, limit_s, None)
        if not adapters.are_of_numpy(x, out) and on_device(x, out):
            return self._devices.calls.start(self._on_device(given), limit_s, here=False)
        if is_by_function(given.op):
            reductions = self._reductions(given)
            operation = self._reducer.start(reductions, limit_s)
            return self._works.add(operation, None, limit_s, lambda _: reductions.finish(), is_counted=False)
        prepared = self._prepare(given)
        operation = self._executor.start(prepared.call, prepared.sources(), prepared.targets)
        operation.go_on(limit_s)
        self._remember(prepared, collective, x, out, given.op, given.root, given.algorithm)
        return self._works.add(operation, None, limit_s, lambda _: prepared.finish())

    def _refused_by_system(self, what: str, error: Exception) -> TransportUnavailableError:
        """Return the error of a call that the system does not let this rank make, and tell those who wait for it."""
        rank = self._executor.members[self.rank]
        refused = unavailable(f"rank {rank} cannot carry out {what}", error, self.rank)
        self._executor.fail(refused)
        return refused

    def _remember(
        self,
        prepared: PreparedCall,
        collective: str,
        x: Any,
        out: Any,
        op: str | Op | tuple[str | Op | None, ...] | None,
        root: int | None,
        algorithm: AlgorithmLike,
    ) -> None:
        """Let a call be known by its arguments from now on, if it can be."""
        if prepared.can_be_known:
            results = [part.result for part in prepared.parts]
            written = out if results[0] is None else results if prepared.gathered else results[0]
            self._executor.cache(prepared.call, collective, x, written, op, root, algorithm)

    def _by_views(self, given: CallArguments) -> Any:
        """Make a call of equal shares on numpy arrays in the memory of `x` and `out`, which the cache may know."""
        contract, x, out = CONTRACTS[given.collective], given.x, given.out
        arguments: dict[str, Any] = {"algorithm": given.algorithm, "timeout_s": given.timeout_s}
        if contract.reduces:
            arguments["op"] = given.op
        if contract.input_at_root or contract.output_at_root:
            arguments["root"] = given.root
        source = None if x is None else adapters.view(x, "x")
        writes = out is not None and contract.has_output(self.rank, given.root or 0)
        target = adapters.view_to_write(out, "out") if writes else None
        result = getattr(self, given.collective)(source, out=target, **arguments)
        if writes or result is None:
            return out if writes else None
        return adapters.adapter_of(x, "x").wrap(result, x)

    def _call_on_host(
        self, kind: CallSpec, x: AnyArray | None, out: AnyArray | None, counts: Counts, timeout_s: float
    ) -> None:
        """See `HostCalls._call_on_host`."""
        self._dispatch(
            kind.collective,
            x,
            out,
            out,
            op=kind.op,
            root=kind.root,
            counts=counts,
            algorithm=kind.algorithm,
            timeout_s=timeout_s,
        )

    def _on_device(self, given: CallArguments) -> CheckedDeviceCall:
        """Return the call that these arguments, of which some are on a device, make; raises as `_prepare` does."""
        self._check_usable()
        prepare = self._reducer.prepare if is_by_function(given.op) else self._prepared
        gathered = list_of(given.x, given.out)
        return self._devices.calls.prepared(lambda memory: prepare(self._parts(spread(given), memory), gathered))

    def _spare(self) -> HostCalls:
        """Return a communicator of the same ranks, for calls that this one consists of."""
        raise NotImplementedError

    def _prepare(self, given: CallArguments) -> PreparedCall:
        """Return the call that these arguments make. Nothing is sent.

        Raises:
            UsageError: the call is wrong, or the communicator is closed.
            NoAlgorithmError: no algorithm carries it out.
        """
        self._check_usable()
        return self._prepared(self._parts(spread(given)), list_of(given.x, given.out))

    def _reductions(self, given: CallArguments) -> Reductions:
        """Return the reduction by a function that these arguments make; raises as `_prepare` does."""
        self._check_usable()
        return self._reducer.prepare(self._parts(spread(given)), list_of(given.x, given.out))

    def _parts(self, calls: Sequence[CallArguments], memory: Memory = HOST) -> list[BoundArray]:
        """Return what calls on single arrays that go together have of each."""
        parts = [self._part(each, memory) for each in calls]
        if len(parts) > 1:
            operands.check_apart([(part.source, part.target) for part in parts])
        return parts

    def _prepared(self, parts: Sequence[BoundArray], gathered: type[Any] | None) -> PreparedCall:
        """Return the one call on these arrays."""
        call = self._calls.find(*(part.kind for part in parts))
        if any(part.is_in_place for part in parts):
            _check_in_place(call)
        return PreparedCall(parts, gathered, call)

    def _part(self, given: CallArguments, memory: Memory) -> BoundArray:
        """Return what a call has of one array; the call of a single array has nothing else."""
        collective, x, out, op, root, counts, algorithm, _ = given
        contract = CONTRACTS[collective]
        root = None if root is None else checked_integer(root, "root", 0, self.size - 1)
        if contract.input is Cut.TOKEN:
            return BoundArray(CallSpec(collective, algorithm=algorithm))
        any_order = contract.input is Cut.VECTOR
        rows = None if counts is None else _rows(counts, self.size)
        # Where only the root has shares to give away, the others are told by `out` what they get.
        has_x = contract.input is not Cut.SHARES or contract.has_input(self.rank, root or 0)
        source = memory.source(x, any_order=any_order) if has_x else None
        written = self._given(memory, contract, out, root or 0, any_order)
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

    def _given(self, memory: Memory, contract: Contract, out: Any, root: int, any_order: bool) -> Operand | None:
        """Return the operand of the user's `out`, unless there is none or it does not matter on this rank."""
        if out is None or not contract.has_output(self.rank, root):
            return None
        given = memory.target(out)
        if given.order == "F" and not any_order:
            raise UsageError("out is in F order, where the parts of the ranks are not contiguous: pass one in C order")
        return given

    def _layout(
        self, collective: str, source: Operand | None, given: Operand | None, rows: tuple[tuple[int, ...], ...] | None
    ) -> Layout:
        if source is not None:
            return layout_of(collective, source.shape, size=self.size, rank=self.rank, rows=rows)
        if given is not None:
            return layout_of_share(given.shape, size=self.size, rank=self.rank, rows=rows)
        raise UsageError(f"{collective} needs an out on every rank but the root: its shape and dtype say what comes")

    def _result(
        self,
        memory: Memory,
        collective: str,
        contract: Contract,
        root: int,
        layout: Layout,
        source: Operand | None,
        out: Any,
        given: Operand | None,
    ) -> tuple[Any, Operand | None]:
        """Return the array that the user gets and the operand to write it by; nothing where this rank gets nothing."""
        if source is None:
            return out, given
        if given is not None:
            operands.check_fit(given, source, layout.results)
            return out, given
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
        """Check that a call can be made that is more than one, each of which waits for the one before.

        Raises:
            UsageError: it cannot be in a group, or the communicator is closed.
        """
        self._check_usable()
        if self._group is not None:
            raise UsageError("this call waits for messages of its own: make it outside of a group")

    def _limit_s(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._options.timeout_s
        return checked_timeout_s(timeout_s)


def spread(given: CallArguments) -> list[CallArguments]:
    """Return the calls that there are in a call on a list of arrays, one for each; of an array alone, the call itself.

    Raises:
        UsageError: `out` is no list of as many arrays, or there are none.
    """
    x, out = given.x, given.out
    if given.counts is not None or CONTRACTS[given.collective].input is Cut.TOKEN or list_of(x, out) is None:
        return [given]
    sources = [None] * len(out) if x is None else x
    if not sources:
        raise UsageError("x is an empty list: there is nothing to be done")
    _check_elements(sources)
    return [given._replace(x=each, out=to) for each, to in zip(sources, operands.outs_of(sources, out), strict=True)]


def _check_elements(x: Sequence[Any]) -> None:
    """Check that a list that was passed as several arrays does not hold the elements of one.

    Raises:
        UsageError: it does.
    """
    for place, element in enumerate(x):
        if isinstance(element, (complex, float, int, np.generic, list, tuple)):
            what = f"x[{place}] is of type {type(element).__name__}"
            raise UsageError(f"a list is several arrays, and {what}: pass numpy.asarray(x) as one array")


def _check_in_place(call: Call) -> None:
    name = call.signature.algorithm
    if not find(call.plan.collective, parsed(name).algorithm).in_place:
        what = f"{call.signature.collective} by {name!r}"
        raise UsageError(f"{what} cannot run in place: pass an out that shares no memory with x")


def _rows(counts: tuple[Sequence[int], ...], size: int) -> tuple[tuple[int, ...], ...]:
    names = ("counts",) if len(counts) == 1 else ("send_counts", "recv_counts")
    return tuple(checked_rows(name, given, size) for name, given in zip(names, counts, strict=True))


def checked_integer(value: int, name: str, least: int, most: int) -> int:
    """Return `value` as an integer from `least` to `most`, or raise `UsageError`, which calls it `name`."""
    try:
        found = operator.index(value)
    except TypeError:
        found = least - 1
    if isinstance(value, bool) or not least <= found <= most:
        raise UsageError(f"{name} must be an integer, {least} to {most}, not {value!r}")
    return found
