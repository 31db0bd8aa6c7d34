"""The backend of torch.distributed since torch 2.14, where c10d's `Backend` can be subclassed in Python.

torch keeps a process group of its own and registers the backend in it for one or more devices. So the group may have
other backends beside it, as in ``"cpu:unisono,cuda:nccl"``, and torch's hooks and wrappers apply to its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.errors import CallError
from unisono.frameworks.torch.calls.work import Work
from unisono.frameworks.torch.constants import NAME
from unisono.frameworks.torch.process_groups.group_operations import GroupOperations
from unisono.frameworks.torch.process_groups.monitored_barrier import wait_for_all
from unisono.frameworks.torch.process_groups.options import Options

# The names that torch has exported c10d's `Backend` by, the newest first. `dist.Backend` is a list of names instead.
_BASES = ("BackendBase", "_Backend")


def backend_base() -> Any:
    """Return the class of torch that a backend written in Python inherits; None if this version of torch has none."""
    for base in filter(None, (getattr(dist, name, None) for name in _BASES)):
        try:
            type("Probe", (base,), {})(0, 1)
        except TypeError:  # before 2.14 the class has no constructor
            continue
        return base
    return None


BASE: Any = backend_base() or object


# The backends of groups that have not been shut down. torch's wrapper for debugging holds only the C++ half of a
# backend, which has no methods once Python has dropped the other half.
_open: set[Backend] = set()


@skip_dynamo
class Backend(GroupOperations, BASE):  # type: ignore[misc]
    """The backend of a process group for tensors on the CPU and on GPUs.

    Args:
        store: the store of torch, for the values of this group only.
        rank, size: this rank in the group, and the number of ranks.
        timeout: the time limit of each call that passes none, and of the rendezvous of all ranks in this constructor.
        options: the options of the program; None for the defaults.

    Raises:
        dist.DistBackendError: the ranks did not meet in time, or have different versions of torch.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, options: Options | None = None) -> None:
        BASE.__init__(self, rank, size)
        self.join(store, rank, size, timeout, options)
        self._abort_hooks: dict[int, Callable[[], None]] = {}
        # Without a reference to this object, which would then live until the next garbage collection.
        self._keeper.on_failure = partial(_call_once, self._abort_hooks)
        _open.add(self)

    @property
    def options(self) -> Any:
        """The options in the form of torch: the name of the backend and the time limit of calls."""
        return BASE.Options(NAME, self._timeout)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have called it, or raise an error that names the missing ranks."""
        wait_for_all(self, opts.timeout, wait_all_ranks)

    # torch dispatches sparse tensors to another name.
    allreduce_sparse = GroupOperations.allreduce

    def start_coalescing(self) -> None:
        """Collect the works of the calls from now on."""
        self._keeper.start_coalescing()

    def end_coalescing(self) -> Work:
        """Return one work for all calls since `start_coalescing`."""
        return self._keeper.end_coalescing()

    # --- groups of some of the ranks ----------------------------------------------------------------------------------

    supports_splitting = supports_shrinking = True

    def split(self, store: Any, ranks: Sequence[int], opts: Any) -> Backend:
        """Return a backend for some of the ranks, in this order, which call it. It has links of its own.

        Raises:
            CallError: this rank is not among them. torch calls `split` there too, and would crash without a backend.
            dist.DistBackendError: the ranks did not meet in time.
        """
        if self.rank() not in ranks:
            raise CallError(
                f"unisono: rank {self.rank()} is not among the ranks {list(ranks)} of the new group: put every rank "
                "into one of the split_ranks, or use new_group"
            )
        return self._of(ranks, store, opts._timeout)

    def perform_nocolor_split(self, _device: Any) -> None:
        """Do nothing, because a rank that is not in a new group takes no part in making it."""

    def shrink(self, ranks_to_exclude: Sequence[int], flags: int = 0, _opts: Any = None) -> Backend:
        """Return a backend for the other ranks, which call it. The excluded ranks may be dead.

        The ranks meet by the store of torch, which torch needs for the new group anyway. So nobody has to find out who
        is alive, as `unisono.Communicator.shrink` does.

        Args:
            ranks_to_exclude: ranks of this group.
            flags: ``SHRINK_ABORT`` to make calls in flight fail on all ranks first.

        Raises:
            dist.DistBackendError: the ranks did not meet in time.
        """
        if flags == c10d.SHRINK_ABORT:
            self._communicator.abort("the process group shrinks")
        remaining = [rank for rank in range(self.size()) if rank not in ranks_to_exclude]
        store = dist.PrefixStore(f"{self.next_key_prefix('shrunk')}/", self._store)
        return self._of(remaining, store, self._timeout)

    def _of(self, ranks: Sequence[int], store: Any, timeout: timedelta) -> Backend:
        """Return a backend for some of the ranks, with the options of this one."""
        return Backend(store, ranks.index(self.rank()), len(ranks), timeout, self._options)

    # --- hooks ----------------------------------------------------------------------------------------------------

    def registerAbortHook(self, hook_id: int, hook: Callable[[], None]) -> None:  # noqa: N802
        """Have `hook` called when a call fails or the group is aborted: once, before the program gets the error."""
        self._abort_hooks[hook_id] = hook

    def unregisterAbortHook(self, hook_id: int) -> None:  # noqa: N802
        """Forget a hook. One that is not registered is ignored."""
        self._abort_hooks.pop(hook_id, None)

    register_abort_hook, unregister_abort_hook = registerAbortHook, unregisterAbortHook

    def shutdown(self) -> None:
        """Leave the group. Calls of other ranks that still need this rank fail. A second call does nothing."""
        super().shutdown()
        _open.discard(self)

    def abort(self) -> None:
        """Make all calls fail on all ranks, and leave the group."""
        self._keeper.on_failure()
        super().abort()


def _call_once(hooks: dict[int, Callable[[], None]]) -> None:
    """Call the hooks and forget them."""
    while hooks:
        hooks.popitem()[1]()
