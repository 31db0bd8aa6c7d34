"""Pools of local ranks that run one test after the other. Ranks that hang dump their stacks, and are replaced."""

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

from unisono.foundation.watchdog import call_if_overdue
from unisono.launchers.launch import Pool
from unisono.options import Options
from unisono.testing.sources import TIMEOUT_S, SourceBackend, literal

# The time that ranks have to dump their stacks before they are killed.
_GRACE_S = 1.0
# In a search for a simpler case: the time after which a call counts as hanging, and the time of the whole search.
BRIEF_S = 10.0
_SEARCH_S = 100.0


@dataclass(frozen=True)
class RanksFailure:
    """The failure that ended the ranks: the error, and their output, with their stacks if they hung."""

    error: Exception
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([f"{type(self.error).__name__}: {self.error}", *self.lines])


class Judges:
    """Local ranks that are reused from one call to the next until a call fails. A context manager.

    Args:
        options: the options of the ranks' communicator.
        backend: the backend under test; None for Unisono itself.
        timeout_s: seconds after which a call counts as hanging.
    """

    def __init__(
        self, options: Options | None = None, backend: SourceBackend | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.timeout_s = timeout_s
        self._options, self._backend = options, backend
        self._pools: dict[int, Pool] = {}
        self._lines: list[str] = []

    def run(
        self, fn: Callable[[Any, Any], Any], value: Any, size: int, most_s: float = math.inf
    ) -> list[Any] | RanksFailure:
        """Run ``fn(comm, value)`` on `size` ranks; return their results by rank, or the failure that ended them.

        After a failure, the next call starts new ranks. If `most_s` is less than the time limit of a call, it replaces
        the limit.

        Raises:
            UnisonoError: the ranks cannot be started.
        """
        pool = self._pool(size)
        self._lines.clear()
        timeout_s = min(self.timeout_s, most_s)
        task = partial(_watched, fn=fn, value=value, backend=self._backend, timeout_s=timeout_s)
        try:
            return pool.run(task, timeout_s=timeout_s + _GRACE_S)
        except Exception as error:  # noqa: BLE001  (any exception is a finding)
            self._pools.clear()  # the failure has ended the ranks
            return RanksFailure(error, tuple(self._lines))

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
            pool.run(_ready)  # so that the first call does not include the start of the ranks
            self._pools[size] = pool
        return self._pools[size]

    def _keep(self, rank: int, _: str, line: str) -> None:
        self._lines.append(f"[{rank}] {line}")


def while_searching(is_wrong: Callable[..., bool]) -> Callable[..., bool]:
    """Return a judge for a search that begins now. Once the search takes too long, the judge accepts every case."""
    end = time.monotonic() + _SEARCH_S
    return lambda *arguments: time.monotonic() < end and is_wrong(*arguments)


def _ready(_: Any) -> None:
    """Do nothing. To call this, the ranks must have completed their rendezvous."""


def _watched(
    comm: Any, *, fn: Callable[[Any, Any], Any], value: Any, backend: SourceBackend | None, timeout_s: float
) -> Any:
    judged = comm if backend is None else backend.make(comm)
    with call_if_overdue(timeout_s, _tell_of_hang, f"hangs in {literal(value)}"):
        return fn(judged, value)


def _tell_of_hang(problem: str) -> None:
    """Write the problem and the stacks of all threads."""
    sys.stderr.write(f"{problem}\n")
    sys.stderr.flush()
    faulthandler.dump_traceback(all_threads=True)
