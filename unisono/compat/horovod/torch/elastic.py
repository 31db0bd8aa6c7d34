"""Elastic training with torch: `run`, `TorchState`, `ObjectState` and `ElasticSampler`."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sized
from typing import Any

import torch

from unisono.compat.horovod import job
from unisono.compat.horovod.elastic import ObjectState, State, run
from unisono.compat.horovod.objects import broadcast_object
from unisono.compat.horovod.torch.functions import broadcast_optimizer_state, broadcast_parameters

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Gives each rank a part of a data set. After a change of the ranks, it divides the samples not yet processed.

    Args:
        dataset: the data set.
        shuffle: whether the order is random: the same on all ranks, and another one in each epoch.
        seed: the seed of that order, the same on all ranks.

    Attributes:
        epoch: the number of the epoch.
        processed_num: how many samples of the epoch all ranks together have processed.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. All ranks call it."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Note that each rank has processed a batch of this many samples. `batch_idx` is ignored, as in Horovod."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, int]:
        """Return the place in the data set."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go on at a place that `state_dict` has returned."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the ranks that there are now."""
        self.rank, self.num_replicas = job.rank(), job.size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)

    def __iter__(self) -> Iterator[int]:
        # The last samples are repeated from the beginning, so that all ranks have the same number.
        total = self.num_samples * self.num_replicas
        repeated = self.remaining_indices * (total // max(1, len(self.remaining_indices)) + 1)
        return iter(repeated[self.rank : total : self.num_replicas])

    def __len__(self) -> int:
        return self.num_samples


class TorchState(ObjectState):
    """A state of models, optimizers, samplers and Python objects, which are its attributes.

    Args:
        model: a module, or None.
        optimizer: an optimizer, or None.
        others: further modules, optimizers and samplers, and Python objects, by name.
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **others: Any) -> None:
        parts = {"model": model, "optimizer": optimizer, **others}
        self.__dict__["_stateful"] = [name for name, value in parts.items() if isinstance(value, _STATEFUL)]
        for name in self._stateful:
            setattr(self, name, parts.pop(name))
        super().__init__(**{name: value for name, value in parts.items() if value is not None})

    def reset(self) -> None:
        for name in self._stateful:
            if isinstance(getattr(self, name), ElasticSampler):
                getattr(self, name).reset()

    def _save_parts(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name).state_dict()) for name in self._stateful}

    def _restore_parts(self, saved: dict[str, Any]) -> None:
        for name, state in saved.items():
            getattr(self, name).load_state_dict(copy.deepcopy(state))

    def _sync_parts(self) -> None:
        for name in self._stateful:
            _synchronize(getattr(self, name))


_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


def _synchronize(value: Any) -> None:
    """Copy the state of an object from rank 0 to all ranks."""
    if isinstance(value, torch.nn.Module):
        broadcast_parameters(value.state_dict(), root_rank=0)
    elif isinstance(value, torch.optim.Optimizer):
        broadcast_optimizer_state(value, root_rank=0)
    else:
        value.load_state_dict(broadcast_object(value.state_dict()))
