"""Calls that go on: `Work`, and its futures.

Theory of operation. A future must not be completed by the only thread that could complete others, for callbacks that
run there may wait for those: each is completed by a thread of its own, of a pool that grows whenever nobody in it is
free. Until the call has ended, no thread waits for it, which might take a core from those who compute. Nor may a future
be ended by `set_exception`: to C++ the exception would be the value. So the future that is handed out comes of one that
only says that the call has ended, by a callback that returns or raises.

A work has two halves: an object of C++, and the Python object with the methods. C++ may hold the first after Python has
dropped the second; DDP's `join` does so, which waits for a work and then asks for its future. C++ would find no
methods then: a wait would never end, and there would be no future. Nothing tells Python when C++ lets go. So `Kept`
holds the Python halves: those that nobody has waited for, and the last ones that Python has dropped.
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
from unisono.frameworks.torch.dynamo_skip import untraced
from unisono.frameworks.torch.errors import translated

_NO_LIMIT = timedelta(0)
# Works that are kept although nobody has waited for them, and those that are kept although Python has dropped them.
_MOST_KEPT = 256
# Results of dropped works are kept up to this size; of larger ones, C++ must hold the tensors if it wants them.
_MOST_RESULT_NBYTES = 4096
# How long a thread waits for another future.
_PATIENCE_S = 5.0


class Kept:
    """The Python halves of works of a process group that C++ may still call.

    Attributes:
        are_coalesced: whether the works of all calls are to become one, as between `start_coalescing` and
            `end_coalescing`.
    """

    def __init__(self) -> None:
        self._works: OrderedDict[Work, None] = OrderedDict()  # many threads change it, and none walks through it
        self._dropped: deque[Work] = deque(maxlen=_MOST_KEPT)
        self.are_coalesced = False
        self._together: list[Work] = []

    def start_coalescing(self) -> None:
        """Let the works of calls become one from now on."""
        self.are_coalesced = True

    def end_coalescing(self) -> Work:
        """Return the work of all calls since `start_coalescing`."""
        works, self._together, self.are_coalesced = self._together, [], False
        results = [tensor for work in works for tensor in work.results]
        return Work(Several([work.pending for work in works]), results, lambda: _finish_all(works), self)

    def keep(self, work: Work) -> None:
        """Keep a work until it is waited for, or has ended long since."""
        self._works[work] = None
        if self.are_coalesced:
            self._together.append(work)
        if len(self._works) > _MOST_KEPT:
            oldest, _ = self._works.popitem(last=False)
            if not oldest.is_completed():
                self._works[oldest] = None

    def drop(self, work: Work) -> None:
        """Keep a work no longer for not having been waited for."""
        self._works.pop(work, None)

    def keep_dropped(self, work: Work) -> None:
        """Keep a work that Python has dropped, until as many others have been as are kept."""
        self._dropped.append(work)


@untraced
class Work(dist.Work):  # type: ignore[misc]
    """What torch.distributed hands out for a call with ``async_op=True``.

    Args:
        pending: the call.
        results: the tensors that the call writes.
        finish: is called when it has ended well, before anybody learns of it, perhaps by several threads.
        kept: where to keep the work.

    Attributes:
        pending, results, finish: the same.
    """

    def __init__(self, pending: Pending, results: list[Any], finish: Callable[[], None], kept: Kept) -> None:
        super().__init__()
        self.pending = pending
        self.results = results
        self.finish = finish
        self._kept = kept
        self._error: Exception | None = None
        self._future: Any = None
        self._has_waited = False
        self._weak_results: list[weakref.ref[Any]] = []
        kept.keep(self)

    def __del__(self) -> None:
        """Come back to life once, for C++ may hold the other half."""
        if self.pending is _ENDED and sum(map(_nbytes, self.results)) > _MOST_RESULT_NBYTES:
            self._weak_results = [weakref.ref(tensor) for tensor in self.results]
            self.results, self._future = [], None
        self._kept.keep_dropped(self)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Wait until the call has ended, or fail it after `timeout`; 0 stands for the limit that the call was given.

        Raises:
            dist.DistBackendError: it failed.
        """
        try:
            self.pending.wait(timeout.total_seconds() if timeout > _NO_LIMIT else None)
            self.finish()
        except UnisonoError as error:
            self._kept.drop(self)
            self._error = translated(error)
            raise self._error from error
        self._has_waited = True
        if self.pending.done():  # on a GPU it may only stand in the stream, and its memory is in use
            self.pending, self.finish = _ENDED, _do_nothing
        self._kept.drop(self)
        return True

    def synchronize(self) -> None:
        """See `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the call has ended, well or not."""
        return self.pending.done()

    def is_success(self) -> bool:
        """Return whether the call has ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that has ended; None if it has not, or well."""
        if self._error is None and self.is_completed():
            try:
                self.wait()
            except dist.DistBackendError as error:
                return error  # type: ignore[no-any-return]
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors that the call has written; waits for it."""
        self.wait()
        results = self.results or [result() for result in self._weak_results]
        if any(tensor is None for tensor in results):
            raise dist.DistBackendError("unisono: the results of this work are gone, as nobody holds the tensors")
        return results

    def get_future(self) -> Any:
        """Return the future of the tensors that the call writes. It has ended if the work has been waited for."""
        if self._future is not None:
            return self._future
        ended: Any = Future()
        future = ended.then(lambda _: self.result())
        if not self._weak_results:  # whose tensors a future would keep
            self._future = future
        if self._has_waited:
            ended.set_result(None)
        else:
            self.pending.add_done_callback(lambda _: THREADS.do(lambda: self._complete(ended)))
        return future

    def _complete(self, ended: Any) -> None:
        with contextlib.suppress(Exception):  # the callback of the future raises it
            self.wait()
        ended.set_result(None)


@untraced
class ReceivedFrom(Work):
    """A receive from any rank."""

    def __init__(self, pending: Any, results: list[Any], finish: Callable[[], None], kept: Kept) -> None:
        super().__init__(pending, results, finish, kept)
        self._call = pending

    def _source_rank(self) -> int:
        """Return the rank that has sent what was received; waits for it."""
        self.wait()
        source: int = self._call.message().source
        return source

    source_rank = _source_rank


class Several:
    """Calls that count as one, which has ended when all have."""

    def __init__(self, calls: Sequence[Pending]) -> None:
        self._calls = calls

    def done(self) -> bool:
        """See `Pending.done`."""
        return all(call.done() for call in self._calls)

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Pending.wait`."""
        for call in self._calls:
            call.wait(timeout_s)

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See `Pending.add_done_callback`."""
        left, lock = list(self._calls), threading.Lock()

        def count(_: Any) -> None:
            with lock:
                left.pop()
                is_last = not left
            if is_last:
                callback(self)

        for call in self._calls:
            call.add_done_callback(count)
        if not self._calls:
            callback(self)


class _Ended:
    """A call that has ended well."""

    def done(self) -> bool:
        """See `Pending.done`."""
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Pending.wait`."""

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """See `Pending.add_done_callback`."""
        callback(self)


_ENDED = _Ended()


def _do_nothing() -> None:
    pass


def _nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())  # `nbytes` is not for sparse tensors


def _finish_all(works: Sequence[Work]) -> None:
    for work in works:
        work.finish()


class Threads:
    """Threads that do one job each at a time, as many as there are jobs under way. Those without one end in a while."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of what follows
        self._all = 0
        self._free = 0

    def do(self, job: Callable[[], None]) -> None:
        """Do a job at once, in a thread that has nothing else to do."""
        with self._changed:
            if self._free:
                self._free -= 1
            else:
                self._all += 1
                threading.Thread(target=self._work, name="unisono-futures", daemon=True).start()
            self._jobs.put(job)

    def rest(self, patience_s: float) -> None:
        """Wait until all jobs have ended, but no longer than that."""
        with self._changed:
            self._changed.wait_for(lambda: self._free == self._all, patience_s)

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_PATIENCE_S)
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
