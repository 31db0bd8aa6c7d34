"""Data-parallel training beside the gradients: parameters, samples, metrics, norms, and groups that run asynchronously.

parameters: copying parameters to all ranks, and comparing them.
sync_check: comparing some parameters in each step.
sampling: the samples of each rank.
metrics: averages over the samples of all ranks.
norms: norms over all parameters and ranks, and scaling by them.

Hybrid groups:
    hybrid: `HybridGroups`, the class that programs use.
    center: the clock, and the center of each layer.
    servers: the part of a rank that serves centers and the clock.
    layers: parameters as layers, and the messages that carry them.
"""
