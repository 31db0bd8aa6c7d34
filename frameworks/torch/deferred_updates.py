"""Updates of parameters that wait for their gradients, until the next forward needs them.

Theory of operation. `defer` takes over the gradients of a step, of which some are still on their way, and notes the
learning rate and what else the groups of the optimizer say at that moment. When a module hands out a parameter
(`lookups`), its gradient is waited for, and the optimizer makes a step of the parameters whose gradients are there by
then: its groups have only these for that moment. So it must be one that updates each parameter by itself, from its own
gradient and state; then the order in which they are updated changes no bit.

A parameter that gets a gradient, and has not been looked up since the step, was read where nobody saw it, and perhaps
before its update: that is an error. A parameter that belongs to no module of the model never waits.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from unisono import UnisonoError, UsageError
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.torch.parameter_watch import owned, watch
from unisono.frameworks.torch.tensors import like

# Classes of torch.optim that update each parameter by itself.
_ONE_BY_ONE = (
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)


class LateUpdates:
    """The updates of the last step that have not been made.

    Args:
        optimizer: what makes them; one that `check_late` has nothing against.
        model: the module whose forward needs the parameters; it is changed until `close`.
        parameters: by name.
    """

    def __init__(self, optimizer: Any, model: Any, parameters: Mapping[str, Any]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._lock = threading.RLock()  # a model may be read, and gradients come, in several threads
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # Of parameters that come later nobody would tell when they are looked up, so that these do not wait.
        self._owned = owned(model) & self._names.keys()
        self._alive = list(parameters.values())  # so that no other parameter gets the id of one of them
        self._settings: list[dict[str, Any]] = []
        self._gradients: Arriving | None = None
        # By name, the group and the parameter, in the order of need; then those not looked up since the step, by id.
        self._waiting: dict[str, tuple[int, Any]] = {}
        self._unseen: set[int] = set()
        self._has_failed = False
        self._end_watch = watch(model, parameters.values(), self.need)

    def defer(self, reduced: Arriving) -> dict[str, Any]:
        """Take over the gradients of a step, and make the updates that are possible at once.

        The parameters whose updates are late have no ``.grad`` from now on: what is still on its way must not be
        changed or read. All updates of the step before must have been made.

        Returns:
            The gradients that are not taken over, by name: of parameters that belong to another optimizer or to no
            module, and all where hooks of the optimizer's step want to see all updates.

        Raises:
            PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
        """
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            return dict(reduced)
        with self._lock:
            groups = self._optimizer.param_groups
            places = {id(each): index for index, group in enumerate(groups) for each in group["params"]}
            self._settings = [_settings(group) for group in groups]
            self._gradients = reduced
            for name in reduced:
                parameter = self._parameters[name]
                if id(parameter) in places and id(parameter) in self._owned:
                    parameter.grad = None
                    self._waiting[name] = places[id(parameter)], parameter
                    self._unseen.add(id(parameter))
            self._update(reduced.arrived(self._waiting))
            return {name: reduced[name] for name in reduced if id(self._parameters[name]) not in self._unseen}

    def need(self, parameter: Any) -> None:
        """Make the update of a parameter, if it is late. Called when it is looked up, in whatever thread.

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
        """Return whether a parameter, which has got a gradient, has not been looked up since the last step."""
        return id(parameter) in self._unseen

    def make(self) -> None:
        """Make all updates, because their memory will be used again. Raises what `need` does."""
        with self._lock:
            while self._waiting:
                self._wait_for(next(iter(self._waiting)))

    def settle(self) -> None:
        """Make all updates, because the program wants to see them. Raises what `need` does."""
        with self._lock:
            self.make()
            self._unseen.clear()

    def close(self) -> None:
        """Make all updates, unless that has failed, and leave the model as it was. Raises what `need` does."""
        try:
            if not self._has_failed:
                self.settle()
        finally:
            self._waiting.clear()
            self._unseen.clear()
            self._end_watch()

    def _wait_for(self, name: str) -> None:
        """Wait for a gradient, and make the updates whose gradients have come by then."""
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
        """Make updates whose gradients have come."""
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
                _as_outside({parameter.device.type for group in groups for parameter in group["params"]})
            )
            stack.enter_context(_groups(self._optimizer, [group for group in groups if group["params"]]))
            self._optimizer.step()


def check_late(optimizer: Any, model: Any, parameters: Mapping[str, Any]) -> None:
    """Check that updates can be late.

    Raises:
        UsageError: they cannot.
    """
    kind = type(optimizer)
    if kind.__name__ not in _ONE_BY_ONE or kind is not getattr(torch.optim, kind.__name__, None):
        raise UsageError(
            f"priorities are for optimizers that update each parameter by itself ({', '.join(_ONE_BY_ONE)} of "
            f"torch.optim), not for {kind.__module__}.{kind.__qualname__}"
        )
    if not isinstance(model, torch.nn.Module):
        raise UsageError("priorities need the module whose forward waits for the parameters: pass model=")
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise UsageError("priorities are not for scripted modules: nothing tells when these read a parameter")
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if own.isdisjoint(owned(model)):
        raise UsageError("model has none of the optimizer's parameters")


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a group of an optimizer says now, whatever a schedule does with it later."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


@contextlib.contextmanager
def _gradient(parameter: Any, gradient: Any) -> Iterator[None]:
    """Let a parameter have a gradient for the moment."""
    before = parameter.grad
    parameter.grad = gradient if isinstance(gradient, torch.Tensor) else like(parameter, gradient)
    try:
        yield
    finally:
        parameter.grad = before


@contextlib.contextmanager
def _groups(optimizer: Any, groups: list[dict[str, Any]]) -> Iterator[None]:
    """Let an optimizer have other groups for the moment."""
    before, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = before


@contextlib.contextmanager
def _as_outside(devices: Iterable[str]) -> Iterator[None]:
    """Compute as outside of the forward that looks a parameter up, which may be one of inference or mixed precision."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
