"""Loaders of torch give each rank its share of the samples."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from unisono import Communicator
from unisono.frameworks.transparent.changes import Changes


def change(changes: Changes, _: Any) -> None:
    """Change `torch.utils.data.DataLoader`."""

    def changed(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            bound = signature.bind(self, *args, **kwargs)
            if not _of_keras(sys._getframe(1).f_globals):
                _share(changes, bound.arguments)
            original(*bound.args, **bound.kwargs)

        return init

    changes.replace(DataLoader, "__init__", changed)


def _of_keras(names: dict[str, Any]) -> bool:
    """Return whether a module is one of Keras, which makes loaders of arrays that `fit` has shared already."""
    return str(names.get("__name__")).startswith("keras.")


def _share(changes: Changes, arguments: dict[str, Any]) -> None:
    """Change the arguments of a `DataLoader` so that it loads the share of this rank."""
    world, dataset = changes.world, arguments["dataset"]
    if isinstance(dataset, IterableDataset):
        if not hasattr(dataset, "__len__"):
            raise changes.refused(
                "its iterable dataset has no length, so the ranks would end at different times: give it a __len__"
            )
        if arguments.get("num_workers"):
            raise changes.refused("its iterable dataset is read by several workers: use num_workers=0")
        arguments["dataset"] = _IterableShare(world.rank, world.size, dataset)
        unit = f"{len(dataset)} samples"
    elif arguments.get("batch_sampler") is not None:
        share = arguments["batch_sampler"] = _Share(world, arguments["batch_sampler"])
        unit = f"{share.total} batches"
    elif arguments.get("sampler") is not None or arguments.get("shuffle"):
        whole = arguments.get("sampler")
        if whole is None:
            whole = RandomSampler(dataset, generator=arguments.get("generator"))
        arguments["shuffle"], share = None, _Share(world, whole)
        arguments["sampler"] = share
        unit = f"{share.total} samples"
    else:
        changes.note(f"the DataLoader does not shuffle, so each rank reads all {len(dataset)} samples, as to evaluate")
        return
    changes.has_shares = True
    batch = arguments.get("batch_size", 1)
    each = f" in batches of {batch}" if batch and arguments.get("batch_sampler") is None else ""
    changes.note(f"the DataLoader gives each of {world.size} ranks its share of {unit}{each}")


class _Share:
    """The items of a sampler for one rank: every `size`-th item of the order that rank 0 has drawn.

    Shares are equally long. If the items do not suffice for that, some of the first are used again. While gradients
    are disabled, a rank gets all items, because the program evaluates then.
    """

    def __init__(self, world: Communicator, whole: Iterable[Any]) -> None:
        self._world, self._whole = world, whole
        self.total = len(whole)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return math.ceil(self.total / self._world.size) if torch.is_grad_enabled() else self.total

    def __iter__(self) -> Iterator[Any]:
        # All ranks draw an order, so that their random generators stay alike.
        order = self._world.broadcast_object(list(self._whole))
        if not torch.is_grad_enabled():
            yield from order
            return
        size = self._world.size
        length = math.ceil(len(order) / size) * size
        yield from itertools.islice(itertools.cycle(order), self._world.rank, length, size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)


class _IterableShare(IterableDataset):  # type: ignore[misc]
    """The share of a rank of an iterable dataset: every `size`-th sample, and as many for each rank.

    While gradients are disabled, a rank gets all samples.
    """

    def __init__(self, rank: int, size: int, whole: Any) -> None:
        self._rank, self._size, self._whole = rank, size, whole

    def __len__(self) -> int:
        return int(len(self._whole) // self._size) if torch.is_grad_enabled() else len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        if not torch.is_grad_enabled():
            return iter(self._whole)
        return itertools.islice(self._whole, self._rank, len(self) * self._size, self._size)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)
