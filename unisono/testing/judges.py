"""Local ranks that judge one thing after the other; those that hang tell where, are killed, and others take over."""

from __future__ import annotations

import faulthandler
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from unisono.launchers.launch import Pool
from unisono.options import Options
from unisono.testing.sources import TIMEOUT_S, Backend, literal
from unisono.watchdog import call_if_overdue

# How long ranks have to tell where they are before they are killed.
_GRACE_S = 1.0
# In a search for the simplest that is wrong: how long one that hangs is waited for, and the search goes on.
BRIEF_S = 10.0
_SEARCH_S = 100.0


@dataclass(frozen=True)
class Failure:
    """What has ended the ranks: the error, and what they wrote of it, with where they were if they hung."""

    error: Exception
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{type(self.error).__name__}: {self.error}", *self.lines])


class Judges:
    """Local ranks that stay from one call to the next, as long as nothing goes wrong. A context manager.

    Args:
        options: those of the ranks' communicator.
        backend: what makes of it the communicator that is judged.
        timeout_s: seconds after which a call counts as one that hangs.
    """

    def __init__(
        self, options: Options | None = None, backend: Backend | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.timeout_s = timeout_s
        self._options, self._backend = options, backend
        self._pools: dict[int, Pool] = {}
        self._lines: list[str] = []

    def run(
        self, fn: Callable[[Any, Any], Any], value: Any, size: int, most_s: float = math.inf
    ) -> list[Any] | Failure:
        """Run ``fn(comm, value)`` on `size` ranks; return what they return, by rank, or what ended them.

        After a failure, new ranks are started for what comes next. If `most_s` is less than the seconds after which a
        call hangs, it counts instead.

        Raises:
            UnisonoError: the ranks cannot be started.
        """
        pool = self._pool(size)
        self._lines.clear()
        timeout_s = min(self.timeout_s, most_s)
        task = partial(_watched, fn=fn, value=value, backend=self._backend, timeout_s=timeout_s)
        try:
            return pool.run(task, timeout_s=timeout_s + _GRACE_S)
        except Exception as error:  # noqa: BLE001  (whatever it is, it is what is wrong)
            self._pools.clear()  # it has ended its ranks
            return Failure(error, tuple(self._lines))

    def close(self) -> None:
        """End the ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Judges:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pool(self, size: int) -> Pool:
        if size not in self._pools:
            self.close()
            pool = Pool(size, options=self._options, on_output=self._keep)
            pool.run(_ready)  # the time that ranks take to start is not that of the first call
            self._pools[size] = pool
        return self._pools[size]

    def _keep(self, rank: int, _: str, line: str) -> None:
        self._lines.append(f"[{rank}] {line}")


def while_searching(is_wrong: Callable[..., bool]) -> Callable[..., bool]:
    """Return a judge for the search that begins now, which finds nothing wrong when that has gone on for too long."""
    end = time.monotonic() + _SEARCH_S
    return lambda *each: time.monotonic() < end and is_wrong(*each)


def _ready(_: Any) -> None:
    """Do nothing, for which the ranks must have found each other."""


def _watched(comm: Any, *, fn: Callable[[Any, Any], Any], value: Any, backend: Backend | None, timeout_s: float) -> Any:
    judged = comm if backend is None else backend.make(comm)
    with call_if_overdue(timeout_s, _tell_of_hang, f"hangs in {literal(value)}"):
        return fn(judged, value)


def _tell_of_hang(what: str) -> None:
    """Write `what`, and where all threads are."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
