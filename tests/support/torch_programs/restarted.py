"""Adds up in steps and saves each. In the first attempt rank 1 dies in a step, or before the ranks meet."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from support.deadlines import await_marks, has_mark, leave_mark
from support.torchrun import report

import unisono as un

STEPS, LAST = 6, 3
SAVED = Path("saved")


def meet_by_backend() -> tuple[int, Callable[[torch.Tensor], None]]:
    dist.init_process_group("unisono")
    return dist.get_rank(), dist.all_reduce


def meet_by_init() -> tuple[int, Callable[[torch.Tensor], None]]:
    world = un.init()
    return world.rank, lambda tensor: world.allreduce(tensor, out=tensor)


def train(rank: int, add_up: Callable[[torch.Tensor], None], death: int) -> list[float]:
    """Add up in all steps that are not saved yet; rank 1 dies in the step `death`."""
    losses = [float(line) for line in SAVED.read_text().split()] if SAVED.exists() else []
    for step in range(len(losses), STEPS):
        if step == death and rank == 1:
            os._exit(3)
        total = torch.tensor([float(step + rank)])
        add_up(total)
        losses.append(float(total))
        if rank == 0:
            SAVED.with_suffix(".new").write_text(" ".join(map(str, losses)))
            SAVED.with_suffix(".new").rename(SAVED)
        add_up(torch.zeros(1))
    return losses


def main() -> None:
    way, death = sys.argv[1:]
    mark = f"began {os.environ['RANK']}"
    is_first = not has_mark(Path(), mark)
    leave_mark(Path(), mark)
    if is_first and death == "early" and os.environ["RANK"] == "1":
        await_marks(Path(), "began 0")
        os._exit(3)
    if death == "late":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that an error ends the survivors, and not their agent
    rank, add_up = {"backend": meet_by_backend, "init": meet_by_init}[way]()
    try:
        losses = train(rank, add_up, LAST if is_first and death == "late" else -1)
    except (RuntimeError, un.UnisonoError) as error:
        Path(f"error-{rank}").write_text(str(error))
        raise
    report(losses=losses, restarts=int(os.environ["TORCHELASTIC_RESTART_COUNT"]))


if __name__ == "__main__":
    main()
