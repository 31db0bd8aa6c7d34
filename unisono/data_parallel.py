"""Data-parallel training with arrays of any library: parameters, samples, metrics and norms over all ranks."""

from unisono.frameworks.data_parallel.hybrid import HybridGroups
from unisono.frameworks.data_parallel.metrics import average_metrics
from unisono.frameworks.data_parallel.norms import clip_global_norm, global_norm, scale_by_larc
from unisono.frameworks.data_parallel.parameters import (
    broadcast_parameters,
    fingerprint,
    first_difference,
    verify_sync,
)
from unisono.frameworks.data_parallel.sampling import ShardedSampler
from unisono.frameworks.outer.training import BlockMomentum, DiLoCo, LocalSGD

__all__ = [
    "BlockMomentum",
    "DiLoCo",
    "HybridGroups",
    "LocalSGD",
    "ShardedSampler",
    "average_metrics",
    "broadcast_parameters",
    "clip_global_norm",
    "fingerprint",
    "first_difference",
    "global_norm",
    "scale_by_larc",
    "verify_sync",
]
