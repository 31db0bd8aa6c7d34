"""Trains with DeepSpeed on the CPU at each stage of ZeRO; DeepSpeed makes the group by the name of the backend."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from support.torch_clients import problem
from support.torchrun import report


def train(stage: int) -> bool:
    """Return whether training at a stage of ZeRO gives the parameters of one process."""
    inner = problem.model()
    config = {
        "train_micro_batch_size_per_gpu": problem.BATCH // 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=inner, optimizer=problem.optimizer(inner), config=config)
    half = slice(engine.global_rank * problem.BATCH // 2, (engine.global_rank + 1) * problem.BATCH // 2)
    for start in range(0, problem.ROWS, problem.BATCH):
        x, y = (part[half] for part in problem.DATA[start : start + problem.BATCH])
        engine.backward(problem.loss_of(engine, x, y))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(inner.parameters()), enabled=stage == 3):
        return problem.is_trained(inner)


def main() -> None:
    deepspeed.init_distributed(dist_backend="unisono")
    trained = {str(stage): train(stage) for stage in range(4)}
    total: Any = torch.ones(3)
    deepspeed.comm.all_reduce(total)
    report(trained=trained, backends=problem.backends(), total=total.tolist())
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
