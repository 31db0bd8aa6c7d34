"""Checkpoints of torch are written by rank 0 alone, and statistics of batches are averaged before they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from unisono.frameworks.transparent.changes import Changes


def change(changes: Changes, _: Any) -> None:
    """Change `torch.save`, `Module.eval` and the layers that collect statistics of batches."""
    world = changes.world

    def saving(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def save(*args: Any, **kwargs: Any) -> None:
            target = args[1] if len(args) > 1 else kwargs.get("f")
            if hasattr(target, "write"):  # memory, or a file that each rank has opened
                original(*args, **kwargs)
                return
            changes.note("torch.save writes on rank 0 alone, and the other ranks wait for it")
            changes.on_rank_0(partial(original, *args, **kwargs))

        return save

    def evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def evaluate(self: Any) -> Any:
            result = original(self)
            for module in self.modules():
                if isinstance(module, _NormBase) and module.track_running_stats and module.running_mean is not None:
                    for statistic in (module.running_mean, module.running_var):
                        statistic.copy_(world.allreduce(statistic, "avg"))
            return result

        return evaluate

    def normalizing(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.track_running_stats and hasattr(self, "num_batches_tracked"):
                changes.note(
                    f"warning: {type(self).__name__} normalizes by the batch of its own rank; its running statistics "
                    "are averaged over the ranks by model.eval()"
                )

        return init

    changes.replace(torch, "save", saving)
    changes.replace(torch.nn.Module, "eval", evaluating)
    changes.replace(_NormBase, "__init__", normalizing)
