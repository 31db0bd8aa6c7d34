"""Collectives of NCCL between the GPUs of a communicator: the algorithm `nccl.native`.

Theory of operation
-------------------
Meeting. At the first call, the ranks exchange their version of NCCL, their GPU, and the name that rank 0 has drawn for
a communicator of NCCL, over the links of the communicator. If one of them cannot take part, all learn why. Then each
joins NCCL's communicator, which is nonblocking: while NCCL waits for other ranks, this rank looks at its links and its
time limit.

Calls. A call is issued to a stream, and its arrays are used when the stream gets there. `issue` returns when NCCL has
issued its kernels.

Failures. A kernel of NCCL waits on the GPU for the other ranks, and without help for ever if one of them has died. So a
`Watch` asks the links while the device works. After a failure, or at the time limit of a call, this rank aborts NCCL's
communicator, which ends its kernels; the results are undefined then. A program goes on by `shrink`, whose communicator
meets anew. CuPy's communicators block: a thread may wait for a lost rank in a call, and holds the lock meanwhile. NCCL
allows another thread to abort the communicator then, which ends the call.

Open questions
--------------
Tried: nothing on a GPU. Everything here has run on a double of NCCL only.

Doubted: that `ncclCommAbort` ends kernels while a peer is dead, and how long that takes. Only the double has shown it.
CuPy's binding cannot abort a communicator that is being created, so a thread stays on each survivor if a rank dies
during the first call. A rank that stops after the others have issued their kernels holds them up: the call has
returned, and only `synchronize(timeout_s)` or an abort ends the wait. Several ranks on one GPU is a feature that NCCL
calls experimental.

This would change our mind: the first run on GPUs (docs/gpu-internals.md). If aborted kernels do not end, the route
needs a process that it can kill, or must refuse jobs that want to survive a loss.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from unisono.errors import CollectiveTimeoutError, TransportUnavailableError, UnisonoError
from unisono.foundation.deadlines import Deadline
from unisono.transports.contracts.call import Extent, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic
from unisono.transports.cuda.device import Device, Stream, is_over
from unisono.transports.cuda.peers.collectives import Watch
from unisono.transports.cuda.peers.peer_exchange import exchange
from unisono.transports.executors.polling import pauses_of_polling
from unisono.transports.nccl.library import Library, NcclComm, loaded, version_text
from unisono.transports.nccl.refusals import BYTE, DTYPES, operation_number

# Several ranks may share a GPU from this version on, if the variable is set.
_SHARED_GPU_VERSION = 23000
# How long an abort waits for a call of another thread, which returns at once if the communicator does not block.
_CALL_S = 0.1
SHARED_GPU_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


class _Arguments(NamedTuple):
    """The arguments of a call: addresses, NCCL's numbers, and the elements of `dtype` in one share."""

    source: int
    target: int
    elements: int
    dtype: int
    nbytes: int  # of these elements
    op: int
    root: int
    rank: int
    size: int
    stream: Stream


def _gather(comm: NcclComm, call: _Arguments) -> None:
    comm.send(call.source, call.elements, call.dtype, call.root, call.stream)
    if call.rank == call.root:
        for peer in range(call.size):
            comm.recv(call.target + peer * call.nbytes, call.elements, call.dtype, peer, call.stream)


def _scatter(comm: NcclComm, call: _Arguments) -> None:
    comm.recv(call.target, call.elements, call.dtype, call.root, call.stream)
    if call.rank == call.root:
        for peer in range(call.size):
            comm.send(call.source + peer * call.nbytes, call.elements, call.dtype, peer, call.stream)


def _alltoall(comm: NcclComm, call: _Arguments) -> None:
    for peer in range(call.size):
        comm.send(call.source + peer * call.nbytes, call.elements, call.dtype, peer, call.stream)
        comm.recv(call.target + peer * call.nbytes, call.elements, call.dtype, peer, call.stream)


_ISSUE: dict[str, Callable[[NcclComm, _Arguments], None]] = {
    "allreduce": lambda comm, c: comm.all_reduce(c.source, c.target, c.elements, c.dtype, c.op, c.stream),
    "reduce": lambda comm, c: comm.reduce(c.source, c.target, c.elements, c.dtype, c.op, c.root, c.stream),
    "reduce_scatter": lambda comm, c: comm.reduce_scatter(c.source, c.target, c.elements, c.dtype, c.op, c.stream),
    # A rank that only receives has no source, and NCCL ignores the address.
    "broadcast": lambda comm, c: comm.broadcast(c.source or c.target, c.target, c.elements, c.dtype, c.root, c.stream),
    "allgather": lambda comm, c: comm.all_gather(c.source, c.target, c.elements, c.dtype, c.stream),
    "gather": lambda comm, c: comm.group(lambda: _gather(comm, c)),
    "scatter": lambda comm, c: comm.group(lambda: _scatter(comm, c)),
    "alltoall": lambda comm, c: comm.group(lambda: _alltoall(comm, c)),
}
# The collectives whose count is the length of OUTPUT, and those whose INPUT and OUTPUT hold a share of each rank.
_BY_OUTPUT = frozenset({"scatter", "reduce_scatter"})
_OF_SHARES = frozenset({"alltoall"})


class NcclCollectives:
    """NCCL's collectives among the ranks of `executor`. Each rank creates it at the same point; it blocks until all do.

    Args:
        executor: the communicator's; its links carry the meeting and report failures.
        device: this rank's device.
        deadline: when the meeting must be over.

    Attributes:
        version: the version of NCCL, equal on all ranks.
        refusal: why these ranks cannot use NCCL; None if they can. Equal on all of them.

    Raises:
        PeerLostError, CollectiveTimeoutError, AbortedError, MismatchError: the meeting failed.
        InternalError: NCCL failed.
    """

    def __init__(self, executor: Executor, device: Device, deadline: Deadline) -> None:
        self._executor, self._device = executor, device
        self._lock = threading.RLock()
        self._aborting = threading.Lock()
        self._issuing: Deadline | None = None  # the deadline of the call that is being issued
        self._comm: NcclComm | None = None
        self._is_intact = True
        self.version = 0
        self.refusal: str | None
        library, mine = _introduce(executor.rank, device.uuid)
        answers = exchange(executor, mine, deadline.remaining_s())
        self.refusal = refusal_of_all(answers)
        if self.refusal is not None:
            return
        assert library is not None, "no rank has refused"
        self.version = library.version
        self._last = device.new_event()
        self._watch = Watch(self)
        self._comm = library.join(bytes.fromhex(answers[0]["id"]), executor.size, executor.rank, device.current)
        self._until_ready("the meeting of all ranks in NCCL", deadline)

    def issue(
        self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream, deadline: Deadline
    ) -> None:
        """Issue a call on flat contiguous arrays to a stream. Blocks until NCCL has issued it, which may need others.

        Args:
            signature: the call, for errors.
            extent: the elements of INPUT and OUTPUT, the dtype and the operation.
            source: the address of INPUT; 0 if this rank has none.
            target: the address of OUTPUT; 0 if this rank has none.
            stream: the stream.
            deadline: when it must have been issued.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError, InternalError: the call failed.
        """
        name = str(signature)
        self._issuing = deadline
        try:
            self._submit(
                name, self._arguments(signature, extent, source, target, stream), signature.collective, deadline
            )
            self._until_ready(name, deadline)
            self._device.record(self._last, stream)
        finally:
            self._issuing = None

    def _submit(self, name: str, arguments: _Arguments, collective: str, deadline: Deadline) -> None:
        """Make a call of NCCL. The watch begins first, because the call may block until a lost rank makes it, too."""
        with self._lock:
            self._executor.check(name)
            assert self._comm is not None, "a refused object issues no call"
            self._watch.begin()
            try:
                if arguments.elements:
                    _ISSUE[collective](self._comm, arguments)
            except UnisonoError as error:
                self._abort()
                self._executor.check(name)  # a lost rank is the reason why NCCL has failed
                reason = _late(name) if deadline.has_passed() else error
                self._executor.fail(reason)
                raise reason from error

    def check(self, operation: str) -> None:
        """Raise the error that prevents a new call, if any."""
        self._executor.check(operation)

    def traffic(self) -> Mapping[int, Traffic]:
        """Return no counters, because NCCL does not report the bytes that it moves."""
        return {}

    def fail(self, error: UnisonoError) -> None:
        """End the communicator with `error` on all ranks, and NCCL's work on this one."""
        self._abort()
        self._executor.fail(error)

    def is_intact(self) -> bool:
        """Return whether NCCL has not been aborted: then calls end with their results."""
        return self._is_intact

    def watch(self) -> bool:
        """Look for failures while the device works, and abort NCCL after one; return whether the device is idle."""
        issuing = self._issuing
        if self._executor.has_failed() or (issuing is not None and issuing.has_passed()):
            self._abort()
        return not self._is_intact or (issuing is None and is_over(self._device, self._last))

    def close(self, deadline: Deadline) -> bool:
        """End this rank's part; return whether the device's work is done. It waits for that until `deadline`."""
        if self.refusal is not None:
            return True
        self._watch.end()
        if not self._is_idle_by(deadline):
            self._abort()
        with self._lock:
            comm, self._comm = self._comm, None
        if comm is not None:
            # NCCL waits here until all ranks of the host have come, and some may never close.
            ending = threading.Thread(target=_destroy, args=[comm], name="unisono-nccl-end", daemon=True)
            ending.start()
            ending.join(deadline.remaining_s())
        is_idle = is_over(self._device, self._last)
        if is_idle:
            self._device.end_event(self._last)
        return is_idle

    def _is_idle_by(self, deadline: Deadline) -> bool:
        """Wait until the device has done its work, and look for failures meanwhile; return whether it has in time."""
        for pause_s in pauses_of_polling():
            self.watch()
            if is_over(self._device, self._last) or deadline.has_passed():
                break
            time.sleep(pause_s or 0.0)
        return is_over(self._device, self._last)

    def _arguments(self, signature: Signature, extent: Extent, source: int, target: int, stream: Stream) -> _Arguments:
        collective, size, dtype, op = signature.collective, self._executor.size, extent.dtype, extent.op
        count = extent.elements[collective in _BY_OUTPUT] // (size if collective in _OF_SHARES else 1)
        nbytes = count * dtype.itemsize
        root = signature.root or 0
        if op is None:  # elements that are only moved travel as bytes
            return _Arguments(source, target, nbytes, BYTE, nbytes, 0, root, self._executor.rank, size, stream)
        number = operation_number(op)
        return _Arguments(
            source, target, count, DTYPES[dtype.name], nbytes, number, root, self._executor.rank, size, stream
        )

    def _until_ready(self, what: str, deadline: Deadline) -> None:
        """Wait until NCCL has done all that it was asked on the host; abort it at a failure and at the time limit."""
        try:
            for pause_s in pauses_of_polling():
                self._executor.check(what)
                if self._is_intact and self._comm_is_ready():
                    return
                if deadline.has_passed():
                    raise _late(what)
                time.sleep(pause_s or 0.0)
        except BaseException as error:
            self._abort()
            if isinstance(error, UnisonoError):
                self._executor.fail(error)
            raise

    def _comm_is_ready(self) -> bool:
        with self._lock:
            return self._comm is None or self._comm.is_ready()

    def _abort(self) -> None:
        has_lock = self._lock.acquire(timeout=_CALL_S)
        try:
            with self._aborting:
                comm, self._comm = self._comm, None
            if comm is not None:
                self._is_intact = False
                with suppress(UnisonoError):
                    comm.abort()
        finally:
            if has_lock:
                self._lock.release()


def _late(what: str) -> CollectiveTimeoutError:
    return CollectiveTimeoutError(f"NCCL waited for other ranks until the time limit, in {what}")


def _destroy(comm: NcclComm) -> None:
    with suppress(UnisonoError):
        comm.destroy()


def _introduce(rank: int, uuid: str) -> tuple[Library | None, dict[str, object]]:
    """Return NCCL, and the facts about this rank that the other ranks must know."""
    try:
        library = loaded()
    except TransportUnavailableError as error:
        return None, {"refusal": error.message}
    shares = os.environ.get(SHARED_GPU_VARIABLE) == "1"
    facts: dict[str, object] = {"version": library.version, "gpu": uuid, "shares": shares}
    return library, facts if rank else {**facts, "id": library.unique_id().hex()}


def refusal_of_all(answers: Sequence[dict[str, object]]) -> str | None:
    """Return the reason why ranks with these facts cannot meet in NCCL, as text; None if they can.

    >>> refusal_of_all([{"version": 23004, "gpu": "a"}, {"version": 22809, "gpu": "b"}])
    'the ranks have different versions of NCCL: 2.30.4 on rank 0, 2.28.9 on rank 1'
    """
    for rank, answer in enumerate(answers):
        if "refusal" in answer:
            return f"rank {rank}: {answer['refusal']}"
    if len({answer["version"] for answer in answers}) > 1:
        versions = ", ".join(f"{_version_of(answer)} on rank {rank}" for rank, answer in enumerate(answers))
        return f"the ranks have different versions of NCCL: {versions}"
    of_gpu: dict[object, int] = {}
    for rank, answer in enumerate(answers):
        first = of_gpu.setdefault(answer["gpu"], rank)
        if first != rank and (reason := _refusal_to_share(answer)) is not None:
            return f"ranks {first} and {rank} are on one GPU, {answer['gpu']}: {reason}"
    return None


def _version_of(answer: dict[str, object]) -> str:
    return version_text(int(str(answer["version"])))


def _refusal_to_share(answer: dict[str, object]) -> str | None:
    if int(str(answer["version"])) < _SHARED_GPU_VERSION:
        return f"NCCL allows that from version 2.30 on, and this is {_version_of(answer)}"
    return None if answer["shares"] else f"NCCL allows that only if {SHARED_GPU_VARIABLE}=1 is set on every rank"
