"""The backend "unisono" of torch.distributed: its process group, and what goes with it."""
