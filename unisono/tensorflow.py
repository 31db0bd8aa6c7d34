"""Unisono for TensorFlow: collectives with gradients, and data-parallel training, in eager mode and in graphs."""

from unisono.frameworks.tensorflow.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    reduce,
    reduce_scatter,
)
from unisono.frameworks.tensorflow.sessions import BroadcastGlobalVariablesHook, DistributedOptimizer
from unisono.frameworks.tensorflow.training import Averager, DistributedGradientTape, broadcast_variables

__all__ = [
    "Averager",
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_variables",
    "reduce",
    "reduce_scatter",
]
