"""Unisono for torch. Importing this module registers the backend "unisono" of torch.distributed."""

from unisono.frameworks.torch.registration import register

register()  # before the other imports, which fail in an old version of torch

from unisono.frameworks.torch.ddp_hook import ddp_hook
from unisono.frameworks.torch.errors import CallError
from unisono.frameworks.torch.fsdp import AllGather, ReduceScatter
from unisono.frameworks.torch.group_operations import communicator
from unisono.frameworks.torch.monitored_barrier import monitored_barrier
from unisono.frameworks.torch.optimizer import DistributedOptimizer
from unisono.frameworks.torch.options import Options
from unisono.frameworks.torch.outer import BlockMomentum, DiLoCo, LocalSGD
from unisono.frameworks.torch.process_group import ProcessGroup

__all__ = [
    "AllGather",
    "BlockMomentum",
    "CallError",
    "DiLoCo",
    "DistributedOptimizer",
    "LocalSGD",
    "Options",
    "ProcessGroup",
    "ReduceScatter",
    "communicator",
    "ddp_hook",
    "monitored_barrier",
    "register",
]
