"""A barrier that names the missing ranks. It uses the store of torch, so it works even after calls have failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from unisono.frameworks.torch.errors import CallError
from unisono.frameworks.torch.process_group import ProcessGroup

_PASSED = b"passed"
_PAUSE_S = 0.001
# How much longer than rank 0 the other ranks wait, so that they receive its verdict.
_GRACE_S = 5.0


def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Wait until all ranks of a group have called it, or raise an error that names the missing ranks.

    It is `torch.distributed.monitored_barrier` for groups of the backend "unisono". On a rank that is not in the group,
    it returns with a warning, as all calls of torch.distributed do.

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
    pg = c10d._get_default_group() if group is None else group
    if not isinstance(pg, ProcessGroup):
        raise CallError(f"unisono: monitored_barrier is for groups of the backend unisono, not {type(pg).__name__}")
    limit_s = (timeout or c10d.default_pg_timeout).total_seconds()
    prefix = pg.next_key_prefix("monitored")
    end = f"{prefix}/end"
    if pg.rank() != 0:
        pg.get_group_store().set(f"{prefix}/{pg.rank()}", "")
        missing = _missing(pg, [end], time.monotonic() + limit_s + _GRACE_S)
        verdict = f"Rank {pg.rank()}: rank 0 failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms".encode()
        verdict = verdict if missing else pg.get_group_store().get(end)
    else:
        keys = [f"{prefix}/{rank}" for rank in range(1, pg.size())]
        missing = [int(key.rpartition("/")[2]) for key in _missing(pg, keys, time.monotonic() + limit_s)]
        missing = missing if wait_all_ranks else missing[:1]
        verdict = f"{_ranks(missing)} failed to pass monitoredBarrier in {limit_s * 1e3:.0f} ms".encode()
        verdict = verdict if missing else _PASSED
        pg.get_group_store().set(end, verdict.decode())
    if verdict != _PASSED:
        raise dist.DistBackendError(f"unisono: Timed out waiting for the other ranks: {verdict.decode()}")


def _missing(pg: ProcessGroup, keys: Sequence[str], deadline: float) -> list[Any]:
    """Wait until all keys are set or the deadline has passed; return the keys that are not set."""
    store = pg.get_group_store()
    unset = [key for key in keys if not store.check([key])]
    while unset and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        unset = [key for key in unset if not store.check([key])]
    return unset


def _ranks(ranks: Sequence[int]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
