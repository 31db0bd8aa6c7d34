"""Ranks of which rank 1 has another version of torch: each rank writes the error that it gets."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from support.torch_programs.meeting import meet

torch.__version__ = "2.98.0" if os.environ["RANK"] == "1" else "2.99.1+cpu"
try:
    meet()
    dist.all_reduce(torch.ones(2))
except RuntimeError as error:
    print(type(error).__name__, str(error).splitlines()[0])
