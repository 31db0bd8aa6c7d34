"""Compares the results of the ranks after each collective: the option `verify_results`.

Used by: `checking`, which wraps the calls that it has checked.

Theory of operation
-------------------
Some collectives have the same result on all ranks, bit for bit. After such a call each rank computes a checksum of its
result (CRC-32C), and the ranks exchange the checksums by an allgather. All ranks then have the same list of checksums,
so all of them come to the same verdict. For example, after an allreduce of four ranks::

    rank        0           1           2           3
    checksum    5a1c03e7    5a1c03e7    91d40b22    5a1c03e7    →  CorruptionError: rank 2 is the odd one

The allgather runs on an executor of the same ranks that nothing else uses, because later calls with ``wait=False`` may
already have started on the communicator. Comparisons run one after the other, so all ranks make them in the same order.

A result that is wrong on all ranks alike is not detected. Most algorithms for long vectors let one rank reduce each
part of the vector and send it to the others, so an error in that reduction reaches all ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from unisono.collectives.calls.executable import ExecutableCall
from unisono.collectives.calls.planning import CallPlanner, CallSpec
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.calls.serial_queue import QueuedOperation, SerialQueue, aborting_if_interrupted
from unisono.collectives.calls.shapes import layout_of
from unisono.collectives.calls.work import Work, Works
from unisono.dtypes import DTYPES
from unisono.errors import CorruptionError
from unisono.foundation.deadlines import Deadline
from unisono.transports import _core
from unisono.transports.contracts.call import Call, Signature
from unisono.transports.contracts.executor import Executor
from unisono.transports.contracts.transport import Traffic

# The collectives whose result is the same on all ranks.
SAME_EVERYWHERE = frozenset({"allreduce", "allgather", "broadcast"})
# The number of exchanges that are kept, because a program whose shapes never repeat would fill the memory.
_MOST_EXCHANGES = 4096


class Verifier:
    """Compares the results of one communicator's calls with those of its other ranks.

    Args:
        executor, planner, works: those of the communicator.
    """

    def __init__(self, executor: Executor, planner: CallPlanner, works: Works) -> None:
        self._executor = executor
        self._works = works
        self._queue = SerialQueue()
        # It is made together with the communicator, because ranks make their first calls at different times.
        self._second_executor = executor.subgroup(range(executor.size))
        layout = layout_of("allgather", (1,), size=executor.size, rank=executor.rank)
        self._plain_exchange = planner.find(CallSpec("allgather", layout, DTYPES["uint32"], algorithm="auto"))
        self._exchanges: dict[Signature, Call] = {}

    def verified(self, call: ExecutableCall) -> ExecutableCall:
        """Return the call with a comparison of its results; the call itself if the ranks get different results."""
        return VerifiedCall(self, call) if call.checked.arrays[0].spec.collective in SAME_EVERYWHERE else call

    def exchange_of(self, signature: Signature) -> Call:
        """Return the exchange of checksums after the call of this signature, which errors of the exchange then name."""
        exchange = self._exchanges.get(signature)
        if exchange is None:
            if len(self._exchanges) >= _MOST_EXCHANGES:
                self._exchanges.clear()
            exchange = self._exchanges[signature] = replace(self._plain_exchange, signature=signature)
        return exchange

    def run(self, call: VerifiedCall, make: Callable[..., Any], limit_s: float) -> Any:
        """Make a call, compare the results of the ranks, and return the result of the call.

        Args:
            call: the call.
            make: ``make()`` makes the call, and ``make(wait=False)`` starts it and returns its work.
            limit_s: the seconds after which call and comparison fail.

        Raises:
            CorruptionError: the ranks have different results.
        """
        with aborting_if_interrupted(self._executor):
            deadline = Deadline(limit_s)
            # If no other call is being compared, `_finish` makes the call, because that is faster than to start it.
            wait = make if self._queue.are_over() else make(wait=False).wait
            ticket = self._queue.take()
            results: list[Any] = []
            ticket.do(lambda: results.append(self._finish(call, wait, deadline)))
            ticket.ended.result()
            return results[0]

    def start(self, call: VerifiedCall, make: Callable[..., Any], limit_s: float) -> Work[Any]:
        """Start a call and the comparison of its results, and return their work. The arguments are those of `run`."""
        with aborting_if_interrupted(self._executor):
            work, deadline = make(wait=False), Deadline(limit_s)
            ticket = self._queue.take()
            self._queue.do_later(ticket, lambda: self._finish(call, work.wait, deadline))
        operation = QueuedOperation(self._executor, ticket.ended, str(call))
        return self._works.add(operation, None, limit_s, lambda _: work.wait(), is_counted=False)

    def traffic(self) -> Mapping[int, Traffic]:
        """Return the traffic of the exchanges of checksums, by peer."""
        return self._second_executor.traffic()

    def close(self) -> None:
        """End the comparisons in progress; the executor of the communicator must have been closed before."""
        self._second_executor.close()
        self._queue.close()

    def _finish(self, call: VerifiedCall, wait: Callable[[], Any], deadline: Deadline) -> Any:
        """Wait until the call has ended on this rank, compare the ranks' results, and return the result of the call."""
        with aborting_if_interrupted(self._executor):
            result = wait()
            own = np.array([_checksum(call.checked.arrays)], np.uint32)
            checksums = np.empty(self._executor.size, np.uint32)
            self._second_executor.run(call.exchange, [own], [checksums], deadline.remaining_s())
            error = verdict(checksums.tolist(), self._executor.members, str(call))
            if error is not None:
                self._executor.fail(error)
                self._executor.check(str(call))
            return result


class VerifiedCall(ExecutableCall):
    """A call whose result the ranks compare.

    Args:
        verifier: compares the results of all calls of the communicator.
        call: the call to run; it is planned already.

    Attributes:
        exchange: the call that exchanges the checksums of the ranks.
    """

    def __init__(self, verifier: Verifier, call: ExecutableCall) -> None:
        super().__init__(call.checked)
        self._verifier = verifier
        self._call = call
        self.exchange = verifier.exchange_of(call.signature)

    @property
    def signature(self) -> Signature:
        return self._call.signature

    def _run(self, limit_s: float) -> None:
        self._verifier.run(self, partial(self._make, limit_s), limit_s)

    def _start(self, limit_s: float) -> Work[Any]:
        return self._verifier.start(self, partial(self._make, limit_s), limit_s)

    def _make(self, limit_s: float, wait: bool = True) -> Any:
        return self._call._run(limit_s) if wait else self._call._start(limit_s)

    def persist(self, limit_s: float) -> Callable[..., Any]:
        make = self._call.persist(limit_s)

        def again(wait: bool = True) -> Any:
            return (self._verifier.run if wait else self._verifier.start)(self, make, limit_s)

        return again


def verdict(checksums: Sequence[int], members: Sequence[int], name: str) -> CorruptionError | None:
    """Return the error about the call `name` whose results have these checksums; None if all are the same.

    Args:
        checksums: the checksum of each rank's result.
        members: the number of each rank in errors.
        name: the call in the error.

    >>> verdict([7, 7, 5], [0, 1, 2], "allreduce(float32[8], op=sum)").message
    'rank 2 has another result of allreduce(float32[8], op=sum) than most ranks: suspect memory and processors there'
    >>> verdict([7, 5], [0, 1], "allreduce(float32[8], op=sum)").message
    'the results of allreduce(float32[8], op=sum) differ, and no majority of the ranks 0, 1 has the same one'
    """
    common, holders = Counter(checksums).most_common(1)[0]
    if holders == len(checksums):
        return None
    if 2 * holders <= len(checksums):
        listed = ", ".join(map(str, members))
        return CorruptionError(f"the results of {name} differ, and no majority of the ranks {listed} has the same one")
    odd = [rank for rank, checksum in zip(members, checksums, strict=True) if checksum != common]
    who = f"rank {odd[0]} has" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))} have"
    text = f"{who} another result of {name} than most ranks: suspect memory and processors there"
    return CorruptionError(text, peer=odd[0])


def _checksum(arrays: Sequence[BoundArray]) -> int:
    """Return the checksum of a result. The root of a broadcast has the result in its source."""
    checksum = 0
    for array in arrays:
        result = array.source if array.target is None else array.target
        assert result is not None, "a rank of such a collective has a result"
        checksum = _core.crc32c(result.view(np.uint8), checksum)
    return checksum
