"""Trains with Ignite over the group that the program has made."""

from __future__ import annotations

from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from ignite.engine import Engine
from ignite.metrics import Accuracy
from support.torch_clients import problem
from support.torchrun import report
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("unisono")  # Ignite has a list of backends of its own, and takes the group that there is
    idist.sync()
    inner = problem.model()
    module = DistributedDataParallel(inner)  # `auto_model` does that for a list of backends only
    sgd = idist.auto_optim(problem.optimizer(inner))

    def step(engine: Engine, batch: Any) -> tuple[Any, Any]:
        sgd.zero_grad()
        problem.loss_of(module, *batch).backward()
        sgd.step()
        return module(batch[0]).detach(), batch[1]

    trainer = Engine(step)
    Accuracy().attach(trainer, "accuracy")
    loader = idist.auto_dataloader(problem.DATA, batch_size=problem.BATCH, shuffle=False)
    trainer.run(loader)
    rank = idist.get_rank()
    report(
        trained=problem.is_trained(inner),
        backends=problem.backends(),
        accuracy=trainer.state.metrics["accuracy"],
        gathered=idist.all_gather(torch.tensor([rank])).tolist(),
        objects=idist.all_gather(f"rank {rank}"),
        reduced=idist.all_reduce(rank + 1),
        sent=idist.broadcast(f"rank {rank}", src=1),
    )
    idist.finalize()


if __name__ == "__main__":
    main()
