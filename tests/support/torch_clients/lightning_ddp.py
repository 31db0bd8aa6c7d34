"""Trains with Lightning, which makes the group by the name of the backend."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning
from lightning.pytorch.strategies import DDPStrategy
from support.torch_clients import problem
from support.torchrun import report
from torch.utils.data import DataLoader, DistributedSampler

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):  # type: ignore[misc]
    """The model of the problem, with what Lightning asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = problem.model()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = problem.loss_of(self.inner, *batch)
        self.log("rank", float(self.global_rank), sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return problem.optimizer(self.inner)


def main() -> None:
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="unisono"),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,  # Lightning's own one shuffles
    )
    sampler = DistributedSampler(problem.DATA, num_replicas=trainer.world_size, rank=trainer.global_rank, shuffle=False)
    trainer.fit(module, DataLoader(problem.DATA, batch_size=problem.BATCH // 2, sampler=sampler))
    report(
        trained=problem.is_trained(module.inner),
        backends=problem.backends(),
        mean_rank=float(trainer.callback_metrics["rank"]),
    )


if __name__ == "__main__":
    main()
