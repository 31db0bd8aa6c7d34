"""One rank of `unisono.bench.programs.training`: trains a model by one method, and rank 0 prints the curve.

Run by path with a `TrainingRequest` as JSON. Unisono's variables say which rank this is. Every method begins with the
same model and the same data on each rank. Clocks stop while the loss is computed.

The ranks of a swarm can lose one of them: with the option "lost", the process of the last rank kills itself after half
of the steps, and some seconds later a new process takes its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

import unisono as un
from unisono.bench.programs.ranks.training_tasks import TASKS, TrainingRequest, TrainingTask, loss_of

PR_SET_PDEATHSIG = 1
# All hosts share the cores of this machine, so a member may answer late.
_HEARTBEAT_S, _ENTRY_S = 20.0, 120.0
# Seconds after which a process enters in place of the one that was lost, and the variable of the step of the loss.
_ABSENT_S, _LAST_STEP = 5.0, "TRAINING_LAST_STEP"


class Result(NamedTuple):
    """The result of a method on rank 0.

    Attributes:
        curve: from time to time, the seconds of training, the loss on test data, and the bytes that this host has sent.
        sent_nbytes: the bytes that left the network device of the rank that sent most, with all headers.
        worst_stall_s: how much longer the longest step took than the median step without communication.
    """

    curve: list[tuple[float, float, int]]
    sent_nbytes: int
    worst_stall_s: float


class Training(NamedTuple):
    """A method that has been set up.

    Attributes:
        model: the model to call.
        optimizer: its `step` is that of the method.
        steps: returns the steps that all members have made; None to count those of this rank.
        finish: called after the last step, in its time.
        most: returns the greatest of the numbers that the ranks pass.
        close: called at the end.
    """

    model: torch.nn.Module
    optimizer: Any
    steps: Callable[[], int] | None
    finish: Callable[[], object]
    most: Callable[[int], int]
    close: Callable[[], object]


def _nothing() -> None:
    pass


def sent_nbytes() -> int:
    """Return the bytes that have left the network devices of this host, without the loopback."""
    lines = [line.replace(":", " ").split() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    return sum(int(fields[9]) for fields in lines if fields[0] != "lo")


def _adamw(task: TrainingTask) -> torch.optim.Optimizer:
    return torch.optim.AdamW(task.model.parameters(), lr=1e-3)


def _met() -> tuple[un.Communicator, Callable[[int], int]]:
    """Return the communicator of all ranks, and a function that returns the greatest value of all ranks."""
    world = un.init()
    world.barrier()
    return world, lambda value: int(world.allreduce(np.array(value), "max"))


def synchronous(task: TrainingTask, request: TrainingRequest) -> Training:
    """Average the gradients in each step."""
    world, most = _met()
    named = list(task.model.named_parameters())
    optimizer = un.torch.DistributedOptimizer(_adamw(task), world, named_parameters=named, **request.method[2])
    return Training(task.model, optimizer, None, _nothing, most, world.close)


def local(task: TrainingTask, request: TrainingRequest) -> Training:
    """Train by a class of `unisono.torch` on a communicator."""
    world, most = _met()
    optimizer = getattr(un.torch, request.method[1])(task.model, _adamw(task), world, **request.method[2])

    def close() -> None:
        optimizer.close()
        world.close()

    return Training(task.model, optimizer, None, optimizer.synchronize, most, close)


def on_swarm(task: TrainingTask, request: TrainingRequest) -> Training:
    """Train by a class of `unisono.torch` on a swarm, which goes on if one rank is lost."""
    options = {name: value for name, value in request.method[2].items() if name != "lost"}
    rank = int(os.environ["UNISONO_RANK"])
    place = f"tcp://{request.hosts[0]}:{request.port}"
    address = request.hosts[rank]
    least = max(1, len(request.hosts) - 1)
    swarm = un.Swarm(
        place,
        name=f"rank {rank}",
        serve=rank == 0,
        min_size=least,
        bind_address=address,
        heartbeat_timeout_s=_HEARTBEAT_S,
        rendezvous_timeout_s=_ENTRY_S,
    )
    optimizer = getattr(un.torch, request.method[1])(task.model, _adamw(task), swarm, **options)

    def most(value: int) -> int:
        optimizer.close()
        return int(swarm.allreduce(np.array(value), "max"))

    return Training(task.model, optimizer, lambda: optimizer.outer.steps, optimizer.synchronize, most, swarm.close)


def ddp(task: TrainingTask, request: TrainingRequest) -> Training:
    """Average the gradients in each step by torch's DistributedDataParallel over Gloo."""
    world, most = _met()
    dist.init_process_group("gloo", f"tcp://{request.hosts[0]}:{request.port}", rank=world.rank, world_size=world.size)
    model = torch.nn.parallel.DistributedDataParallel(task.model)
    return Training(model, _adamw(task), None, _nothing, most, world.close)


def by_torchft(task: TrainingTask, request: TrainingRequest) -> Training:
    """Train by torchft's DiLoCo. Each rank is a replica group of its own."""
    import torchft
    from torchft.local_sgd import DiLoCo

    world, most = _met()
    options = dict(request.method[2])
    address, host = request.hosts[world.rank], request.hosts[0]
    lighthouse = _lighthouse(f"{host}:{request.port + 2}", world.size) if world.rank == 0 else None
    world.barrier()
    store = dist.TCPStore(address, request.port + 1, is_master=True, wait_for_workers=False)
    inner = _adamw(task)

    def load(state: dict[str, Any]) -> None:
        task.model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    limit = timedelta(seconds=120)
    logging.getLogger("torchft").setLevel(logging.ERROR)
    os.environ["TORCHFT_LIGHTHOUSE"] = f"http://{host}:{request.port + 2}"
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": task.model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=world.size,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=request.port + 1,
        replica_id=f"rank{world.rank}",
        hostname=address,
        init_sync=False,  # the parameters are equal; a checkpoint's address would be this machine's name
    )
    parts = _parts(task.model, options.pop("fragments", 1))
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    stack = contextlib.ExitStack()
    stack.callback(store.set, "end", "")
    if lighthouse is not None:
        stack.callback(lighthouse.kill)
    stack.callback(manager.shutdown)
    stack.enter_context(DiLoCo(manager, parts, inner, outer, sync_every=options["inner_steps"], **_delay(options)))

    def close() -> None:
        world.barrier()
        stack.close()

    return Training(task.model, inner, None, _nothing, most, close)


def _lighthouse(address: str, size: int) -> subprocess.Popen[bytes]:
    """Start the process in which the members of torchft meet."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    words = ["--bind", address, "--min_replicas", str(size), "--join_timeout_ms", "10000"]
    return subprocess.Popen([program, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _delay(options: dict[str, Any]) -> dict[str, Any]:
    """Return our options of streaming in torchft's names; its α is the share of the rank's own parameters."""
    return {
        "fragment_sync_delay": options.get("overlap", 0),
        "fragment_update_alpha": 1 - options.get("mixing", 1.0),
    }


def _parts(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    """Return the layers of a model in `count` parts of about equal size."""
    if count == 1:
        return [model]
    layers = [part for child in model.children() for part in (getattr(child, "layers", None) or [child])]
    sizes = [sum(x.numel() for x in layer.parameters()) for layer in layers]
    parts: list[list[torch.nn.Module]] = [[] for _ in range(count)]
    totals = [0] * count
    for index in sorted(range(len(layers)), key=lambda index: -sizes[index]):
        least = totals.index(min(totals))
        parts[least].append(layers[index])
        totals[least] += sizes[index]
    return [torch.nn.ModuleList(part) for part in parts]


KINDS: dict[str, Callable[[TrainingTask, TrainingRequest], Training]] = {
    "synchronous": synchronous,
    "local": local,
    "swarm": on_swarm,
    "ddp": ddp,
    "torchft": by_torchft,
}


def trained(request: TrainingRequest, rank: int) -> Result:
    """Train by the method, and return the losses and times."""
    torch.manual_seed(0)
    task = TASKS[request.model](request, rank, len(request.hosts))
    alone = []
    for batch in task.batches[:5]:
        began = time.monotonic()
        loss_of(task.model, batch).backward()
        alone.append(time.monotonic() - began)
    task.model.zero_grad()
    training = KINDS[request.method[0]](task, request)
    sent = sent_nbytes()
    last_step = int(os.environ.get(_LAST_STEP, request.steps))
    step, seconds, times, curve = 0, 0.0, [], []
    while step < last_step:
        began = time.monotonic()
        done = training.steps() if training.steps is not None else step
        training.optimizer.zero_grad()
        loss_of(training.model, task.batches[done]).backward()
        training.optimizer.step()
        step = training.steps() if training.steps is not None else step + 1
        if step == request.steps:
            training.finish()
        times.append(time.monotonic() - began)
        seconds += times[-1]
        if step % request.every == 0 or step == request.steps:
            with torch.no_grad():
                curve.append((seconds, float(loss_of(task.model, task.test)), sent_nbytes() - sent))
    if last_step < request.steps:
        os.kill(os.getpid(), signal.SIGKILL)
    most = training.most(sent_nbytes() - sent)
    training.close()
    return Result(curve, most, max(times) - statistics.median(alone))


def lost_and_replaced(request: TrainingRequest) -> None:
    """Train in a process that is lost after half of the steps, and then in another one."""
    for last_step in (request.steps // 2, request.steps):
        environ = {**os.environ, _LAST_STEP: str(last_step)}
        subprocess.run([sys.executable, *sys.argv], env=environ, check=False)
        time.sleep(_ABSENT_S)


def main() -> None:
    """Train. Rank 0 prints its result as JSON."""
    request = TrainingRequest(*json.loads(sys.argv[1]))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    rank = int(os.environ["UNISONO_RANK"])
    if request.method[2].get("lost") and rank == len(request.hosts) - 1 and _LAST_STEP not in os.environ:
        lost_and_replaced(request)
        return
    result = trained(request, rank)
    if rank == 0:
        sys.stdout.write(json.dumps(result))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
