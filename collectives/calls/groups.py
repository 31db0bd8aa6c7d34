"""Groups: many calls, carried out together when their with-block ends, in as few messages as can be.

Theory of operation. In a group, a call is only taken note of. When the block ends, calls of one collective are fused
into one, each array an extent of it, whatever their dtypes and operations. A fused call stands where the first of its
calls does, so that all ranks, which make the same calls, fuse them alike. Calls with counts stand alone. Everything is
checked before anything is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.dispatch import CallArguments, Dispatcher, checked_integer
from unisono.collectives.calls.planning import AlgorithmLike, as_request
from unisono.collectives.calls.prepared import BoundArray, PreparedCall
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.errors import InternalError, UnisonoError, UsageError
from unisono.records import record
from unisono.transports.contracts.call import AnyArray
from unisono.transports.contracts.executor import NO_CACHE, NO_MESSAGES
from unisono.transports.host.system_limits import is_refusal

if TYPE_CHECKING:
    from unisono.collectives.calls.group_recorder import Batch, Group
    from unisono.collectives.custom_ops.reducer import Reductions
    from unisono.collectives.device.work import CheckedDeviceCall


@record
class _Anew:
    """What there is to run of a batch that the cache does not know.

    Attributes:
        parts: what each call has of its arrays.
        prepared, sources: all of them that are not by functions as one call, and its INPUT.
        reductions: each of those that are.
        on_device: each call, where they are on arrays of a device.
    """

    parts: Sequence[BoundArray]
    prepared: PreparedCall | None
    sources: Sequence[AnyArray | None]
    reductions: Sequence[Reductions]
    on_device: Sequence[CheckedDeviceCall] = ()


class Groups(Dispatcher):
    """Calls together."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """Let the calls of a with-block be carried out together when it ends.

        In it, every call returns a `Work`, which has its result after the block; ``wait`` changes nothing. Calls on any
        number of arrays, of any shapes, dtypes and operations, are sent as one for each collective, root and algorithm,
        at the place of the first, those by functions apart; barriers and calls with counts keep their order. Messages
        are started before. What is written may not be in any other array of the group.

        All ranks must make the same calls in the same order. A group in a group belongs to the outer one. A plan is
        carried out at once, as if it stood before the block.

        Raises:
            UsageError, NoAlgorithmError: a call of the block is wrong; nothing has been sent. So it is if the block
                raises. The works then raise `UsageError`.
            MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: a call failed, and so do the works of
                all that have not ended.

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
        cache, self._cache, self._group = self._cache, group.notes, group
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
            self._carry_out(group)
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
        """Check what the calls of a batch have in common; everything else is looked at when the group ends.

        Raises:
            UsageError: the root or algorithm cannot be, or the communicator is closed.
        """
        self._check_usable()
        if root is not None:
            checked_integer(root, "root", 0, self.size - 1)
        name = as_request(algorithm).algorithm
        if name is not None and not isinstance(name, str):
            raise UsageError(f"algorithm must be a name, not {name!r}")

    def _carry_out(self, group: Group) -> None:
        """Carry out a group: check everything, start the messages, run the collectives, wait for the messages."""
        batches, messages = group.batches(), group.messages()
        if group.outcomes:
            self._check_usable()
        for batch in batches:
            for timeout_s in batch.timeouts_s:
                self._limit_s(timeout_s)
        # Of a single batch, nothing has been sent while it is being looked up.
        if len(group.outcomes) == len(batches) == 1 and self._run_known(batches[0]):
            return
        looked_up = [self._look_up(batch) for batch in batches]
        for message in messages:
            message.start()
        for batch, anew in zip(batches, looked_up, strict=True):
            if anew is not None:
                self._run_anew(batch, anew)
            elif not self._run_known(batch):
                raise InternalError("a call was forgotten", operation=batch.collective)
        for message in messages:
            message.wait()

    def _look_up(self, batch: Batch) -> _Anew | None:
        """Return what there is to run of a batch; None if the cache knows it. Nothing is sent.

        Raises:
            UsageError, NoAlgorithmError: a call of it is wrong.
        """
        if self._knows(batch):
            return None
        if batch.counts is None and batch.spread() and (not batch.x or self._knows(batch)):
            return None
        calls = [
            CallArguments(batch.collective, x, out, op, batch.root, batch.counts, batch.algorithm)
            for x, out, op in zip(batch.x, batch.outs, batch.ops, strict=True)
        ]
        if on_device(batch.x, batch.outs):
            made = [self._on_device(call) for call in calls]
            return _Anew([part for call in made for part in call.checked.parts], None, (), (), made)
        parts = self._parts(calls)
        reductions = [self._reducer.prepare([part], None) for part in parts if is_by_function(part.kind.op)]
        others = [part for part in parts if not is_by_function(part.kind.op)]
        prepared = self._prepared(others, list) if others else None
        return _Anew(parts, prepared, prepared.sources() if prepared else (), reductions)

    def _knows(self, batch: Batch) -> bool:
        return batch.counts is None and self._cache.knows(*batch.arguments())

    def _run_known(self, batch: Batch) -> bool:
        """Run a batch if the cache knows it or it is empty; return whether it was so, and otherwise do nothing."""
        if batch.counts is not None:
            return False
        if batch.x and not self._cache.run(*batch.arguments(), batch.limit_s(self._options.timeout_s)):
            return False
        has_output = CONTRACTS[batch.collective].has_output(self.rank, batch.root or 0)
        batch.end_well(batch.targets if has_output else [None] * len(batch.x))
        return True

    def _run_anew(self, batch: Batch, anew: _Anew) -> None:
        default_s = self._options.timeout_s
        limit_s = batch.limit_s(default_s) or default_s
        if anew.prepared is not None:
            self._run(anew.prepared, anew.sources, limit_s)
        if anew.prepared is not None and not anew.reductions:
            self._remember(anew.prepared, *batch.arguments())
        for call in anew.on_device:
            self._devices.calls.start(call, limit_s, here=True).wait()
        for reductions in anew.reductions:
            self._reducer.run(reductions, limit_s)
        batch.end_well([part.finish() for part in anew.parts])
