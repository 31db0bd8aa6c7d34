"""Optimizers of torch average gradients over the ranks before each step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unisono import GradientReducer
from unisono.data_parallel import broadcast_parameters
from unisono.frameworks.torch.training.trainable import TorchTrainable, mean_loss, weak
from unisono.frameworks.training.averager import Averager
from unisono.frameworks.transparent.changes import Changes


def change(changes: Changes, _: Any) -> None:
    """Change `torch.optim.Optimizer` and the functions that clip gradients; make unusable functions raise an error."""
    optimizers = _Optimizers(changes)

    def making(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            optimizers.add(self)

        return init

    def zeroing(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            optimizers.of(self).forget()

        return zero_grad

    def clipping(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            optimizers.average(parameters)
            return original(parameters, *args, **kwargs)

        return clip

    def scaling(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.is_enabled():
                raise changes.refused(
                    "a GradScaler skips a step on the ranks alone whose gradients overflow: use bfloat16 without it"
                )

        return init

    def distributing(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def init_process_group(*args: Any, **kwargs: Any) -> Any:
            raise changes.refused("it trains by torch.distributed already: start it without --data-parallel")

        return init_process_group

    def adapting(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def step(self: Any, metrics: Any, *args: Any, **kwargs: Any) -> None:
            original(self, mean_loss(changes.world, float(metrics)), *args, **kwargs)

        return step

    changes.replace(torch.optim.Optimizer, "__init__", making)
    changes.replace(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", adapting)
    changes.replace(torch.optim.Optimizer, "zero_grad", zeroing)
    register_optimizer_step_pre_hook(optimizers.before_step)
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = clipping(getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, clip)
        setattr(torch.nn.utils.clip_grad, name, clip)
    changes.replace(torch.amp.GradScaler, "__init__", scaling)
    if torch.distributed.is_available():
        changes.replace(torch.distributed, "init_process_group", distributing)


class _Optimizers:
    """The optimizers that the program has made.

    The optimizer that was made last for a parameter owns it. A program may replace an optimizer, but not use both.
    """

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._averaged: dict[Any, _Averaged] = {}
        self._owners: dict[int, _Averaged] = {}  # by the id of the parameter

    def add(self, optimizer: Any) -> None:
        """Copy the parameters of a new optimizer from rank 0."""
        self._changes.has_training = True
        averaged = self._averaged[optimizer] = _Averaged(self._changes, optimizer)
        self._owners.update(dict.fromkeys(averaged.ids(), averaged))

    def of(self, optimizer: Any) -> _Averaged:
        """Return the part of an optimizer that averages its gradients."""
        if optimizer not in self._averaged:  # a copy of another one, or from a file
            self.add(optimizer)
        return self._averaged[optimizer]

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Average the gradients. With a closure, return the arguments of `step` with one that averages them."""
        averaged = self.of(optimizer)
        self._check_owner(averaged)
        arguments = dict(zip(("self", "closure"), args, strict=False)) | kwargs
        closure = arguments.get("closure")
        if closure is None:
            averaged.average()
            averaged.forget()
            return None
        return (args[0], averaged.closure(closure)), {name: x for name, x in kwargs.items() if name != "closure"}

    def average(self, parameters: Iterable[Any]) -> None:
        """Average the gradients of the optimizers that have some of these parameters, before they are clipped."""
        owners = (self._owners.get(id(parameter)) for parameter in parameters)
        for averaged in dict.fromkeys(owner for owner in owners if owner is not None):
            averaged.average()

    def _check_owner(self, averaged: _Averaged) -> None:
        for number in averaged.ids():
            owner = self._owners.setdefault(number, averaged)
            if owner is not averaged and owner.has_stepped:
                raise self._changes.refused(
                    f"{averaged.name} and {owner.name} change the same parameters, so gradients would be averaged "
                    "twice: use one optimizer for a parameter"
                )


class _Averaged:
    """The gradients of one optimizer, which are averaged over the ranks.

    A gradient that the program changes between backward and `step` is an error on all ranks: the program would have
    changed the gradient of one rank, which is not the one that the optimizer applies.

    Attributes:
        name: the class of the optimizer.
        has_stepped: whether gradients have been averaged.
    """

    def __init__(self, changes: Changes, optimizer: Any) -> None:
        self._changes = changes
        self.name = type(optimizer).__name__
        self._trainable = TorchTrainable(optimizer, None)
        self._averager = Averager(self._trainable, self._opened, None, moves=False)
        self._reducer: GradientReducer | None = None
        self._seen: dict[str, tuple[Any, int]] = {}  # by name, the gradient after backward, and its version
        self._is_averaged = False  # since the last step
        self.has_stepped = False
        broadcast_parameters(changes.world, self._trainable.own)
        self._trainable.hook(weak(self._accumulated), self._trainable.own)
        size = changes.world.size
        changes.note(
            f"{self.name}: {len(self._trainable.own)} parameters are copied from rank 0; each step averages their "
            f"gradients over {size} ranks; the learning rate is not scaled"
        )

    def ids(self) -> set[int]:
        """Return the ids of the parameters."""
        return {id(parameter) for parameter in self._trainable.own.values()}

    def forget(self) -> None:
        """Begin to collect the gradients of a new step, which backward adds to the present ones, such as zeros."""
        self._is_averaged = False
        gradients = {name: parameter.grad for name, parameter in self._trainable.own.items()}
        self._seen = {name: (grad, grad._version) for name, grad in gradients.items() if grad is not None}

    def average(self) -> None:
        """Average the gradients in place, unless that has been done since the last step.

        Raises:
            UsageError: a rank has changed a gradient, or has a sparse one; the same on all ranks.
        """
        if self._is_averaged:
            return
        if not self.has_stepped and not self._changes.has_shares:
            self._changes.note(
                "warning: no DataLoader shares its samples, so ranks that read the same samples compute the same"
            )
        self._trainable.update()
        for name, parameter in self._trainable.own.items():
            if parameter.grad is not None and (problem := self._problem(name, parameter.grad)):
                self._opened().complain(problem)
        self._averager.adopt(self._averager.reduce(self._trainable.own))
        self._is_averaged = self.has_stepped = True

    def closure(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure for `step` that averages the gradients and the loss over the ranks."""

        def averaged() -> Any:
            self.forget()
            with torch.enable_grad():
                loss = original()
            self.average()
            return mean_loss(self._changes.world, loss)

        return averaged

    def _opened(self) -> GradientReducer:
        if self._reducer is None:
            self._reducer = GradientReducer(self._changes.world, missing="zero", parameters=self._trainable.own)
        return self._reducer

    def _problem(self, name: str, gradient: Any) -> str:
        """Return the reason why a gradient cannot be averaged; an empty text if it can."""
        if gradient.layout is not torch.strided:
            return f"the gradient of {self._shown(name)} is sparse, which --data-parallel does not average"
        seen, version = self._seen.get(name, (None, 0))
        if seen is gradient and gradient._version == version:
            return ""
        return (
            f"the program has set or changed the gradient of {self._shown(name)} after backward, and --data-parallel "
            "averages gradients later: clip by torch.nn.utils.clip_grad_norm_ or clip_grad_value_, or use "
            "unisono.torch.DistributedOptimizer"
        )

    def _shown(self, name: str) -> str:
        return f"parameter {name} of {self.name}, of shape {list(self._trainable.own[name].shape)}"

    def _accumulated(self, name: str, parameter: Any) -> None:
        """Note a gradient that backward has accumulated."""
        if self._is_averaged:
            self._add_late(name, parameter)
        self._seen[name] = parameter.grad, parameter.grad._version

    def _add_late(self, name: str, parameter: Any) -> None:
        """Begin a new step if the program has dropped the averaged gradients, as without a step."""
        seen, _ = self._seen.get(name, (None, 0))
        if seen is parameter.grad:
            self._opened().complain(
                f"backward has added to the gradient of {self._shown(name)} after it was clipped and averaged: clip "
                "after the last backward of a step"
            )
        self._is_averaged = False
