"""An elastic training script of Horovod, with only its import changed: it loses a rank and gets a new one.

    unisono run -n 3 --max-restarts 1 examples/horovod_elastic.py

At step 10 the last rank kills itself, as if its machine failed. The others return to the last commit and go on. At step
20 they wait for the process that the launcher has started anew. It joins, and gets the state of rank 0.
"""

from __future__ import annotations

import math
import os
import signal
import time

import torch

import unisono.compat.horovod.torch as hvd  # was: import horovod.torch as hvd

STEPS, LOST_AT, JOIN_AT = 30, 10, 20
SAMPLES = 96


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and targets, the same on every rank."""
    inputs = torch.randn((SAMPLES, 4), generator=torch.Generator().manual_seed(1))
    return inputs, inputs.sum(1, keepdim=True)


@hvd.elastic.run
def train(state: hvd.elastic.TorchState) -> None:
    """Make the steps that `state` lacks, and commit each."""
    inputs, targets = data()
    while state.step < STEPS:
        if state.sizes[-1:] != [hvd.size()]:
            state.sizes.append(hvd.size())
        while state.step == JOIN_AT and hvd.size() < state.sizes[0]:
            time.sleep(0.05)
            state.check_host_updates()
        if state.step == LOST_AT and hvd.rank() == hvd.size() - 1 and len(state.sizes) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        part = slice(hvd.rank(), None, hvd.size())
        state.optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(state.model(inputs[part]), targets[part])
        loss.backward()
        state.optimizer.step()
        state.losses.append(hvd.allreduce(loss.detach()).item())
        state.step += 1
        state.commit()


def train_alone() -> list[float]:
    """Return the losses of the same training by this process alone."""
    inputs, targets = data()
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def new_model() -> torch.nn.Linear:
    """Return the model, with the same parameters in every process."""
    torch.manual_seed(2)
    return torch.nn.Linear(4, 1)


def main() -> None:
    """Train, and compare the losses with those of a single process."""
    torch.set_num_threads(1)
    hvd.init()
    model = new_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model.named_parameters())
    state = hvd.elastic.TorchState(model, optimizer, step=0, losses=[], sizes=[])
    train(state)
    if hvd.rank() == 0:
        pairs = zip(state.losses, train_alone(), strict=True)
        assert all(math.isclose(loss, expected, rel_tol=1e-3) for loss, expected in pairs)
        sizes = ", then ".join(map(str, state.sizes))
        print(f"loss {state.losses[0]:.3f} → {state.losses[-1]:.4f} with {sizes} ranks, as by a single process")


if __name__ == "__main__":
    main()
