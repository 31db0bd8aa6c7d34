"""`Slots`: gradients in the memory in which a `GradientReducer` reduces them, so that nothing is copied back."""

from __future__ import annotations

from typing import Any

import torch

from unisono import GradientReducer
from unisono.frameworks.torch.tensors import like


class Slots:
    """The slots of a reducer as tensors.

    Args:
        reducer: the reducer.
    """

    def __init__(self, reducer: GradientReducer) -> None:
        self._reducer = reducer
        self._tensors: dict[str, tuple[int, Any]] = {}  # by name, the address and the tensor

    def moved(self, name: str, parameter: Any) -> Any:
        """Move the gradient of a parameter to its slot, if it has one; return the gradient."""
        gradient = parameter.grad
        if gradient.layout is not torch.strided:
            return gradient
        slot = self._reducer.slot(name)
        if slot is None or slot.shape != gradient.shape:
            return gradient
        address, tensor = self._tensors.get(name, (0, None))
        if address != slot.ctypes.data:
            tensor = like(parameter, slot)
            self._tensors[name] = slot.ctypes.data, tensor
        if gradient.data_ptr() == tensor.data_ptr():
            return gradient
        parameter.grad = tensor.copy_(gradient)
        return tensor
