"""`Averaging`: passes the gradients of an optimizer to a `GradientReducer`, and its results back."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import Average, Sum
from unisono.compat.horovod.compression import Compressor
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet
from unisono.compat.horovod.reducers import JobReducer
from unisono.compat.horovod.torch.calls import sparse_allreduce_async
from unisono.compat.horovod.torch.compression import Compression
from unisono.errors import UnisonoError
from unisono.frameworks.torch.slots import Slots
from unisono.frameworks.torch.tensors import like
from unisono.frameworks.torch.trained import TrainedParameters

# A gradient of one element, because a step of the reducer cannot be empty, and all gradients may be sparse.
_PLACEHOLDER = "(placeholder)"


class Averaging:
    """The gradients of one optimizer.

    Args:
        trained: the parameters of the optimizer by name.
        op: "avg" or "sum".
        compression: the compressor.
        passes: how many backwards accumulate gradients before they are averaged.
        predivide: gradients are divided by it before they are averaged, and multiplied by it after.
        sparse_as_dense: whether sparse gradients are averaged as dense ones.
        process_set: the ranks.

    Attributes:
        has_begun: whether gradients of this step are being averaged.
    """

    def __init__(
        self,
        trained: TrainedParameters,
        *,
        op: str,
        compression: type[Compressor],
        passes: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._trained, self._op, self._compression = trained, op, compression
        self._predivide, self._sparse_as_dense, self._process_set = predivide, sparse_as_dense, process_set
        self._slots: Any = None  # of the reducer
        self._hooks: dict[str, tuple[Any, Any]] = {}  # by name, the parameter and its hook
        self._passed: dict[str, Callable[[Any], None]] = {}  # by name, the function that takes the average
        self._sparse: dict[str, tuple[Any, Callable[[], Any]]] = {}
        self._remaining: dict[str, int] = {}
        self._reducer = JobReducer(
            repr([(name, tuple(parameter.shape)) for name, parameter in trained.own.items()]),
            process_set,
            op,
            is_half=compression is Compression.fp16,
            on_open=_method(weakref.WeakMethod(self._forget_step)),
        )
        self.set_passes(passes)
        self._hook_parameters()

    @property
    def has_begun(self) -> bool:
        return bool(self._passed or self._sparse)

    def set_passes(self, passes: int) -> None:
        """Set how many backwards accumulate gradients before they are averaged; raises `ArgumentError`."""
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ArgumentError(f"backward_passes_per_step must be an integer, 1 or more, not {passes!r}")
        self._passes = passes
        self._remaining = {}

    def restart(self) -> None:
        """Forget the backwards that were not followed by a step."""
        with self._reducer.lock:
            self._remaining, self._passed, self._sparse = {}, {}, {}

    def finish(self) -> None:
        """Wait until all gradients of this step are averaged, those of missing backwards included.

        Raises:
            HorovodInternalError: a rank was lost, or ranks disagree.
        """
        if not self._reducer.averages():
            self._remaining = {}
            return
        with self._reducer.lock:
            try:
                self._pass_others()
                passed, self._passed = self._passed, {}
                if self._slots is not None:  # there are none before the first dense gradient
                    self._slots.vacate_others(passed.keys())
                sparse, self._sparse = self._sparse, {}
                self._remaining = {}
                self._reducer.begin_step()
                reducer = self._reducer.opened()
                if sparse:
                    reducer.ready(_PLACEHOLDER, np.zeros(1, np.float32))
                reduced = reducer.finish()
            except UnisonoError as error:
                job.raise_explained(error)
            finally:
                self._reducer.end_step()
            for name, gradient in reduced.items():
                if name in passed:
                    passed[name](gradient)
                elif name in self._trained.named:
                    parameter = self._trained.named[name]
                    parameter.grad = like(parameter, gradient)
            for parameter, wait in sparse.values():
                parameter.grad = wait()

    def _pass_others(self) -> None:
        """Pass the gradients that no hook has passed: zeros, and those of fewer backwards than the step should have."""
        self._trained.update()
        self._hook_parameters()
        for name, parameter in self._trained.own.items():
            if parameter.requires_grad and name not in self._passed and name not in self._sparse:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                self._pass(name, parameter)

    def _forget_step(self) -> None:
        """Forget gradients that other ranks will not average, because the reducer has been opened for new ranks."""
        self._passed, self._sparse = {}, {}
        self._slots = Slots(self._reducer.reducer)

    def _hook_parameters(self) -> None:
        """Add a hook to each trained parameter that has none."""
        for name, parameter in self._trained.own.items():
            before, hook = self._hooks.get(name, (None, None))
            if parameter is before or not parameter.requires_grad:
                continue
            if hook is not None:
                hook.remove()
            self._hooks[name] = parameter, parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))

    def accumulated(self, name: str, parameter: Any) -> None:
        """Count a backward of a parameter, and pass its gradient if it was the last one of the step."""
        with self._reducer.lock:
            remaining = self._remaining.get(name, self._passes)
            if remaining == 0:
                raise AssertionError(
                    f"the gradient of {name!r} was computed more than backward_passes_per_step={self._passes} times "
                    "before step(): call step(), or increase backward_passes_per_step"
                )
            self._remaining[name] = remaining - 1
            if remaining == 1 and self._reducer.averages():
                try:
                    self._pass(name, parameter)
                except UnisonoError as error:
                    job.raise_explained(error)

    def _pass(self, name: str, parameter: Any) -> None:
        """Pass the gradient of a parameter to the reducer, and note who takes the average."""
        gradient = parameter.grad
        if gradient.is_sparse and not self._sparse_as_dense:
            op = Average if self._op == "avg" else Sum
            wait = sparse_allreduce_async(gradient, f"{self._reducer.name}.{name}", op, self._process_set)
            self._sparse[name] = parameter, wait
            return
        reducer = self._reducer.opened()
        is_sparse = gradient.is_sparse
        if is_sparse:
            gradient = gradient.to_dense()
        elif self._is_plain():
            self._passed[name] = lambda average: None  # the reducer writes the average into the gradient itself
            return reducer.ready(name, self._slots.moved(name, parameter))
        else:
            gradient = gradient.detach()
        if self._predivide != 1.0:
            gradient = gradient / self._predivide
        context = None
        is_custom = self._compression not in (Compression.none, Compression.fp16)
        if is_custom:
            gradient, context = self._compression.compress(gradient)

        def take(average: Any) -> None:
            if is_custom:
                average = self._compression.decompress(average, context)
            if self._predivide != 1.0:
                average = average * self._predivide
            parameter.grad = average.to_sparse() if is_sparse else average

        self._passed[name] = take
        return reducer.ready(name, gradient)

    def _is_plain(self) -> bool:
        """Return whether gradients are averaged as they are."""
        return self._predivide == 1.0 and self._compression in (Compression.none, Compression.fp16)


def _method(method: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Return a function that calls a method and does not keep its object alive."""

    def call() -> None:
        bound = method()
        if bound is not None:
            bound()

    return call


def _hook(averaging: weakref.ref[Averaging], name: str) -> Callable[[Any], None]:
    """Return a hook that does not keep the optimizer alive."""

    def accumulated(parameter: Any) -> None:
        owner = averaging()
        if owner is not None:
            owner.accumulated(name, parameter)

    return accumulated
