"""Horovod's API for Keras over Unisono: ``import unisono.compat.horovod.keras as hvd``.

It works on the backends TensorFlow, torch and JAX of Keras 3. Names, arguments, defaults and results are those of
Horovod 0.28, whose backend was TensorFlow.

The files:
    training: `DistributedOptimizer` and `load_model`.
    averaging: gradients on the backends torch and JAX.
    calls: the calls on values.
    callbacks: the callbacks for `fit`.
    compression: the forms in which tensors travel.
    elastic: training that goes on when ranks are lost or join.
"""

from unisono.compat.horovod.arguments import Adasum, Average, Max, Min, Product, Sum
from unisono.compat.horovod.errors import HorovodInternalError, HostsUpdatedInterrupt
from unisono.compat.horovod.job import (
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from unisono.compat.horovod.keras import callbacks, elastic
from unisono.compat.horovod.keras.calls import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from unisono.compat.horovod.keras.compression import Compression
from unisono.compat.horovod.keras.training import DistributedOptimizer, PartialDistributedOptimizer, load_model
from unisono.compat.horovod.objects import allgather_object, broadcast_object
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
