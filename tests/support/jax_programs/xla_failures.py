"""Adds arrays over all processes in steps, in which rank 1 fails in the way of the first argument; prints the error.

The second argument is a folder in which the other ranks leave marks when the error has reached them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import jax
import numpy as np
from support.jax_programs.sharded import WORLD, add, gather, sharded


def fail(fault: str, folder: Path) -> None:
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise ArithmeticError("planted")
    if fault == "disagree":
        gather(x).block_until_ready()
    while len(list(folder.iterdir())) < WORLD.size - 1:
        time.sleep(0.02)
    os._exit(0)


fault, folder = sys.argv[1], Path(sys.argv[2])
x = sharded(np.ones(4 * WORLD.size))
add(x).block_until_ready()
try:
    for step in range(20):
        if (step, WORLD.rank) == (10, 1):
            fail(fault, folder)
        add(x).block_until_ready()
except (jax.errors.JaxRuntimeError, ValueError) as error:
    (folder / str(WORLD.rank)).touch()
    print(str(error).replace("\n", " "), flush=True)
    raise SystemExit(3) from None
