"""How the ranks of these programs meet: in a file of the folder that they are in."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def meet(backend: str = "unisono", **arguments: Any) -> tuple[int, int]:
    """Make the default group; return this rank and the number of ranks."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"file://{os.getcwd()}/{arguments.pop('file', 'meeting')}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, **{"timeout": TIMEOUT, **arguments})
    return rank, size
