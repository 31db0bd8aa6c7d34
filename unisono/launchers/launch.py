"""`launch` and `Pool`: run a function on several local ranks from a notebook, a test or a program.

The ranks are new processes, so nothing is forked and no ``if __name__ == "__main__"`` is needed. Functions and results
are pickled by cloudpickle, and travel over sockets to which only the pool and its ranks have access.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from unisono.errors import UsageError
from unisono.foundation.deadlines import Deadline, checked_timeout_s
from unisono.foundation.uncopyable import uncopyable
from unisono.launchers.job import require_open_files
from unisono.launchers.pool_processes import OnOutput, PoolProcesses
from unisono.launchers.pool_protocol import PoolCall, RankSetup, by_value, encoded
from unisono.options import Options


def launch(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    timeout_s: float | None = None,
    bind: str | None = None,
    options: Options | None = None,
    env: Mapping[str, str] | None = None,
    on_output: OnOutput | None = None,
) -> list[Any]:
    """Run ``fn(comm, *args)`` in `size` new local processes and return the results by rank.

    Args:
        fn: any function, including one of a notebook or of ``__main__``.
        size: the number of ranks, at least 1.
        args: further arguments; arguments and results are pickled.
        timeout_s: seconds after which all ranks are killed; None means never.
        bind: "core" binds rank r to the r-th core.
        options: the options of the ranks' communicator.
        env: variables to add to the environment that the ranks inherit.
        on_output: a function that is called from another thread with (rank, "stdout" or "stderr", line) for each line
            that a rank writes; by default the line is printed after the number of the rank.

    Raises:
        UsageError: an argument has a value that it cannot have.
        CollectiveTimeoutError: the ranks did not return in time.
        PeerLostError: a rank was killed or ended without an answer.
        Exception: the exception of `fn` on the rank that failed first; its cause is the rank's traceback as text.
    """
    with Pool(size, bind=bind, options=options, env=env, on_output=on_output) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


@uncopyable("make another one")
class Pool:
    """A context manager for local ranks that run one function after the other with the same communicator.

    The first `run` starts the ranks, and so does the next `run` after a failure. The ranks end when `close` is called,
    when the pool is garbage-collected, or at exit. In a forked child the pool has no ranks, and the first `run` there
    starts new ones.
    """

    def __init__(
        self,
        size: int,
        *,
        bind: str | None = None,
        options: Options | None = None,
        env: Mapping[str, str] | None = None,
        on_output: OnOutput | None = None,
    ) -> None:
        """Prepare a pool, with the arguments of `launch`.

        Raises:
            UsageError: an argument has a value that it cannot have.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"size must be a positive number of ranks; got {size!r}")
        require_open_files(size)
        self._size = size
        self._bind = bind
        self._options = options
        self._environ = {**os.environ, **(env or {})}
        self._on_output = on_output
        self._processes: PoolProcesses | None = None
        self._finalizer: weakref.finalize[[], Pool] | None = None
        _pools.add(self)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Run ``fn(comm, *args)`` on every rank and return the results by rank. Raises the errors of `launch`."""
        deadline = Deadline(math.inf if timeout_s is None else checked_timeout_s(timeout_s))
        with by_value(fn):
            task = encoded(PoolCall(fn, args))
        if self._processes is None:
            setup = RankSetup(list(sys.path), self._options)
            self._processes = PoolProcesses(self._size, setup, self._on_output, bind=self._bind, environ=self._environ)
            self._finalizer = weakref.finalize(self, self._processes.hang_up)
            self._finalizer.atexit = False
        processes = self._processes
        try:
            return processes.run(task, deadline)
        except BaseException:
            self._forget()
            processes.kill()
            raise

    def close(self) -> None:
        """Close the communicators and end the ranks. A second call does nothing; a later `run` starts new ranks.

        Raises:
            MismatchError: the ranks disagree on their last call; all have ended.
        """
        processes = self._processes
        self._forget()
        if processes is not None:
            processes.close()

    def _forget(self) -> None:
        """Forget the ranks without ending them. The caller ends them."""
        self._processes = None
        if self._finalizer is not None:
            self._finalizer.detach()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _forget_all() -> None:
    """Forget the ranks of all pools in a forked child, without ending them, because they belong to the parent."""
    for pool in list(_pools):
        pool._forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
