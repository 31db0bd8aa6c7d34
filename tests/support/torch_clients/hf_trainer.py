"""Trains with the Trainer of Hugging Face over the group that the program has made."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.torch_clients import problem
from support.torchrun import report
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments


class Rows(Dataset[dict[str, Any]]):
    """The rows of the problem, as the Trainer passes them to a model."""

    def __len__(self) -> int:
        return problem.ROWS

    def __getitem__(self, row: int) -> dict[str, Any]:
        x, y = problem.DATA[row]
        return {"x": x, "labels": y}


class Model(torch.nn.Module):
    """The model of the problem, with the loss as its first output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = problem.model()

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        scores = self.inner(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that takes the rows in their order."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(dataset or self.train_dataset)


def main() -> None:
    dist.init_process_group("unisono")  # before the Trainer, which makes no group if there is one
    model = Model()
    arguments = TrainingArguments(
        output_dir="trainer",
        use_cpu=True,
        per_device_train_batch_size=problem.BATCH // 2,
        num_train_epochs=1,
        max_grad_norm=0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    schedule = torch.optim.lr_scheduler.ConstantLR
    sgd = problem.optimizer(model)
    trainer = InOrder(
        model, arguments, train_dataset=Rows(), eval_dataset=Rows(), optimizers=(sgd, schedule(sgd, factor=1.0))
    )
    trainer.train()
    predicted = trainer.predict(Rows())
    report(
        trained=problem.is_trained(model.inner),
        backends=problem.backends(),
        predictions=len(predicted.predictions),
        mode=str(arguments.parallel_mode),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
