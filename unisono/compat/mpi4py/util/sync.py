"""Ranks take turns, count, exclude and notify each other, by numbers in a window.

A rank that waits looks at a number again and again, with pauses. If the rank for which it waits dies, it gets an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from unisono.compat.mpi4py.communicators.session import COMM_SELF
from unisono.compat.mpi4py.communicators.window import Win
from unisono.compat.mpi4py.futures.worker import BACKOFF_S, pauses
from unisono.compat.mpi4py.values.info import INFO_NULL
from unisono.compat.mpi4py.values.op import OPS

if TYPE_CHECKING:
    from typing_extensions import Self

_T = TypeVar("_T")
_FREE = 0  # the owner of a mutex that no rank holds


class _Cells:
    """Numbers in the memory of one rank of a communicator."""

    def __init__(self, values: Sequence[float], typecode: str, comm: Any, info: Any, root: int = 0) -> None:
        initial = np.array(values, typecode)
        is_root = comm.Get_rank() == root
        self._dtype, self._root = initial.dtype, root
        self._win: Any = Win.Allocate(initial.nbytes * is_root, initial.itemsize, info, comm)
        if is_root:
            np.frombuffer(self._win.tomemory(), typecode)[:] = initial
        comm.Barrier()
        self._win.Lock_all()

    def combine(self, value: float, op: Any, index: int = 0) -> Any:
        """Combine a number with a value, and return the number as it was."""
        before = np.zeros(1, self._dtype)
        self._open().Fetch_and_op(np.array([value], self._dtype), before, self._root, index, op)
        self._win.Flush(self._root)
        return before.item()

    def swap(self, value: int, expected: int) -> bool:
        """Set the first number to a value if it is the expected one; return whether it was."""
        before = np.zeros(1, self._dtype)
        new, old = (np.array([each], self._dtype) for each in (value, expected))
        self._open().Compare_and_swap(new, old, before, self._root, 0)
        self._win.Flush(self._root)
        return bool(before == old)

    def _open(self) -> Any:
        if self._win is None:
            raise RuntimeError("it has been freed")
        return self._win

    @property
    def is_freed(self) -> bool:
        """Whether `free` has been called."""
        return self._win is None

    def free(self) -> None:
        """Close the window; all ranks call it."""
        if self._win is not None:
            win, self._win = self._win, None
            win.Unlock_all()
            win.Free()


class Sequential:
    """A context manager whose block the ranks of a communicator run one after the other.

    Args:
        comm: the communicator.
        tag: the tag of the messages.
    """

    def __init__(self, comm: Any, tag: int = 0) -> None:
        self.comm, self.tag = comm, tag

    def __enter__(self) -> Sequential:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Wait until the ranks before this one have called `end`."""
        if self.comm.Get_rank() > 0:
            self.comm.Recv(bytearray(0), self.comm.Get_rank() - 1, self.tag)

    def end(self) -> None:
        """Let the next rank begin."""
        if self.comm.Get_rank() < self.comm.Get_size() - 1:
            self.comm.Send(b"", self.comm.Get_rank() + 1, self.tag)


class Counter:
    """An iterator whose values the ranks of a communicator share: each value goes to one rank.

    Args:
        start, step: the first value, and the difference of two values.
        typecode: the type of the values, as in numpy.
        comm: the communicator.
        info: hints.
        root: the rank that has the counter in its memory.
    """

    def __init__(
        self,
        start: int = 0,
        step: int = 1,
        *,
        typecode: str = "i",
        comm: Any = COMM_SELF,
        info: Any = INFO_NULL,
        root: int = 0,
    ) -> None:
        self._cells, self._step = _Cells([start], typecode, comm, info, root), step

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, incr: int | None = None) -> Any:
        """Return the value, and add `incr`, or the step, to it.

        Raises:
            RuntimeError: the counter has been freed.
        """
        return self._cells.combine(self._step if incr is None else incr, OPS["SUM"])

    def free(self) -> None:
        """Close the counter; all ranks call it."""
        self._cells.free()


class _Acquired:
    """An object that a with-block acquires when it begins and releases when it ends."""

    acquire: Callable[..., bool]
    release: Callable[..., None]

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Mutex(_Acquired):
    """A lock that one rank of a communicator holds.

    Args:
        recursive: whether the rank that holds it may acquire it again.
        comm: the communicator.
        info: hints.
    """

    def __init__(self, *, recursive: bool = False, comm: Any = COMM_SELF, info: Any = INFO_NULL) -> None:
        self.comm, self._recursive = comm, recursive
        self._owner = _Cells([_FREE], "q", comm, info)
        self._count = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the lock; return whether this rank holds it.

        Args:
            blocking: whether to wait for the rank that holds it.

        Raises:
            RuntimeError: this rank holds it, and it is not recursive, or it has been freed.
        """
        if self.locked():
            if not self._recursive:
                raise RuntimeError("this rank holds the mutex already")
        elif not self._taken(blocking):
            return False
        self._count += 1
        return True

    def _taken(self, blocking: bool) -> bool:
        pause, me = pauses(BACKOFF_S), self.comm.Get_rank() + 1
        while not self._owner.swap(me, _FREE):
            if not blocking:
                return False
            pause()
        return True

    def release(self) -> None:
        """Release the lock, or undo one `acquire` of a recursive one.

        Raises:
            RuntimeError: this rank does not hold it, or it has been freed.
        """
        require_held(self)
        self._count -= 1
        if not self._count:
            self._owner.combine(_FREE, OPS["REPLACE"])

    def locked(self) -> bool:
        """Return whether this rank holds the lock."""
        return self.count() > 0

    def count(self) -> int:
        """Return how often this rank has acquired the lock and not released it."""
        if self._owner.is_freed:
            raise RuntimeError("the mutex has been freed")
        return self._count

    def let_go(self) -> int:
        """Release the lock, however often this rank has acquired it; return how often that was."""
        count = 0 if self._owner.is_freed else self._count
        for _ in range(count):
            self.release()
        return count

    def free(self) -> None:
        """Release the lock if this rank holds it, and close it; all ranks call it."""
        self.let_go()
        self._owner.free()


def require_held(mutex: Mutex) -> None:
    """Raise `RuntimeError` unless this rank holds a mutex."""
    if not mutex.locked():
        raise RuntimeError("this rank does not hold the mutex")


class Condition(_Acquired):
    """A condition variable: ranks wait for it, and are notified, while they hold its mutex.

    The first number of its window is the last ticket. The others are the tickets of the ranks that wait, or 0.

    Args:
        mutex: the mutex; None for a new one.
        recursive: whether a new mutex is recursive.
        comm: the communicator of a new mutex.
        info: hints.
    """

    def __init__(
        self, mutex: Mutex | None = None, *, recursive: bool = True, comm: Any = COMM_SELF, info: Any = INFO_NULL
    ) -> None:
        self._owns_mutex = mutex is None
        self._mutex = Mutex(recursive=recursive, comm=comm, info=info) if mutex is None else mutex
        comm = self._mutex.comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._tickets = _Cells([0] * (1 + self._size), "q", comm, info)

    def acquire(self, blocking: bool = True) -> bool:
        """Acquire the mutex; see `Mutex.acquire`."""
        return self._open().acquire(blocking)

    def release(self) -> None:
        """Release the mutex."""
        self._open().release()

    def locked(self) -> bool:
        """Return whether this rank holds the mutex."""
        return self._open().locked()

    def _open(self) -> Mutex:
        if self._tickets.is_freed:
            raise RuntimeError("the condition has been freed")
        return self._mutex

    def _ticket(self, rank: int) -> int:
        return int(self._tickets.combine(0, OPS["NO_OP"], 1 + rank))

    def wait(self) -> bool:
        """Release the mutex, wait until another rank notifies this one, and acquire the mutex again.

        Raises:
            RuntimeError: this rank does not hold the mutex.
        """
        mutex, pause = self._open(), pauses(BACKOFF_S)
        require_held(mutex)
        self._tickets.combine(1 + self._tickets.combine(1, OPS["SUM"]), OPS["REPLACE"], 1 + self._rank)
        count = mutex.let_go()
        while self._ticket(self._rank):
            pause()
        for _ in range(count):
            mutex.acquire()
        return True

    def wait_for(self, predicate: Callable[[], _T]) -> _T:
        """Wait until a function returns a true value, and return that."""
        require_held(self._open())
        while not (result := predicate()):
            self.wait()
        return result

    def notify(self, n: int = 1) -> int:
        """Notify at most `n` of the ranks that wait, those first that have waited longest; return how many these are.

        Raises:
            RuntimeError: this rank does not hold the mutex.
        """
        require_held(self._open())
        waiting = sorted((ticket, rank) for rank in range(self._size) if (ticket := self._ticket(rank)))
        notified = list(itertools.islice(waiting, n))
        for _, rank in notified:
            self._tickets.combine(0, OPS["REPLACE"], 1 + rank)
        return len(notified)

    def notify_all(self) -> int:
        """Notify all ranks that wait; return how many these are."""
        return self.notify(self._size)

    def free(self) -> None:
        """Release the mutex if this rank holds it, and close the condition; all ranks call it."""
        self._mutex.let_go()
        self._tickets.free()
        if self._owns_mutex:
            self._mutex.free()


class Semaphore(_Acquired):
    """A number of permits, of which a rank takes one or waits.

    Args:
        value: the number of permits.
        bounded: whether a release of more permits than `value` is an error.
        comm: the communicator.
        info: hints.

    Raises:
        ValueError: `value` is negative.
    """

    def __init__(self, value: int = 1, *, bounded: bool = True, comm: Any = COMM_SELF, info: Any = INFO_NULL) -> None:
        if value < 0:
            raise ValueError("the number of permits must not be negative")
        self._value, self._bounded = value, bounded
        self._counter = Counter(value, typecode="q", comm=comm, info=info)
        self._condition = Condition(recursive=False, comm=comm, info=info)

    def acquire(self, blocking: bool = True) -> bool:
        """Take a permit; return whether this rank got one.

        Args:
            blocking: whether to wait for one.
        """
        with self._condition:
            while self._counter.next(0) <= 0:
                if not blocking:
                    return False
                self._condition.wait()
            self._counter.next(-1)
        return True

    def release(self, n: int = 1) -> None:
        """Give permits back.

        Raises:
            ValueError: `n` is not positive, or the semaphore is bounded and would have more permits than at first.
        """
        if n < 1:
            raise ValueError("the number of permits must be positive")
        with self._condition:
            if self._bounded and self._counter.next(0) + n > self._value:
                raise ValueError("the semaphore would have more permits than at first")
            self._counter.next(n)
            self._condition.notify(n)

    def free(self) -> None:
        """Close the semaphore; all ranks call it."""
        self._condition.free()
        self._counter.free()
