"""The backend "unisono" of torch.distributed, and training by torch without a process group.

- `registration`: how torch finds the backend.
- `constants`: the name and the devices of the backend.
- `process_groups/`: process groups of the backend.
- `calls/`: calls on tensors, for process groups and for training.
- `training/`: optimizers, and hooks of DDP and FSDP2.
"""
