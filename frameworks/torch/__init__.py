"""The backend "unisono" of torch.distributed, and training by torch without a process group.

The backend:
    registration: how torch finds the backend.
    constants: the name and the devices of the backend.
    creation: the factory that torch calls.
    direct_group: the process group of a backend that serves all devices, from torch 2.14 on.
    backend, process_group: what the factory returns, from torch 2.14 on and before.
    group_operations: what both have in common.
    collectives, point_to_point: its calls.
    sparse: the sum of sparse tensors.
    monitored_barrier: a barrier that names the missing ranks.
    work: calls in flight, and their futures.
    options: the options of a process group.
    operations, errors: operations and errors of torch and of Unisono.
    tensors: tensors as the memory of a call.
    dynamo_skip: what keeps torch.compile out of the backend.

Training:
    optimizer: `DistributedOptimizer`.
    applied_sums: sums that a step has applied and the program has not reset.
    outer: `DiLoCo`, `BlockMomentum` and `LocalSGD`.
    wrapped_optimizer: attributes of an optimizer that wraps another one.
    trainable: the parameters of an optimizer by name, and their gradients.
    deferred_updates: updates that wait for their gradients, with priorities.
    parameter_watch: noticing when a model reads a parameter.
    ddp_hook: a communication hook for DDP.
    fsdp: collectives for FSDP2.
"""
