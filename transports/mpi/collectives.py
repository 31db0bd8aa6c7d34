"""Runs calls by MPI's own collectives: the algorithm `mpi.native`.

Theory of operation
-------------------
A call begins with an agreement, which is a barrier of Unisono that carries the signature of the call. By this barrier
Unisono detects a rank that makes another call, makes no call or has died, before MPI is called. Also, all ranks start
the operations of MPI in the same order, which MPI requires. Then this rank starts the nonblocking operation of MPI. It
tests the operation again and again, and between the tests checks the failure flag of the communicator and the deadline.
If the communicator has failed or the deadline has passed, the rank stops testing the operation and raises the error.
The buffers of the operation are kept until the process ends, because MPI may still write to them.

A thread tests the calls that go on in the background if MPI was initialised for several threads (MPI_THREAD_MULTIPLE).
Otherwise they make progress when the program polls them.

A communicator of some of the ranks has MPI's collectives only if MPI was initialised for several threads. It needs a
communicator of MPI with the same ranks. The call of MPI that creates one blocks, so a thread makes this call, when the
ranks have agreed on their first operation.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.dtypes import DType
from unisono.errors import UnisonoError, UsageError
from unisono.foundation.deadlines import Deadline
from unisono.operations import Combine, Lower, Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray, Call, Operand, Usage
from unisono.transports.contracts.executor import Operation
from unisono.transports.executors.call_memory import arrays_of
from unisono.transports.mpi.library import Comm, LateComm, give_up

# Longer messages would need 64-bit counts, which not every library has.
_NBYTES_END = 1 << 31
# A wait polls so often without a pause, and then sleeps for `_PAUSE_S` after each poll.
_EAGER_POLLS = 20_000
_PAUSE_S = 0.00005
_TESTS_BETWEEN_CHECKS = 64

_TYPES = {
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "bool": "C_BOOL",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
# Elements that are not reduced travel as another type of the same size.
_MOVED: dict[int, tuple[Any, str]] = {
    1: (np.uint8, "UINT8_T"),
    2: (np.uint16, "UINT16_T"),
    4: (np.uint32, "UINT32_T"),
    8: (np.uint64, "UINT64_T"),
    16: (np.complex128, "C_DOUBLE_COMPLEX"),
}
_ARITHMETIC = frozenset({"integer", "float", "complex"})
# Combination → its name in MPI, and the kinds of dtype for which both mean the same. MPI does not define minimum and
# maximum of NaN, so these are for integers only.
_OPERATIONS: dict[Combine, tuple[str, frozenset[str]]] = {
    Combine.SUM: ("SUM", _ARITHMETIC),
    Combine.PROD: ("PROD", _ARITHMETIC),
    Combine.MIN: ("MIN", frozenset({"integer"})),
    Combine.MAX: ("MAX", frozenset({"integer"})),
    Combine.BAND: ("BAND", frozenset({"integer"})),
    Combine.BOR: ("BOR", frozenset({"integer"})),
    Combine.BXOR: ("BXOR", frozenset({"integer"})),
    Combine.LAND: ("LAND", frozenset({"integer", "bool"})),
    Combine.LOR: ("LOR", frozenset({"integer", "bool"})),
    Combine.LXOR: ("LXOR", frozenset({"integer", "bool"})),
}


def refusal(collective: str, nbytes: int, reduced: Sequence[tuple[DType, Op]], arrays: int, size: int) -> str | None:
    """Return the reason why MPI cannot carry out such a call, as text; None if it can. It is equal on all ranks."""
    if arrays > 1:
        return "takes one array at a time"
    if nbytes >= _NBYTES_END:
        return f"takes less than {_NBYTES_END} bytes"
    for dtype, op in reduced:
        name, kinds = _OPERATIONS.get(op.combine, ("", frozenset[str]()))
        if op.lower is Lower.DIVIDE_BY_SIZE or not name:
            return f"has no operation {op.name!r}"
        if dtype.name not in _TYPES:
            return f"does not reduce {dtype.name}: no MPI rounds it as Unisono does"
        if dtype.kind not in kinds or (op.lower is Lower.TRUTH and size == 1):
            return f"has no {op.name!r} of {dtype.name} that is the same as Unisono's"
    return None


class _Bound(NamedTuple):
    """The arguments of an operation of MPI. A buffer is None if this rank has none."""

    comm: Any
    source: Any
    target: Any
    op: Any
    root: int
    varying: tuple[Sequence[int], Sequence[int]] | None  # the counts that this rank sends and receives, by rank


def _vector(buffer: Any, counts: Sequence[int]) -> Any:
    """Return a buffer that is cut into shares of `counts` elements."""
    if buffer is None:
        return None
    array, kind = buffer
    return [array, (list(counts), list(accumulate(counts, initial=0))[:-1]), kind]


def _allgather(call: _Bound) -> Any:
    if call.varying is None:
        return call.comm.Iallgather(call.source, call.target)
    return call.comm.Iallgatherv(call.source, _vector(call.target, call.varying[1]))


def _gather(call: _Bound) -> Any:
    if call.varying is None:
        return call.comm.Igather(call.source, call.target, call.root)
    return call.comm.Igatherv(call.source, _vector(call.target, call.varying[1]), call.root)


def _scatter(call: _Bound) -> Any:
    if call.varying is None:
        return call.comm.Iscatter(call.source, call.target, call.root)
    return call.comm.Iscatterv(_vector(call.source, call.varying[0]), call.target, call.root)


def _alltoall(call: _Bound) -> Any:
    if call.varying is None:
        return call.comm.Ialltoall(call.source, call.target)
    sent, received = call.varying
    return call.comm.Ialltoallv(_vector(call.source, sent), _vector(call.target, received))


def _reduce_scatter(call: _Bound) -> Any:
    if call.varying is None:
        return call.comm.Ireduce_scatter_block(call.source, call.target, call.op)
    return call.comm.Ireduce_scatter(call.source, call.target, list(call.varying[0]), call.op)


def _broadcast(call: _Bound) -> Any:
    if call.source is not None:
        np.copyto(call.target[0], call.source[0])
    return call.comm.Ibcast(call.target, call.root)


_BEGIN: dict[str, Callable[[_Bound], Any]] = {
    "allreduce": lambda call: call.comm.Iallreduce(call.source, call.target, call.op),
    "reduce": lambda call: call.comm.Ireduce(call.source, call.target, call.op, call.root),
    "scan": lambda call: call.comm.Iscan(call.source, call.target, call.op),
    "exscan": lambda call: call.comm.Iexscan(call.source, call.target, call.op),
    "barrier": lambda call: call.comm.Ibarrier(),
    "broadcast": _broadcast,
    "allgather": _allgather,
    "gather": _gather,
    "scatter": _scatter,
    "alltoall": _alltoall,
    "reduce_scatter": _reduce_scatter,
}


class Failures(Protocol):
    """Checks for failures of the communicator, and fails it with a text."""

    def check_now(self, operation: str, /) -> None:
        """Raise the failure, if there is one."""

    def lose(self, text: str, /) -> None:
        """Fail with `PeerLostError`, on all ranks."""

    def time_out(self, text: str, /) -> None:
        """Fail with `CollectiveTimeoutError`, on all ranks."""

    def break_down(self, text: str, /) -> None:
        """Fail with `InternalError`, on all ranks."""

    def abort(self, reason: str, /) -> None:
        """Fail with `AbortedError`, on all ranks."""


class MpiCollectives:
    """MPI's collectives over a communicator of mpi4py that Unisono alone uses, and the operations in progress on it.

    Args:
        comm: the communicator of all ranks of the job.
        ranks: the ranks of this communicator, in order; empty for all ranks of the job.
        tag: a tag that is equal on these ranks, and that no other communicator with one of these ranks has.

    Attributes:
        refusal: returns the reason why MPI cannot carry out a call.
    """

    def __init__(self, comm: Any, ranks: Sequence[int] = (), tag: int = 0) -> None:
        self.refusal = refusal
        self._mpi: Any = sys.modules["mpi4py.MPI"]
        self._world = comm
        self._comm: Comm | LateComm = LateComm(comm, ranks, tag) if ranks else Comm(comm)
        self._rank: int = ranks.index(comm.Get_rank()) if ranks else comm.Get_rank()
        self._used: dict[int, tuple[Call, Usage]] = {}
        self._lock = threading.RLock()
        self._waiting: deque[MpiOperation] = deque()  # agreed on in this order
        self._going_on: set[MpiOperation] = set()
        self._thread: threading.Thread | None = None
        level = self._mpi.Query_thread()
        self._any_thread: bool = level >= self._mpi.THREAD_SERIALIZED
        self._own_thread: bool = level == self._mpi.THREAD_MULTIPLE

    def subgroup(self, ranks: Sequence[int], communicator: int) -> MpiCollectives | None:
        """Return MPI's collectives of some ranks, or None if MPI was not initialised for several threads.

        Args:
            ranks: the ranks, by their numbers in the job.
            communicator: the id of their communicator.
        """
        if not self._own_thread:
            return None
        return MpiCollectives(self._world, ranks, communicator % self._world.Get_attr(self._mpi.TAG_UB))

    def usage(self) -> Sequence[tuple[Call, Usage]]:
        """Return how often each call has run to its end."""
        with self._lock:
            return list(self._used.values())

    def count(self, call: Call, seconds: float) -> None:
        """Count a call that has ended. The caller holds the lock."""
        before = self._used.get(id(call), (call, Usage(0, 0, 0.0)))[1]
        self._used[id(call)] = call, Usage(before.calls + 1, before.timed + 1, before.seconds + seconds)

    def start(
        self, call: Call, source: Operand, target: Operand, agree: Callable[[], Operation], failures: Failures
    ) -> MpiOperation:
        """Start a call; `agree` starts the barrier that carries its signature.

        Raises:
            UsageError: MPI was initialised for the main thread only, and this is another one. Nothing has been sent.
        """
        if not self._any_thread and not self._mpi.Is_thread_main():
            raise UsageError(
                "MPI was initialised for its main thread alone: call mpi.native there, or initialise MPI with "
                "MPI.THREAD_MULTIPLE"
            )
        bound = self._bind(call, source, target)
        with self._lock:
            operation = MpiOperation(self, call, agree(), bound, failures)
            self._waiting.append(operation)
        return operation

    def close(self) -> bool:
        """Abandon all operations in progress, and return whether any of them had not succeeded."""
        with self._lock:
            unfinished = [*self._waiting, *self._going_on]
            self._waiting.clear()
            self._going_on.clear()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for operation in unfinished:
            operation.leave()
        if not unfinished:
            self._comm.close()
        return any(not operation.ended_well() for operation in unfinished)

    def comm(self) -> Any | None:
        """Return MPI's communicator, or None while a thread creates it. Raises the error of MPI if that fails."""
        return self._comm.get()

    def advance(self) -> None:
        """Start the operations that have been agreed on, in order. The caller holds the lock."""
        while self._waiting and self._waiting[0].begin():
            self._waiting.popleft()

    def let_go_on(self, operation: MpiOperation) -> None:
        """Make a background thread poll an operation, if MPI was initialised for several threads."""
        if not self._own_thread:
            return
        with self._lock:
            self._going_on.add(operation)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._go_on, name="unisono-mpi", daemon=True)
                self._thread.start()

    def _go_on(self) -> None:
        while True:
            with self._lock:
                self._going_on = {operation for operation in self._going_on if not operation.ended()}
                if not self._going_on:
                    self._thread = None
                    return
            time.sleep(_PAUSE_S)

    def _bind(self, call: Call, source: Operand, target: Operand) -> _Bound:
        plan, contract = call.plan, CONTRACTS[call.plan.collective]
        if not call.extents:
            return _Bound(None, None, None, None, 0, None)
        extent = call.extents[0]
        send = _first(source, extent.dtype, contract.has_input(self._rank, plan.root))
        recv = _first(target, extent.dtype, contract.has_output(self._rank, plan.root))
        if send is not None and recv is not None and np.may_share_memory(send, recv):
            send = send.copy()  # MPI_IN_PLACE would have to be used on all ranks or on none
        if recv is not None and plan.collective == "exscan" and self._rank == 0:
            recv = np.empty_like(recv)  # MPI leaves the result of rank 0 undefined; the caller's array stays
        if extent.op is None:
            view, name = _MOVED[extent.dtype.itemsize]
            send, recv = (None if array is None else array.view(view) for array in (send, recv))
            op = None
        else:
            name, op = _TYPES[extent.dtype.name], getattr(self._mpi, _OPERATIONS[extent.op.combine][0])
        kind = getattr(self._mpi, name)
        return _Bound(None, _buffer(send, kind), _buffer(recv, kind), op, plan.root, _counts(call))


def _buffer(array: AnyArray | None, kind: Any) -> list[Any] | None:
    return None if array is None else [array, kind]


def _first(operand: Operand, dtype: DType, is_present: bool) -> AnyArray | None:
    if not is_present:
        return None
    array = next(iter(arrays_of(operand)), None)
    return np.empty(0, dtype.name if dtype.name in _TYPES else f"V{dtype.itemsize}") if array is None else array


def _counts(call: Call) -> tuple[Sequence[int], Sequence[int]] | None:
    varying, counts = CONTRACTS[call.plan.collective].varying, call.shape.counts
    return None if varying is None or varying[0] not in counts else (counts[varying[0]], counts[varying[1]])


class MpiOperation:
    """The `Operation` of a call by `mpi.native`."""

    def __init__(
        self,
        collectives: MpiCollectives,
        call: Call,
        agreement: Operation,
        bound: _Bound,
        failures: Failures,
    ) -> None:
        self._collectives = collectives
        self._call = call
        self._agreement = agreement
        self._bound = bound
        self._name = str(call.signature)
        self._failures = failures
        self._began = time.perf_counter()
        self._request: Any = None
        self._deadline = Deadline(float("inf"))
        self._limit_s = 0.0
        self._tests = 0
        self._done = False
        self._error: UnisonoError | None = None

    def begin(self) -> bool:
        """Start the operation in MPI if all ranks have agreed on it; return whether the next one may start.

        The caller holds the lock.
        """
        try:
            if self._request is None and self._error is None:
                if not self._agreement.poll():
                    return False
                comm = self._call_mpi(self._collectives.comm)
                if comm is None:
                    return False
                begin = partial(_BEGIN[self._call.plan.collective], self._bound._replace(comm=comm))
                self._request = self._call_mpi(begin)
        except UnisonoError as error:
            self._fail(error)
        return True

    def poll(self) -> bool:
        with self._collectives._lock:
            if not self._done and self._error is None:
                self._collectives.advance()
                self._test()
            if self._error is not None:
                raise self._error
            return self._done

    def wait(self, timeout_s: float) -> None:
        self._set_deadline(timeout_s)
        polls = 0
        try:
            if self._request is None and self._error is None and self._is_next():
                self._agreement.wait(timeout_s)
            while not self.poll():
                polls += 1
                if polls < _EAGER_POLLS:
                    os.sched_yield()
                else:
                    time.sleep(_PAUSE_S)
        except KeyboardInterrupt:
            self.abort("it was interrupted")
            raise

    def run_in_background(self, timeout_s: float) -> None:
        self._set_deadline(timeout_s)
        self._agreement.run_in_background(timeout_s)
        self._collectives.let_go_on(self)

    def ended(self) -> bool:
        try:
            return self.poll()
        except UnisonoError:
            return True

    def abort(self, reason: str) -> None:
        self._failures.abort(reason)

    def leave(self) -> None:
        """Stop testing the operation, and keep its buffers until the process ends, because MPI may still use them."""
        if not self._done and self._request is not None:
            give_up(self._request, self._bound)

    def ended_well(self) -> bool:
        """Return whether the operation has ended without an error."""
        return self._done

    def _is_next(self) -> bool:
        with self._collectives._lock:
            return bool(self._collectives._waiting) and self._collectives._waiting[0] is self

    def _set_deadline(self, timeout_s: float) -> None:
        self._limit_s, self._deadline = timeout_s, Deadline(timeout_s)

    def _test(self) -> None:
        try:
            if self._request is not None and self._call_mpi(self._request.Test):
                self._done = True
                self._collectives.count(self._call, time.perf_counter() - self._began)
                return
            self._tests += 1
            if self._tests % _TESTS_BETWEEN_CHECKS == 0 or self._request is None:
                self._failures.check_now(self._name)
                if self._deadline.has_passed():
                    self._failures.time_out(f"{self._name} by MPI has not ended within {self._limit_s:g} s")
                    self._failures.check_now(self._name)
        except UnisonoError as error:
            self._fail(error)

    def _call_mpi(self, function: Callable[[], Any]) -> Any:
        """Return the result of a function of MPI. An error of MPI fails the communicator, and that failure is raised.

        MPI reduces in the calling thread, so the floating-point environment must be the same on all ranks.
        """
        mpi = self._collectives._mpi
        try:
            with _core.DefaultFloatEnvironment():
                return function()
        except mpi.Exception as error:
            lost = (getattr(mpi, "ERR_PROC_FAILED", None), getattr(mpi, "ERR_REVOKED", None))
            fail = self._failures.lose if error.Get_error_class() in lost else self._failures.break_down
            fail(f"MPI failed in {self._name}: {error}")
            self._failures.check_now(self._name)
            raise

    def _fail(self, error: UnisonoError) -> None:
        self._error = error
        self.leave()
