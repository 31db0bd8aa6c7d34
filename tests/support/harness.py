"""Runs executors in tests: calls for them, and ranks as threads (`LocalRanks`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from support.deadlines import DEADLINE_S

from unisono.algorithms.catalogue.registry import ALGORITHMS, find
from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.plan import Counts, Plan
from unisono.dtypes import DTYPES
from unisono.errors import AbortedError
from unisono.operations import operation
from unisono.transports.contracts.call import Call, Extent, Signature
from unisono.transports.contracts.transport import MessageTransport
from unisono.transports.executors.generic import GenericExecutor
from unisono.transports.message.faulty import Faults, FaultyTransport
from unisono.transports.message.local import LocalNetwork


def message_algorithms(collective: str) -> list[str]:
    """Return the names of the algorithms of a collective that need no mapped memory."""
    return [name for name, algorithm in ALGORITHMS[collective].items() if not algorithm.mapped]


def make_call(
    collective: str,
    algorithm: str,
    size: int,
    rank: int,
    *,
    dtype: str | None,
    count: int,
    op: str | None = None,
    root: int | None = None,
    segments: int = 1,
) -> Call:
    """Return the call of a registered algorithm. `dtype` is None for a barrier, and `root` if there is none."""
    plan = find(collective, algorithm).build(size, rank, root or 0)
    return call_of(plan, dtype, (count, count), op=op, root=root, segments=segments)


def call_of(
    plan: Plan,
    dtype: str | None,
    elements: tuple[int, int],
    *,
    op: str | None = None,
    root: int | None = None,
    segments: int = 1,
    counts: dict[Counts, Sequence[int]] | None = None,
) -> Call:
    """Return the call of `plan`. `elements` are the lengths of INPUT and OUTPUT, and `counts` as in `Shape`."""
    shape = None if dtype is None or counts else (elements[0],)
    extent = None if dtype is None else Extent(elements, DTYPES[dtype], None if op is None else operation(op))
    return Call(
        signature=Signature(plan.collective, dtype, shape, "C", op, root, plan.algorithm, segments),
        plan=plan,
        shape=Shape(elements, counts or {}),
        extents=() if extent is None else (extent,),
        segments=segments,
    )


@dataclass(frozen=True)
class LocalRanks:
    """Ranks as threads of this process, each with a `GenericExecutor` over the local transport."""

    size: int
    capacity: int = 0
    faults: Faults | None = None
    deadline_s: float = DEADLINE_S

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``fn(executor, *args)`` on every rank; return the results by rank, or raise the first error.

        A rank closes its executor as soon as it has finished. Ranks that still run at the deadline are aborted, and
        then TimeoutError names them.
        """
        network = LocalNetwork(self.size, self.capacity)
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def run_rank(rank: int, executor: GenericExecutor) -> None:
            try:
                results[rank] = fn(executor, *args)
            except BaseException as error:  # noqa: BLE001  (it is raised again by the thread of the test)
                errors.append(error)
            finally:
                executor.close()

        executors = [GenericExecutor(transport) for transport in self._transports(network)]
        threads = [
            threading.Thread(target=run_rank, args=(executor.rank, executor), daemon=True) for executor in executors
        ]
        for thread in threads:
            thread.start()
        stuck = _join_until(threads, time.monotonic() + self.deadline_s)
        if stuck:
            network.fail(AbortedError(f"the test's deadline has passed; ranks {stuck} were still running"))
            _join_until(threads, time.monotonic() + 1.0)
        if errors:
            raise errors[0]
        if stuck:
            raise TimeoutError(f"ranks {stuck} were still running after {self.deadline_s} s")
        return results

    def _transports(self, network: LocalNetwork) -> Iterator[MessageTransport]:
        for transport in network.transports:
            yield transport if self.faults is None else FaultyTransport(transport, self.faults)


def _join_until(threads: list[threading.Thread], deadline: float) -> list[int]:
    """Wait for the threads until `deadline`; return the indices of the threads that still run."""
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [index for index, thread in enumerate(threads) if thread.is_alive()]
