"""Unisono for Keras 3: an optimizer that averages gradients over ranks, and callbacks for `model.fit`.

The backends of Keras are torch, TensorFlow and JAX.
"""

from unisono.frameworks.keras.callbacks import (
    BroadcastVariables,
    LearningRateSchedule,
    LearningRateWarmup,
    MetricAverage,
    ModelCheckpoint,
)
from unisono.frameworks.keras.optimizer import DistributedOptimizer
from unisono.frameworks.keras.outer import BlockMomentum, DiLoCo, LocalSGD

__all__ = [
    "BlockMomentum",
    "BroadcastVariables",
    "DiLoCo",
    "DistributedOptimizer",
    "LearningRateSchedule",
    "LearningRateWarmup",
    "LocalSGD",
    "MetricAverage",
    "ModelCheckpoint",
]
