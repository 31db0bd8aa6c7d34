"""`Window`: memory of all ranks of a communicator that each of them accesses by itself (MPI-4.1, chapter 12).

Theory of operation
-------------------
Each rank exposes a *part*, and accesses the part of another rank, its *target*, without a call of that rank. If the
rank maps the memory of the target, it carries the operation out itself, by the native core. Otherwise it sends a
request, and a thread of the target carries it out (`remote.py`). Both change elements by the same atomic instructions
on the same memory, so they may be mixed.

For example, rank 1 adds 5 to element 0 of rank 0 by ``window.accumulate(5, 0)``. On one host, this is one
compare-and-swap in shared memory. From another host, it is a message of 40 bytes, and the next flush waits for its
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike

from unisono.collectives.arrays.mapped import element_of
from unisono.collectives.arrays.operands import check_dtype
from unisono.collectives.calls.arguments import checked_integer
from unisono.collectives.calls.work import Work, Works
from unisono.collectives.windows.elements import Place, cell_of, selected, source_of, target_of
from unisono.collectives.windows.epochs import Epochs
from unisono.collectives.windows.exposure import Exposure
from unisono.collectives.windows.operations import Element, check_atomic
from unisono.errors import UsageError
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.uncopyable import uncopyable
from unisono.operations import Op
from unisono.transports import _core
from unisono.transports.contracts.call import AnyArray

if TYPE_CHECKING:
    from unisono.collectives.windows.contracts import WindowComm, WindowTarget
    from unisono.transports.contracts.executor import Operation, WindowExecutor

_CLOSED = "this window is closed: make a new one by window() of a communicator"


class OpenWindow:
    """The state that all views of a window share.

    Args:
        comm: the communicator of this window alone, which is closed with it.
        executor: its executor.
        targets: the target of each rank.
        sizes: the number of bytes of each part.
        memory: the parts that this rank maps, as bytes.
        server: the server of this rank's part; None if all ranks map it.
    """

    def __init__(
        self,
        comm: WindowComm,
        executor: WindowExecutor,
        targets: Sequence[WindowTarget],
        sizes: tuple[int, ...],
        memory: dict[int, AnyArray],
        server: _core.WindowServer | None,
    ) -> None:
        self.comm, self.executor, self.targets, self.sizes, self.memory = comm, executor, targets, sizes, memory
        self._server = server
        self.epochs = Epochs(targets)
        self.exposure = Exposure(executor)
        self.works = Works(executor)
        self._refusal: str | None = None

    @property
    def is_closed(self) -> bool:
        """Whether `close` or `abandon` has been called."""
        return self._refusal is not None

    def target(self, rank: int) -> WindowTarget:
        """Return the target of an operation.

        Raises:
            UsageError: there is no such rank, no epoch allows access to it, or the window is closed.
            PeerLostError, CollectiveTimeoutError, AbortedError: the job has failed.
        """
        self.check()
        rank = self.rank_of(rank)
        target = self.epochs.open.get(rank)
        if target is None:
            raise self.epochs.outside(rank)
        return target

    def check(self) -> None:
        """Raise the error of a call if the window is closed or the job has failed."""
        if self._refusal is not None or self.comm.is_closed:
            raise UsageError(self._refusal or _CLOSED)
        if self.executor.has_failed():
            self.executor.check("window")

    def rank_of(self, rank: Any) -> int:
        """Return a rank of the window's communicator; raises `UsageError` if it is none."""
        return checked_integer(rank, "rank", 0, self.comm.size - 1)

    def limit_s(self, timeout_s: float | None) -> float:
        """Return the time limit of a call in seconds."""
        return self.comm.timeout_s if timeout_s is None else checked_timeout_s(timeout_s)

    def flush(self, ranks: Sequence[int], limit_s: float) -> None:
        """Complete all operations on these targets; raise the first refusal when all are complete."""
        deadline, refusal = Deadline(limit_s), None
        for rank in ranks:
            try:
                self.targets[rank].flush(deadline.remaining_s())
            except UsageError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        """Give back locks and end the server. Other ranks can access this rank's part no more."""
        if self.is_closed:
            return
        self._give_back_locks()
        self._refuse(_CLOSED)
        self.comm.close()
        self.works.close()
        if self._server is not None:
            self._server.join()

    def abandon(self, why: str) -> None:
        """In a forked child, make every later call raise ``UsageError(why)``; the memory stays mapped."""
        self._refuse(why)

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self.epochs.end()

    def _give_back_locks(self) -> None:
        """Give back the locks of parts that this rank maps; none if the job has failed.

        A lock of another part stays taken. Its rank may have left before, so asking it could fail the job.
        """
        if not self.executor.has_failed():
            for rank, exclusive in self.epochs.locked.items():
                if rank in self.memory:
                    self.targets[rank].unlock(exclusive, 0.0)
        self.epochs.locked.clear()


class Ending:
    """An epoch that has begun: as a context manager, it ends the epoch. Otherwise the program ends it by the method."""

    def __init__(self, window: Window, end: Callable[[], object], *, after_errors: bool) -> None:
        self._window, self._end, self._after_errors = window, end, after_errors

    def __enter__(self) -> Window:
        return self._window

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or self._after_errors:
            self._end()


@uncopyable("it belongs to this process; view() sees the same memory as another dtype")
class Window:
    """Memory of all ranks, which each of them accesses by itself; a context manager that frees it at its end.

    `Communicator.window` makes one. Positions count elements of a flat part: 0 is the first element. A position ``at``
    is the first element, a slice, or a sequence of positions. A window does not shorten slices that go beyond a part.

    An operation on a rank needs an *epoch* that allows it: of `fence`, of `start`, or of `lock`. `put`, `get` and local
    accesses to the same element are ordered by epochs only. `accumulate`, `get_accumulate`, `fetch_and_op` and
    `compare_and_swap` are atomic for each element, also with each other, and those of one rank on one element happen in
    their order.

    `put` and `accumulate` return when the caller may change the array. They are done at the target after `flush`, or
    after the end of the epoch. The other operations return their result, or with ``wait=False`` a `Work` at once.

    All methods raise `UsageError` if they are wrong, before anything is sent. They raise `PeerLostError`,
    `CollectiveTimeoutError` or `AbortedError` if the job fails, as all calls do.

    Attributes:
        array: this rank's part, in the shape in which it was made. It stays readable after the window is closed.
        dtype: numpy's dtype of the elements.
        rank, size: this rank, and the number of ranks.
        lengths: the number of elements of each part.

    >>> import numpy as np, unisono as un
    >>> def counted(world):
    ...     with world.window(1, "int64") as window:
    ...         with window.lock_all():
    ...             ticket = int(window.fetch_and_op(1, 0))
    ...         window.fence()
    ...         return ticket, int(window.array[0]) if world.rank == 0 else None
    >>> tickets = un.launch(counted, 3)
    >>> sorted(ticket for ticket, _ in tickets), tickets[0][1]
    ([0, 1, 2], 3)
    """

    def __init__(self, opened: OpenWindow, element: Element, array: AnyArray) -> None:
        self._opened, self._element, self.array = opened, element, array
        self._open, self._failed = opened.epochs.open, opened.executor.failed
        self._timeout_s = opened.comm.timeout_s
        self.dtype = element.numpy
        self.rank, self.size = opened.comm.rank, opened.comm.size
        self.lengths = tuple(nbytes // element.itemsize for nbytes in opened.sizes)

    def __repr__(self) -> str:
        return f"<unisono.Window of {self._element.dtype.name}, rank {self.rank} of {self.size}>"

    def __enter__(self) -> Window:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.free()
        else:
            self._opened.close()

    # --- operations ------------------------------------------------------------------------------------------------

    def put(self, x: Any, rank: int, at: Place = 0) -> None:
        """Copy an array or a number to the part of `rank`, beginning at element `at`."""
        target, source = self._target(rank), source_of(x, self._element)
        target.put(self._element, selected(at, source.size, self.lengths[rank], rank), source)

    def get(
        self, rank: int, at: Place = slice(None), *, out: Any = None, wait: bool = True, timeout_s: float | None = None
    ) -> Any:
        """Return a copy of elements of the part of `rank`, in `out` or in a new flat array; by default of all.

        With an integer `at`, it copies as many elements as `out` has, or one.
        """
        target = self._target(rank)
        flat, count = (None, None) if out is None else target_of(out, self._element)
        where = selected(at, count, self.lengths[rank], rank)
        if flat is None:
            out = flat = np.empty(where.elements, self._element.numpy)
        return self._finished(target.get(self._element, where, flat), out, wait, timeout_s)

    def accumulate(self, x: Any, rank: int, at: Place = 0, op: str | Op = "sum") -> None:
        """Combine elements of the part of `rank` with `x`: each becomes element ∘ x, atomically.

        `op` is a reduction except ``"avg"``, or ``"replace"``, which is an atomic `put`. Reductions are those of
        `Communicator.allreduce`, and a Python function is none of them.
        """
        target, source = self._target(rank), source_of(x, self._element)
        where = selected(at, source.size, self.lengths[rank], rank)
        target.accumulate(self._element, self._element.op(op), where, source)

    def get_accumulate(
        self,
        x: Any,
        rank: int,
        at: Place = 0,
        op: str | Op = "sum",
        *,
        out: Any = None,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine elements as `accumulate` does, and return their values before, in `out` or in a new flat array.

        With the op ``"no_op"`` nothing changes, so that this is an atomic `get`; `x` then only says how many elements.
        """
        target, source = self._target(rank), source_of(x, self._element)
        where = selected(at, source.size, self.lengths[rank], rank)
        code = self._element.op(op)
        if out is None:
            out = flat = np.empty(source.size, self._element.numpy)
        else:
            flat, count = target_of(out, self._element)
            if count != source.size:
                raise UsageError(f"out has {count} elements, and x has {source.size}: pass as many")
        return self._finished(target.get_accumulate(self._element, code, where, source, flat), out, wait, timeout_s)

    def fetch_and_op(
        self,
        value: Any,
        rank: int,
        at: int = 0,
        op: str | Op = "sum",
        *,
        wait: bool = True,
        timeout_s: float | None = None,
    ) -> Any:
        """Combine one element with `value` as `accumulate` does, and return its value before, a scalar of numpy."""
        check_atomic(self._element.dtype)
        target, cell = self._target(rank), cell_of(value, self._element)
        where = selected(at, 1, self.lengths[rank], rank)
        operation = target.get_accumulate(self._element, self._element.op(op), where, cell, cell)
        if operation is None and wait:
            return cell[()]
        return self._finished(operation, cell, wait, timeout_s, _scalar)

    def compare_and_swap(
        self, value: Any, compared: Any, rank: int, at: int = 0, *, wait: bool = True, timeout_s: float | None = None
    ) -> Any:
        """Set one element to `value` if it has the bits of `compared`, and return its value before."""
        check_atomic(self._element.dtype)
        target, cell = self._target(rank), cell_of(value, self._element)
        expected = cell_of(compared, self._element, "compared")
        where = selected(at, 1, self.lengths[rank], rank)
        if where.indices is not None or where.step != 1:
            raise UsageError(f"compare_and_swap takes one position, not {at!r}")
        operation = target.compare_and_swap(self._element, where.start, expected, cell)
        return self._finished(operation, cell, wait, timeout_s, _scalar)

    def shared(self, rank: int) -> AnyArray:
        """Return the part of a rank of this host as a flat array, without a copy, as ``MPI_Win_shared_query`` does.

        Raises:
            UsageError: this rank does not map that memory: it is on another host, an array of the user, or the ranks
                exchange no messages through shared memory.
        """
        self._opened.check()
        rank = self._opened.rank_of(rank)
        if rank not in self._opened.memory:
            raise UsageError(f"this rank does not map the part of rank {rank}: use get() and put()")
        array: AnyArray = self._opened.memory[rank][: self.lengths[rank] * self._element.itemsize].view(self.dtype)
        return array

    def view(self, dtype: DTypeLike) -> Window:
        """Return a window on the same memory whose elements have another dtype; epochs and closing are common."""
        numpy_dtype = element_of(dtype)
        element = Element(check_dtype(numpy_dtype, "the window"), numpy_dtype)
        mine = self._opened.memory[self.rank]
        whole = mine[: mine.size - mine.size % element.itemsize]
        if whole.size and whole.__array_interface__["data"][0] % element.moved_nbytes:
            raise UsageError(
                f"the part begins at no multiple of {element.moved_nbytes} bytes, so it has no {numpy_dtype}"
            )
        return Window(self._opened, element, whole.view(numpy_dtype))

    # --- epochs ----------------------------------------------------------------------------------------------------

    def fence(self, *, last: bool = False, timeout_s: float | None = None) -> Ending:
        """Complete all operations of all ranks, and begin an epoch in which every rank may access every part.

        All ranks call it. After it, each rank sees what the others have done before it. As a context manager, it calls
        the last fence at the end of the block, unless an exception ends the block.

        Args:
            last: begin no epoch.
            timeout_s: seconds until the call fails; by default the option `timeout_s`.
        """
        opened, deadline = self._opened, Deadline(self._opened.limit_s(timeout_s))
        opened.check()
        opened.epochs.check_fence()
        refusal = None
        try:
            opened.flush(range(self.size), deadline.remaining_s())
        except UsageError as error:  # the other ranks are in the fence
            refusal = error
        opened.comm.barrier(timeout_s=deadline.remaining_s())
        opened.epochs.fence(last)
        if refusal is not None:
            raise refusal
        return Ending(self, lambda: self.fence(last=True, timeout_s=timeout_s), after_errors=False)

    def lock(self, rank: int, *, exclusive: bool = True, timeout_s: float | None = None) -> Ending:
        """Wait for the lock of the part of `rank`, and begin an epoch for it.

        Either one rank holds a lock exclusively, or any number of ranks share it. There is no order among ranks that
        wait. As a context manager, it unlocks at the end of the block.
        """
        opened, limit_s = self._opened, self._opened.limit_s(timeout_s)
        opened.check()
        rank = opened.rank_of(rank)
        opened.epochs.check_lock(rank)
        self._end_fence(limit_s)
        opened.targets[rank].lock(bool(exclusive), limit_s)
        opened.epochs.lock(rank, bool(exclusive))
        return Ending(self, lambda: self.unlock(rank, timeout_s=timeout_s), after_errors=True)

    def unlock(self, rank: int, *, timeout_s: float | None = None) -> None:
        """Complete all operations on `rank`, and give up its lock."""
        opened = self._opened
        opened.check()
        rank = opened.rank_of(rank)
        opened.epochs.check_unlock(rank)
        self._unlock(rank, opened.limit_s(timeout_s))

    def lock_all(self, *, timeout_s: float | None = None) -> Ending:
        """Share the locks of all parts, and begin an epoch for them. It is no collective call.

        As a context manager, it unlocks at the end of the block.
        """
        opened = self._opened
        deadline = Deadline(opened.limit_s(timeout_s))
        opened.check()
        opened.epochs.check_lock_all()
        self._end_fence(deadline.remaining_s())
        for rank, target in enumerate(opened.targets):
            target.lock(False, deadline.remaining_s())
            opened.epochs.lock(rank, False)
        opened.epochs.all_locked = True
        return Ending(self, lambda: self.unlock_all(timeout_s=timeout_s), after_errors=True)

    def unlock_all(self, *, timeout_s: float | None = None) -> None:
        """Complete all operations, and give up all locks of `lock_all`."""
        opened = self._opened
        opened.check()
        if not opened.epochs.all_locked:
            raise UsageError("the locks of all ranks are not held: call lock_all() first")
        opened.epochs.all_locked = False
        deadline, refusal = Deadline(opened.limit_s(timeout_s)), None
        for rank in range(self.size):
            try:
                self._unlock(rank, deadline.remaining_s())
            except UsageError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def flush(self, rank: int, *, timeout_s: float | None = None) -> None:
        """Wait until all operations of this rank on `rank` are done, at the target too."""
        self._target(rank).flush(self._timeout_s if timeout_s is None else self._opened.limit_s(timeout_s))

    def flush_all(self, *, timeout_s: float | None = None) -> None:
        """Wait until all operations of this rank are done, at the targets too."""
        self._opened.check()
        self._opened.flush(list(self._opened.epochs.open), self._opened.limit_s(timeout_s))

    def flush_local(self, rank: int, *, timeout_s: float | None = None) -> None:
        """Wait until the caller may use the arrays of all its operations on `rank`; here the same as `flush`."""
        self.flush(rank, timeout_s=timeout_s)

    def flush_local_all(self, *, timeout_s: float | None = None) -> None:
        """Wait until the caller may use the arrays of all its operations; here the same as `flush_all`."""
        self.flush_all(timeout_s=timeout_s)

    def sync(self) -> None:
        """Order this rank's own accesses to shared parts before and after it, as ``MPI_Win_sync`` does."""
        self._opened.check()
        _core.fence_memory()

    def post(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> None:
        """Let these ranks access this rank's part, until all of them have called `complete`; see `start`."""
        opened = self._opened
        opened.check()
        if opened.epochs.posted is not None:
            raise UsageError("this rank's part is exposed by post() already: call wait() first")
        group = self._group(ranks)
        opened.exposure.post(group, opened.limit_s(timeout_s))
        opened.epochs.posted = group

    def start(self, ranks: Sequence[int], *, timeout_s: float | None = None) -> Ending:
        """Wait until all these ranks have called `post` for this rank, and begin an epoch for them.

        As a context manager, it completes at the end of the block.

        >>> import unisono as un
        >>> def given(world):
        ...     with world.window(1, "int64") as window:
        ...         if world.rank == 0:
        ...             window.post([1])
        ...             window.wait()
        ...             return int(window.array[0])
        ...         with window.start([0]):
        ...             window.put(7, 0)
        >>> un.launch(given, 2)
        [7, None]
        """
        opened, limit_s = self._opened, self._opened.limit_s(timeout_s)
        opened.check()
        opened.epochs.check_start()
        group = self._group(ranks)
        self._end_fence(limit_s)
        opened.exposure.await_posts(group, limit_s)
        opened.epochs.start(group)
        return Ending(self, lambda: self.complete(timeout_s=timeout_s), after_errors=True)

    def complete(self, *, timeout_s: float | None = None) -> None:
        """Complete all operations of the epoch of `start`, tell its targets, and end it."""
        opened, deadline = self._opened, Deadline(self._opened.limit_s(timeout_s))
        opened.check()
        group, refusal = opened.epochs.complete(), None
        try:
            opened.flush(group, deadline.remaining_s())
        except UsageError as error:
            refusal = error
        opened.exposure.complete(group, deadline.remaining_s())
        if refusal is not None:
            raise refusal

    def wait(self, *, timeout_s: float | None = None) -> None:
        """Wait until all ranks of the last `post` have called `complete`."""
        opened = self._opened
        opened.check()
        self._check_posted()
        opened.exposure.await_completions(opened.limit_s(timeout_s))
        opened.epochs.posted = None

    def test(self) -> bool:
        """Return whether `wait` would return at once. If it would, the part is exposed no more, as after `wait`."""
        opened = self._opened
        opened.check()
        self._check_posted()
        if not opened.exposure.have_completed():
            return False
        opened.epochs.posted = None
        return True

    def free(self, *, timeout_s: float | None = None) -> None:
        """Complete all operations of all ranks, and close the window. All ranks call it.

        Arrays on its memory stay valid, but other ranks reach it no more. A window that is closed already, or whose
        communicator is, stays so.
        """
        opened = self._opened
        if opened.is_closed or opened.comm.is_closed:
            opened.close()
            return
        opened.check()
        opened.epochs.check_fence()
        try:
            self.fence(last=True, timeout_s=timeout_s)
        finally:
            opened.close()

    # ---------------------------------------------------------------------------------------------------------------

    def _target(self, rank: int) -> WindowTarget:
        """Return the target of an operation; raises as `OpenWindow.target`, which explains why there is none."""
        target = self._open.get(rank)
        if target is None or self._failed():
            return self._opened.target(rank)
        return target

    def _finished(
        self,
        operation: Operation | None,
        result: Any,
        wait: bool,
        timeout_s: float | None,
        convert: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Return the result of a started operation when it has ended, or its work at once."""
        if operation is None and wait:
            return result if convert is None else convert(result)
        limit_s, works = self._opened.limit_s(timeout_s), self._opened.works
        if operation is None:
            return Work(works, None, result, limit_s, convert)
        if wait:
            operation.wait(limit_s)
            return result if convert is None else convert(result)
        return works.add(operation, result, limit_s, convert)

    def _end_fence(self, limit_s: float) -> None:
        """Complete the operations of the epoch that the last fence has begun, because another epoch follows."""
        if self._opened.epochs.is_fenced:
            self._opened.flush(range(self.size), limit_s)

    def _unlock(self, rank: int, limit_s: float) -> None:
        exclusive = self._opened.epochs.unlock(rank)
        self._opened.targets[rank].unlock(exclusive, limit_s)

    def _group(self, ranks: Sequence[int]) -> tuple[int, ...]:
        try:
            members = [self._opened.rank_of(rank) for rank in ranks]
        except TypeError:
            raise UsageError(f"ranks must be a sequence of ranks, not {ranks!r}") from None
        if len(set(members)) != len(members):
            raise UsageError(f"ranks must be different, but a rank occurs twice in {members}")
        return tuple(members)

    def _check_posted(self) -> None:
        if self._opened.epochs.posted is None:
            raise UsageError("this rank's part is not exposed: call post() first")


def _scalar(cell: AnyArray) -> Any:
    return cell[()]
