"""`MPIPoolExecutor`, whose workers are spawned ranks, and `MPICommExecutor`, whose workers are those of a communicator.

Under ``python -m mpi4py.futures``, all executors share the ranks from 1 on.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

from unisono.compat.mpi4py import MPI
from unisono.compat.mpi4py.futures import worker
from unisono.compat.mpi4py.futures.channels import CommChannel, SpawnedChannel, ThreadChannel
from unisono.compat.mpi4py.futures.tasks import importing
from unisono.compat.mpi4py.futures.workers import Share, Workers

# The workers that all executors share; None outside of ``python -m mpi4py.futures``.
shared: Workers | None = None


class MPIPoolExecutor(futures.Executor):
    """An executor that runs calls in ranks of a job of its own.

    Args:
        max_workers: the number of ranks; by default the variable MPI4PY_FUTURES_MAX_WORKERS, or 1.
        initializer: called in each worker before its first task.
        initargs: its arguments.
        options: `python_exe`, `python_args`, `globals`, `main`, `path`, `wdir`, `env` and `backoff`, as in mpi4py.
            `mpi_info` and `use_pkl5` are ignored: large parts of memory always travel beside the pickle.

    Raises:
        ValueError: `max_workers` is not positive.
        TypeError: `initializer` is no function.
    """

    Future = futures.Future

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: Iterable[Any] = (),
        **options: Any,
    ) -> None:
        if max_workers is None:
            max_workers = int(os.environ.get("MPI4PY_FUTURES_MAX_WORKERS", "1"))
        if max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        backoff_s = options.get("backoff")
        if backoff_s is None:
            backoff_s = float(os.environ.get("MPI4PY_FUTURES_BACKOFF", worker.BACKOFF_S))
        self._options = {**options, "backoff": backoff_s}
        self._start = initializer, tuple(initargs)
        self._asked_workers = max_workers
        self._lock = threading.Lock()
        self._pool: Share | None = None
        self._shutdown = False

    def _workers(self) -> Workers:
        """Return the workers, which the first task starts."""
        if shared is not None:
            return shared
        open_channel = functools.partial(SpawnedChannel, self._asked_workers, self._options)
        return Workers(open_channel, backoff_s=self._options["backoff"])

    def _booted(self) -> Share:
        if self._shutdown:
            raise RuntimeError("the executor has been shut down")
        if importing.is_set():
            raise RuntimeError('a worker that imports the program starts no workers: use `if __name__ == "__main__"`')
        if self._pool is None:
            self._pool = Share(self._workers(), *self._start)
            weakref.finalize(self, self._pool.close).atexit = False
        return self._pool

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 after `shutdown`."""
        with self._lock:
            share = None if self._shutdown else self._booted()
        return 0 if share is None else share.size

    @property
    def _max_workers(self) -> int:
        return self.num_workers

    def bootup(self, wait: bool = True) -> Any:
        """Start the workers, and return this executor.

        Raises:
            RuntimeError: the executor has been shut down.
        """
        with self._lock:
            share = self._booted()
        if wait:
            share.event.wait()
        return self

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        """Let a worker call a function, and return the future of its result.

        Raises:
            RuntimeError: the executor has been shut down.
            BrokenExecutor: an initializer has failed, or the workers are lost.
        """
        with self._lock:
            future: futures.Future[Any] = self.Future()
            self._booted().submit(future, fn, args, kwargs)
            return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Return the results of calls, each with one item of each iterable."""
        options: Any = {"timeout": timeout, "chunksize": chunksize, "buffersize": buffersize, "unordered": unordered}
        return self.starmap(fn, zip(*iterables, strict=False), **options)

    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
        unordered: bool = False,
    ) -> Iterator[Any]:
        """Return the results of calls with the arguments that an iterable returns.

        Args:
            fn: the function.
            iterable: returns tuples of arguments.
            timeout: seconds from now until `TimeoutError`.
            chunksize: the number of calls in a task.
            buffersize: the most tasks whose results have not been returned; None submits all at once.
            unordered: whether results come as tasks end.

        Raises:
            ValueError: a size is not positive, or `buffersize` comes with `unordered`.
            TypeError: `buffersize` is no integer.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1")
        if buffersize is not None:
            if not isinstance(buffersize, int):
                raise TypeError("buffersize must be an integer or None")
            if buffersize < 1 or unordered:
                raise ValueError("buffersize must be >= 1, or None if results are unordered")
        end = None if timeout is None else time.monotonic() + timeout
        items = iter(iterable)
        chunks = iter(lambda: list(itertools.islice(items, chunksize)), [])
        tasks = (self.submit(called, fn, chunk) for chunk in chunks)
        started = deque(itertools.islice(tasks, buffersize))
        return _unordered(started, end) if unordered else _ordered(started, tasks, end)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no further calls.

        Args:
            wait: whether to wait until all calls have ended.
            cancel_futures: whether to cancel the calls that no worker runs yet.
        """
        with self._lock:
            self._shutdown, share = True, self._pool
        if share is None:
            return
        if cancel_futures:
            share.cancel()
        share.close()
        if wait:
            share.join()
            self._pool = None


class ThreadPoolExecutor(MPIPoolExecutor):
    """An executor whose workers are threads of this process."""

    def _workers(self) -> Workers:
        return Workers(functools.partial(ThreadChannel, self._asked_workers), backoff_s=self._options["backoff"])


class ProcessPoolExecutor(MPIPoolExecutor):
    """An executor whose workers are ranks of a job of its own."""


class _CommPoolExecutor(MPIPoolExecutor):
    """An executor whose workers are the ranks of the other group of an intercommunicator."""

    def __init__(self, comm: Any, **options: Any) -> None:
        super().__init__(comm.Get_remote_size(), **options)
        self._comm = comm

    def _workers(self) -> Workers:
        return Workers(functools.partial(CommChannel, self._comm), backoff_s=self._options["backoff"])


def called(function: Callable[..., Any], chunk: list[Any]) -> list[Any]:
    """Return the results of calls with the arguments of each item of a chunk."""
    return [function(*args) for args in chunk]


def _ordered(started: deque[Any], tasks: Iterator[Any], end: float | None) -> Iterator[Any]:
    try:
        while started:
            results = started[0].result(None if end is None else end - time.monotonic())
            started.popleft()
            started.extend(itertools.islice(tasks, 1))
            yield from results
    finally:
        for future in started:
            future.cancel()


def _unordered(started: Iterable[Any], end: float | None) -> Iterator[Any]:
    try:
        for future in futures.as_completed(started, None if end is None else end - time.monotonic()):
            yield from future.result()
    finally:
        for future in started:
            future.cancel()


def comm_split(comm: Any, root: int) -> tuple[Any, Any]:
    """Return a communicator between the root and the other ranks, and one of the other ranks; null on the root."""
    is_root = comm.Get_rank() == root
    local = comm.Split(int(is_root), comm.Get_rank())
    between = local.Create_intercomm(0, comm, int(root == 0) if is_root else root)
    if is_root:
        local.Free()
    return between, local


class MPICommExecutor:
    """A context manager that gives the root of a communicator an executor, whose tasks the other ranks run.

    The other ranks get None, after all tasks have been run.

    Args:
        comm: the communicator, by default `COMM_WORLD`.
        root: the rank that gets the executor.
        options: those of `MPIPoolExecutor`.

    Raises:
        ValueError: `comm` is between two groups, or has no such rank.
    """

    def __init__(self, comm: Any = None, root: int = 0, **options: Any) -> None:
        comm = MPI.COMM_WORLD if comm is None else comm  # type: ignore[attr-defined]
        if comm.Is_inter():
            raise ValueError("expecting a communicator of one group")
        if not 0 <= root < comm.Get_size():
            raise ValueError("expecting a root in range(comm.size)")
        self._comm, self._root, self._options = comm, root, options
        self._executor: MPIPoolExecutor | None = None
        self._between: Any = None

    def __enter__(self) -> MPIPoolExecutor | None:
        if self._executor is not None:
            raise RuntimeError("__enter__ has been called already")
        if shared is not None:
            self._executor = MPIPoolExecutor(**self._options)
        elif self._comm.Get_size() == 1:
            self._executor = ThreadPoolExecutor(1, **self._options)
        else:
            self._between, workers = comm_split(self._comm, self._root)
            if workers:
                serve_comm(self._between, workers)
                self._between.Free()
                workers.Free()
            else:
                self._executor = _CommPoolExecutor(self._between, **self._options).bootup(wait=False)
        return self._executor

    def __exit__(self, *_: object) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()
            if self._between is not None:
                self._between.Free()


def serve_comm(between: Any, workers: Any) -> None:
    """Run the tasks of the master, which is the only rank of the other group of `between`."""
    worker.serve(between._live.object_port, 0, workers)
