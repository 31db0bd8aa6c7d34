"""Python objects that ranks exchange."""

from __future__ import annotations

from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from unisono.compat.horovod.arguments import named, root_of
from unisono.compat.horovod.entries import StartedCall
from unisono.compat.horovod.job import calls_of
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.requests import ReadyCall


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the rank `root_rank`; other ranks' `obj` is ignored. It travels as a pickle."""
    calls = calls_of(process_set)
    root = root_of(root_rank, process_set)
    data = cloudpickle.dumps(obj) if calls.comm.rank == root else None
    kind = "broadcast_object"
    received = calls.make(StartedCall(ReadyCall(kind, named(calls, kind, name), root=root), [data]))
    return obj if data is not None else cloudpickle.loads(received)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in the order of ranks. They travel as pickles."""
    calls = calls_of(process_set)
    kind = "allgather_object"
    gathered = calls.make(StartedCall(ReadyCall(kind, named(calls, kind, name)), [cloudpickle.dumps(obj)]))
    return [cloudpickle.loads(each) for each in gathered]
