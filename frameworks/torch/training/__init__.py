"""Training by torch: optimizers without a process group, and hooks of DDP and FSDP2.

- `optimizer`: `DistributedOptimizer`. `outer`: `DiLoCo`, `BlockMomentum` and `LocalSGD`.
- `applied_sums`: sums that a step has applied and the program has not reset.
- `wrapped_optimizer`: attributes of an optimizer that wraps another one.
- `trainable`: the parameters of an optimizer by name, and their gradients.
- `deferred_updates`: updates that wait for their gradients, with priorities.
- `parameter_watch`: noticing when a model reads a parameter.
- `ddp_hook`: a communication hook for DDP. `fsdp`: collectives for FSDP2.
"""
