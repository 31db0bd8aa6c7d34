"""A barrier that names the missing ranks. It uses the store of torch, so it works even after calls have failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.frameworks.torch.process_groups.group_operations import GroupOperations, operations_of

_PASSED = b"passed"
_PAUSE_S = 0.001
# How much longer than rank 0 the other ranks wait, so that they receive its verdict.
_GRACE_S = 5.0


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of a group have called it, or raise an error that names the missing ranks.

    It is `torch.distributed.monitored_barrier` for groups of the backend "unisono", also before torch 2.14. On a rank
    that is not in the group, it returns with a warning, as all calls of torch.distributed do.

    Args:
        group: a group of the backend "unisono"; by default the group of all ranks.
        timeout: how long to wait; by default half an hour, as in torch.
        wait_all_ranks: whether the error names all missing ranks, or only the first.

    Raises:
        CallError: the group is of another backend.
        dist.DistBackendError: ranks did not call it in time; the group can still be used.
    """
    if c10d._rank_not_in_group(group):
        c10d._warn_not_in_group("monitored_barrier")
        return
    wait_for_all(operations_of(group), timeout or c10d.default_pg_timeout, wait_all_ranks)


def wait_for_all(group: GroupOperations, timeout: timedelta, wait_all_ranks: bool) -> None:
    """Wait until all ranks of a group have called it, as `monitored_barrier` does."""
    limit_s = timeout.total_seconds()
    rank, size, store = group.communicator.rank, group.communicator.size, group.store
    prefix = group.next_key_prefix("monitored")
    end = f"{prefix}/end"
    if rank != 0:
        store.set(f"{prefix}/{rank}", "")
        missing = _missing(store, [end], time.monotonic() + limit_s + _GRACE_S)
        verdict = f"Rank {rank}: rank 0 failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms".encode()
        verdict = verdict if missing else store.get(end)
    else:
        keys = [f"{prefix}/{peer}" for peer in range(1, size)]
        missing = [int(key.rpartition("/")[2]) for key in _missing(store, keys, time.monotonic() + limit_s)]
        missing = missing if wait_all_ranks else missing[:1]
        verdict = f"{_ranks(missing)} failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms".encode()
        verdict = verdict if missing else _PASSED
        store.set(end, verdict.decode())
    if verdict != _PASSED:
        raise dist.DistBackendError(f"unisono: Timed out waiting for the other ranks: {verdict.decode()}")


def _missing(store: Any, keys: Sequence[str], deadline: float) -> list[Any]:
    """Wait until all keys are set or the deadline has passed; return the keys that are not set."""
    unset = [key for key in keys if not store.check([key])]
    while unset and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        unset = [key for key in unset if not store.check([key])]
    return unset


def _ranks(ranks: Sequence[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
