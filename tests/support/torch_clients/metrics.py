"""Computes metrics of torchmetrics over rows of which each rank has another number."""

from __future__ import annotations

import torch
import torch.distributed as dist
from support.torch_clients import problem
from support.torchrun import report
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix


def main() -> None:
    dist.init_process_group("unisono")
    first = (0, 10)[dist.get_rank()]
    share = slice(first, (10, problem.ROWS)[dist.get_rank()])
    x, y = problem.DATA[:]
    scores = problem.model()(x).softmax(1).detach()
    metrics = MetricCollection(
        [MulticlassAccuracy(4), MulticlassAUROC(4), MulticlassConfusionMatrix(4)], compute_groups=False
    )
    metrics.update(scores[share], y[share])
    alone = MetricCollection(
        [
            MulticlassAccuracy(4, sync_on_compute=False),
            MulticlassAUROC(4, sync_on_compute=False),
            MulticlassConfusionMatrix(4, sync_on_compute=False),
        ],
        compute_groups=False,
    )
    alone.update(scores, y)
    mean, cat = MeanMetric(), CatMetric()
    for row in range(problem.ROWS)[share]:
        mean.update(row)
        cat.update(row)
    expected = alone.compute()
    report(
        equal={name: torch.allclose(value, expected[name]) for name, value in metrics.compute().items()},
        backends=problem.backends(),
        mean=float(mean.compute()),
        rows=cat.compute().tolist(),
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
