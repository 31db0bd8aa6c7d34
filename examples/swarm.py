"""Train while machines come and go: start this program in several terminals, kill it there, and start it again.

    (umask 077; head -c 32 /dev/urandom > key); export UNISONO_KEY_FILE=key
    python examples/swarm.py                     # in each terminal

Each process fits a linear model to examples of its own. After each step the gradients of all current members are
averaged. A process that is started later gets the parameters from the others. There is no code for losses. The first
process on a machine also serves the meeting place, and another one takes over when it ends.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np

import unisono as un

FEATURES, BATCH = 64, 32
RATE = 0.05


def main() -> None:
    """Train as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", default="tcp://127.0.0.1:29400", help="the address of the meeting place")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=0.1, help="how long a step computes")
    parser.add_argument("--checkpoint", type=Path, help="a file from which to resume when all processes are gone")
    options = parser.parse_args()
    swarm = un.Swarm(options.place, serve=True, min_size=1)
    with swarm:
        train(swarm, options)


def train(swarm: un.Swarm, options: argparse.Namespace) -> None:
    """Take the steps that the swarm has not taken yet."""
    chance = np.random.default_rng(os.getpid())
    truth = np.sin(np.arange(FEATURES))
    weights, step = np.zeros(FEATURES), 0
    if options.checkpoint is not None and options.checkpoint.exists():
        with np.load(options.checkpoint) as saved:
            weights, step = saved["weights"], int(saved["step"])
    while step < options.steps:
        step = swarm.state({"weights": weights}, step).revision
        features = chance.normal(size=(BATCH, FEATURES))
        errors = features @ (weights - truth)
        averaged = swarm.allreduce({"gradient": features.T @ errors / BATCH, "loss": np.array(np.mean(errors**2))})
        weights -= RATE * averaged["gradient"]
        step += 1
        if step % 10 == 0:
            assert swarm.last_call is not None
            names = ", ".join(member.name for member in swarm.last_call.contributors)
            print(f"step {step}: loss {averaged['loss']:.4f} of {names}", flush=True)
            save(options.checkpoint, weights, step)
        time.sleep(options.seconds)  # stands for a larger model


def save(path: Path | None, weights: np.ndarray[tuple[int], np.dtype[np.float64]], step: int) -> None:
    """Replace the checkpoint, if there is one."""
    if path is not None:
        with open(path.with_suffix(".new"), "wb") as file:
            np.savez(file, weights=weights, step=step)
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
