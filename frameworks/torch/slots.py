"""`Slots`: gradients in the memory in which a `GradientReducer` reduces them, so that nothing is copied back."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch

from unisono import GradientReducer
from unisono.frameworks.torch.tensors import like


class Slots:
    """The slots of a reducer as tensors.

    A program may keep the gradient of a step, as by ``before = weight.grad``, and then compute the next one, which
    torch puts into other memory. So a tensor that the program holds when its slot is needed again gets memory of its
    own. Views of it, such as ``weight.grad.detach()``, stay in the slot.

    Args:
        reducer: the reducer.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._tensors: dict[str, tuple[int, Any]] = {}  # by name, the address and the tensor
        self._idle = (0, 0)  # the references to a tensor that the program does not hold

    def moved(self, name: str, parameter: Any) -> Any:
        """Move the gradient of a parameter to its slot, if it has one; return the gradient."""
        gradient = parameter.grad
        if gradient.layout is not torch.strided:
            return gradient
        slot = self._reducer.slot(name)
        if slot is None or slot.shape != gradient.shape:
            return gradient
        address = slot.ctypes.data
        if gradient.data_ptr() == address:
            return gradient
        self._vacate(name)
        if name not in self._tensors or self._tensors[name][0] != address:
            self._tensors[name] = address, like(parameter, slot)
            self._idle = self._references(name)
        tensor = self._tensors[name][1]
        parameter.grad = tensor.copy_(gradient)
        return tensor

    def vacate_others(self, passed: Collection[str]) -> None:
        """Take the tensors of all slots but those in `passed` out of them, because the reducer writes zeros there."""
        for name in self._tensors.keys() - passed:
            self._vacate(name)

    def _vacate(self, name: str) -> None:
        """Give the tensor in a slot memory of its own, if the program holds it."""
        if name in self._tensors and self._references(name) != self._idle:
            _, tensor = self._tensors.pop(name)
            tensor.data = tensor.clone()

    def _references(self, name: str) -> tuple[int, int]:
        """Return how often Python and C++ refer to the tensor of a slot, for a caller that has no variable for it."""
        tensor = self._tensors[name][1]
        return sys.getrefcount(tensor), tensor._use_count()
