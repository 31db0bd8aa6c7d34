"""Copying parameters and the state of optimizers from one rank to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.job import calls_of
from unisono.compat.horovod.objects import broadcast_object
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.torch.calls import broadcast_async_, synchronize


def broadcast_parameters(params: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite tensors with those of the rank `root_rank`.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()``, ``model.parameters()``, or a list of tensors.
        root_rank: the rank of the job whose tensors are copied.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: `params` is none of these.
    """
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in _pairs(params)]
    for handle in handles:
        synchronize(handle)


def _pairs(params: Any) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        return [(str(name), tensor) for name, tensor in sorted(params.items()) if isinstance(tensor, torch.Tensor)]
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ArgumentError(f"params must be a state_dict or parameters of a model, not {type(params).__name__}")
    return [each if isinstance(each, tuple) else (None, each) for each in params]


def broadcast_optimizer_state(optimizer: Any, root_rank: int, model: Any = None) -> None:
    """Overwrite the state and the options of an optimizer, such as its learning rate, with those of one rank.

    Args:
        optimizer: an optimizer of torch, or a `DistributedOptimizer`.
        root_rank: the rank whose state is copied. If its optimizer has made no step yet, the others lose their state.
        model: ignored here; needed by Horovod for sparse parameters.
    """
    tensors: list[Any] = []
    own = optimizer.state_dict()
    skeleton = broadcast_object(_taken_apart(own, tensors), root_rank)
    is_root = calls_of(global_process_set).comm.rank == root_rank
    state = own if is_root else _put_together(skeleton, tensors := [])
    broadcast_parameters([(f"optimizer state {index}", each) for index, each in enumerate(tensors)], root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


class _Hole:
    """The place of a tensor in a state without tensors."""

    def __init__(self, tensor: Any) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)


def _taken_apart(state: Any, tensors: list[Any]) -> Any:
    """Return a state with holes in the place of tensors, which are added to `tensors`."""

    def take(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value if value.layout is torch.strided else value.to_dense())
        return _Hole(tensors[-1])

    return _mapped(state, take)


def _put_together(skeleton: Any, tensors: list[Any]) -> Any:
    """Return a state with new tensors in the place of its holes; they are added to `tensors`."""

    def fill(value: Any) -> Any:
        if not isinstance(value, _Hole):
            return value
        tensors.append(torch.zeros(value.shape, dtype=value.dtype))
        return tensors[-1]

    return _mapped(skeleton, fill)


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return nested dicts, lists and tuples with `function` applied to everything else."""
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return function(value)
