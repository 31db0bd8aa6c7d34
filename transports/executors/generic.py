"""The generic executor: runs any plan for one rank over any message or mapped transport, in pure Python.

Theory of operation
-------------------
This executor defines the meaning of a plan (`algorithms/ir/plan.py`): every other executor must give the same results.
A started collective holds one `Lane` for each lane of its plan. The lane decides when a group may be posted.

The steps of a group are posted together, for one segment. Local steps are carried out at once. Messages become requests
of the transport. `RecvReduce` receives into a temporary buffer, which is combined when the message has arrived.
`ReadReduce` does the same for each peer that it reads. If the transport maps memory, the memory of a call is published
as long as the call runs. Nothing blocks. `poll` of any operation drives all operations of the executor, so ranks may
wait for them in different orders.

The first error ends the communicator: the executor passes it to the transport, which raises it on every rank.

Open questions
--------------
Considered: its steps over native links, for reductions by Python functions. The order and number of the function's
calls would depend on the algorithm, and every message would pass through Python (decision 9).

Doubted: the definition is only as good as the tests that judge both executors. A rule that no test asks for, such as
what a failed call has written, may differ between them. Waiting is polling, with pauses of up to 0.2 ms, because a
transport has no descriptor to sleep on. So every wait takes a share of a core.

This would change our mind: a transport of a package that is used for large jobs. It would need a descriptor to wait on
in `MessageTransport`, as the channels of the native core have.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from unisono.algorithms.ir.plan import (
    Copy,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Signal,
    Span,
    Step,
    Wait,
    Write,
)
from unisono.dtypes import DType
from unisono.errors import AbortedError, CollectiveTimeoutError, PeerLostError, PlanError, UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import (
    AnyArray,
    Call,
    MemoryType,
    Operand,
    Signature,
    Usage,
    VendorRefusal,
    moved,
)
from unisono.transports.contracts.executor import (
    NO_CACHE,
    NO_MESSAGES,
    CallCache,
    Executor,
    Message,
    MessageCalls,
    Operation,
    ProgramExecutor,
    WindowExecutor,
)
from unisono.transports.contracts.transport import Identity, MappedTransport, MessageTransport, Request, Traffic
from unisono.transports.executors.call_memory import Memory, OperandView, as_bytes, checked, flat, scatter
from unisono.transports.executors.lane import Lane, Posted
from unisono.transports.executors.matching import AllRequests, Matching, Receive, signature_of
from unisono.transports.executors.plan_checks import MESSAGES, WRITES, check_plan
from unisono.transports.executors.polling import LONGEST_PAUSE_S, pauses_of_polling, wait_by_polling
from unisono.transports.reductions.definition import reduce_into

if TYPE_CHECKING:
    from pathlib import Path

    from unisono.transports.executors.call_records import CallRecords

_NO_RECORDS = "this communicator records no calls, because its ranks are threads of one process"


class GenericExecutor:
    """The `Executor` of one rank over a transport.

    Args:
        transport: the transport that carries its messages.
        beside: an executor of the same ranks over Unisono's own links. Both make the same subgroups, and this one
            closes it. None if the ranks are threads of one process.
        records: the records of its collectives. None if the ranks are threads of one process.
    """

    def __init__(
        self, transport: MessageTransport, beside: Executor | None = None, records: CallRecords | None = None
    ) -> None:
        self.rank = transport.rank
        self.size = transport.size
        self.members = transport.members
        self.vendors: Mapping[str, VendorRefusal] = {}
        self._subgroups: defaultdict[tuple[int, ...], Iterator[int]] = defaultdict(count)
        self._transport = transport
        self._beside = beside
        self._records = records
        self._lock = threading.RLock()  # guards all that follows; a thread that makes progress holds it
        self._active: list[_Running] = []
        self._going_on: dict[_Running, Deadline] = {}  # operations in the background, with their deadlines
        self._ended = 0
        self._sequence = 0
        self._matching = Matching(transport)
        self._failure: UnisonoError | None = None
        self._raised = False  # whether the caller has seen the failure itself; later calls raise AbortedError
        self._closed = False

    @property
    def maps_memory(self) -> bool:
        """Whether the ranks can use each other's memory."""
        return self._transport.mapped is not None

    def subgroup(self, ranks: Sequence[int]) -> GenericExecutor:
        members = tuple(ranks)
        number = next(self._subgroups[members])
        transport = self._transport.subgroup(members, number)
        beside = None if self._beside is None else self._beside.subgroup(members)
        records = None if self._records is None else self._records.subgroup(transport.members, number)
        return GenericExecutor(transport, beside, records)

    def authenticated(self) -> Executor:
        return self if self._beside is None else self._beside.authenticated()

    def for_programs(self) -> ProgramExecutor:
        raise UsageError(
            f"calls in compiled programs need the native core, and it does not drive the transport "
            f"{self._transport.name}: use another one"
        )

    def for_windows(self) -> WindowExecutor:
        raise UsageError(
            f"windows need the native core, and it does not drive the transport {self._transport.name}: use another one"
        )

    def start(self, call: Call, source: Operand, target: Operand) -> Operation:
        """Start `call`.

        Raises:
            AbortedError: the communicator has failed before. The first time, this rank raises the failure itself.
            PlanError: the plan is for another rank, or needs mapped memory, which the transport does not have.
            UsageError: an array does not fit the plan, or the communicator is closed.
        """
        with self._lock:
            self._check_usable(call.signature)
            supported = MESSAGES if self._transport.mapped is None else WRITES
            check_plan(call.plan, self.rank, self.size, self._transport.name, supported)
            memory = Memory(call, source, target)
            sequence = self._sequence
            self._sequence += 1
            self._transport.announce(sequence, call.signature)
            collective = _Collective(self, call, sequence, memory, self._transport)
            if self._records is not None:
                collective.record = self._records.begin(call, sequence)
            return self._launch(collective)

    def run(self, call: Call, source: Operand, target: Operand, timeout_s: float) -> None:
        self.start(call, source, target).wait(timeout_s)

    def call_cache(self, timeout_s: float) -> CallCache:
        return NO_CACHE

    def message_calls(self, any_source: object, any_tag: object, timeout_s: float) -> MessageCalls:
        return NO_MESSAGES

    def cache(self, call: Call, collective: str, x: Any, out: Any, op: Any, root: Any, algorithm: Any) -> None:
        """Do nothing: this executor has no call cache."""

    def persistent(
        self,
        call: Call,
        source: Operand,
        target: Operand,
        timeout_s: float,
        result: Any,
        on_start: Callable[[Operation, Any], Any],
    ) -> Callable[..., Any]:
        def run_again(wait: bool = True) -> Any:
            operation = self.start(call, source, target)
            if not wait:
                operation.run_in_background(timeout_s)
                return on_start(operation, result)
            operation.wait(timeout_s)
            return result

        return run_again

    def sends_from(self, memory: MemoryType, dest: int, nbytes: int, timeout_s: float) -> bool:
        return False  # message transports read the bytes of every message on the host

    def receives_into(self, memory: MemoryType, source: int | None, nbytes: int) -> bool:
        return False

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
    ) -> Operation:
        signature = signature_of(dtype, array.size, shape)
        with self._lock:
            self._check_message(signature, dest)
            pieces = [_piece(array, dtype)]
            send = self._matching.send_synchronously if synchronous else self._matching.send
            request = send(dest, tag, signature, pieces)
            return self._launch(_OpenMessage(self, signature, [dest], request))

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
    ) -> _Receive:
        if up_to:
            raise UsageError("transports of packages receive no messages of an unknown length, as mpi4py's calls do")
        signature = signature_of(dtype, array.size, shape)
        with self._lock:
            self._check_message(signature, source)
            pieces = [_piece(array, dtype)]
            request = self._matching.receive(source, tag, signature, pieces)
            receive = _Receive(self, signature, self._matching, request)
            self._launch(receive)
            return receive

    def takes_from_itself(self, tag: int, nbytes: int) -> bool:
        with self._lock:
            self.progress()
            return self.is_over() or self._matching.takes_own(tag, nbytes)

    def probe(self, source: int | None, tag: int | None, *, once: bool, takes: bool = False) -> _Probe | _Taking:
        signature = Signature("probe", None, None, "C", None, None, "direct", 1)
        with self._lock:
            self._check_message(signature, source)
            if takes:
                taking = _Taking(self, signature, self._matching, self._matching.take(source, tag, once))
                self._launch(taking)
                return taking
            probe = _Probe(self, signature, self._matching.sources(source), partial(self._look, source, tag, once))
            self._launch(probe)
            return probe

    def acknowledge(self, taken: Receive, signature: Signature) -> Operation:
        """Start to answer the sender of a message that has been taken, if it waits for an answer."""
        assert taken.message is not None, "it has taken a message"
        source = taken.message.source
        with self._lock:
            self._check_message(signature, source)
            return self._launch(_OpenMessage(self, signature, [source], self._matching.acknowledge(taken)))

    def wait_for_end(self, seen: int, most_s: float) -> int:
        deadline = Deadline(most_s)
        while self._ended <= seen and not deadline.has_passed():
            self.progress()
            time.sleep(LONGEST_PAUSE_S)
        return self._ended

    def shares_memory_with(self, ranks: Sequence[int]) -> bool:
        return True

    def links(self) -> Mapping[int, str]:
        return dict.fromkeys((peer for peer in range(self.size) if peer != self.rank), self._transport.name)

    def traffic(self) -> Mapping[int, Traffic]:
        return self._transport.traffic()

    def usage(self) -> Sequence[tuple[Call, Usage]]:
        return ()  # this executor does not count

    def dump(self, directory: str | os.PathLike[str]) -> Path:
        return self._recorded_beside().dump(directory)

    def trace(self, path: str | os.PathLike[str]) -> Path:
        return self._recorded_beside().trace(path)

    def abort(self, reason: str) -> None:
        self.fail(AbortedError(f"rank {self.members[self.rank]} aborted the communicator: {reason}"))

    def settle(self) -> None:
        """Do nothing: a message transport cannot ask other ranks about their calls."""

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._failure = self._failure or AbortedError(f"rank {self.members[self.rank]} closed the communicator")
                self._forget_all()
                self._transport.close()
                if self._records is not None:
                    self._records.close()
                if self._beside is not None:
                    self._beside.close()

    def progress(self) -> None:
        """Make progress on all started operations. The first error ends the communicator on all ranks."""
        with self._lock:
            if self._failure is not None:
                return
            try:
                # A call that has all its messages is done, even if the communicator has failed since.
                active, ended = list[_Running](), list[_Running]()
                for operation in self._active:
                    (ended if operation.advance() else active).append(operation)
                self._active = active
                self._note_ends(ended, is_done=True)
                self._transport.progress()
            except UnisonoError as error:
                self.fail(error)

    def check(self, operation: str) -> None:
        self.progress()
        if (error := self.failure()) is not None:
            error.rank, error.operation = self.members[self.rank], operation
            raise error

    def has_failed(self) -> bool:
        self.progress()
        return self.failure() is not None

    def fail(self, error: UnisonoError) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error
                self._forget_all()
                self._transport.abort(error)
                if isinstance(error, PeerLostError):
                    self._failure = self._cause() or error

    def _cause(self) -> UnisonoError | None:
        """Return the error that has ended the transport, which may know why a rank has left."""
        try:
            self._transport.progress()
        except UnisonoError as error:
            return error
        return None

    def failure(self) -> UnisonoError | None:
        """Return a copy of the error that ended the communicator, for the caller to raise; None if there is none."""
        self._raised = self._failure is not None
        return copy.copy(self._failure)

    def run_in_background(self, operation: _Running, timeout_s: float) -> None:
        """Let a thread drive all operations until `operation` has ended. Fail them all after `timeout_s` seconds."""
        with self._lock:
            is_driven = bool(self._going_on)
            self._going_on[operation] = Deadline(timeout_s)
        if not is_driven:
            threading.Thread(target=self._drive, name="unisono-generic", daemon=True).start()

    def _drive(self) -> None:
        pauses = pauses_of_polling()
        while True:
            self.progress()
            with self._lock:
                pending = self._going_on.items()
                self._going_on = {operation: deadline for operation, deadline in pending if not operation.ended()}
                if not self._going_on:
                    return
                first = min(self._going_on, key=lambda operation: self._going_on[operation].when)
                if self._going_on[first].has_passed():
                    self.fail(first.timeout())
            time.sleep(next(pauses) or 0.0)

    def _forget_all(self) -> None:
        self._note_ends(self._active, is_done=False)
        self._active.clear()

    def _note_ends(self, operations: Sequence[_Running], *, is_done: bool) -> None:
        self._ended += len(operations)
        for operation in operations:
            if self._records is not None and operation.record is not None:
                self._records.end(operation.record, is_done=is_done)

    def _recorded_beside(self) -> Executor:
        if self._beside is None:
            raise UsageError(_NO_RECORDS)
        return self._beside

    def is_over(self) -> bool:
        """Return whether the communicator has failed or is closed. The error still counts as not raised."""
        return self._failure is not None

    def _look(self, source: int | None, tag: int | None, once: bool) -> tuple[bool, Message | None]:
        """Return whether a probe is done, and the message that has arrived, or None without one."""
        message = self._matching.find(source, tag)
        return once or message is not None, message

    def _launch(self, operation: _Running) -> Operation:
        self._active.append(operation)
        self.progress()
        return operation

    def _check_message(self, signature: Signature, peer: int | None) -> None:
        self._check_usable(signature)
        if peer is not None and not 0 <= peer < self.size:
            raise UsageError(f"rank {peer} does not exist: there are {self.size} ranks", operation=str(signature))

    def _check_usable(self, signature: Signature) -> None:
        """Raise if the communicator is closed or has failed: the failure itself the first time, then `AbortedError`."""
        error: UnisonoError | None
        if self._closed:
            error = UsageError("the communicator is closed")
        elif self._raised and self._failure is not None:
            error = AbortedError(f"the communicator has failed before: {self._failure.message}")
        else:
            error = self.failure()
        if error is not None:
            error.rank, error.operation, error.buffers = self.members[self.rank], str(signature), "output untouched"
            raise error


class _Running:
    """A started operation of `executor`: the base class of collectives and messages."""

    def __init__(self, executor: GenericExecutor, signature: Signature, sequence: int | None = None) -> None:
        self._executor = executor
        self._signature = signature
        self._sequence = sequence
        self._timeout_s = 0.0
        self._finished = False
        self.record: int | None = None  # the index of its record, of a collective that is recorded

    def poll(self) -> bool:
        if not self._finished:
            self._executor.progress()
        if not self._finished and (error := self._executor.failure()) is not None:
            error.rank, error.operation = self._executor.members[self._executor.rank], str(self._signature)
            error.sequence = self._sequence
            error.buffers = "output undefined" if self.has_written() else "output untouched"
            raise error
        return self._finished

    def ended(self) -> bool:
        if not self._finished:
            self._executor.progress()
        return self._finished or self._executor.is_over()

    def run_in_background(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._executor.run_in_background(self, timeout_s)

    def wait(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        wait_by_polling(self, timeout_s, lambda: self._executor.fail(self.timeout()))

    def abort(self, reason: str) -> None:
        self._executor.abort(reason)

    def advance(self) -> bool:
        """Make progress; return whether the operation is finished."""
        raise NotImplementedError

    def waits_for(self) -> set[int]:
        """Return the peers whose messages the operation waits for."""
        raise NotImplementedError

    def has_written(self) -> bool:
        """Return whether the caller's output may have been written to."""
        raise NotImplementedError

    def absent(self) -> Collection[int]:
        """Return the ranks that certainly have not made this call yet."""
        raise NotImplementedError

    def timeout(self) -> CollectiveTimeoutError:
        """Return the error of an operation whose time limit has passed."""
        members = self._executor.members
        awaited, absent = ([members[rank] for rank in ranks] for ranks in (sorted(self.waits_for()), self.absent()))
        me = members[self._executor.rank]
        message = f"rank {me} waited {self._timeout_s:g} s for {_ranks(awaited)} in {self._signature}"
        message += f", which {_ranks(absent)} had not called" if absent else ""
        return CollectiveTimeoutError(message, peer=next(iter(absent or awaited), None))


class _OpenMessage(_Running):
    """A started send or receive of one message.

    Args:
        peers: the ranks of which one is the other end. A receive from any rank has several.
        request: the request of the transport.
    """

    def __init__(
        self, executor: GenericExecutor, signature: Signature, peers: Collection[int], request: Request
    ) -> None:
        super().__init__(executor, signature)
        self._peers = peers
        self._request = request

    def advance(self) -> bool:
        self._finished = self._request.done()
        return self._finished

    def waits_for(self) -> set[int]:
        return set(self._peers)

    def absent(self) -> Collection[int]:
        return ()

    def has_written(self) -> bool:
        return False


class _Receive(_OpenMessage):
    """A started receive of one message. It ends when the sender of a synchronous one has its answer."""

    def __init__(self, executor: GenericExecutor, signature: Signature, matching: Matching, receive: Receive) -> None:
        super().__init__(executor, signature, matching.sources(receive.source), receive)
        self._matching = matching
        self._receive = receive

    def advance(self) -> bool:
        if self._request.done():
            message = self._receive.message
            self._finished = message is None or self._matching.has_answered(message.source)
        return self._finished

    def message(self) -> Message | None:
        return self._receive.message

    def host_copy(self) -> bytes | None:
        return None

    def acknowledge(self, timeout_s: float) -> None:
        self._executor.acknowledge(self._receive, self._signature).wait(timeout_s)

    def fits(self, dtype: DType, count: int, shape: Sequence[int]) -> bool:
        return signature_of(dtype, count, shape).agrees(self._receive.signature)

    def has_written(self) -> bool:
        return True


class _Taking(_Receive):
    """A started probe that takes its message."""

    def host_copy(self) -> bytes | None:
        return bytes(self._receive.pieces[0]) if self._receive.pieces else None


class _Probe(_Running):
    """A started probe for a message that one of the ranks `peers` sends.

    `look` returns whether the probe is done, and the message if one has arrived.
    """

    def __init__(
        self,
        executor: GenericExecutor,
        signature: Signature,
        peers: Collection[int],
        look: Callable[[], tuple[bool, Message | None]],
    ) -> None:
        super().__init__(executor, signature)
        self._peers = peers
        self._look = look
        self._message: Message | None = None

    def message(self) -> Message | None:
        return self._message

    def host_copy(self) -> bytes | None:
        return None

    def acknowledge(self, timeout_s: float) -> None:
        """Do nothing, because the message is not taken."""

    def fits(self, dtype: DType, count: int, shape: Sequence[int]) -> bool:
        return False  # only the message of a receive is compared

    def advance(self) -> bool:
        self._finished, self._message = self._look()
        return self._finished

    def waits_for(self) -> set[int]:
        return set(self._peers)

    def absent(self) -> Collection[int]:
        return ()

    def has_written(self) -> bool:
        return False


class _Collective(_Running):
    """A started collective: its lanes, and a method for each kind of step."""

    def __init__(
        self, executor: GenericExecutor, call: Call, sequence: int, memory: Memory, transport: MessageTransport
    ) -> None:
        super().__init__(executor, call.signature, sequence)
        self._number = sequence
        self._size = call.plan.size
        self._memory = memory
        self._transport = transport
        self._mapped = transport.mapped
        if self._mapped is not None:
            self._mapped.publish(sequence, memory)
        self._lanes = [Lane(index, call, self.post) for index in range(len(call.plan.lanes))]

    def advance(self) -> bool:
        while any(lane.advance(self._lanes) for lane in self._lanes):
            pass
        self._finished = all(lane.is_finished() for lane in self._lanes)
        if self._finished and self._mapped is not None:
            self._mapped.withdraw(self._number)
        return self._finished

    def waits_for(self) -> set[int]:
        return {posted.peer for lane in self._lanes for posted in lane.posted()}

    def absent(self) -> Collection[int]:
        return self._transport.absent(self._number)

    def has_written(self) -> bool:
        return self._memory.output_written

    def post(self, step: Step, lane: int, group: int, segment: int) -> Posted | None:
        """Carry out a local step and return None, or post a message and return it.

        An empty message is posted only if its step says `even_if_empty`.
        """
        return _POST[type(step)](self, step, Identity(self._number, lane, group, segment))

    def post_send(self, step: Send, identity: Identity) -> Posted | None:
        pieces = self._memory.bytes_to_read(step.src, identity.segment)
        if not pieces and not step.even_if_empty:
            return None
        return Posted(step.peer, self._transport.post_send(step.peer, identity, self._signature, pieces))

    def post_recv(self, step: Recv, identity: Identity) -> Posted | None:
        pieces = self._memory.bytes_to_write(step.dst, identity.segment)
        return self._post_recv(step.peer, identity, pieces) if pieces or step.even_if_empty else None

    def post_recv_reduce(self, step: RecvReduce, identity: Identity) -> Posted | None:
        source = flat(self._memory.views(step.src, identity.segment))
        stage = [view.empty() for view in source]
        operands = [stage, source] if step.received_first else [source, stage]
        finish = partial(self._combine, step.dst, operands, identity.segment, step.lower)
        pieces = [as_bytes(view.array) for view in stage]
        return self._post_recv(step.peer, identity, pieces, finish) if pieces else None

    def post_copy(self, step: Copy, identity: Identity) -> None:
        if step.lower:
            self._reduce(step.dst, (step.src,), identity.segment, lower=True)
            return
        source = self._memory.views(step.src, identity.segment)
        target = self._memory.views_to_write(step.dst, identity.segment)
        if [view.array.ctypes.data for view in target] != [view.array.ctypes.data for view in source]:
            scatter(target, flat(source))

    def post_reduce(self, step: Reduce, identity: Identity) -> None:
        self._reduce(step.dst, step.sources, identity.segment, step.lower)

    def post_read(self, step: Read, identity: Identity) -> Posted | None:
        pieces = self._memory.bytes_to_write(step.dst, identity.segment)
        return Posted(step.peer, self._read(step.peer, step.src, identity.segment, pieces)) if pieces else None

    def post_read_reduce(self, step: ReadReduce, identity: Identity) -> Posted | None:
        like = flat(self._memory.views(step.dst, identity.segment))
        if not like:
            return None
        operands, requests = [], []
        for peer, source in step.sources:
            if peer == self._executor.rank:
                operands.append(flat(self._memory.views(source, identity.segment)))
                continue
            stage = [view.empty() for view in like]
            operands.append(stage)
            requests.append(self._read(peer, source, identity.segment, [as_bytes(view.array) for view in stage]))
        finish = partial(self._combine, step.dst, operands, identity.segment, step.lower)
        return Posted(step.sources[0][0], AllRequests(requests), finish)

    def post_write(self, step: Write, identity: Identity) -> Posted | None:
        pieces = self._memory.bytes_to_read(step.src, identity.segment)
        if not pieces:
            return None
        return Posted(step.peer, self._shared().write(step.peer, self._number, step.dst, identity.segment, pieces))

    def post_signal(self, step: Signal, identity: Identity) -> Posted:
        return Posted(step.peer, self._shared().signal(step.peer, identity))

    def post_wait(self, step: Wait, identity: Identity) -> Posted:
        return Posted(step.peer, self._shared().wait(step.peer, identity))

    def _post_recv(
        self, peer: int, identity: Identity, pieces: list[memoryview], finish: Callable[[], None] | None = None
    ) -> Posted:
        return Posted(peer, self._transport.post_recv(peer, identity, self._signature, pieces), finish)

    def _read(self, peer: int, source: Span, segment: int, pieces: list[memoryview]) -> Request:
        return self._shared().read(peer, self._number, source, segment, pieces)

    def _shared(self) -> MappedTransport:
        assert self._mapped is not None, "check_plan refuses a plan that needs mapped memory without it"
        return self._mapped

    def _reduce(self, dst: Span, sources: tuple[Span, ...], segment: int, lower: bool) -> None:
        self._combine(dst, [flat(self._memory.views(source, segment)) for source in sources], segment, lower)

    def _combine(self, dst: Span, sources: list[list[OperandView]], segment: int, lower: bool) -> None:
        results = []
        for parts in zip(*sources, strict=True):
            result, op = parts[0].empty(), parts[0].op
            if op is None:
                raise PlanError(f"the plan reduces, but {self._signature} has no operation")
            reduce_into(result.array, [part.array for part in parts], op, self._size, lower)
            results.append(result)
        scatter(self._memory.views_to_write(dst, segment), results)


# Kind of step → the method that carries it out.
_POST: dict[type, Callable[[_Collective, Any, Identity], Posted | None]] = {
    Send: _Collective.post_send,
    Recv: _Collective.post_recv,
    RecvReduce: _Collective.post_recv_reduce,
    Copy: _Collective.post_copy,
    Reduce: _Collective.post_reduce,
    Read: _Collective.post_read,
    ReadReduce: _Collective.post_read_reduce,
    Write: _Collective.post_write,
    Signal: _Collective.post_signal,
    Wait: _Collective.post_wait,
}


def _piece(array: AnyArray, dtype: DType) -> memoryview:
    """Return the bytes of the array of a message; raises `UsageError` if it is not flat, or not of this dtype."""
    flat_array = moved(array, dtype)
    return as_bytes(checked("array", flat_array, dtype.moved, flat_array.size))


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
