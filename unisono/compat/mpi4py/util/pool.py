"""`Pool`, with the methods of `multiprocessing.Pool`, over an executor of `mpi4py.futures`."""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any

from unisono.compat.mpi4py import futures
from unisono.compat.mpi4py.futures.pool import called

_CHUNKS_PER_WORKER = 4
_IGNORED = ("maxtasksperchild", "context")
_Callback = Callable[[Any], object] | None


class AsyncResult:
    """The result of a call that a worker runs.

    Args:
        future: the future of the call.
        callback: called with the result, before `wait` returns.
        error_callback: called with the error of the call instead.
    """

    def __init__(self, future: Future[Any], callback: _Callback = None, error_callback: _Callback = None) -> None:
        self.future = future
        self._callbacks = callback, error_callback
        self._ended = threading.Event()
        future.add_done_callback(self._end)

    def _end(self, future: Future[Any]) -> None:
        try:
            if not future.cancelled():
                error = future.exception()
                callback = self._callbacks[error is not None]
                if callback is not None:
                    callback(future.result() if error is None else error)
        finally:
            self._ended.set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended, or has been cancelled."""
        self._ended.wait(timeout)

    def get(self, timeout: float | None = None) -> Any:
        """Return the result.

        Raises:
            TimeoutError: the call has not ended in time, or has been cancelled.
            Exception: the error of the call.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError
        try:
            return self.future.result()
        except CancelledError:
            raise TimeoutError from None

    def ready(self) -> bool:
        """Return whether the call has ended."""
        return self._ended.is_set()

    def successful(self) -> bool:
        """Return whether the call has ended without an error.

        Raises:
            ValueError: it has not ended.
        """
        if not self.ready():
            raise ValueError("the call has not ended")
        return not self.future.cancelled() and self.future.exception() is None


class ApplyResult(AsyncResult):
    """The result of `Pool.apply_async`."""


class MapResult(AsyncResult):
    """The results of `Pool.map_async` and `Pool.starmap_async`, as a list."""


class Pool:
    """Workers that are ranks of a job of their own.

    Args:
        processes: the number of workers; None as for `MPIPoolExecutor`.
        initializer: called in each worker before its first task.
        initargs: its arguments.
        options: those of `MPIPoolExecutor`. `maxtasksperchild` and `context` of multiprocessing have no effect.

    Raises:
        ValueError: `processes` is not positive.
        TypeError: `initializer` is no function.
    """

    Executor: Any = futures.MPIPoolExecutor

    def __init__(
        self,
        processes: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        for name in _IGNORED:
            if options.pop(name, None) is not None:
                warnings.warn(f"{name} has no effect", stacklevel=2)
        self.executor = self.Executor(processes, initializer=initializer, initargs=initargs, **options)

    def apply(self, func: Callable[..., Any], args: Iterable[Any] = (), kwds: Mapping[str, Any] | None = None) -> Any:
        """Call a function in a worker, and return its result."""
        return self.apply_async(func, args, kwds).get()

    def apply_async(
        self,
        func: Callable[..., Any],
        args: Iterable[Any] = (),
        kwds: Mapping[str, Any] | None = None,
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> ApplyResult:
        """Let a worker call a function."""
        return ApplyResult(self.executor.submit(func, *args, **(kwds or {})), callback, error_callback)

    def map(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int | None = None) -> list[Any]:
        """Return the results of calls, each with one item."""
        return self.map_async(func, iterable, chunksize).get()

    def map_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Any],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> MapResult:
        """Let workers call a function with each item."""
        return self.starmap_async(func, zip(iterable, strict=False), chunksize, callback, error_callback)

    def imap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        """Return the results of calls, each with one item, in the order of the items."""
        return self.istarmap(func, zip(iterable, strict=False), chunksize)

    def imap_unordered(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        """Return the results of calls, each with one item, as they end."""
        return self.istarmap_unordered(func, zip(iterable, strict=False), chunksize)

    def starmap(
        self, func: Callable[..., Any], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[Any]:
        """Return the results of calls, each with the arguments of one item."""
        return self.starmap_async(func, iterable, chunksize).get()

    def starmap_async(
        self,
        func: Callable[..., Any],
        iterable: Iterable[Iterable[Any]],
        chunksize: int | None = None,
        callback: _Callback = None,
        error_callback: _Callback = None,
    ) -> MapResult:
        """Let workers call a function with the arguments of each item."""
        items = list(iterable)
        size = chunksize or len(items) // (_CHUNKS_PER_WORKER * self.executor._max_workers) + 1
        chunks = [items[first : first + size] for first in range(0, len(items), size)]
        tasks = [self.executor.submit(called, func, chunk) for chunk in chunks]
        return MapResult(_joined(tasks), callback, error_callback)

    def istarmap(self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        """Return the results of calls with the arguments of each item, in the order of the items."""
        return self.executor.starmap(func, iterable, chunksize=chunksize)

    def istarmap_unordered(
        self, func: Callable[..., Any], iterable: Iterable[Any], chunksize: int = 1
    ) -> Iterator[Any]:
        """Return the results of calls with the arguments of each item, as they end."""
        return self.executor.starmap(func, iterable, chunksize=chunksize, unordered=True)

    def close(self) -> None:
        """Accept no further calls."""
        self.executor.shutdown(wait=False)

    def terminate(self) -> None:
        """Accept no further calls, and cancel those that no worker runs yet."""
        self.executor.shutdown(wait=False, cancel_futures=True)

    def join(self) -> None:
        """Wait until the workers have ended; call `close` or `terminate` before."""
        self.executor.shutdown(wait=True)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.terminate()


class ThreadPool(Pool):
    """Workers that are threads of this process."""

    Executor: Any = futures.ThreadPoolExecutor


def _joined(tasks: list[Future[list[Any]]]) -> Future[list[Any]]:
    """Return the future of all results. It has the error of the first task with one, and is cancelled with a task."""
    joined: Future[list[Any]] = Future()
    lock, remaining = threading.Lock(), itertools.count(len(tasks) - 1, -1)

    def end(_: object = None) -> None:
        with lock:
            if next(remaining) > 0:
                return
        if any(task.cancelled() for task in tasks):
            joined.cancel()
            joined.set_running_or_notify_cancel()
            return
        errors = [error for task in tasks if (error := task.exception()) is not None]
        if errors:
            joined.set_exception(errors[0])
        else:
            joined.set_result([result for task in tasks for result in task.result()])

    for task in tasks:
        task.add_done_callback(end)
    if not tasks:
        end()
    return joined
