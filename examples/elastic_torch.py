"""DDP training that goes on when a rank is lost, from memory, and admits a replacement later.

    unisono run -n 4 --max-restarts 1 examples/elastic_torch.py

At step 20, rank 3 kills itself, as if its machine failed. The backward pass of the other ranks fails; they shrink the
communicator and go on as three. At step 40 they wait for the process that the launcher has started in place of the lost
one, and go on as four. It gets model, optimizer and losses from the memory of another rank.

The ranks of torch.distributed cannot change. So the process group of DDP is each process alone, and a hook averages the
gradients over Unisono's communicator. DDP is made anew, with a new hook, after each change. The batches do not depend
on the number of ranks, so rank 0 can compare the loss curve with that of a single process.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import unisono as un

STEPS, GROW_AT, BATCH = 60, 40, 96


def new_model() -> torch.nn.Sequential:
    """Return the model, with the same parameters on every rank."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


@dataclass
class State:
    """The state of the training, which every rank has in memory.

    Attributes:
        model, optimizer: those of torch.
        losses: the mean squared error of each finished step.
    """

    model: torch.nn.Module = field(default_factory=new_model)
    optimizer: torch.optim.Optimizer = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.02)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the points of a step and the values of the function there, the same on every rank."""
    points = torch.rand((BATCH, 2), generator=torch.Generator().manual_seed(step)) * 2 - 1
    return points, torch.sin(3 * points[:, :1]) * points[:, 1:]


def train(world: un.Communicator, state: State, before_step: Callable[[int], None], end: int) -> None:
    """Make the steps up to `end` that `state` lacks. If a call fails, `state` is that of the last finished step."""
    ddp = DistributedDataParallel(state.model)
    ddp.register_comm_hook(None, un.torch.ddp_hook(world))
    while len(state.losses) < end:
        before_step(len(state.losses))
        points, values = batch_of(len(state.losses))
        share = slice(world.rank, None, world.size)
        state.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(points[share]), values[share])
        loss.backward()
        mean = world.allreduce(loss.detach(), "avg")
        state.optimizer.step()
        state.losses.append(float(mean))
    world.barrier()


def agree(world: un.Communicator, state: State) -> None:
    """Replace `state` by the state of the rank that has finished the most steps."""
    root = int(world.allgather(np.array([len(state.losses)])).argmax())
    mine = (state.model.state_dict(), state.optimizer.state_dict(), state.losses)
    model, optimizer, losses = world.broadcast_object(mine if world.rank == root else None, root=root)
    state.model.load_state_dict(model)
    state.optimizer.load_state_dict(optimizer)
    state.losses = list(losses)


def train_elastically(size: int, before_step: Callable[[int], None]) -> tuple[un.Communicator, State]:
    """Train, with fewer ranks after each loss, and with `size` ranks again from step `GROW_AT` on.

    A process that starts in place of a lost rank runs this too: `init` lets it join, and `agree` gives it the state.
    All ranks make `agree` their first call on each new communicator, so that their calls match.
    """
    state = State()
    world = un.init()
    while True:
        try:
            agree(world, state)
            step = len(state.losses)
            if step >= GROW_AT and world.size < size:
                world = replaced(world, world.grow(size - world.size), f"step {step}: a replacement has joined")
                continue
            train(world, state, before_step, GROW_AT if step < GROW_AT else STEPS)
            if len(state.losses) == STEPS:
                return world, state
        except (un.PeerLostError, RuntimeError):  # backward raises a RuntimeError; shrink refuses if no rank was lost
            world = replaced(world, world.shrink(), f"step {len(state.losses)}: a rank was lost")


def replaced(old: un.Communicator, new: un.Communicator, why: str) -> un.Communicator:
    """Close `old`, let rank 0 print why `new` replaces it, and return `new`."""
    old.close()
    if new.rank == 0:
        print(f"{why}; {new.size} ranks go on")
    return new


def train_alone() -> State:
    """Return the state after the same training by this process alone."""
    state = State()
    for step in range(STEPS):
        points, values = batch_of(step)
        state.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(state.model(points), values)
        loss.backward()
        state.optimizer.step()
        state.losses.append(float(loss.detach()))
    return state


def main() -> None:
    """Train, lose a rank, replace it, and compare the loss curve with that of a single process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lose", type=int, default=3, metavar="RANK")
    parser.add_argument("--at-step", type=int, default=20, metavar="STEP")
    arguments = parser.parse_args()
    number, size = int(os.environ["UNISONO_RANK"]), int(os.environ["UNISONO_SIZE"])

    def die(step: int) -> None:
        if (number, step) == (arguments.lose, arguments.at_step):
            os.kill(os.getpid(), signal.SIGKILL)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world, state = train_elastically(size, die)
    with world:
        if world.rank == 0:
            np.testing.assert_allclose(state.losses, train_alone().losses, rtol=1e-3)
            print(f"loss {state.losses[0]:.3f} → {state.losses[-1]:.4f} in {STEPS} steps, as by a single process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
