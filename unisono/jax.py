"""Unisono for JAX: collectives inside programs, and XLA's own collectives between processes.

Import this module before JAX, which looks for its libraries when it is imported, if the program calls `use_for_xla`.
"""

from unisono.frameworks.jax import installed, mpi_library

mpi_library.announce()  # before JAX is imported
installed.check()

from unisono.frameworks.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    exscan,
    gather,
    make_token,
    permute,
    recv,
    reduce,
    reduce_scatter,
    scan,
    scatter,
    send,
    sendrecv,
)
from unisono.frameworks.jax.xla import use_for_xla

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "make_token",
    "permute",
    "recv",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "use_for_xla",
]
