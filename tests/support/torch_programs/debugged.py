"""Makes calls under ``TORCH_DISTRIBUTED_DEBUG=DETAIL``: right ones, and one in which the ranks disagree."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from support.torch_programs.meeting import meet

rank, size = meet()
tensor = torch.full((2,), rank + 1.0)
gc.collect()  # torch holds the backend only in C++
dist.all_reduce(tensor)
print(tensor.tolist())
try:
    dist.all_reduce(torch.ones(2 + rank))
except RuntimeError as error:
    print(str(error).splitlines()[0])
dist.destroy_process_group()
