"""Kills a worker of an executor in a task, or between two tasks: every later result is a `BrokenExecutor`."""

import contextlib
import os
import signal
import sys
import time
from concurrent.futures import BrokenExecutor

from mpi4py.futures import MPIPoolExecutor


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    executor = MPIPoolExecutor(2)
    pid = executor.submit(os.getpid).result()
    if sys.argv[1] == "pause":
        os.kill(pid, signal.SIGKILL)
        while os.path.exists(f"/proc/{pid}/exe"):
            time.sleep(0.01)
    futures = []
    for function in (die, die, die):
        with contextlib.suppress(BrokenExecutor):
            futures.append(executor.submit(function))
    for number in range(3):
        error = futures[number].exception(60) if number < len(futures) else BrokenExecutor()
        print(type(error).__name__)
    try:
        executor.submit(die)
    except BrokenExecutor as error:
        print(type(error).__name__)
    executor.shutdown()
    print("has shut down")
