"""Uses the features of a c10d backend: devices, hooks, splits and more. Prints the name of each part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
from support.torch_programs.meeting import meet
from torch._C._distributed_c10d import FlightRecorderHook, _dump_fr_trace_json

import unisono as un
from unisono.frameworks.torch.process_groups.backend import BASE

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RANK, SIZE = 0, 1


def expect(result: Any, expected: Any) -> None:
    assert result == expected, f"{result} instead of {expected}"


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "no error"


def all_reduced(group: Any = None) -> list[float]:
    tensor = torch.full((3,), RANK + 1.0)
    dist.all_reduce(tensor, group=group)
    return tensor.tolist()


SUM = [6.0] * 3


class OnGpu(BASE):  # type: ignore[misc]
    """A double of NCCL: a backend that makes no calls."""

    def getBackendName(self) -> str:  # noqa: N802
        return "on_gpu"


def devices() -> None:
    """Form groups with another backend for tensors on a GPU, in both orders."""
    nccl = c10d.Backend._BackendPlugin(lambda _, rank, size, __: OnGpu(rank, size), extended_api=False)
    c10d.Backend._plugins["NCCL"] = nccl
    for backends in ("cpu:unisono,cuda:nccl", "cuda:nccl,cpu:unisono"):
        group = dist.new_group(list(range(SIZE)), backend=backends)
        expect(type(group), dist.ProcessGroup)
        expect(type(group._get_backend(CUDA)), OnGpu)
        expect(all_reduced(group), SUM)
        expect(un.torch.communicator(group).size, SIZE)
        dist.destroy_process_group(group)
    group = dist.new_group(list(range(SIZE)), backend="cuda:nccl")
    expect("does not use Unisono" in error_of(lambda: un.torch.communicator(group)), True)


def device_types_that_are_not_served() -> None:
    group = dist.new_group(list(range(SIZE)), backend="cpu:unisono")
    expect([device_type.type for device_type in group._device_types], ["cpu"])
    expect("No backend type associated with device type cuda" in error_of(lambda: group._get_backend(CUDA)), True)
    expect(all_reduced(group), SUM)


def monitored_barrier() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    if RANK == 0:
        text = error_of(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True))
        expect("Ranks 1, 2 failed to pass" in text, True)
    dist.barrier()


def timeouts() -> None:
    for set_timeout in (dist.set_timeout, c10d._set_pg_timeout):
        group = dist.new_group(list(range(SIZE)))
        set_timeout(timedelta(seconds=0.5), group)
        if RANK == 0:
            expect("0.5 s" in error_of(lambda group=group: dist.barrier(group=group)), True)
        dist.barrier()
        dist.destroy_process_group(group)


def messages() -> None:
    group = dist.group.WORLD.group_name
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    out = torch.zeros(2)
    tensors = [torch.full((2,), float(RANK)), out]
    results = torch.ops._c10d_functional.batch_p2p_ops(["isend", "irecv"], [after, before], [1, 1], tensors, group)
    for tensor in (*tensors, *results):
        functional.wait_tensor(tensor)
    expect(out.tolist(), [float(before)] * 2)
    if RANK == 0:
        senders = {dist.recv(torch.zeros(2)) for _ in range(1, SIZE)}
        expect(senders, set(range(1, SIZE)))
    else:
        dist.send(torch.ones(2), 0)


def works() -> None:
    """Check that works have all methods of torch's own works."""
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    expect((work.is_completed(), work.result()[0] is tensor), (True, True))


def splits() -> None:
    """Split the group by its method, and by torch's function on a machine that seems to have a GPU."""
    world = dist.group.WORLD
    group = world.split_group([2, 0] if RANK != 1 else [1], timeout=timedelta(seconds=60), group_name=f"of {RANK == 1}")
    expect(group.size(), 1 if RANK == 1 else 2)
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    expect(tensor.tolist(), [float(group.size())] * 2)
    expect(un.torch.communicator(group).rank, group.rank())
    group.shutdown()
    if RANK == 1:
        text = error_of(lambda: world.split_group([2, 0], timeout=timedelta(seconds=60), group_name="without 1"))
        expect("rank 1 is not among the ranks [2, 0]" in text, True)
    gpu = torch.device("cuda", 0)
    world.bound_device_id = gpu
    with (
        mock.patch("torch.accelerator.is_available", return_value=True),
        mock.patch("torch.accelerator.current_accelerator", return_value=gpu),
    ):
        group = dist.split_group(split_ranks=[[0, 1], [2]])
    world.bound_device_id = None
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    expect(tensor.tolist(), [2.0 if RANK < 2 else 1.0] * 2)


def hooks() -> None:
    group = dist.new_group(list(range(SIZE)), pg_options=un.torch.Options(hooks=True))
    names = []
    group.register_pre_hook(7, lambda call: names.append(call.name.name))
    expect(all_reduced(group), SUM)
    group.unregister_pre_hook(7)
    expect(names, ["ALLREDUCE"])
    recorder = FlightRecorderHook.attach(group)
    dist.broadcast(torch.ones(2), 0, group=group)
    recorder.remove()
    entries = json.loads(_dump_fr_trace_json())["entries"]
    expect([entry["profiling_name"] for entry in entries], ["c10d:broadcast"])
    with mock.patch.dict(os.environ, {"TORCH_DIST_NAN_CHECK": "1"}):
        checked = dist.new_group(list(range(SIZE)))
    expect("NaN" in error_of(lambda: dist.all_reduce(torch.tensor([float("nan")]), group=checked)), True)


def abort_hooks() -> None:
    called = []
    group = dist.new_group(list(range(SIZE)), timeout=timedelta(seconds=0.5))
    group.register_abort_hook(1, lambda: called.append(1))
    group.register_abort_hook(2, lambda: called.append(2))
    group.unregister_abort_hook(2)
    expect(
        "not defined for float32" in error_of(lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND, group)), True
    )
    expect(called, [])
    if RANK == 0:
        error_of(lambda: dist.barrier(group=group))
        error_of(lambda: dist.barrier(group=group))
        expect(called, [1])
    dist.barrier()


def memory() -> None:
    backend = dist.group.WORLD._get_backend(CPU)
    tensor = backend.allocate_tensor(1 << 18, dtype=torch.float32, device=CPU).fill_(RANK + 1)
    dist.all_reduce(tensor)
    expect(tensor.unique().tolist(), SUM[:1])


def shrinking() -> None:
    """Shrink the group to all ranks but the last one, which makes no call.

    Shrinking aborts the calls in progress. So the ranks first meet at the store, when all have ended their last call.
    """
    store = c10d._get_default_store()
    store.set(f"ended {RANK}", "")
    store.wait([f"ended {rank}" for rank in range(SIZE)])
    if RANK == SIZE - 1:
        return
    group = dist.shrink_group([SIZE - 1], shrink_flags=c10d.SHRINK_ABORT)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=group)
    expect(tensor.tolist(), [SIZE - 1.0] * 2)


PARTS = [
    devices,
    device_types_that_are_not_served,
    monitored_barrier,
    timeouts,
    messages,
    works,
    splits,
    hooks,
    abort_hooks,
    memory,
    shrinking,
]


def main() -> None:
    global RANK, SIZE
    RANK, SIZE = meet()
    for part in PARTS:
        part()
        print(part.__name__, flush=True)


if __name__ == "__main__":
    main()
