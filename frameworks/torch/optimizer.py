"""An optimizer whose gradients are averaged over ranks while backward computes; it needs no process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unisono import Communicator, GradientReducer, UsageError
from unisono.data_parallel import HybridGroups, broadcast_parameters
from unisono.frameworks.gradients import agreement
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.torch.deferred_updates import LateUpdates, check_late
from unisono.frameworks.torch.tensors import like
from unisono.frameworks.torch.trained import TrainedParameters


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer of torch, with gradients that are averaged over ranks. Use it as the one that it is given.

    Each gradient is handed to a `GradientReducer` when backward has accumulated it, and `step` waits for all of them.
    Where several backwards make one step, all but the last stand in `no_sync`. All ranks make it and call `step`,
    `flush`, `add_param_group`, `load_state_dict` and `close` alike. When it is made, the parameters of rank 0 become
    those of all.

    Between backward and `step` gradients are averaged where they lie, and reading `.grad` shows some numbers that are
    averages already and some that are not. Call `synchronize` before you read, clip or scale gradients. If a gradient
    was changed before that, `step` raises a `UsageError` on all ranks, and no rank applies it.

    Layers may be unfrozen, and parameters added to `param_groups` or replaced there, between two steps on all ranks
    alike: `step` looks for them, and their first gradient is averaged too. With a lag, call `flush` and
    ``reducer.reset()`` before. Each step compares some of the parameters with those of the other ranks, by a checksum;
    parameters that have drifted apart are a `MismatchError` of `step` on all ranks, with the name of the first.

    Args:
        optimizer: what applies the gradients; of the same parameters.
        world: the ranks.
        named_parameters: the names and the parameters, ``model.named_parameters()``, in the same order on all ranks; by
            default, those of `model`, or else they are numbered.
        model: the module that they are of; only needed with `priorities`.
        priorities: whether `step` returns before all gradients are there, and the update of a parameter is made when it
            is next looked up in `model`, as in the next forward; see `GradientReducer`. Parameters have no ``.grad``
            after `step` then. Not with a lag, groups or a closure, and only for optimizers of torch.optim that update
            each parameter by itself.
        groups: number or members of the groups inside which gradients are averaged; each step then exchanges what it
            has changed with the other groups, as `HybridGroups.exchange` does, and `finish` ends the training. None for
            one group of all ranks.
        staleness: of these groups; see `HybridGroups`.
        verify_every: in how many steps each parameter is compared once with those of the other ranks, or with those of
            its group, if there are groups; the first three steps compare all. 0 for never: for ranks whose processors
            round differently, so that updates by equal gradients differ in their last bits.
        options: what `GradientReducer` takes: `lag`, `compression`, `missing` and the others.

    Attributes:
        optimizer: the same.
        hybrid: the groups; None if there are none.
        reducer: the reducer; its `report` tells what communication has cost.

    Raises:
        UsageError: an argument cannot be used, or the optimizer has parameters that are not named, or is not one for
            `priorities`.
        MismatchError: the ranks have other parameters; it names the first that differs.
    """

    # A `GradScaler` divides the gradients itself: what it would tell a fused optimizer, it would tell this one alone.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        world: Communicator,
        *,
        named_parameters: Iterable[tuple[str, Any]] | None = None,
        model: torch.nn.Module | None = None,
        priorities: bool = False,
        groups: int | Sequence[Sequence[int]] | None = None,
        staleness: int = 8,
        verify_every: int = 100,
        **options: Any,
    ) -> None:
        # What the class above would set up is that of `optimizer`, which `__getattr__` finds.
        self.optimizer = optimizer
        if named_parameters is None and model is not None:
            named_parameters = _module(model).named_parameters()
        self._trained = TrainedParameters(optimizer, named_parameters)
        self._parameters = self._trained.named
        if priorities:
            if groups is not None:
                raise UsageError("priorities are for one group of all ranks: use them without groups")
            check_late(optimizer, model, self._parameters)
        self._is_prompt = not options.get("lag")
        broadcast_parameters(world, self._parameters)
        self.hybrid: HybridGroups | None = None
        if groups is not None:
            self.hybrid = HybridGroups(world, self._parameters, groups=groups, staleness=staleness)
        self._world = self.hybrid.group if self.hybrid is not None else world
        self.reducer = GradientReducer(
            self._world, priorities=priorities, parameters=self._trained.own, verify_every=verify_every, **options
        )
        self._late = LateUpdates(optimizer, model, self._parameters) if priorities else None
        self._syncs = True
        self._is_synchronized = False
        self._has_gradients = False
        self._slots: dict[str, tuple[int, Any]] = {}
        self._given: dict[str, Any] = {}  # by name, the gradients of this step that the reducer has got
        self._hooks: dict[str, tuple[Any, Any]] = {}  # by name, the parameter and its hook
        self._hook_parameters()

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"DistributedOptimizer({self.optimizer!r})"

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backwards of a with-block only accumulate gradients on this rank."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def synchronize(self) -> None:
        """Wait for the gradients that are due, so that they can be looked at or clipped before `step`.

        With priorities, this is to wait for all of them, and `step` makes all updates at once.

        Raises:
            What `GradientReducer.finish` raises.
        """
        self._adopt(self._reduced())
        self._is_synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients that are due, after `synchronize`, unless that has been called; nothing if none are.

        With priorities, and without `synchronize` before, it returns when it is known that no rank complains. What it
        has not applied by then is applied when `model` is asked for the parameter, with the learning rate of now. Where
        the optimizer has hooks of its step, it waits.

        Args:
            closure: as with torch's own; what it returns is averaged over ranks, so that all decide alike by it.

        Raises:
            UsageError: there is a closure, and a lag or priorities; or with priorities, a parameter that was not looked
                up in `model` since the last step has got a gradient.
            The same as `synchronize`. With priorities, the forward raises errors of ranks that are lost, too.
        """
        if closure is not None:
            return self._apply(self._closure(closure))
        if not self._is_synchronized:
            reduced = self._reduced()
            if self._late is not None and isinstance(reduced, Arriving):
                reduced = self._late.defer(reduced)
            self._adopt(reduced)
        self._is_synchronized = False
        return self._apply() if self._has_gradients else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See torch's own."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See torch's own; the new parameters of rank 0 become those of all. All ranks call it, between two steps.

        Raises:
            UsageError: there are hybrid groups, which exchange the parameters that they began with.
            MismatchError: the ranks add other parameters; it names the first that differs.
        """
        if self.hybrid is not None:
            raise UsageError(
                "hybrid groups exchange the parameters that they began with: make a new optimizer for more"
            )
        self._settle()
        before = set(self._parameters)
        self.optimizer.add_param_group(param_group)
        self._trained.update()
        broadcast_parameters(self._world, {name: x for name, x in self._parameters.items() if name not in before})
        self._hook_parameters()

    def flush(self) -> None:
        """Apply all gradients that are in flight, a step each: in the end, and before what is trained is saved."""
        self._settle()
        for gradients in self.reducer.flush():
            for name, gradient in gradients.items():
                self._parameters[name].grad = like(self._parameters[name], gradient)
            self._apply()

    def finish(self) -> None:
        """End the training: `flush`, and wait for the other groups, if there are some. All ranks call it.

        Then all hold the same bits. It is followed by `close` only.
        """
        self.flush()
        if self.hybrid is not None:
            self.hybrid.finish(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, and under "reducer" that of this rank's reducer."""
        self._settle()
        return {**self.optimizer.state_dict(), "reducer": self.reducer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load such a state, or one of the optimizer alone."""
        self._settle()
        state = dict(state_dict)
        reducer = state.pop("reducer", None)
        self.optimizer.load_state_dict(state)
        self.reducer.verify_all()
        if reducer is not None:
            self.reducer.load_state_dict(reducer)

    def close(self) -> None:
        """Leave: the optimizer that it was given can be used by itself again.

        With priorities, what `step` has not applied is applied; raises what `synchronize` does.
        """
        with contextlib.ExitStack() as stack:
            if self.hybrid is not None:
                stack.callback(self.hybrid.close)
            stack.callback(self.reducer.close)
            for _, hook in self._hooks.values():
                hook.remove()
            if self._late is not None:
                self._late.close()

    def _reduced(self) -> Mapping[str, Any]:
        """Return the gradients that are due."""
        self._settle()
        self._look_again()
        given, self._given = self._given, {}
        for name, gradient in given.items():
            if self._parameters[name].grad is not gradient:
                self.reducer.complain(agreement.changed(name, "replaced").message)
        reduced = self.reducer.finish()
        self._has_gradients = bool(reduced)
        if reduced and not self._is_prompt:
            # The error of a gradient that is new, or was replaced, comes in a later step. Until then, apply averages.
            for name in given:
                self._parameters[name].grad = reduced.get(name)
        return reduced

    def _look_again(self) -> None:
        """Give the gradients of parameters that were unfrozen, added or replaced since the last step."""
        if self._trained.update():
            self.reducer.verify_all()
        if self._trained.added and self.hybrid is not None:
            name = self._trained.added[0]
            self.reducer.complain(f"{name!r} is new, and hybrid groups exchange the parameters that they began with")
        for name in self._hook_parameters():
            parameter = self._parameters[name]
            if parameter.grad is not None:
                self._give(name, parameter)

    def _hook_parameters(self) -> list[str]:
        """Hook all parameters that are trained and have no hook yet; return their names."""
        hooked = []
        for name, parameter in self._parameters.items():
            before, hook = self._hooks.get(name, (None, None))
            if parameter is before or not parameter.requires_grad:
                continue
            if hook is not None:
                hook.remove()
            self._hooks[name] = parameter, parameter.register_post_accumulate_grad_hook(self._hook(name))
            hooked.append(name)
        return hooked

    def _adopt(self, reduced: Mapping[str, Any]) -> None:
        """Wait for gradients, and let parameters that had none on this rank have theirs."""
        for name, gradient in reduced.items():
            if not isinstance(gradient, torch.Tensor):
                self._parameters[name].grad = like(self._parameters[name], gradient)

    def _settle(self) -> None:
        """Make all updates of the last step."""
        if self._late is not None:
            self._late.settle()

    def _apply(self, *closure: Callable[[], Any]) -> Any:
        """Apply gradients, and exchange what they have changed with the other groups."""
        loss = self.optimizer.step(*closure)
        if self.hybrid is not None:
            self.hybrid.exchange(self._parameters)
        return loss

    def _hook(self, name: str) -> Callable[[Any], None]:
        def ready(parameter: Any) -> None:
            if self._late is not None:
                self._make_late(self._late, name, parameter)
            if self._syncs:
                self._give(name, parameter)

        return ready

    def _give(self, name: str, parameter: Any) -> None:
        """Hand a gradient to the reducer."""
        gradient = self._given[name] = self._moved_to_slot(name, parameter)
        self.reducer.ready(name, gradient)

    def _make_late(self, late: LateUpdates, name: str, parameter: Any) -> None:
        """Make what updates are left before a gradient of the next step is taken, and check that none was forgotten."""
        if late.overlooked(parameter):
            late.settle()
            self.reducer.complain(
                f"{name!r} has got a gradient, and model was not asked for it since the last step(): with priorities, "
                "read it as an attribute of its module in each forward"
            )
        elif self._syncs:
            late.make()

    def _moved_to_slot(self, name: str, parameter: Any) -> Any:
        """Return the gradient, which lies where it is reduced, if it may, so that the result need not be copied."""
        gradient = parameter.grad
        if not self._is_prompt or gradient.layout is not torch.strided:
            return gradient
        slot = self.reducer.slot(name)
        if slot is None or slot.shape != gradient.shape:
            return gradient
        address, tensor = self._slots.get(name, (0, None))
        if address != slot.ctypes.data:
            tensor = like(parameter, slot)
            self._slots[name] = slot.ctypes.data, tensor
        if gradient.data_ptr() == tensor.data_ptr():
            return gradient
        parameter.grad = tensor.copy_(gradient)
        return tensor

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._late is not None:
            raise UsageError("a closure wants the parameters of this step at once: use one without priorities")
        if not self._is_prompt:
            raise UsageError("a closure wants the gradients of this step at once: use one without lag")

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            self._is_synchronized = False
            if isinstance(loss, torch.Tensor):
                return self._world.allreduce(loss.detach(), "avg")
            return float(self._world.allreduce(np.array(float(loss)), "avg"))

        return averaged


def _module(model: Any) -> Any:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    return model
