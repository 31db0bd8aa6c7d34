"""Trains with Accelerate over the group that the program has made."""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from support.torch_clients import problem
from support.torchrun import report
from torch.utils.data import DataLoader


def main() -> None:
    dist.init_process_group("unisono")  # before Accelerate, which makes no group if there is one
    accelerator = Accelerator(cpu=True)
    module = problem.model()
    loader = DataLoader(problem.DATA, batch_size=problem.BATCH // 2)
    module, sgd, loader = accelerator.prepare(module, problem.optimizer(module), loader)
    for x, y in loader:
        sgd.zero_grad()
        accelerator.backward(problem.loss_of(module, x, y))
        sgd.step()
    rank = accelerator.process_index
    report(
        trained=problem.is_trained(accelerator.unwrap_model(module)),
        backends=problem.backends(),
        gathered=accelerator.gather(torch.tensor([rank])).tolist(),
        padded=accelerator.pad_across_processes(torch.ones(1 + rank)).tolist(),
        objects=accelerator.gather_for_metrics([f"rank {rank}"], use_gather_object=True),
    )
    accelerator.end_training()  # which destroys the group


if __name__ == "__main__":
    main()
