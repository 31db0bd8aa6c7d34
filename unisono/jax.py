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
from unisono.frameworks.jax.outer import BlockMomentum, DiLoCo, LocalSGD
from unisono.frameworks.jax.xla import use_for_xla

_IN_JAX = {
    **dict.fromkeys(("psum", "pmean", "pmax", "pmin"), "allreduce, with the argument op"),
    **dict.fromkeys(("all_gather", "pgather"), "allgather"),
    "psum_scatter": "reduce_scatter",
    "all_to_all": "alltoall",
    **dict.fromkeys(("ppermute", "pshuffle"), "permute"),
    "pbroadcast": "broadcast",
    "axis_index": "the attribute rank of the communicator",
    "axis_size": "the attribute size of the communicator",
}


def __getattr__(name: str) -> object:
    instead = f": use {_IN_JAX[name]}" if name in _IN_JAX else ""
    raise AttributeError(f"module 'unisono.jax' has no attribute {name!r}{instead}")


__all__ = [
    "BlockMomentum",
    "DiLoCo",
    "LocalSGD",
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
