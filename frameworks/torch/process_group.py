"""The process group of the backend. Its ranks find each other by the store that torch passes."""

from __future__ import annotations

import atexit
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import unisono
from unisono import Communicator, UnisonoError
from unisono.frameworks.torch.collectives import Collectives
from unisono.frameworks.torch.constants import DEVICES, NAME
from unisono.frameworks.torch.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.errors import torch_error
from unisono.frameworks.torch.options import Options
from unisono.frameworks.torch.point_to_point import PointToPoint
from unisono.frameworks.torch.work import THREADS, Work, WorkKeeper

# How long `shutdown` waits for callbacks of futures. There is a limit, because a callback may wait for `shutdown`.
_CALLBACKS_S = 2.0


def create(facts: Any, options: Any) -> ProcessGroup:
    """Return a process group. This is the factory that torch calls.

    Args:
        facts: torch's description of the group: its store, rank, size, timeout and name.
        options: the ``pg_options`` of the program, or None.

    Raises:
        CallError: `options` are not `Options`.
        dist.DistBackendError: the ranks did not meet in time.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be unisono.torch.Options, not {type(options).__name__}")
    return ProcessGroup(
        facts.store, facts.group_rank, facts.group_size, facts.timeout, options or Options(), facts.group_id
    )


@skip_dynamo
class ProcessGroup(Collectives, PointToPoint, dist.ProcessGroup):  # type: ignore[misc]
    """A process group of torch.distributed over a communicator of its own.

    Each group uses its own part of the store and has its own links. So the failure of one group does not affect another
    one, and threads may use different groups at the same time.

    Args:
        store: the store of torch, for the values of this group only.
        rank, size: this rank in the group, and the number of ranks.
        timeout: the time limit of each call that passes none, and of the rendezvous of all ranks in this constructor.
        options: the options of the program; None for the defaults.
        name: the name of the group.

    Raises:
        dist.DistBackendError: the ranks did not meet in time.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, options: Options | None = None, name: str = ""
    ) -> None:
        dist.ProcessGroup.__init__(self, rank, size)
        options = options or Options()
        self._store = store
        self._name = name
        self._description = "undefined"
        self._keeper = WorkKeeper()
        self._rounding = options.rounding()
        self._limit_s = None
        self._collectives = 0
        self._opening = store.add(f"unisono/groups/{rank}", 1)  # groups of this name so far: a store may outlive one
        self._uses: Counter[str] = Counter()  # of `next_key_prefix`, by purpose
        try:
            self._communicator: Communicator = unisono.init(
                options.settings(timeout), store=store, rank=rank, size=size
            )
        except UnisonoError as error:
            raise torch_error(error) from error
        _groups.add(self)

    @property
    def communicator(self) -> Communicator:
        """The communicator that carries all calls of the group, with its counters of traffic."""
        return self._communicator

    # --- attributes that torch looks up by name ---------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name of the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that the program has set."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of the group."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(device) for device in DEVICES]

    # Optional features of backends, which torch asks for.
    supports_coalescing = supports_shrinking = supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, _device: Any) -> bool:
        """Return whether the backend allocates memory for tensors: it does not."""
        return False

    def _get_backend(self, _device: Any) -> ProcessGroup:
        """Return the backend for a device: this object, because it has no backend in C++."""
        return self

    def get_group_store(self) -> Any:
        """Return the store of torch for the values of this group."""
        return self._store

    def next_key_prefix(self, purpose: str) -> str:
        """Return a new prefix for keys in the store. The k-th call for a purpose returns the same text on all ranks."""
        self._uses[purpose] += 1
        return f"unisono/{purpose}/{self._opening}/{self._uses[purpose]}"

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called. It is equal on ranks that have made the same calls."""
        return self._collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because all ranks count from 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later calls that pass none."""
        self._limit_s = timeout.total_seconds()

    def _start_coalescing(self, _device: Any) -> None:
        self._keeper.start_coalescing()

    def _end_coalescing(self, _device: Any) -> Work:
        return self._keeper.end_coalescing()

    # --- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group. Calls of other ranks that still need this rank fail. A second call does nothing."""
        self._communicator.close()
        THREADS.wait_idle(_CALLBACKS_S)

    def abort(self) -> None:
        """Make all calls fail on all ranks, and leave the group."""
        self._communicator.abort("the process group was aborted")
        self.shutdown()


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _shut_down_all() -> None:
    """Shut down all groups, so that no thread waits in the native core when the interpreter ends."""
    for group in list(_groups):
        group.shutdown()


atexit.register(_shut_down_all)
