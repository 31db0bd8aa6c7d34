"""Train while machines come and go: start this program in several terminals, kill it there, and start it again.

    (umask 077; head -c 32 /dev/urandom > key); export UNISONO_KEY_FILE=key
    python examples/swarm.py                     # in each terminal

Each process trains a network on examples of its own. After every `--inner-steps` steps, `DiLoCo` joins what the current
members have learned. A process that is started later gets the parameters from the others, and so does one that was cut
off. There is no code for losses.
The first process on a machine also serves the meeting place, and another one takes over when it ends. Ctrl-C ends a
process in order, and kill -9 in disorder: the others go on.

With `--checkpoint`, the process saves the state. When all have ended, those that are started again begin with it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

import unisono as un
from unisono.data_parallel import DiLoCo

INPUTS, HIDDEN, BATCH = 2, 32, 64
RATE = 0.2
Model = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def main() -> None:
    """Train as the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", default="tcp://127.0.0.1:29400", help="the address of the meeting place")
    parser.add_argument("--steps", type=int, default=3000, help="the number of steps, equal in all processes")
    parser.add_argument("--inner-steps", type=int, default=50, help="the steps between two averages of a parameter")
    parser.add_argument("--seconds", type=float, default=0.01, help="how long a step computes")
    parser.add_argument("--checkpoint", type=Path, help="a file to save, and from which to begin")
    options = parser.parse_args()
    if min(options.steps, options.inner_steps) < 1 or options.seconds < 0:
        parser.error("--steps and --inner-steps must be at least 1, and --seconds at least 0")
    if options.checkpoint and not options.checkpoint.absolute().parent.is_dir():
        parser.error(f"the checkpoint {str(options.checkpoint)!r} cannot be saved: its folder does not exist")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"this process enters the swarm at {options.place}", flush=True)
    try:
        with un.Swarm(options.place, serve=True, min_size=1) as swarm:
            train(swarm, options)
    except KeyboardInterrupt:
        print("this process has left the swarm", flush=True)
    except (un.UsageError, un.RendezvousError) as error:
        parser.error(str(error))


def train(swarm: un.Swarm, options: argparse.Namespace) -> None:
    """Take the steps that the swarm has not taken yet."""
    chance = np.random.default_rng(os.getpid())
    model = new_model()
    saved, losses = load(options.checkpoint), []
    rule = {"inner_steps": options.inner_steps, "fragments": 2, "compression": "int8"}
    with DiLoCo(swarm, model, state=saved, **rule) as outer:
        print(f"step {outer.steps}: this process begins", flush=True)
        if outer.steps >= options.steps > 0:
            print(f"the swarm has taken {options.steps} steps already: ask for more by --steps")
            return
        while outer.steps < options.steps:
            x = chance.uniform(-1, 1, size=(BATCH, INPUTS)).astype(np.float32)
            losses.append(trained(model, x, np.sin(4 * x[:, :1]) * x[:, 1:]))
            outer.step(model)
            if outer.steps % options.inner_steps == 0:
                names = ", ".join(member.name for member in swarm.members)
                print(f"step {outer.steps}: loss {np.mean(losses):.4f} of {names}", flush=True)
                losses.clear()
                save(options.checkpoint, outer.state_dict())
            time.sleep(options.seconds)  # stands for a larger model
        outer.synchronize(model)


def new_model() -> Model:
    """Return a network of two layers."""
    chance = np.random.default_rng(0)
    return {
        "first.weight": chance.normal(size=(INPUTS, HIDDEN)).astype(np.float32),
        "first.bias": np.zeros(HIDDEN, np.float32),
        "second.weight": (chance.normal(size=(HIDDEN, 1)) / HIDDEN**0.5).astype(np.float32),
        "second.bias": np.zeros(1, np.float32),
    }


def trained(model: Model, x: Any, y: Any) -> float:
    """Take a step of gradient descent, and return the mean squared error before it."""
    hidden = np.tanh(x @ model["first.weight"] + model["first.bias"])
    error = hidden @ model["second.weight"] + model["second.bias"] - y
    slope = 2 * error / len(x)
    inner = slope @ model["second.weight"].T * (1 - hidden**2)
    for name, gradient in (
        ("second.weight", hidden.T @ slope),
        ("second.bias", slope.sum(axis=0)),
        ("first.weight", x.T @ inner),
        ("first.bias", inner.sum(axis=0)),
    ):
        model[name] -= RATE * gradient
    return float(np.mean(error**2))


def load(path: Path | None) -> dict[str, Any] | None:
    """Return the state in the checkpoint, or None if there is no checkpoint."""
    if path is None or not path.exists():
        return None
    state: dict[str, Any] = pickle.loads(path.read_bytes())
    return state


def save(path: Path | None, state: dict[str, Any]) -> None:
    """Replace the checkpoint, if there is one."""
    if path is not None:
        path.with_suffix(".new").write_bytes(pickle.dumps(state))
        path.with_suffix(".new").replace(path)


if __name__ == "__main__":
    main()
