"""Trains a language model with tied weights by the Trainer of Hugging Face, with the optimizer of Unisono."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.utils.data import SequentialSampler
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import unisono as un

ROWS, BATCH, TOKENS = 24, 8, 6
_RANDOM = torch.Generator().manual_seed(0)
DATA = torch.randint(0, 16, (ROWS, TOKENS), generator=_RANDOM)


class InOrder(Trainer):  # type: ignore[misc]
    """A Trainer that takes the rows in their order."""

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(dataset or self.train_dataset)


def trained(world: Any, folder: str, steps: int = 6, resumes: str = "", **options: Any) -> list[float]:
    """Return the parameters after training on these ranks, or in one process if `world` is None."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)  # so that the Trainer is one process, and wraps the model into no DDP
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False))
    size, rank = (1, 0) if world is None else (world.size, world.rank)
    rows = DATA.view(-1, size, BATCH // size // 2, TOKENS)[:, rank].reshape(-1, TOKENS)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    if world is not None:
        optimizer = un.torch.DistributedOptimizer(
            optimizer, world, named_parameters=model.named_parameters(), **options
        )
    arguments = TrainingArguments(
        output_dir=f"{folder}/{rank}",
        use_cpu=True,
        per_device_train_batch_size=BATCH // size // 2,
        gradient_accumulation_steps=2,
        max_steps=steps,
        lr_scheduler_type="constant",
        max_grad_norm=0.3,
        save_steps=3,
        save_strategy="steps",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    InOrder(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train(
        resume_from_checkpoint=resumes or None
    )
    if world is not None:
        world.barrier()  # rank 0 has written its checkpoint
        optimizer.close()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()


def compared(world: Any, folder: str) -> dict[str, list[float]]:
    """Return the parameters of several trainings on these ranks; the last one resumes from the checkpoint of rank 0."""
    compressed = {"compression": "int8"}
    trainings = {"plain": trained(world, f"{folder}/plain"), "whole": trained(world, f"{folder}/whole", **compressed)}
    trained(world, f"{folder}/parts", steps=3, **compressed)
    resumed = trained(world, f"{folder}/resumed", resumes=f"{folder}/parts/0/checkpoint-3", **compressed)
    return {**trainings, "resumed": resumed}
