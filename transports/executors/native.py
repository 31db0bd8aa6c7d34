"""The native executor: translates calls for the native core, opens their channels, and raises the core's failures."""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.catalogue.vendors import MPI_NATIVE
from unisono.algorithms.ir.binding import Shape, bounds
from unisono.algorithms.ir.encode import encode
from unisono.algorithms.ir.plan import Buffer, Counts, peers
from unisono.dtypes import DTYPES, DType
from unisono.errors import AbortedError, PeerLostError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.foundation.records import record
from unisono.operations import Combine
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call, Extent, MemoryType, Operand, Usage, VendorRefusal, moved
from unisono.transports.contracts.communicator_id import communicator_id
from unisono.transports.contracts.executor import ENDED, CallCache, Exchange, Message, MessageCalls, Operation
from unisono.transports.contracts.transport import ANY_OBJECT_TAG, Traffic
from unisono.transports.executors.call_memory import arrays_of, checked_extents
from unisono.transports.executors.call_records import facts_of
from unisono.transports.executors.plan_checks import MESSAGES, READS, check_plan, check_reads
from unisono.transports.host.system_limits import unavailable
from unisono.transports.links.failures import ABORTED, ERRORS, INTERNAL, MISMATCH, PEER_LOST, TIMEOUT, culprit, kind_of
from unisono.transports.links.session import Session
from unisono.transports.recorder.recorder import Recorder
from unisono.transports.reductions.definition import known_dtype, numpy_dtype
from unisono.transports.reductions.native import divisor

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.transports.mpi.collectives import MpiCollectives


# The id of the communicator of all ranks.
_WORLD = 0
# The number of the communicator of authenticated links. Communicators of the user on the same ranks count from 0.
_AUTHENTICATED = -1
# The number of the communicator for the calls of compiled programs.
_PROGRAMS = -2
# The number of the communicator of the first window; later ones count downwards.
_FIRST_WINDOW = -3

_PENDING, _DONE = 0, 1
# The outcome of a wait for a lock whose time has passed.
_LOCK_LATE = 1

# Dtypes that numpy cannot export by the buffer protocol are passed as unsigned integers of the same size.
_AS_INTEGERS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
_DTYPES_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
# The INPUT of a barrier, and its extents in the form of the core.
_TOKEN = np.zeros(1, np.uint8)
_TOKEN_ROWS = [(1, DTYPES["uint8"].code, int(Combine.SUM), 1)], [(0, DTYPES["uint8"].code, int(Combine.SUM), 1)]
_Buffers: TypeAlias = "tuple[AnyArray | None, ...]"
# The longest wait for the end of any call if MPI may run one: the core does not notice the end of a call by MPI.
_LOOK_S = 0.002
# A rank cannot end one of these before every other rank has begun it. So if it is the last call, all ranks agree on it.
_ENDED_BY_ALL = frozenset({"allreduce", "allgather", "alltoall", "reduce_scatter", "barrier"})
# How long `close` waits for ranks that have not made this rank's last call yet. They detect later disagreements.
_SETTLING_S = 5.0
# The number of compiled calls that are kept. Each keeps its `Call` alive, because the id of the `Call` is the key.
_MOST_COMPILED = 4096


class _Failures:
    """Raises the failure of a rank's communicators: the failure itself the first time, then `AbortedError`."""

    def __init__(
        self, control: _core.Control, recorder: Recorder, rank: int, hosts_and_pids: Sequence[tuple[str, int]]
    ) -> None:
        self._control = control
        self._recorder = recorder
        self._rank = rank
        self._hosts_and_pids = hosts_and_pids
        self._process = os.getpid()
        self._raised = False

    def check(self, outcome: int, operation: str) -> bool:
        """Return True if `outcome` is success; otherwise raise the failure."""
        if outcome == _DONE:
            return True
        if os.getpid() != self._process:
            raise UsageError("this process was forked from a rank", rank=self._rank, operation=operation)
        kind, *_, text = self._control.failure()
        if kind == 0:
            raise UsageError("this communicator is closed", rank=self._rank, operation=operation)
        if self._has_been_raised():
            raise AbortedError(f"this communicator had failed: {text}", rank=self._rank, operation=operation)
        self._raised = True
        # The error gets no local name here: a frame that refers to its own error keeps the caller's objects alive.
        raise self._error(operation)

    def _error(self, operation: str) -> UnisonoError:
        kind, finder, peer, sequence, text = self._control.failure()
        error = ERRORS[kind](
            text,
            rank=self._rank,
            peer=culprit(kind, finder, peer),
            operation=operation,
            sequence=sequence if sequence >= 0 else None,
            buffers="the contents of the output are undefined",
        )
        error.dump = self._recorder.dump_failure() or None
        error.last_calls = self._recorder.last_calls()
        if isinstance(error, PeerLostError) and peer >= 0:
            error.host, error.pid = self._hosts_and_pids[peer]
        return error

    def check_disagreement(self, operation: str) -> None:
        """Raise the failure if it is a `MismatchError` that no call of this rank has raised."""
        if not self._has_been_raised() and self._control.failure()[0] == MISMATCH:
            self.check(_PENDING, operation)

    def _has_been_raised(self) -> bool:
        return self._raised or _core.xla_has_failed(self._control)

    def check_now(self, operation: str) -> None:
        """Raise the failure, if there is one."""
        if self._control.failed():
            self.check(_PENDING, operation)

    def lose(self, text: str) -> None:
        """Make every call of the job fail, on all ranks, with `PeerLostError`."""
        self._control.fail(PEER_LOST, -1, text)

    def time_out(self, text: str) -> None:
        """Make every call of the job fail, on all ranks, with `CollectiveTimeoutError`."""
        self._control.fail(TIMEOUT, -1, text)

    def break_down(self, text: str) -> None:
        """Make every call of the job fail, on all ranks, with `InternalError`."""
        self._control.fail(INTERNAL, -1, text)

    def abort(self, reason: str) -> None:
        """Make every call of the job fail, on all ranks, with `AbortedError`; raises `UsageError` in a forked child."""
        if os.getpid() != self._process:
            raise UsageError("this process was forked from a rank: only the rank can abort", rank=self._rank)
        self._control.fail(ABORTED, self._rank, f"rank {self._rank} aborted: {reason}")


class NativeOperation:
    """The `Operation` of a call that the native core runs."""

    def __init__(self, failures: _Failures, started: _core.StartedCall, operation: str) -> None:
        self._failures = failures
        self._started = started
        self._operation = operation

    def poll(self) -> bool:
        outcome = self._started.poll()
        return outcome != _PENDING and self._failures.check(outcome, self._operation)

    def wait(self, timeout_s: float) -> None:
        outcome = self._started.wait(timeout_s)
        if outcome != _DONE:
            self._failures.check(outcome, self._operation)

    def run_in_background(self, timeout_s: float) -> None:
        self._started.run_in_background(timeout_s)

    def ended(self) -> bool:
        return self._started.poll() != _PENDING

    def abort(self, reason: str) -> None:
        self._failures.abort(reason)


class NativeProbe(NativeOperation):
    """The `Probe` of a probe or a receive that the native core runs."""

    def cancel(self) -> None:
        """End a receive that runs in the background without a message, unless it has matched one."""
        self._started.cancel()

    def message(self) -> Message | None:
        message = self._started.message()
        if message is None:
            return None
        source, tag, code, nbytes = message
        dtype = _DTYPES_BY_CODE.get(code) or _moved_as_bytes(code)
        return Message(source, tag, dtype.name, nbytes // dtype.itemsize)

    def host_copy(self) -> bytes | None:
        return self._started.host_copy()

    def acknowledge(self, timeout_s: float) -> None:
        started = self._started.acknowledge()
        if started is not None:
            NativeOperation(self._failures, started, self._operation).wait(timeout_s)

    def fits(self, dtype: DType, count: int, shape: Sequence[int]) -> bool:
        return self._started.fits(dtype.code, count * dtype.itemsize, shape)


@record
class _Compiled:
    """A call in the form of the native core, and the lengths of INPUT and OUTPUT in elements."""

    call: Call
    native: _core.Call
    lengths: tuple[int, int]


class NativeExecutor:
    """Runs the plans of one communicator in the native core, over its channels.

    Args:
        session: the session of this rank, which has a roster.
        parent: the executor of the parent communicator; None for all ranks of the job.
        communicator: the id of the communicator, equal on all ranks; 63 bits.
        members: its ranks, by their numbers in the job; empty for all ranks.
        mpi: MPI's collectives of the same ranks in the same order, or None.
        is_authenticated: whether messages travel only over authenticated links, whatever the option `transports` says.
    """

    def __init__(
        self,
        session: Session,
        parent: NativeExecutor | None = None,
        communicator: int = _WORLD,
        members: tuple[int, ...] = (),
        mpi: MpiCollectives | None = None,
        is_authenticated: bool = False,
    ) -> None:
        self._mpi = mpi
        self.vendors: Mapping[str, VendorRefusal] = {} if mpi is None else {MPI_NATIVE: mpi.refusal}
        self._agreements: dict[int, tuple[Call, Call]] = {}
        self.members = members or tuple(range(session.identity.size))
        self.rank = self.members.index(session.identity.rank)
        self.size = len(self.members)
        self._session = session
        self._communicator = communicator
        crowded = session.peers_of_host() > session.cores_of_host()
        try:
            self._endpoint = _core.Endpoint(session.control, communicator, crowded, list(members))
        except OSError as error:
            refused = unavailable(f"rank {session.identity.rank} cannot create a communicator", error, self.rank)
            session.control.fail(
                kind_of(refused), -1, refused.message
            )  # without it, other ranks would wait in their first call
            raise refused from None
        # An object of its own, so that the call cache and persistent calls do not refer to this executor.
        self._failures: _Failures = (
            parent._failures
            if parent
            else _Failures(session.control, session.recorder, session.identity.rank, session.hosts_and_pids())
        )
        self._subgroups: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)
        self._windows = itertools.count()
        self.failed = session.control.failed
        self._compiling = threading.Lock()
        self._cache: _core.CallCache | None = None
        self._compiled: dict[int, _Compiled] = {}
        self._closed = False
        session.channels.add_communicator(communicator, self._endpoint, is_authenticated=is_authenticated)

    @property
    def session(self) -> Session:
        """The session of this rank."""
        return self._session

    @property
    def communicator(self) -> int:
        """The communicator's id."""
        return self._communicator

    def subgroup(self, ranks: Sequence[int]) -> NativeExecutor:
        members = tuple(self.members[rank] for rank in ranks)
        number = next(self._subgroups[members])
        communicator = communicator_id(self._communicator, members, number)
        mpi = None if self._mpi is None else self._mpi.subgroup(members, communicator)
        return NativeExecutor(self._session, self, communicator, members, mpi)

    def authenticated(self) -> NativeExecutor:
        if self._session.channels.is_authenticated:
            return self
        communicator = communicator_id(self._communicator, self.members, _AUTHENTICATED)
        return NativeExecutor(self._session, self, communicator, self.members, is_authenticated=True)

    def for_programs(self) -> NativeExecutor:
        communicator = communicator_id(self._communicator, self.members, _PROGRAMS)
        return NativeExecutor(self._session, self, communicator, self.members)

    def for_windows(self) -> NativeExecutor:
        communicator = communicator_id(self._communicator, self.members, _FIRST_WINDOW - next(self._windows))
        is_authenticated = not self._session.channels.is_authenticated
        return NativeExecutor(self._session, self, communicator, self.members, is_authenticated=is_authenticated)

    def shares_memory_with(self, ranks: Sequence[int]) -> bool:
        return self._session.channels.shares_memory(self.members[rank] for rank in ranks)

    def part_of(self, memory: AnyArray, locks: AnyArray | memoryview, index: int, timeout_s: float) -> _core.WindowPart:
        return _core.WindowPart(memory, locks, index, self._session.control, timeout_s)

    def end_access(self, outcome: int, operation: str) -> None:
        if outcome == _LOCK_LATE:
            self._failures.time_out(
                f"rank {self.members[self.rank]} waited too long in {operation}, because another rank has stopped "
                "within an accumulate on the same part"
            )
        self._failures.check(_PENDING, operation)

    def serve_part(self, part: _core.WindowPart) -> _core.WindowServer:
        def open_channel(peer: int) -> None:
            with self._compiling:
                self._open([(_core.SENDING_LANE, peer)])

        return _core.WindowServer(self._endpoint, part, open_channel)

    def lock_part(self, part: _core.WindowPart, exclusive: bool, timeout_s: float, operation: str) -> None:
        outcome = part.lock(exclusive, self.rank, timeout_s, self._session.control)
        if outcome == _LOCK_LATE:
            holder = part.holder()
            by = f"rank {self.members[holder]} holds" if 0 <= holder < self.size else "other ranks share"
            self._failures.time_out(f"rank {self.members[self.rank]} waited {timeout_s:g} s for a lock that {by}")
        if outcome:
            self._failures.check(_PENDING, operation)

    def register(self, call: Call, timeout_s: float, zeros: int) -> int:
        return _core.register_for_xla(self._endpoint, self._compile(call).native, timeout_s, zeros)

    def register_exchange(self, exchange: Exchange, timeout_s: float, zeros: int) -> int:
        if exchange.dest is not None:
            with self._compiling:
                self._open([(_core.SENDING_LANE, exchange.dest)])
        return _core.register_exchange_for_xla(
            self._endpoint,
            _description(exchange),
            _side(exchange.dest, exchange.dtype, exchange.sent),
            _side(exchange.source, exchange.dtype, exchange.received),
            exchange.tag,
            zeros,
            timeout_s,
        )

    def unregister(self, number: int) -> None:
        _core.forget_for_xla(number)

    def start(self, call: Call, source: Operand, target: Operand) -> Operation:
        if call.plan.algorithm in self.vendors:
            return self._start_by_mpi(call, source, target)
        compiled = self._compile(call)
        if call.extents:
            source = checked_extents("source", source, call.extents, Buffer.INPUT, compiled.lengths[0])
            target = checked_extents("target", target, call.extents, Buffer.OUTPUT, compiled.lengths[1])
        request = self._endpoint.start(compiled.native, *_memory(compiled, source, target))
        return NativeOperation(self._failures, request, str(call.signature))

    def _start_by_mpi(self, call: Call, source: Operand, target: Operand) -> Operation:
        """Start a call that MPI runs, with the barrier by which the ranks agree on it."""
        assert self._mpi is not None
        if id(call) not in self._agreements:
            barrier = find("barrier", "dissemination").build(self.size, self.rank)
            self._agreements[id(call)] = call, Call(call.signature, barrier, Shape((1, 1), {}), ())
        agree = partial(self.start, self._agreements[id(call)][1], None, None)
        return self._mpi.start(call, source, target, agree, self._failures)

    def run(self, call: Call, source: Operand, target: Operand, timeout_s: float) -> None:
        if call.plan.algorithm in self.vendors:
            self.start(call, source, target).wait(timeout_s)
            return
        compiled = self._compile(call)
        outcome = self._endpoint.run(compiled.native, *_memory(compiled, source, target), timeout_s)
        if outcome != _DONE:
            self._failures.check(outcome, str(call.signature))

    def call_cache(self, timeout_s: float) -> CallCache:
        if self._cache is None:
            failures = self._failures

            def started(request: _core.StartedCall | None, operation: str) -> Operation:
                return ENDED if request is None else NativeOperation(failures, request, operation)

            self._cache = _core.CallCache(self._endpoint, np.ndarray, failures.check, started, timeout_s)
        return self._cache

    def cache(self, call: Call, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> None:
        if self._cache is not None and call.plan.algorithm not in self.vendors:
            compiled = self._compile(call)
            uses = (length > 0 for length in compiled.lengths)
            self._cache.add(collective, x, out, op, root, algorithm, compiled.native, *uses)

    def persistent(
        self,
        call: Call,
        source: Operand,
        target: Operand,
        timeout_s: float,
        result: Any,
        on_start: Callable[[Operation, Any], Any],
    ) -> Callable[..., Any]:
        if call.plan.algorithm in self.vendors:
            return partial(self._start_again, call, source, target, timeout_s, result, on_start)
        compiled = self._compile(call)
        memory = _memory(compiled, source, target)
        failures = self._failures

        def started(request: _core.StartedCall | None, operation: str, result: Any) -> Any:
            return on_start(ENDED if request is None else NativeOperation(failures, request, operation), result)

        return _core.PersistentCall(
            self._endpoint, compiled.native, *memory, failures.check, started, timeout_s, result
        )

    def _start_again(
        self,
        call: Call,
        source: Operand,
        target: Operand,
        timeout_s: float,
        result: Any,
        on_start: Callable[[Operation, Any], Any],
        wait: bool = True,
    ) -> Any:
        operation = self.start(call, source, target)
        if wait:
            operation.wait(timeout_s)
            return result
        operation.run_in_background(timeout_s)
        return on_start(operation, result)

    def sends_from(self, memory: MemoryType, dest: int, nbytes: int, timeout_s: float) -> bool:
        if dest == self.rank or not self._session.channels.carries(memory, self.members[dest]):
            return False
        with self._compiling:
            self._open([(_core.SENDING_LANE, dest)])
        deadline = Deadline(timeout_s)
        while (takes := self._endpoint.takes(_core.SENDING_LANE, dest, memory, nbytes)) is None:
            if self._session.control.failed() or deadline.has_passed():
                return False  # the message itself will raise the error
            time.sleep(_LOOK_S)
        return takes

    def receives_into(self, memory: MemoryType, source: int | None, nbytes: int) -> bool:
        others = [peer for peer in range(self.size) if peer != self.rank] if source is None else [source]
        return self.rank not in others and all(self._reaches(memory, peer, nbytes) for peer in others)

    def _reaches(self, memory: MemoryType, source: int, nbytes: int) -> bool:
        """Return whether messages of `source` can be received into `memory`, as far as the transport shows it.

        Before the channel is open, only the session knows what its transport carries.
        """
        takes = self._endpoint.takes(_core.RECEIVING_LANE, source, memory, nbytes)
        return self._session.channels.carries(memory, self.members[source]) if takes is None else takes

    def send(
        self,
        array: AnyArray,
        dtype: DType,
        dest: int,
        tag: int,
        memory: MemoryType = MemoryType.HOST,
        shape: Sequence[int] = (),
        *,
        synchronous: bool = False,
    ) -> NativeOperation:
        if dest != self.rank:
            with self._compiling:
                self._open([(_core.SENDING_LANE, dest)])
        request = self._endpoint.send(dest, dtype.code, tag, _as_buffer(array, dtype), memory, shape, synchronous)
        how = ", synchronous" if synchronous else ""
        call = f"send({_shown(array, dtype, shape)}, dest={dest}, tag={tag}{how})"
        return NativeOperation(self._failures, request, call)

    def recv(
        self,
        array: AnyArray,
        dtype: DType,
        source: int | None,
        tag: int | None,
        memory: MemoryType = MemoryType.HOST,
        shape: Sequence[int] = (),
        *,
        up_to: bool = False,
    ) -> NativeProbe:
        request = self._endpoint.receive(source, dtype.code, tag, _as_buffer(array, dtype), memory, shape, up_to)
        return NativeProbe(self._failures, request, f"recv({_shown(array, dtype, shape)}, {_origin(source, tag)})")

    def takes_from_itself(self, tag: int, nbytes: int) -> bool:
        return self._endpoint.takes_from_itself(tag, nbytes)

    def probe(self, source: int | None, tag: int | None, *, once: bool, takes: bool = False) -> NativeProbe:
        request = self._endpoint.probe(source, tag, once, takes)
        return NativeProbe(self._failures, request, f"{'iprobe' if once else 'probe'}({_origin(source, tag)})")

    def message_calls(self, any_source: object, any_tag: object, timeout_s: float) -> MessageCalls:
        return _core.MessageCalls(
            self._endpoint,
            np.ndarray,
            _code_of,
            any_source,
            any_tag,
            self._failures.check,
            partial(NativeOperation, self._failures),
            partial(NativeProbe, self._failures),
            timeout_s,
        )

    def wait_for_end(self, seen: int, most_s: float) -> int:
        # The core does not count calls by MPI. If there may be some, the caller must poll them, so this waits briefly.
        return self._endpoint.wait_for_end(seen, most_s if self._mpi is None else min(most_s, _LOOK_S))

    def links(self) -> Mapping[int, str]:
        others = (peer for peer in range(self.size) if peer != self.rank)
        return {peer: self._session.channels.link_to(self.members[peer]) for peer in others}

    def traffic(self) -> Mapping[int, Traffic]:
        totals: dict[int, Traffic] = {}
        for peer, transport, sent, sent_nbytes, received, received_nbytes, waited_ns in self._endpoint.traffic():
            moved = Traffic(transport, sent, sent_nbytes, received, received_nbytes, waited_ns / 1e9)
            totals[peer] = moved + totals.get(peer, Traffic(transport))
        return totals

    def usage(self) -> Sequence[tuple[Call, Usage]]:
        # Calls that were dropped because more than `_MOST_COMPILED` were compiled are not counted.
        agreements = {id(agreement) for _, agreement in list(self._agreements.values())}
        own = [compiled for key, compiled in list(self._compiled.items()) if key not in agreements]
        counts = [(compiled.call, compiled.native.usage()) for compiled in own]
        by_mpi = [] if self._mpi is None else self._mpi.usage()
        return [*((call, Usage(calls, timed, ns / 1e9)) for call, (calls, timed, ns) in counts), *by_mpi]

    def check(self, operation: str) -> None:
        self._failures.check_now(operation)

    def has_failed(self) -> bool:
        return self._session.control.failed()

    def fail(self, error: UnisonoError) -> None:
        control = self._session.control
        peer = -1 if error.peer is None else error.peer
        if isinstance(error, PeerLostError) and peer >= 0:
            control.lose(peer, error.message)
        else:
            control.fail(kind_of(error), peer, error.message)

    def dump(self, directory: str | os.PathLike[str]) -> Path:
        return self._session.recorder.dump(directory, "request")

    def trace(self, path: str | os.PathLike[str]) -> Path:
        return self._session.recorder.trace(path)

    def abort(self, reason: str) -> None:
        self._failures.abort(reason)

    def settle(self) -> None:
        collective = self._endpoint.last_call().partition("(")[0]
        if self.size > 1 and collective and collective not in _ENDED_BY_ALL and not self._session.control.failed():
            self._endpoint.settle(_SETTLING_S)
        self._failures.check_disagreement("close()")

    def close(self) -> None:
        if self._mpi is not None and not self._closed and self._mpi.close():
            self._failures.abort("it has left while MPI was running a call")
        self._closed = True
        self._session.channels.remove_communicator(self._communicator)
        self._endpoint.close()
        self._compiled.clear()
        if self._cache is not None:
            self._cache.forget()

    def _compile(self, call: Call) -> _Compiled:
        compiled = self._compiled.get(id(call))
        if compiled is None:
            with self._compiling:
                compiled = self._compiled.get(id(call)) or self._compile_anew(call)
        return compiled

    def _compile_anew(self, call: Call) -> _Compiled:
        if self._closed:
            raise UsageError("this communicator is closed", rank=self.rank, operation=str(call.signature))
        supported = READS if self._session.channels.shares_memory(self.members) else MESSAGES
        check_plan(call.plan, self.rank, self.size, self._session.channels.preference, supported)
        if supported is READS:
            check_reads(call.plan)
        if len(self._compiled) >= _MOST_COMPILED:
            self._compiled.clear()
        self._open(peers(call.plan))
        lengths = _lengths(call)
        compiled = self._compiled[id(call)] = _Compiled(call, _native_call(call, lengths), lengths)
        return compiled

    def _open(self, channels: list[tuple[int, int]]) -> None:
        self._session.channels.open(self._communicator, [(lane, self.members[peer]) for lane, peer in channels])


def _side(peer: int | None, dtype: DType, elements: int) -> tuple[int, int, int] | None:
    """Return one side of an exchange in the form of the core: the peer, the number of the dtype, and the bytes."""
    return None if peer is None else (peer, dtype.code, elements * dtype.itemsize)


def _description(exchange: Exchange) -> str:
    sides = {"dest": (exchange.dest, exchange.sent), "source": (exchange.source, exchange.received)}
    shown = [
        f"{name}={peer}, {exchange.dtype.name}[{elements}]"
        for name, (peer, elements) in sides.items()
        if peer is not None
    ]
    return f"exchange({'; '.join(shown)}; tag={exchange.tag})"


def _moved_as_bytes(code: int) -> DType:
    from unisono.transports.contracts.byte_dtypes import byte_dtype_of  # most programs do not need it

    return byte_dtype_of(code)


def _origin(source: int | None, tag: int | None) -> str:
    return f"source={'any' if source is None else source}, tag={'any' if tag in {None, ANY_OBJECT_TAG} else tag}"


def _shown(array: AnyArray, dtype: DType, shape: Sequence[int]) -> str:
    """Return the array of a message as its errors show it, such as ``float64[6,4]``."""
    return f"{dtype.name}[{','.join(map(str, shape or array.shape))}]"


def _code_of(element: np.dtype[Any]) -> int | None:
    """Return the number of a dtype if `element` is the object that numpy uses for it; None for an equal object."""
    dtype = known_dtype(element)
    return dtype.code if dtype is not None and element is numpy_dtype(dtype) else None


def _as_buffer(array: AnyArray, dtype: DType) -> AnyArray:
    integers = _AS_INTEGERS.get(dtype.name)
    return moved(array, dtype) if integers is None else array.view(integers)


def _memory(compiled: _Compiled, source: Operand, target: Operand) -> tuple[_Buffers, _Buffers]:
    """Return INPUT and OUTPUT in the form of the core: an array for each extent of `_rows`."""
    extents = compiled.call.extents
    if not extents:
        return (_TOKEN,), (None,)
    return _buffers(extents, source, compiled.lengths[0]), _buffers(extents, target, compiled.lengths[1])


def _buffers(extents: Sequence[Extent], operand: Operand, length: int) -> _Buffers:
    if length == 0:
        return (None,)
    pairs = zip(arrays_of(operand), extents, strict=True)
    return tuple(None if array is None else _as_buffer(array, extent.dtype) for array, extent in pairs)


def _lengths(call: Call) -> tuple[int, int]:
    if not call.extents:
        return 0, 0
    return _length(call, Buffer.INPUT), _length(call, Buffer.OUTPUT)


def _length(call: Call, buffer: Buffer) -> int:
    return sum(length for _, length in bounds(call.plan, buffer, call.shape))


def _rows(call: Call, buffer: Buffer, length: int) -> list[tuple[int, int, int, int]]:
    """Return the extents of a buffer in the form of the core; a single one for a buffer without elements."""
    rows = [_row(extent, extent.elements[buffer], call.plan.size) for extent in call.extents]
    return rows if length else [_row(call.extents[0], 0, call.plan.size)]


def _row(extent: Extent, elements: int, size: int) -> tuple[int, int, int, int]:
    op = extent.op
    combine = Combine.SUM if op is None else op.combine
    return elements, extent.dtype.code, int(combine), 1 if op is None else divisor(op, size)


def _native_call(call: Call, lengths: tuple[int, int]) -> _core.Call:
    rows = _TOKEN_ROWS
    if call.extents:
        rows = _rows(call, Buffer.INPUT, lengths[0]), _rows(call, Buffer.OUTPUT, lengths[1])
    return _core.Call(
        plan=_core.Plan(encode(call.plan)),
        inputs=rows[0],
        outputs=rows[1],
        counts=[list(call.shape.counts.get(kind, ())) for kind in Counts],
        segments=call.segments,
        digest=call.signature.digest,
        description=str(call.signature),
        facts=json.dumps(facts_of(call)),
        shared=(call.is_shared(Buffer.INPUT), call.is_shared(Buffer.OUTPUT)),
    )
