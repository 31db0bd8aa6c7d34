"""The process group of the backend: ranks that meet in the store which torch hands over."""

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
from unisono.frameworks.torch.dynamo_skip import untraced
from unisono.frameworks.torch.errors import translated
from unisono.frameworks.torch.options import Options
from unisono.frameworks.torch.point_to_point import Messages
from unisono.frameworks.torch.work import THREADS, Kept, Work

# How long leaving waits for the callbacks of futures, one of which may wait for whoever leaves.
_FAREWELL_S = 2.0


def create(facts: Any, options: Any) -> ProcessGroup:
    """Return a process group, by what torch tells of it and the ``pg_options`` of the user, which may be None.

    Raises:
        CallError: `options` are not `Options`.
        dist.DistBackendError: the ranks did not meet in time.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"pg_options must be unisono.torch.Options, not {type(options).__name__}")
    return ProcessGroup(
        facts.store, facts.group_rank, facts.group_size, facts.timeout, options or Options(), facts.group_id
    )


@untraced
class ProcessGroup(Collectives, Messages, dist.ProcessGroup):  # type: ignore[misc]
    """Ranks of torch.distributed over a communicator of their own.

    Each group meets in its own part of the store and has links of its own, so that one that fails takes no other with
    it, and threads may use different groups as they like.

    Args:
        store: torch's store, for the values of this group alone.
        rank, size: this rank of the group, and how many there are.
        timeout: how long calls may take that say nothing else, and how long the ranks wait for each other here.
        options: of the user.
        name: the group's name.

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
        self._kept = Kept()
        self._rounding = options.rounding()
        self._limit_s = None
        self._collectives = 0
        self._opening = store.add(f"unisono/groups/{rank}", 1)  # a store may outlive groups of the same name
        self._places: Counter[str] = Counter()
        try:
            self._communicator: Communicator = unisono.init(
                options.settings(timeout), store=store, rank=rank, size=size
            )
        except UnisonoError as error:
            raise translated(error) from error
        _groups.add(self)

    @property
    def communicator(self) -> Communicator:
        """The communicator that carries everything, with its counters of traffic."""
        return self._communicator

    # --- what torch asks for by name --------------------------------------------------------------------------------

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
        """Return what the user says of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the user says of the group."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[Any]:
        return [torch.device(device) for device in DEVICES]

    # What torch's own backends may have, and it asks for.
    supports_coalescing = supports_shrinking = supports_splitting = supports_time_estimate = False

    def supports_tensor_alloc(self, _device: Any) -> bool:
        """Return whether the backend has memory of its own to give."""
        return False

    def _get_backend(self, _device: Any) -> ProcessGroup:
        """Return the backend for a device: this, for there is none of C++ below it."""
        return self

    def get_group_store(self) -> Any:
        """Return torch's store, for the values of this group alone."""
        return self._store

    def next_place(self, purpose: str) -> str:
        """Return the beginning of keys in the store that all ranks know which call this for a purpose equally often."""
        self._places[purpose] += 1
        return f"unisono/{purpose}/{self._opening}/{self._places[purpose]}"

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called; it is the same on all ranks that have called the same."""
        return self._collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Let calls that say nothing else take so long from now on."""
        self._limit_s = timeout.total_seconds()

    def _start_coalescing(self, _device: Any) -> None:
        self._kept.start_coalescing()

    def _end_coalescing(self, _device: Any) -> Work:
        return self._kept.end_coalescing()

    # --- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group; calls of other ranks that still need this one fail. May be called twice."""
        self._communicator.close()
        THREADS.rest(_FAREWELL_S)

    def abort(self) -> None:
        """Make all calls fail, on all ranks, and leave the group."""
        self._communicator.abort("the process group was aborted")
        self.shutdown()


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()


def _leave_all() -> None:
    """Let no thread wait in the native core when the interpreter ends."""
    for group in list(_groups):
        group.shutdown()


atexit.register(_leave_all)
