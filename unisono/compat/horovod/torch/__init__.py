"""Horovod's API for torch over Unisono: ``import unisono.compat.horovod.torch as hvd``.

A script of Horovod works when its import is changed. Names, arguments, defaults and results are those of Horovod 0.28.
Ranks are started by `unisono run`, in place of ``horovodrun``.

The files:
    calls: the calls on tensors.
    gradients: those through which gradients flow.
    functions: copying parameters and states.
    optimizer: `DistributedOptimizer`.
    averaging: its gradients.
    compression: the forms in which tensors travel.
    sync_batch_norm: `SyncBatchNorm`.
    elastic: training that goes on when ranks are lost or join.
    staging: tensors as the memory of a call.
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
from unisono.compat.horovod.objects import allgather_object, broadcast_object
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.torch import elastic
from unisono.compat.horovod.torch.calls import (
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall_async,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter_async,
    poll,
    reducescatter_async,
    sparse_allreduce_async,
    synchronize,
)
from unisono.compat.horovod.torch.compression import Compression
from unisono.compat.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters
from unisono.compat.horovod.torch.gradients import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from unisono.compat.horovod.torch.optimizer import DistributedOptimizer
from unisono.compat.horovod.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
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
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
