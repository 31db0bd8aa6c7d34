"""`launch` and `Pool`: run a function on several local ranks from a notebook, a test or a program.

The ranks are new processes, so nothing is forked and no ``if __name__ == "__main__"`` is needed. Functions and results
travel by cloudpickle, over sockets that only the pool and its ranks have.
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

from unisono.deadlines import Deadline, checked_timeout_s
from unisono.errors import UsageError
from unisono.launchers.job import require_open_files
from unisono.launchers.pool_processes import OnOutput, PoolProcesses
from unisono.launchers.pool_protocol import Setup, Task, by_value, encoded
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
    """Run ``fn(comm, *args)`` in `size` new local processes and return the results, by rank.

    Args:
        fn: any function, also one of a notebook or of ``__main__``.
        size: number of ranks, at least 1.
        args: further arguments; they are pickled, as the results are.
        timeout_s: seconds after which all ranks are killed; None means never.
        bind: "core" binds rank r to the r-th core.
        options: the options of the ranks' communicator.
        env: variables added to the environment that the ranks inherit.
        on_output: called with (rank, "stdout" or "stderr", line) for each line that a rank writes, from another thread;
            by default the line is printed with the rank before it.

    Raises:
        UsageError: an argument cannot be used.
        CollectiveTimeoutError: the ranks did not return in time.
        PeerLostError: a rank was killed or ended without an answer.
        Exception: whatever `fn` raised on the rank that failed first; the rank's traceback is its cause.
    """
    with Pool(size, bind=bind, options=options, env=env, on_output=on_output) as pool:
        return pool.run(fn, *args, timeout_s=timeout_s)


class Pool:
    """Local ranks that stay, with their communicator open, from one function to the next. A context manager.

    They are started by the first `run`, and again by the next one after a failure. They end with `close`, when the pool
    is garbage, or at exit. In a forked child the pool has no ranks, and its first `run` starts some.
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
        """Prepare a pool; `launch` says what the arguments mean.

        Raises:
            UsageError: an argument cannot be used.
        """
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"size must be a positive number of ranks; got {size!r}")
        require_open_files(size)
        self._size = size
        self._bind = bind
        self._options = options
        self._environ = {**os.environ, **(env or {})}
        self._on_output = on_output
        self._team: PoolProcesses | None = None
        self._finalizer: weakref.finalize[[], Pool] | None = None
        _pools.add(self)

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Run ``fn(comm, *args)`` on every rank and return the results, by rank; raises what `launch` raises."""
        deadline = Deadline(math.inf if timeout_s is None else checked_timeout_s(timeout_s))
        with by_value(fn):
            task = encoded(Task(fn, args))
        if self._team is None:
            setup = Setup(list(sys.path), self._options)
            self._team = PoolProcesses(self._size, setup, self._on_output, bind=self._bind, environ=self._environ)
            self._finalizer = weakref.finalize(self, self._team.hang_up)
            self._finalizer.atexit = False
        team = self._team
        try:
            return team.run(task, deadline)
        except BaseException:
            self._forget()
            team.kill()
            raise

    def close(self) -> None:
        """Close the communicators and end the ranks. May be called twice; a later `run` starts new ones.

        Raises:
            MismatchError: the ranks disagree on their last call; all have ended.
        """
        team = self._team
        self._forget()
        if team is not None:
            team.close()

    def _forget(self) -> None:
        """Have no ranks from now on; what becomes of them is the caller's concern."""
        self._team = None
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
    """In a forked child: the ranks are the parent's."""
    for pool in list(_pools):
        pool._forget()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_forget_all)
