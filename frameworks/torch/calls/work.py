"""`Work`, the object that torch.distributed hands out for a call in flight, and its futures.

Theory of operation
-------------------
*Futures.* The callback of a future may wait for another future. So no single thread completes all futures: each is
completed by a thread of its own, from a pool that grows whenever no thread is free. No thread waits for a call that is
in flight, because it might take a core from the program. A future must not end by `set_exception` either, because C++
would take the exception for the value. So `Work` completes an inner future that only says that the call has ended. The
future that is handed out follows from it by a callback that returns the result or raises.

*Two halves.* A work is an object of C++ and a Python object with the methods. C++ may hold the first after Python has
dropped the second. For example, DDP's `join` waits for a work and asks for its future. C++ would then find no methods:
a wait would never end, and there would be no future. Nothing tells Python when C++ lets go. So `WorkKeeper` holds
Python halves: those that nobody has waited for, and the last ones that Python has dropped.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from unisono import UnisonoError
from unisono.frameworks.pending import Pending
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.errors import torch_error

_NO_LIMIT = timedelta(0)
# How many works a keeper holds that nobody has waited for, and how many that Python has dropped.
_MOST_KEPT = 256
# Results of dropped works are held up to this size. Of larger results, the caller must hold the tensors.
_MOST_RESULT_NBYTES = 4096
_MOST_ITEMSIZE = 16  # that of complex128
# How long a thread without a job waits for another one before it ends.
_IDLE_S = 5.0


class WorkKeeper:
    """Holds the Python halves of the works of a process group, because C++ may still call them.

    Attributes:
        is_coalescing: whether the works of calls are being collected into one, between `start_coalescing` and
            `end_coalescing`.
        on_failure: a function to call when a call of the group has failed, before the program gets the error.
    """

    def __init__(self) -> None:
        self.on_failure: Callable[[], None] = do_nothing
        self._unwaited: OrderedDict[Work, None] = OrderedDict()  # many threads change it, and none iterates over it
        self._dropped: deque[Work] = deque(maxlen=_MOST_KEPT)
        self.is_coalescing = False
        self._coalesced: list[Work] = []

    def start_coalescing(self) -> None:
        """Collect the works of the calls from now on."""
        self.is_coalescing = True

    def end_coalescing(self) -> Work:
        """Return one work for all calls since `start_coalescing`."""
        works, self._coalesced, self.is_coalescing = self._coalesced, [], False
        results = [tensor for work in works for tensor in work.results]
        return Work(JoinedCalls([work.pending for work in works]), results, lambda: _finish_all(works), self)

    def keep(self, work: Work) -> None:
        """Hold a work until it is waited for. If there are too many, release the oldest one if it has ended."""
        self._unwaited[work] = None
        if self.is_coalescing:
            self._coalesced.append(work)
        if len(self._unwaited) > _MOST_KEPT:
            oldest, _ = self._unwaited.popitem(last=False)
            if not oldest.is_completed():
                self._unwaited[oldest] = None

    def release(self, work: Work) -> None:
        """Let go of a work that has been waited for."""
        self._unwaited.pop(work, None)

    def keep_dropped(self, work: Work) -> None:
        """Keep a work alive after Python has dropped its last reference, until 256 later ones have been dropped."""
        self._dropped.append(work)


@skip_dynamo
class Work(dist.Work):  # type: ignore[misc]
    """The object that torch.distributed hands out for a call with ``async_op=True``.

    Args:
        pending: the call.
        results: the tensors that the call writes.
        finish: a function to call when the call has ended without an error and before its result is used. Several
            threads may call it.
        keeper: holds the work.

    Attributes:
        pending, results, finish: the same.
    """

    def __init__(self, pending: Pending, results: list[Any], finish: Callable[[], None], keeper: WorkKeeper) -> None:
        dist.Work.__init__(self)
        self.pending = pending
        self.results = results
        self.finish = finish
        self._keeper = keeper
        keeper.keep(self)

    # In the class, because most works change none of them.
    _error: Exception | None = None
    _future: Any = None
    _has_waited = False
    _weak_results: Sequence[weakref.ref[Any]] = ()

    def __del__(self) -> None:
        """Resurrect the object once, because C++ may hold its other half."""
        if self.pending is _ENDED and not _are_small(self.results):
            self._weak_results = [weakref.ref(tensor) for tensor in self.results]
            self.results, self._future = [], None
        self._keeper.keep_dropped(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the call has ended, or make it fail after `timeout`. With 0, the time limit of the call applies.

        Raises:
            dist.DistBackendError: the call failed.
        """
        try:
            self.pending.wait(None if timeout is _NO_LIMIT or timeout <= _NO_LIMIT else timeout.total_seconds())
            self.finish()
        except UnisonoError as error:
            self._keeper.release(self)
            self._keeper.on_failure()
            self._error = torch_error(error)
            raise self._error from error
        self._has_waited = True
        if self.pending.done():  # False on a GPU while the call is in the stream, because its memory is in use
            self.pending, self.finish = _ENDED, do_nothing
        self._keeper.release(self)
        return True

    def synchronize(self) -> None:
        """Wait until the call has ended, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, with or without an error."""
        return self.pending.done()

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that has failed, or None."""
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except dist.DistBackendError as error:
                return error  # type: ignore[no-any-return]
        return self._error

    def result(self) -> list[Any]:
        """Wait for the call and return the tensors that it has written."""
        self.wait()
        results = self.results or [result() for result in self._weak_results]
        if any(tensor is None for tensor in results):
            raise dist.DistBackendError("unisono: the results of this work are gone: the program holds no tensor of it")
        return results

    def get_future(self) -> Any:
        """Return the future of the tensors that the call writes. It is complete if the work has been waited for."""
        if self._future is not None:
            return self._future
        # With the devices, those who wait let their current stream wait for the streams in which the results are ready.
        ended: Any = Future(devices=list({tensor.device for tensor in self.results if tensor.is_cuda}))
        future = ended.then(lambda _: self.result())
        if not self._weak_results:  # a future would hold the tensors of the weak references
            self._future = future
        if self._has_waited:
            ended.set_result(None)
        else:
            self.pending.add_done_callback(lambda _: THREADS.run(lambda: self._complete(ended)))
        return future

    def _complete(self, ended: Any) -> None:
        with contextlib.suppress(Exception):  # the callback of the future raises it
            self.wait()
        ended.set_result(None)


@skip_dynamo
class AnySourceReceive(Work):
    """The work of a receive from any rank."""

    def __init__(self, pending: Any, results: list[Any], finish: Callable[[], None], keeper: WorkKeeper) -> None:
        super().__init__(pending, results, finish, keeper)
        self._call = pending

    def _source_rank(self) -> int:
        """Wait for the message and return the rank that sent it."""
        self.wait()
        source: int = self._call.message().source
        return source

    source_rank = _source_rank


class JoinedCalls:
    """Several calls as one `Pending`, which has ended when all of them have."""

    def __init__(self, calls: Sequence[Pending]) -> None:
        self._calls = calls

    def done(self) -> bool:
        return all(call.done() for call in self._calls)

    def wait(self, timeout_s: float | None = None) -> None:
        for call in self._calls:
            call.wait(timeout_s)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        unfinished, lock = list(self._calls), threading.Lock()

        def count(_: Any) -> None:
            with lock:
                unfinished.pop()
                is_last = not unfinished
            if is_last:
                callback(self)

        for call in self._calls:
            call.add_done_callback(count)
        if not self._calls:
            callback(self)


class _Ended:
    """A call that has ended without an error."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        callback(self)


_ENDED = _Ended()


def do_nothing() -> None:
    """Do nothing, when a call has ended whose results are in the memory of their tensors."""


def _are_small(tensors: Sequence[Any]) -> bool:
    """Return whether tensors have at most `_MOST_RESULT_NBYTES` in total. Sparse tensors have no `nbytes`."""
    if len(tensors) == 1 and tensors[0].numel() * _MOST_ITEMSIZE <= _MOST_RESULT_NBYTES:
        return True
    nbytes: int = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return nbytes <= _MOST_RESULT_NBYTES


def _finish_all(works: Sequence[Work]) -> None:
    for work in works:
        work.finish()


class Threads:
    """A pool of threads that runs every job at once: it starts a thread if none is free. Idle threads end after 5 s."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of the two counts below
        self._all = 0
        self._free = 0

    def run(self, job: Callable[[], None]) -> None:
        """Run a job in a free thread, or in a new one."""
        with self._changed:
            if self._free:
                self._free -= 1
            else:
                self._all += 1
                threading.Thread(target=self._work, name="unisono-futures", daemon=True).start()
            self._jobs.put(job)

    def wait_idle(self, timeout_s: float) -> None:
        """Wait until all jobs have ended, at most `timeout_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._free == self._all, timeout_s)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._changed:
                    if self._jobs.empty() and self._free:
                        self._all -= 1
                        self._free -= 1
                        return
                continue
            job()
            del job
            with self._changed:
                self._free += 1
                self._changed.notify_all()


THREADS = Threads()
