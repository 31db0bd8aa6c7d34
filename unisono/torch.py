"""Unisono for torch. Importing this module registers the backend "unisono" of torch.distributed."""

from unisono.frameworks.torch.registration import register

register()  # before the other imports, which fail in an old version of torch

from unisono.frameworks.torch.calls.errors import CallError
from unisono.frameworks.torch.process_groups.group_operations import communicator
from unisono.frameworks.torch.process_groups.monitored_barrier import monitored_barrier
from unisono.frameworks.torch.process_groups.options import Options
from unisono.frameworks.torch.process_groups.process_group import ProcessGroup
from unisono.frameworks.torch.training.ddp_hook import ddp_hook
from unisono.frameworks.torch.training.fsdp import AllGather, ReduceScatter
from unisono.frameworks.torch.training.optimizer import DistributedOptimizer
from unisono.frameworks.torch.training.outer import BlockMomentum, DiLoCo, LocalSGD

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
