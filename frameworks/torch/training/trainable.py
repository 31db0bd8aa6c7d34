"""`TorchTrainable`: the parameters of an optimizer of torch with their gradients, as an `Averager` uses them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from unisono import Communicator, UsageError
from unisono.frameworks.torch.calls.tensors import like


class TorchTrainable:
    """The parameters of an optimizer by name, also those that the program adds or replaces later, and their gradients.

    A program may keep the gradient of a step, as by ``before = weight.grad``, and then compute the next one, which
    torch puts into other memory. So a tensor that the program holds when its slot is needed again gets memory of its
    own. Views of it, such as ``weight.grad.detach()``, stay in the slot.

    Args:
        optimizer: an optimizer of torch. The program may change its `param_groups` at any time; `update` reads them
            again.
        named_parameters: names and parameters, which include those of the optimizer; None to number the parameters.

    Attributes:
        named: all parameters by name.
        own: the parameters of the optimizer by name, in its order.
        added: the names of parameters that the optimizer did not have at first.

    Raises:
        UsageError: two parameters have the same name, one has two names, or `named_parameters` lacks a parameter of the
            optimizer.
    """

    def __init__(self, optimizer: Any, named_parameters: Iterable[tuple[str, Any]] | None) -> None:
        self._optimizer = optimizer
        self._ids = self._current_ids()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.named = _named(parameters, named_parameters)
        self.own: dict[str, Any] = {}
        self.added: list[str] = []
        self._names = {id(parameter): name for name, parameter in self.named.items()}
        self._name_at: dict[tuple[int, int], str] = {}  # by the index of the group and the index in it
        self._accumulated: Callable[..., None]
        self._hooked: dict[str, Any] = {}  # the parameters that get hooks: `named` or `own`
        self._hooks: dict[str, tuple[Any, Any]] = {}  # by name, the parameter and its hook
        self._slots: dict[str, tuple[int, Any]] = {}  # by name, the address of a slot and the tensor there
        self._idle = (0, 0)  # the references to a tensor in a slot that the program does not hold
        self._name_all()

    def update(self) -> bool:
        """Read the groups of the optimizer again, and hook new parameters; return whether it has other parameters now.

        A parameter that replaces another one gets its name. Any other new parameter is named by its place, such as
        ``param_groups[1][0]``, so that it has the same name on all ranks that add it there.
        """
        ids = self._current_ids()
        is_other = ids != self._ids
        if is_other:
            self._ids = ids
            self._name_all()
        self._hook_all()
        return is_other

    def hook(self, accumulated: Callable[[str, Any], None], parameters: dict[str, Any]) -> None:
        """Call ``accumulated(name, parameter)`` when backward has accumulated a gradient, until `close`.

        Args:
            accumulated: the function, which must be kept alive by the parameters, or be `weak`.
            parameters: `named` or `own`.
        """
        self._accumulated, self._hooked = accumulated, parameters
        self._hook_all()

    def close(self) -> None:
        """Remove all hooks."""
        for _, hook in self._hooks.values():
            hook.remove()

    def gradient(self, name: str) -> Any:
        """Return the gradient of a parameter, or None."""
        return self.named[name].grad

    def put(self, name: str, average: Any) -> Any:
        """Make an array, a tensor or None the gradient of a parameter; return the gradient."""
        parameter = self.named[name]
        is_array = average is not None and not isinstance(average, torch.Tensor)
        parameter.grad = like(parameter, average) if is_array else average
        return parameter.grad

    def moved(self, name: str, slot: Any) -> Any:
        """Move the gradient of a parameter to the slot in which it is reduced, if it has one; return the gradient."""
        parameter = self.named[name]
        gradient = parameter.grad
        if slot is None or slot.shape != gradient.shape:
            return gradient
        address = slot.ctypes.data
        if gradient.data_ptr() == address:
            return gradient
        self._vacate(name)
        if name not in self._slots or self._slots[name][0] != address:
            self._slots[name] = address, like(parameter, slot)
            self._idle = self._references(name)
        tensor = self._slots[name][1]
        parameter.grad = tensor.copy_(gradient)
        return tensor

    def vacate_others(self, passed: Collection[str]) -> None:
        """Move the tensors out of all slots but those in `passed`, because the reducer writes zeros there."""
        for name in self._slots.keys() - passed:
            self._vacate(name)

    def is_sparse(self, gradient: Any) -> bool:
        """Return whether a gradient is not a dense tensor."""
        return gradient.layout is not torch.strided

    def can_gather(self, gradient: Any) -> bool:
        """Return whether the elements of a sparse gradient can be gathered."""
        return gradient.layout is torch.sparse_coo

    def dense(self, gradient: Any) -> Any:
        """Return a gradient as a dense tensor, outside of autograd."""
        return gradient.to_dense() if self.is_sparse(gradient) else gradient.detach()

    def sparse(self, gradient: Any) -> Any:
        """Return a dense gradient in coordinate format."""
        return gradient.to_sparse()

    def placeholder(self, name: str) -> Any:
        """Return the dense tensor that says that a gradient is sparse: it has one dimension more than the parameter."""
        parameter = self.named[name]
        return parameter.new_zeros((1,) * (parameter.dim() + 1), requires_grad=False)

    def is_placeholder(self, name: str, average: Any) -> bool:
        """Return whether the average of a gradient is that of placeholders."""
        return bool(len(average.shape) > self.named[name].dim())

    def _hook_all(self) -> None:
        """Add a hook to each parameter that has none."""
        for name, parameter in self._hooked.items():
            before, hook = self._hooks.get(name, (None, None))
            if parameter is before or not parameter.requires_grad:
                continue
            if hook is not None:
                hook.remove()
            hook = parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
            self._hooks[name] = parameter, hook

    def _vacate(self, name: str) -> None:
        """Give the tensor in a slot memory of its own, if the program holds it."""
        if name in self._slots and self._references(name) != self._idle:
            _, tensor = self._slots.pop(name)
            tensor.data = tensor.clone()

    def _references(self, name: str) -> tuple[int, int]:
        """Return how often Python and C++ refer to the tensor of a slot, for a caller that has no variable for it."""
        tensor = self._slots[name][1]
        return sys.getrefcount(tensor), tensor._use_count()

    def _current_ids(self) -> list[int]:
        return [id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]]

    def _name_all(self) -> None:
        present, before, self._name_at = set(self._ids), self._name_at, {}
        self.own.clear()
        for group_index, group in enumerate(self._optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                place = (group_index, index)
                name = self._names.get(id(parameter))
                if name is None:
                    name = self._new_name(place, before.get(place), present)
                    if name in self.named:
                        del self._names[id(self.named[name])]
                    else:
                        self.added.append(name)
                    self.named[name], self._names[id(parameter)] = parameter, name
                self.own[name] = parameter
                self._name_at[place] = name

    def _new_name(self, place: tuple[int, int], before: str | None, present: Collection[int]) -> str:
        if before is not None and id(self.named[before]) not in present:
            return before
        name = "param_groups[{}][{}]".format(*place)
        return name if name not in self.named else f"{name} #{len(self.named)}"


def _named(parameters: list[Any], named_parameters: Iterable[tuple[str, Any]] | None) -> dict[str, Any]:
    pairs = [(str(number), parameter) for number, parameter in enumerate(parameters)]
    pairs = list(named_parameters) if named_parameters is not None else pairs
    named = dict(pairs)
    if len(named) != len(pairs):
        raise UsageError("two parameters in named_parameters have the same name: rename one")
    ids = {id(parameter) for parameter in named.values()}
    if len(ids) != len(named):
        raise UsageError("a parameter has two names in named_parameters: give it one, as model.named_parameters() does")
    if unnamed := [tuple(parameter.shape) for parameter in parameters if id(parameter) not in ids]:
        raise UsageError(f"named_parameters lacks parameters of the optimizer, with the shapes {unnamed}")
    return named


def mean_loss(world: Communicator, loss: Any) -> Any:
    """Return the mean of the result of a closure over ranks, so that all ranks make the same decisions by it."""
    if isinstance(loss, torch.Tensor):
        return world.allreduce(loss.detach(), "avg")
    return float(world.allreduce(np.array(float(loss)), "avg"))


def weak(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method, and does not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        bound = reference()
        if bound is not None:
            bound(*arguments)

    return call
