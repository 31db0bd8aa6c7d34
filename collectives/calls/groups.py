"""Groups of calls: `Communicator.group` collects calls and runs them, fused, when its with-block ends.

Theory of operation
-------------------
Inside the block a call is only recorded (`group_recorder`). When the block ends, the calls with the same collective,
root and requested algorithm form a batch, whatever their shapes, dtypes and ops. A batch runs as one call with an
extent for each array. For example, 100 sums of small arrays become one call with 100 extents. A batch runs at the
position of its first call. All ranks make the same calls in the same order, so all of them fuse alike. Calls with
counts, and barriers, are not fused. All batches are checked before the first message is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unisono.collectives.calls.arguments import CallArguments, checked_integer, gets_result
from unisono.collectives.calls.dispatch import Dispatcher
from unisono.collectives.calls.executable import CheckedCalls
from unisono.collectives.calls.planning import AlgorithmLike, as_request
from unisono.errors import InternalError, UnisonoError, UsageError
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES
from unisono.transports.host.system_limits import is_refusal

if TYPE_CHECKING:
    from unisono.collectives.calls.group_recorder import Batch, Group


class Groups(Dispatcher):
    """The method `group` of a communicator."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """Run the calls of a with-block together when the block ends.

        Inside the block every call returns a `Work`, with or without ``wait=False``. The work has the result after the
        block. Calls with the same collective, root and algorithm are fused into one call, whatever the number, shapes,
        dtypes and ops of their arrays. The fused call runs at the position of its first call. Calls by custom ops,
        barriers and calls with counts are not fused. Messages start before the collectives. An array that the group
        writes must not overlap any other array of the group.

        All ranks must make the same calls in the same order. A group inside a group belongs to the outer one. A
        persistent call runs at once, as if it stood before the block.

        Raises:
            UsageError, NoAlgorithmError: a call of the block is wrong. Nothing has been sent, and the works raise
                `UsageError`. The works also do so if the block raises.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: a call failed. The works of all calls
                that had not ended raise the same error.

        >>> import numpy as np, unisono as un
        >>> def both(world):
        ...     with world.group():
        ...         total = world.allreduce(np.ones(2))
        ...         most = world.allreduce(np.array(world.rank), "max")
        ...     return total.result().tolist(), int(most.result())
        >>> un.launch(both, 2)
        [([2.0, 2.0], 1), ([2.0, 2.0], 1)]
        """
        if self._group is not None:
            yield
            return
        from unisono.collectives.calls.group_recorder import Group

        group = Group(self._check_common)
        cache, self._cache, self._group = self._cache, group.recorder, group
        messages, self._messages = self._messages, NO_MESSAGES
        try:
            yield
        except BaseException as error:
            group.fail(UsageError(f"this call was not made: the with-block of its group raised {error!r}"))
            raise
        finally:
            self._group = None
            if self._refusal is None:
                self._cache, self._messages = cache, messages
            else:
                self._cache = NO_CACHE
        try:
            self._run_group(group)
        except UnisonoError as error:
            group.fail(error)
            raise
        except BaseException as error:
            if isinstance(error, Exception) and is_refusal(error):
                refused = self._refused_by_system("a group", error)
                group.fail(refused)
                raise refused from None
            group.fail(UsageError(f"this call was not made, or not to its end: its group raised {error!r}"))
            raise

    def _check_common(self, root: int | None, algorithm: AlgorithmLike) -> None:
        """Check the arguments that the calls of a batch share; all others are checked when the group ends.

        Raises:
            UsageError: the root or the algorithm is wrong, or the communicator is closed.
        """
        self._check_usable()
        if root is not None:
            checked_integer(root, "root", 0, self.size - 1)
        name = as_request(algorithm).algorithm
        if name is not None and not isinstance(name, str):
            raise UsageError(f"algorithm must be a name, not {name!r}")

    def _run_group(self, group: Group) -> None:
        """Check all calls, start the messages, run the collectives, and wait for the messages."""
        batches, messages = group.batches(), group.messages()
        if group.outcomes:
            self._check_usable()
        for batch in batches:
            for timeout_s in batch.timeouts_s:
                self._limit_s(timeout_s)
        # A single batch needs no check of others before it is sent, so one look into the cache is enough.
        if len(group.outcomes) == len(batches) == 1 and self._run_cached(batches[0]):
            return
        checked = [self._check_batch(batch) for batch in batches]
        for message in messages:
            message.start()
        for batch, calls in zip(batches, checked, strict=True):
            if calls is not None:
                self._run_checked(batch, calls)
            elif not self._run_cached(batch):
                raise InternalError("a call left the cache while its group ran", operation=batch.collective)
        for message in messages:
            message.wait()

    def _check_batch(self, batch: Batch) -> CheckedCalls | None:
        """Return the checked calls of a batch; None if the batch is empty or in the call cache. Nothing is sent.

        Raises:
            UsageError, NoAlgorithmError: a call of the batch is wrong.
        """
        if self._is_cached(batch):
            return None
        if batch.counts is None and batch.spread() and (not batch.x or self._is_cached(batch)):
            return None
        calls = [
            CallArguments(batch.collective, x, out, op, batch.root, batch.counts, batch.algorithm)
            for x, out, op in zip(batch.x, batch.outs, batch.ops, strict=True)
        ]
        return self._checker.check([[call] for call in calls], list, self._check_usable)

    def _is_cached(self, batch: Batch) -> bool:
        return batch.counts is None and self._cache.contains(*batch.arguments())

    def _run_cached(self, batch: Batch) -> bool:
        """Run a batch that is empty or in the call cache, and return True; otherwise do nothing and return False."""
        if batch.counts is not None:
            return False
        if batch.x and not self._cache.run(*batch.arguments(), batch.limit_s(self._options.timeout_s)):
            return False
        has_output = gets_result(batch.collective, self.rank, batch.root)
        batch.end_well(batch.targets if has_output else [None] * len(batch.x))
        return True

    def _run_checked(self, batch: Batch, checked: CheckedCalls) -> None:
        default_s = self._options.timeout_s
        limit_s = batch.limit_s(default_s) or default_s
        for call in checked.calls:
            call.run(limit_s)
        if len(checked.calls) == 1:
            checked.calls[0].remember(*batch.arguments())
        batch.end_well([array.finish() for array in checked.arrays])
