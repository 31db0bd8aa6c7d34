"""Creates the default group of a program: its ranks meet in a file of their current folder."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def meet(backend: str = "unisono", **arguments: Any) -> tuple[int, int]:
    """Create the default group; return this rank and the number of ranks.

    `file` names the file in which the ranks meet. Other arguments go to ``dist.init_process_group``.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    url = f"file://{os.getcwd()}/{arguments.pop('file', 'meeting')}"
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, **{"timeout": TIMEOUT, **arguments})
    return rank, size
