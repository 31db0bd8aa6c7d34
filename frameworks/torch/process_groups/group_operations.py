"""`GroupOperations`: a group of torch.distributed over a communicator of its own, without a base class of torch.

Before version 2.14, torch takes a `ProcessGroup` written in Python; since then it takes a `Backend` too. Both inherit
`GroupOperations` beside their base class, so that all calls exist once.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import unisono
from unisono import Communicator, UnisonoError
from unisono.frameworks.sparse_sums import SparseSums
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.errors import CallError, torch_error
from unisono.frameworks.torch.calls.work import THREADS, WorkKeeper
from unisono.frameworks.torch.constants import NAME
from unisono.frameworks.torch.process_groups.collectives import Collectives
from unisono.frameworks.torch.process_groups.options import Options
from unisono.frameworks.torch.process_groups.point_to_point import PointToPoint
from unisono.frameworks.torch.training.fsdp import Memory

# How long `shutdown` waits for callbacks of futures. There is a limit, because a callback may wait for `shutdown`.
_CALLBACKS_S = 2.0
_VERSION = "unisono/torch"  # the key of rank 0's version of torch
# The key of a random text that rank 0 sets for each group, because ranks and groups of the same name may share a store
# one after the other.
_TOKEN = "unisono/group"


@skip_dynamo
class GroupOperations(Collectives, PointToPoint):
    """The calls of a group, and the actions at its beginning and its end.

    Each group uses its own part of the store and has its own links. So the failure of one group does not affect another
    one, and threads may use different groups at the same time.
    """

    def join(self, store: Any, rank: int, size: int, timeout: timedelta, options: Options | None) -> None:
        """Meet the other ranks of the group.

        Args:
            store: the store of torch, for the values of this group only.
            rank: this rank in the group.
            size: the number of ranks.
            timeout: the time limit of each call that passes none, and of the rendezvous of all ranks.
            options: the options of the program; None for the defaults.

        Raises:
            dist.DistBackendError: the ranks did not meet in time, or have different versions of torch.
        """
        self._options = options or Options()
        if rank == 0:
            store.set(_VERSION, torch.__version__)
            store.set(_TOKEN, os.urandom(8).hex())
        try:
            communicator = unisono.init(self._options.settings(timeout), store=store, rank=rank, size=size)
        except UnisonoError as error:
            raise torch_error(error) from error
        self._begin(communicator, store, timeout, store.get(_TOKEN).decode())
        self._check_version(store.get(_VERSION).decode())

    def _begin(self, communicator: Communicator, store: Any, timeout: timedelta, token: str) -> None:
        """Set the attributes of a group whose ranks have met."""
        self._communicator = communicator
        self._sparse_sums = SparseSums(communicator)
        self._store = store
        self._timeout = timeout
        self._token = token
        self._keeper = WorkKeeper()
        self._rounding = self._options.rounding()
        self._limit_s = None
        self._collectives = 0
        self._memory = Memory()
        self._uses: Counter[str] = Counter()  # of `next_key_prefix`, by purpose
        _groups.add(self)

    def _check_version(self, of_rank_0: str) -> None:
        """Check that this rank has rank 0's minor version of torch: another may make other calls for a program.

        Raises:
            dist.DistBackendError: it has not. The calls of the other ranks fail with the same text.
        """
        if of_rank_0.split(".")[:2] != torch.__version__.split(".")[:2]:
            text = (
                f"rank 0 has torch {of_rank_0} and rank {self._communicator.rank} has torch {torch.__version__}: "
                "install one version for all ranks"
            )
            self._communicator.abort(text)
            raise dist.DistBackendError(f"unisono: {text}")

    @property
    def communicator(self) -> Communicator:
        """The communicator that carries all calls of the group, with its counters of traffic."""
        return self._communicator

    @property
    def store(self) -> Any:
        """The store of torch for the values of this group."""
        return self._store

    # --- what torch asks of a group -----------------------------------------------------------------------------------

    supports_coalescing = supports_time_estimate = False

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the backend."""
        return NAME

    def next_key_prefix(self, purpose: str) -> str:
        """Return a new prefix for keys in the store. The k-th call for a purpose returns the same text on all ranks."""
        self._uses[purpose] += 1
        return f"unisono/{purpose}/{self._token}/{self._uses[purpose]}"

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called. It is equal on ranks that have made the same calls."""
        return self._collectives

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing, because all ranks count from 0."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of later calls that pass none."""
        self._limit_s = timeout.total_seconds()

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return whether `allocate_tensor` has memory for a device: for the CPU."""
        return isinstance(device, torch.device) and device.type == "cpu"

    def allocate_tensor(self, size: int, *, dtype: Any, device: Any) -> Any:
        """Return an uninitialised tensor of `size` elements in memory that the ranks of a host read where it lies.

        The memory is that of `unisono.empty`. It is used again when no tensor uses it any more, and freed together with
        this object.
        """
        return self._memory.allocate((size,), dtype=dtype, device=device)

    # --- the end ----------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group. Calls of other ranks that still need this rank fail. A second call does nothing."""
        self._communicator.close()
        THREADS.wait_idle(_CALLBACKS_S)

    def abort(self) -> None:
        """Make all calls fail on all ranks, and leave the group."""
        self._communicator.abort("the process group was aborted")
        self.shutdown()


def operations_of(group: Any = None) -> GroupOperations:
    """Return the calls of Unisono for a group of torch.distributed; None is the group of all ranks.

    Raises:
        CallError: Unisono serves no device of the group.
    """
    group = c10d._get_default_group() if group is None else group
    if isinstance(group, GroupOperations):
        return group
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)  # torch wraps it when it looks for mistakes of programs
        if isinstance(backend, GroupOperations):
            return backend
    raise CallError(f"unisono: the group of the backend {c10d.get_backend_config(group)} does not use Unisono")


def communicator(group: Any = None) -> Communicator:
    """Return the communicator that carries the calls of a group of torch.distributed, with its counters of traffic.

    Args:
        group: a group of the backend "unisono"; by default the group of all ranks.

    Raises:
        CallError: the group is of another backend.
        ValueError: torch.distributed has no default group.
    """
    return operations_of(group).communicator


_groups: weakref.WeakSet[GroupOperations] = weakref.WeakSet()


def _shut_down_all() -> None:
    """Shut down all groups, so that no thread waits in the native core when the interpreter ends."""
    for group in list(_groups):
        group.shutdown()


atexit.register(_shut_down_all)
