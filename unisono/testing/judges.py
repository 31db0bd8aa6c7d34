"""Local ranks that judge one thing after the other; those that hang tell where, are killed, and others take over."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from unisono.launchers.launch import Pool
from unisono.options import Options
from unisono.testing.sources import TIMEOUT_S, Backend, literal

# How long ranks have to tell where they are before they are killed.
_GRACE_S = 1.0


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
        self._options, self._backend, self._timeout_s = options, backend, timeout_s
        self._pools: dict[int, Pool] = {}
        self._lines: list[str] = []

    def run(self, fn: Callable[[Any, Any], Any], value: Any, size: int) -> list[Any] | Failure:
        """Run ``fn(comm, value)`` on `size` ranks; return what they return, by rank, or what ended them.

        After a failure, new ranks are started for what comes next.

        Raises:
            UnisonoError: the ranks cannot be started.
        """
        pool = self._pool(size)
        self._lines.clear()
        task = partial(_watched, fn=fn, value=value, backend=self._backend, timeout_s=self._timeout_s)
        try:
            return pool.run(task, timeout_s=self._timeout_s + _GRACE_S)
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


def _ready(_: Any) -> None:
    """Do nothing, for which the ranks must have found each other."""


def _watched(comm: Any, *, fn: Callable[[Any, Any], Any], value: Any, backend: Backend | None, timeout_s: float) -> Any:
    judged = comm if backend is None else backend.make(comm)
    with _watch(timeout_s, f"hangs in {literal(value)}"):
        return fn(judged, value)


@contextmanager
def _watch(timeout_s: float, what: str) -> Iterator[None]:
    """Write `what`, and where all threads are, if the block has not been left after `timeout_s`."""

    def tell() -> None:
        sys.stderr.write(f"{what}\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(all_threads=True)

    timer = threading.Timer(timeout_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
