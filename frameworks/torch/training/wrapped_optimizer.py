"""`WrappedOptimizer`: the attributes of an optimizer that wraps another one."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class WrappedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose attributes are those of the optimizer that it wraps, except for its own.

    Its own are the attributes of its class, and those that its constructor has set before it called `_seal`. So
    ``optimizer.state = {}`` reaches the wrapped optimizer, as do names that libraries invent. A scheduler that
    replaces ``optimizer.step`` replaces the method of the wrapper.

    It cannot be copied or pickled, because a copy would need ranks and hooks of its own.

    Attributes:
        optimizer: the wrapped optimizer.
    """

    _is_sealed = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # The base class is not initialised: all its attributes are those of the wrapped optimizer.
        self.optimizer = optimizer

    def _seal(self) -> None:
        """End the constructor: attributes that are new from now on belong to the wrapped optimizer."""
        self._is_sealed = True

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            object.__delattr__(self, name)
        else:
            delattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        name = type(self).__name__
        raise TypeError(
            f"a {name} cannot be copied or pickled, because it has ranks and hooks: save its state_dict(), or copy "
            "optimizer.optimizer, which it wraps, and make another one of the copy"
        )

    def __setstate__(self, state: Any) -> NoReturn:
        # That of torch would patch the `step` of this class, for all optimizers of the process.
        self.__reduce_ex__(None)

    def _owns(self, name: str) -> bool:
        return not self._is_sealed or name in self.__dict__ or hasattr(type(self), name)
