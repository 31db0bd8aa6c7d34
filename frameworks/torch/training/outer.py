"""`DiLoCo`, `BlockMomentum` and `LocalSGD` for torch: an optimizer whose steps now and then join the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from unisono import Communicator
from unisono.data_parallel import broadcast_parameters
from unisono.frameworks.outer import training
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.training.wrapped_optimizer import WrappedOptimizer

if TYPE_CHECKING:
    from unisono import Swarm


@skip_dynamo
class DiLoCo(WrappedOptimizer):
    """A wrapper of an optimizer of torch, for ranks that train alone and join their changes every `inner_steps` steps.

    Use it like the optimizer that it wraps. Its `step` is a step of that optimizer and then of
    `unisono.data_parallel.DiLoCo`, over all parameters of `model` that need a gradient. The constructor copies the
    parameters and buffers of rank 0 to all ranks. Buffers, such as the means of batch normalization, stay those of each
    rank. At the end, all ranks call `synchronize`.

    `state_dict` is that of the wrapped optimizer. Save ``optimizer.outer.state_dict()`` beside it.

    Args:
        model: the module that is trained.
        optimizer: the inner optimizer.
        world: the ranks, or a swarm. On a swarm, buffers are not copied.
        options: the arguments of `unisono.data_parallel.DiLoCo`, such as `inner_steps`.

    Attributes:
        optimizer: the wrapped optimizer.
        outer: the outer optimizer.

    Raises:
        UsageError, MismatchError: as for `unisono.data_parallel.DiLoCo`.
    """

    _kind: ClassVar[type[training.DiLoCo]] = training.DiLoCo

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, world: Communicator | Swarm, **options: Any
    ) -> None:
        super().__init__(optimizer)
        if isinstance(world, Communicator):
            broadcast_parameters(world, model.state_dict())
        self._trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self.outer = self._kind(world, self._trained, **options)
        self._seal()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step of the inner optimizer, and join the changes of the ranks that are due after it.

        Returns:
            The loss that `closure` returns, or None.

        Raises:
            UsageError, MismatchError, PeerLostError, CollectiveTimeoutError, AbortedError: as for
                `unisono.data_parallel.DiLoCo.step`.
        """
        loss = self.optimizer.step() if closure is None else self.optimizer.step(closure)
        self.outer.step(self._trained)
        return loss

    def synchronize(self) -> None:
        """Average all parameters now, so that all ranks hold the same bits. All ranks call it."""
        self.outer.synchronize(self._trained)

    def close(self) -> None:
        """Close the communicators. A second call does nothing."""
        self.outer.close()


@skip_dynamo
class BlockMomentum(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.BlockMomentum`."""

    _kind = training.BlockMomentum


@skip_dynamo
class LocalSGD(DiLoCo):
    """`DiLoCo` with the defaults of `unisono.data_parallel.LocalSGD`."""

    _kind = training.LocalSGD
