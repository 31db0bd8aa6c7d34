"""Makes calls that fail inside programs of JAX, in one job after the other, and prints the error of each."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import unisono as un
import unisono.jax as uj

x = jnp.ones(4)


def repeated(x: Any) -> Any:
    """Return a result that takes hours."""
    return jax.lax.fori_loop(0, 10**9, lambda _, x: uj.allreduce(x, "avg"), x)


def shapes(world: un.Communicator) -> None:
    jax.jit(partial(uj.allreduce, comm=world))(jnp.ones(3 + world.rank)).block_until_ready()


def branches(world: un.Communicator) -> None:
    """Make a call in a branch that only rank 0 takes, and then the same barrier on all ranks."""
    chosen = jax.jit(lambda which, x: (jax.lax.cond(which, uj.allreduce, lambda x: x, x), uj.barrier())[0])
    chosen(world.rank == 0, x).block_until_ready()


def messages(world: un.Communicator) -> None:
    other = 1 - world.rank
    jax.jit(lambda x: uj.sendrecv(x, other, other))(jnp.ones(3 + world.rank)).block_until_ready()
    jax.effects_barrier()


def aborted(world: un.Communicator) -> None:
    if world.rank == 0:
        world.abort("enough")
    jax.jit(repeated)(x).block_until_ready()


def closed(world: un.Communicator) -> None:
    compiled = jax.jit(partial(uj.allreduce, comm=world))
    compiled(x)
    world.close()
    compiled(x).block_until_ready()


def forked(world: un.Communicator) -> None:
    compiled = jax.jit(partial(uj.allreduce, comm=world))
    compiled(x).block_until_ready()
    child = os.fork()
    if child == 0:
        show(lambda: compiled(x).block_until_ready())
        os._exit(0)
    os.waitpid(child, 0)


def interrupted(world: un.Communicator) -> None:
    """Press Ctrl-C on rank 0 while the program runs."""
    program = jax.jit(repeated).lower(x).compile()
    uj.barrier()
    if world.rank == 0:
        threading.Thread(target=interrupt_soon).start()
    try:
        program(x).block_until_ready()
        raise AssertionError("the program has ended")
    finally:
        time.sleep(0)  # where Python handles signals


def interrupt_soon() -> None:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)


def died(world: un.Communicator) -> None:
    program = jax.jit(repeated).lower(x).compile()
    uj.barrier()
    if world.rank == 1:
        threading.Timer(0.2, os._exit, [0]).start()
    program(x).block_until_ready()


def show(run: Callable[[], Any]) -> None:
    try:
        run()
        print("no error", flush=True)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        names = [type(error).__name__, *str(error).split(" ", 1)]
        print(*names, flush=True)


for name in sys.argv[1:]:
    world = un.init()
    show(lambda name=name, world=world: globals()[name](world))
    world.close()
