"""Data-parallel training in numpy that goes on when a rank is lost, from memory, and admits a replacement later.

    unisono run -n 4 --keep-going examples/elastic.py
    unisono run -n 4 --max-restarts 1 examples/elastic.py --replace

A small network learns a function of two variables. At step 60, rank 3 kills itself, as if its machine failed. The other
ranks get `PeerLostError` and shrink the communicator. One of them may have finished a step in which the call of another
failed, so all take the state of the rank that has finished the most steps. With `--replace`, they wait at step 120 for
the process that the launcher has started in place of the lost one. It takes their state too, and trains on with them.
The batches do not depend on the number of ranks, so the loss curve does not either, except for rounding. Rank 0
compares it with the curve of a single process.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

import unisono as un

Array = NDArray[np.float64]

HIDDEN = 32
STEPS, BATCH = 200, 96
GROW_AT = 120
LEARNING_RATE = 0.2


@dataclass
class State:
    """The state of the training, which every rank has in memory.

    Attributes:
        step: the number of finished steps.
        parameters: the weights and biases of the hidden layer, and the weights of the output, one row each for a
            variable, the bias and the output.
        losses: the mean squared error of each finished step.
    """

    step: int = 0
    parameters: Array = field(default_factory=lambda: np.random.default_rng(0).normal(size=(4, HIDDEN)))
    losses: Array = field(default_factory=lambda: np.zeros(STEPS))


def batch_of(step: int) -> tuple[Array, Array]:
    """Return the points of a step and the values of the function there, the same on every rank."""
    points = np.random.default_rng([1, step]).uniform(-1.0, 1.0, size=(BATCH, 2))
    return points, np.sin(3.0 * points[:, 0]) * points[:, 1]


def loss_and_gradient(parameters: Array, points: Array, values: Array) -> tuple[float, Array]:
    """Return the squared error summed over the points, and half of its gradient."""
    weights, bias, output = parameters[:2], parameters[2], parameters[3]
    hidden = np.tanh(points @ weights + bias)
    error = hidden @ output / HIDDEN - values
    hidden_error = np.outer(error, output) * (1.0 - hidden**2)
    gradient = np.vstack([points.T @ hidden_error, hidden_error.sum(axis=0), error @ hidden])
    return float(error @ error), gradient


def train(world: un.Communicator, state: State, before_step: Callable[[int], None], end: int) -> None:
    """Make the steps up to `end` that `state` lacks. If a call fails, `state` is that of the last finished step."""
    while state.step < end:
        before_step(state.step)
        points, values = batch_of(state.step)
        share = slice(world.rank, None, world.size)
        loss, gradient = loss_and_gradient(state.parameters, points[share], values[share])
        total = world.allreduce(np.append(gradient, loss)) / BATCH
        state.parameters = state.parameters - LEARNING_RATE * total[:-1].reshape(gradient.shape)
        state.losses[state.step] = total[-1]
        state.step += 1
    world.barrier()


def agree(world: un.Communicator, state: State) -> None:
    """Replace `state` by the state of the rank that has finished the most steps."""
    steps = world.allgather(np.array([state.step]))
    root = int(steps.argmax())
    parameters, losses = world.broadcast(state.parameters, root=root), world.broadcast(state.losses, root=root)
    state.step, state.parameters, state.losses = int(steps.max()), parameters, losses


def train_elastically(size: int, before_step: Callable[[int], None]) -> tuple[un.Communicator, State]:
    """Train, with fewer ranks after each loss, and with `size` ranks again from step `GROW_AT` on.

    A process that starts in place of a lost rank runs this too: `init` lets it join, and `agree` gives it the state.
    All ranks make `agree` their first call on each new communicator, so that their calls match.
    """
    world, state = un.init(), State()
    while True:
        try:
            agree(world, state)
            if state.step >= GROW_AT and world.size < size:
                world = replaced(world, world.grow(size - world.size), f"step {state.step}: a replacement has joined")
                continue
            train(world, state, before_step, GROW_AT if state.step < GROW_AT else STEPS)
            if state.step == STEPS:
                return world, state
        except un.PeerLostError as error:
            world = replaced(world, world.shrink(), f"step {state.step}: {error.message}")


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
        loss, gradient = loss_and_gradient(state.parameters, *batch_of(step))
        state.losses[step] = loss / BATCH
        state.parameters = state.parameters - LEARNING_RATE * gradient / BATCH
    return state


def main() -> None:
    """Train, lose a rank, replace it on request, and compare the loss curve with that of a single process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lose", type=int, default=3, metavar="RANK")
    parser.add_argument("--at-step", type=int, default=60, metavar="STEP")
    parser.add_argument("--replace", action="store_true", help="wait for a process in place of the lost one")
    arguments = parser.parse_args()
    number = int(os.environ["UNISONO_RANK"])  # shrink() numbers the ranks anew
    size = int(os.environ["UNISONO_SIZE"]) if arguments.replace else 0

    def die(step: int) -> None:
        if (number, step) == (arguments.lose, arguments.at_step):
            os.kill(os.getpid(), signal.SIGKILL)

    world, state = train_elastically(size, die)
    with world:
        if world.rank == 0:
            np.testing.assert_allclose(state.losses, train_alone().losses, rtol=1e-6)
            print(f"loss {state.losses[0]:.3f} → {state.losses[-1]:.4f} in {STEPS} steps, as by a single process")


if __name__ == "__main__":
    main()
