"""Trains by torch over Unisono beside Gloo, with ranks that share a GPU, and runs programs of other libraries.

A job of two ranks trains a model in each way of `ddp_rank.WAYS`. The losses must be those of DDP over Gloo. Ways that
load or compile much have a second job, beside which a program of CuPy and calls on arrays of JAX run. A job has a time
limit, and rank 0 prints a record of each way when it ends.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

import unisono as un
from unisono.bench.gpu_stages.checks.machine import FORBIDDEN
from unisono.bench.gpu_stages.results.records import reason_of, tell
from unisono.bench.gpu_stages.speeds.ddp_rank import GLOO, WAYS

RANKS = 2
SLOW = ("FSDP2", "DDP of a compiled model")
FAST = tuple(way for way in WAYS if way not in SLOW)
# torch shares a machine with the other ranks, and rounds alike in each run.
ENVIRON = {
    **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
LINES = 3  # the last lines of a failed program that are kept
SEES_GPU = "import torch; print(torch.cuda.is_available())"


def run_ranks(timeout_s: int, *command: str) -> str:
    """Run a program on the ranks, which write to this standard output; return why it failed, or ""."""
    words = ("-m", "unisono", "run", "-n", str(RANKS), "--no-label", "--timeout", str(timeout_s), "--", sys.executable)
    process = subprocess.run(
        [sys.executable, *words, *command],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    last = process.stderr.strip().splitlines()[-LINES:]
    return f"code {process.returncode}: {' | '.join(last)}" if process.returncode else ""


def train(ways: Sequence[str], timeout_s: int, arguments: Sequence[str]) -> bool:
    """Train in these ways; return whether the ranks have ended well."""
    module = ("-m", "unisono.bench.gpu_stages.speeds.ddp_rank")
    reason = run_ranks(timeout_s, *module, "--ways", "; ".join(ways), *arguments)
    if reason:
        tell("training", way=", ".join(ways), device="", ranks=RANKS, failure=reason)
    return not reason


def run_cupy(program: Path, timeout_s: int) -> bool:
    """Run a program of CuPy; return whether it has ended well."""
    about = {"way": f"CuPy: {program.name}", "device": "cuda", "ranks": RANKS}
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001  (CuPy raises errors of its own)
        tell("training", **about, failure=f"CuPy cannot be used: {reason_of(error)}")
        return True
    reason = run_ranks(timeout_s, str(program), "--steps", "20")
    tell("training", **about, **({"failure": reason} if reason else {"right": True}))
    return not reason


def of_jax(world: un.Communicator) -> tuple[str, str]:
    """Return the platform of JAX, and how a call on its arrays ended: "right", "wrong", or the refusal."""
    import jax

    x = jax.numpy.arange(1000, dtype="float32") * (world.rank + 1)
    platform: str = jax.default_backend()
    try:
        total = world.allreduce(x)
    except un.UnisonoError as error:
        return platform, f"refused: {reason_of(error)}"
    expected = np.arange(1000, dtype=np.float32) * sum(range(1, world.size + 1))
    return platform, "right" if np.array_equal(np.asarray(total), expected) else "wrong"


def call_jax(timeout_s: int) -> bool:
    """Make a call on arrays of JAX; return whether it is right, or refused with a reason."""
    about = {"way": "JAX: allreduce", "ranks": RANKS}
    if importlib.util.find_spec("jax") is None:
        tell("training", **about, device="", failure="JAX is not installed")
        return True
    try:
        platform, said = un.launch(of_jax, RANKS, timeout_s=timeout_s)[0]
    except un.UnisonoError as error:
        tell("training", **about, device="", failure=reason_of(error))
        return False
    if platform == "cpu" and os.environ.get(FORBIDDEN):
        said = "JAX sees no GPU"
    outcome = {"right": said == "right"} if said in ("right", "wrong") else {"failure": said}
    tell("training", **about, device=platform, **outcome)
    return bool(said != "wrong")


def has_torch_gpu() -> bool:
    """Return whether torch sees a GPU, asked in a process of its own, so that this one starts ranks without torch."""
    asked = subprocess.run([sys.executable, "-c", SEES_GPU], capture_output=True, text=True, check=False)
    return asked.stdout.strip() == "True"


def main() -> int:
    """Train, and run the other programs; return 1 if one of them has failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cupy", type=Path, required=True, help="a program of CuPy")
    parser.add_argument("--width", default="2048")
    parser.add_argument("--steps", default="30")
    parser.add_argument("--compiler", default="inductor", help="the backend of torch.compile")
    parser.add_argument("--timeout", type=int, default=24, help="the seconds after which a job is ended")
    options = parser.parse_args()
    os.environ.update(ENVIRON)
    timeout_s = options.timeout
    arguments = ["--width", options.width, "--steps", options.steps, "--compiler", options.compiler]
    others: list[Callable[[], bool]] = [lambda: run_cupy(options.cupy, timeout_s), lambda: call_jax(timeout_s)]
    is_good = True
    if importlib.util.find_spec("torch") is None:
        tell("training", way="torch", device="", ranks=RANKS, failure="torch is not installed")
    elif not (has_gpu := has_torch_gpu()) and os.environ.get(FORBIDDEN):
        tell("training", way="torch", device="", ranks=RANKS, failure="torch sees no GPU")
        is_good = False
    else:
        arguments += [] if has_gpu else ["--cpu"]
        is_good = train(FAST, timeout_s, arguments)
        others.append(lambda: train((GLOO, *SLOW), timeout_s, arguments))
    with ThreadPoolExecutor() as threads:
        return 0 if all([is_good, *threads.map(lambda other: other(), others)]) else 1


if __name__ == "__main__":
    sys.exit(main())
