"""Horovod's API for TensorFlow over Unisono: ``import unisono.compat.horovod.tensorflow as hvd``.

A script of Horovod works when its import is changed. Names, arguments, defaults and results are those of Horovod 0.28.
Ranks are started by `unisono run`, in place of ``horovodrun``. `unisono.compat.horovod.tensorflow.keras` is for
programs that train by `fit`.

The files:
    calls: the calls on tensors, in eager mode and in graphs.
    functions: copying variables and objects.
    training: `DistributedGradientTape` and `DistributedOptimizer`.
    averaging: their gradients.
    compression: the forms in which tensors travel.
    sync_batch_norm: `SyncBatchNormalization`.
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
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.tensorflow import elastic
from unisono.compat.horovod.tensorflow.calls import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from unisono.compat.horovod.tensorflow.compression import Compression
from unisono.compat.horovod.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from unisono.compat.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization
from unisono.compat.horovod.tensorflow.training import (
    DistributedGradientTape,
    DistributedOptimizer,
    PartialDistributedGradientTape,
)

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
