"""Makes calls that fail. For each call, a rank prints one line with the error's classes, its cause and its text."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from support.torch_programs.meeting import meet
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import unisono as un


def report(name: str, call: Callable[[], Any]) -> None:
    """Print the error that a call raises, on one line."""
    began = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  (any error is the result)
        cause = type(error.__cause__).__name__
        kinds = ",".join(kind.__name__ for kind in type(error).__mro__)
        print(f"{name}|{kinds}|{cause}|{str(error).splitlines()[0]}|{time.monotonic() - began:.1f}", flush=True)
    else:
        print(f"{name}|nothing", flush=True)


def refusals(rank: int, size: int) -> None:
    """Make calls that every rank refuses, after which the group still works."""
    leaf = torch.full((3,), float(rank), requires_grad=True)
    report("leaf", lambda: dist.all_reduce(leaf))
    outs = [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]
    report("dtypes", lambda: dist.group.WORLD.allgather([outs], [torch.ones(2)]).wait())
    report("sizes", lambda: dist.all_gather_into_tensor(torch.zeros(5), torch.ones(2)))
    report("operation", lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BAND))
    report("list", lambda: dist.all_gather([torch.zeros(1)] * 2 * size, torch.ones(2)))
    report("expanded", lambda: dist.all_reduce(torch.ones(1).expand(4)))
    mesh = init_device_mesh("cpu", (size,))
    report("DTensor", lambda: dist.all_reduce(DTensor.from_local(torch.ones(2), mesh, [Shard(0)])))
    report("device", lambda: dist.all_reduce(torch.ones(2, device="meta")))
    report("second default group", lambda: meet(file="second"))
    report("options", lambda: dist.new_group([0, 1], pg_options=object()))
    report("timeout in seconds", lambda: un.torch.Options(timeout=5))
    report("no such setting", lambda: un.torch.Options(colour="red"))
    child = os.fork()
    if child == 0:
        report(f"fork of {rank}", lambda: dist.all_reduce(torch.ones(2)))
        os._exit(0)
    os.waitpid(child, 0)
    with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        report("anomaly mode and profiler", lambda: model(torch.ones(1, 2)).sum().backward())
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context=context)
        total = torch.tensor(float(sum(int(batch) for batch in loader)))
        report(f"{context} of a loader", lambda total=total: dist.all_reduce(total))
    dist.barrier()


def shapes(rank: int, size: int) -> None:
    report("shapes", lambda: dist.all_reduce(torch.ones(3 + rank)))
    report("afterwards", lambda: dist.all_reduce(torch.ones(2)))
    report("a new group", lambda: meet_again(rank))


def meet_again(rank: int) -> None:
    dist.destroy_process_group()
    meet(file="again")
    dist.all_reduce(torch.ones(2))


def late(rank: int, size: int) -> None:
    hasty = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    if rank == 0:
        report("late", lambda: dist.barrier(group=hasty))
    else:
        time.sleep(2)
        report("late", lambda: dist.barrier(group=hasty))
    report("the other group", dist.barrier)


def death(rank: int, size: int) -> None:
    """Let the last rank die in the middle of a backward pass."""
    model = DistributedDataParallel(
        torch.nn.Sequential(*[torch.nn.Linear(50, 50) for _ in range(6)]), bucket_cap_mb=0.01
    )

    def hook(_grad: Any) -> None:
        if rank == size - 1 and step == 2:
            os._exit(3)

    model.module[3].weight.register_hook(hook)
    step = 0

    def train() -> None:
        nonlocal step
        while step < 4:
            step += 1
            model(torch.ones(2, 50)).sum().backward()

    report("death", train)


def cycles(rank: int, size: int) -> None:
    """Create and destroy the default group 205 times, and print how many threads and descriptors the last 200 leak."""
    dist.destroy_process_group()
    open_after = {}
    for cycle in range(205):
        meet(file=f"cycle-{cycle}")
        dist.all_reduce(torch.ones(3))
        if cycle % 5 == 0:
            dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()
        dist.destroy_process_group()
        if cycle in {4, 204}:
            gc.collect()
            open_after[cycle] = (len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")))
    print("cycles|" + "|".join(str(last - first) for first, last in zip(open_after[4], open_after[204], strict=True)))
    meet(file="the last")


CASES = {"survived": (refusals, late, shapes, cycles), "death": (death,)}


def main() -> None:
    report("before", lambda: dist.all_reduce(torch.ones(1)))
    rank, size = meet()
    for case in CASES[sys.argv[1]]:
        case(rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
