"""Deferred updates: with priorities, a parameter is updated when the next forward reads it.

Theory of operation
-------------------
`defer` takes over the gradients of a step. Some of them are still on their way. It also copies the learning rate and
the other settings of the optimizer's groups. When a module hands out a parameter (`parameter_watch`), its gradient is
waited for. Then the optimizer makes a step for all parameters whose gradients have arrived: for the time of that step
its groups hold only these. So the optimizer must update each parameter by itself, from its own gradient and state. Then
the order of updates changes no bit.

If a parameter gets a new gradient and was not looked up since the step, that is an error: the program has read it
without asking the module, perhaps before its update. A parameter that belongs to no module of the model is updated at
once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from unisono import UnisonoError, UsageError
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.torch.calls.tensors import like
from unisono.frameworks.torch.training.parameter_watch import owned, watch

# Classes of torch.optim that update each parameter by itself.
_ONE_BY_ONE = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


class DeferredUpdates:
    """The updates of the last step that have not been made yet.

    Args:
        optimizer: makes the updates; it must pass `check_deferrable`.
        model: the module whose forward needs the parameters. Its parameters are watched until `close`.
        parameters: the parameters by name.
    """

    def __init__(self, optimizer: Any, model: Any, parameters: Mapping[str, Any]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._lock = threading.RLock()  # several threads may read the model and pass gradients
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # Parameters that the program adds later are not watched, so their updates are not deferred.
        self._owned = owned(model) & self._names.keys()
        self._alive = list(parameters.values())  # so that no other parameter gets one of these ids
        self._settings: list[dict[str, Any]] = []
        self._gradients: Arriving | None = None
        # The updates not made yet: by name, the index of the group and the parameter, in the order of need.
        self._waiting: dict[str, tuple[int, Any]] = {}
        self._unseen: set[int] = set()  # the ids of parameters that were not looked up since the step
        self._has_failed = False
        self._end_watch = watch(model, parameters.values(), self.need)

    def defer(self, reduced: Arriving) -> dict[str, Any]:
        """Keep the gradients of a step for deferred updates, and make the updates whose gradients have arrived.

        A parameter whose update is deferred has no ``.grad`` from now on, because a gradient on its way must not be
        changed or read. All updates of the step before must have been made.

        Returns:
            By name, the gradients that are not taken over. They belong to parameters of another optimizer or of no
            module. They are all gradients if the optimizer has hooks of its step, because these must see all updates.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            return dict(reduced)
        with self._lock:
            groups = self._optimizer.param_groups
            group_of = {id(each): index for index, group in enumerate(groups) for each in group["params"]}
            self._settings = [_settings(group) for group in groups]
            self._gradients = reduced
            for name in reduced:
                parameter = self._parameters[name]
                if id(parameter) in group_of and id(parameter) in self._owned:
                    parameter.grad = None
                    self._waiting[name] = group_of[id(parameter)], parameter
                    self._unseen.add(id(parameter))
            self._update(reduced.arrived(self._waiting))
            return {name: reduced[name] for name in reduced if id(self._parameters[name]) not in self._unseen}

    def need(self, parameter: Any) -> None:
        """Update a parameter now if its update is deferred. Called when a parameter is looked up, in any thread.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        if id(parameter) not in self._unseen:
            return
        with self._lock:
            name = self._names[id(parameter)]
            if name in self._waiting and self._gradients is not None:
                self._update(self._gradients.arrived(self._waiting))
            if name in self._waiting:
                self._wait_for(name)
            self._unseen.discard(id(parameter))

    def overlooked(self, parameter: Any) -> bool:
        """Return whether a parameter had a gradient in the last step, and the model has not read it since."""
        return id(parameter) in self._unseen

    def make_all(self) -> None:
        """Make all updates, because the memory of their gradients will be used again. Raises as `need` does."""
        with self._lock:
            while self._waiting:
                self._wait_for(next(iter(self._waiting)))

    def settle(self) -> None:
        """Make all updates, because the program is about to see the parameters. Raises as `need` does."""
        with self._lock:
            self.make_all()
            self._unseen.clear()

    def close(self) -> None:
        """Make all updates, unless one has failed, and end the watch of the model. Raises as `need` does."""
        try:
            if not self._has_failed:
                self.settle()
        finally:
            self._waiting.clear()
            self._unseen.clear()
            self._end_watch()

    def _wait_for(self, name: str) -> None:
        """Wait for a gradient, and update all parameters whose gradients have arrived by then."""
        assert self._gradients is not None
        try:
            self._gradients[name]
        except UnisonoError as error:
            if not self._has_failed:
                error.message += f": the last step() has not updated {name!r}, and perhaps others"
            self._has_failed = True
            raise
        self._update(self._gradients.arrived(self._waiting))

    def _update(self, names: Iterable[str]) -> None:
        """Make the updates of these names, whose gradients have arrived."""
        assert self._gradients is not None
        gradients = {name: self._gradients[name] for name in names}
        if not gradients:
            return
        groups = [{**settings, "params": []} for settings in self._settings]
        with contextlib.ExitStack() as stack:
            for name, gradient in gradients.items():
                index, parameter = self._waiting.pop(name)
                groups[index]["params"].append(parameter)
                stack.enter_context(_gradient(parameter, gradient))
            stack.enter_context(
                _default_modes({parameter.device.type for group in groups for parameter in group["params"]})
            )
            stack.enter_context(_groups(self._optimizer, [group for group in groups if group["params"]]))
            self._optimizer.step()


def check_deferrable(optimizer: Any, model: Any, parameters: Mapping[str, Any]) -> None:
    """Check that the updates of an optimizer can be deferred.

    Raises:
        UsageError: they cannot; the message says why.
    """
    class_ = type(optimizer)
    if class_.__name__ not in _ONE_BY_ONE or class_ is not getattr(torch.optim, class_.__name__, None):
        raise UsageError(
            f"priorities=True needs an optimizer that updates each parameter by itself ({', '.join(_ONE_BY_ONE)} of "
            f"torch.optim), not {class_.__module__}.{class_.__qualname__}"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError("priorities=True needs the module whose forward reads the parameters: pass model=")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError("priorities=True takes no scripted modules, because Unisono does not see their reads")
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own.isdisjoint(owned(model)):
        raise UsageError("model has none of the optimizer's parameters")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings of an optimizer's group, which a later learning-rate schedule does not change."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


@contextlib.contextmanager
def _gradient(parameter: Any, gradient: Any) -> Iterator[None]:
    """Set the gradient of a parameter inside the block."""
    before = parameter.grad
    parameter.grad = gradient if isinstance(gradient, torch.Tensor) else like(parameter, gradient)
    try:
        yield
    finally:
        parameter.grad = before


@contextlib.contextmanager
def _groups(optimizer: Any, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Replace the groups of an optimizer inside the block."""
    before, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = before


@contextlib.contextmanager
def _default_modes(devices: Iterable[str]) -> Iterator[None]:
    """Turn inference mode and autocast off inside the block: the forward that reads the parameter may use them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
