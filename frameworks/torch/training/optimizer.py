"""`DistributedOptimizer`: averages gradients over ranks while backward computes. It needs no process group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from unisono import Communicator, GradientReducer, UnisonoError, UsageError
from unisono.data_parallel import HybridGroups, broadcast_parameters
from unisono.frameworks.gradients.priorities import Arriving
from unisono.frameworks.sparse_sums import SparseSums
from unisono.frameworks.torch.calls import sparse
from unisono.frameworks.torch.calls.dynamo_skip import skip_dynamo
from unisono.frameworks.torch.calls.tensors import array_of, tensor_of
from unisono.frameworks.torch.training.applied_sums import is_applied, mark_applied, warn_if_kept
from unisono.frameworks.torch.training.deferred_updates import DeferredUpdates, check_deferrable
from unisono.frameworks.torch.training.trainable import TorchTrainable, mean_loss
from unisono.frameworks.torch.training.wrapped_optimizer import WrappedOptimizer
from unisono.frameworks.training.averager import Averager


@skip_dynamo
class DistributedOptimizer(WrappedOptimizer):
    """A wrapper of an optimizer of torch that averages gradients over ranks. Use it like the optimizer that it wraps.

    When backward has accumulated a gradient, a hook passes the gradient to a `GradientReducer`. At its end, backward
    waits until all gradients are averages, so the program may then read, clip and scale them. `step` averages the
    gradients that backward has not averaged, for example those that the program has set. All ranks create the
    optimizer and call backward, `step`, `flush`, `add_param_group`, `load_state_dict` and `close` in the same order.
    The constructor copies the parameters of rank 0 to all ranks.

    If a training step has several backwards, put all of them except the last in `no_sync`, so that gradients are
    averaged once. A gradient that no rank has in a step is None, and `optimizer` leaves its parameter out.

    With a lag, with priorities or with ``op="sum"``, `step` waits for the averages, and not backward. Between backward
    and `step`, ``.grad`` may then hold the average or not: call `synchronize` before you read or change gradients. If a
    gradient was changed before that, `step` raises a `UsageError` on all ranks, and no rank applies it.

    With ``op="sum"``, call `zero_grad` in each training step. After `step`, ``.grad`` holds the sum S of all n ranks. A
    backward that adds the gradients g of the ranks to it leads to n S + ∑ g, because each rank passes S again. The
    first such backward warns. With averages it leads to S + ∑ g / n, as in one process.

    Between two training steps, all ranks may unfreeze layers, and add or replace parameters in `param_groups`. `step`
    finds these parameters, and averages their first gradients too. With a lag, call `flush` and ``reducer.reset()``
    before that. Each `step` compares a checksum of some parameters with the other ranks. If they differ, `step` raises
    a `MismatchError` on all ranks, with the name of the first parameter that differs.

    Args:
        optimizer: applies the gradients.
        world: the ranks.
        named_parameters: names and parameters, as ``model.named_parameters()`` returns them, in the same order on all
            ranks. By default, those of `model`; without a model, the parameters are numbered.
        model: the module of the parameters; only needed with `priorities`.
        priorities: whether `step` returns before all gradients have arrived. A parameter is then updated when it is
            next looked up in `model`, as in the next forward; see `GradientReducer`. Parameters have no ``.grad`` after
            `step`. It cannot be used with a lag, groups or a closure, and only with optimizers of torch.optim that
            update each parameter by itself.
        groups: the number of groups of ranks inside which gradients are averaged, or the ranks of each group. After
            each `step`, a group of ranks exchanges its changes with the other groups by `HybridGroups.exchange`, and
            `finish` ends the training. None for one group of all ranks.
        staleness: how far the groups of ranks may be apart; see `HybridGroups`.
        verify_every: in how many training steps each parameter is compared once with the other ranks of the group. The
            first three training steps compare all parameters. Pass 0 to compare none, if the processors of the ranks
            round differently: then equal gradients give updates that differ in their last bits.
        options: further arguments of `GradientReducer`, such as `lag`, `compression` and `missing`.

    Attributes:
        optimizer: the wrapped optimizer.
        hybrid: the `HybridGroups` of the argument `groups`; None without this argument.
        reducer: the reducer; its `report` shows the time of communication.

    Raises:
        UsageError: an argument has a value that it cannot have, a parameter of the optimizer has no name, or the
            optimizer cannot be used with `priorities`.
        MismatchError: the parameters of the ranks differ in name, shape or dtype; the message names the first.
    """

    # False makes a `GradScaler` divide the gradients itself. With True it would set attributes for a fused optimizer on
    # this wrapper, and not on the wrapped optimizer.
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
        super().__init__(optimizer)
        if named_parameters is None and model is not None:
            named_parameters = _module(model).named_parameters()
        self._trainable = TorchTrainable(optimizer, named_parameters)
        self._parameters = self._trainable.named
        if priorities:
            if groups is not None:
                raise UsageError("priorities=True needs groups=None, because it orders the gradients of all ranks")
            check_deferrable(optimizer, model, self._parameters)
        self._is_prompt = not options.get("lag")
        self._averages = options.get("op", "avg") == "avg"
        # A sum cannot be summed up again, as the gradients of several backwards would be.
        self._ends_in_backward = self._is_prompt and not priorities and self._averages
        broadcast_parameters(world, self._parameters)
        self.hybrid: HybridGroups | None = None
        if groups is not None:
            self.hybrid = HybridGroups(world, self._parameters, groups=groups, staleness=staleness)
        self._world = self.hybrid.group if self.hybrid is not None else world
        self._sparse_sums = SparseSums(self._world)
        self.reducer = GradientReducer(
            self._world, priorities=priorities, parameters=self._trainable.own, verify_every=verify_every, **options
        )
        self._deferred = DeferredUpdates(optimizer, model, self._parameters) if priorities else None
        self._syncs = True
        self._is_synchronized = False  # whether all gradients are averages, as far as hooks know
        self._has_gradients = False
        gather = self._gather if self._is_prompt and not priorities else None
        self._averager = Averager(self._trainable, lambda: self.reducer, gather, moves=self._is_prompt)
        self._is_end_queued = False  # whether backward will call `_end_backward`
        self._error: UnisonoError | None = None  # of a backward, for the next `step` or `synchronize` to raise
        self._steps = self._turns = 0  # steps, and how often gradients have been averaged since the last one
        self._trainable.hook(self._accumulated, self._parameters)
        watched = () if self._averages else [item for item in self._trainable.own.items() if item[1].requires_grad][:1]
        self._watches = [warn_if_kept(*item) for item in watched]
        self._seal()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Make the backwards in the block accumulate gradients on this rank only."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def synchronize(self) -> None:
        """Average the gradients that are due, unless backward has, so that the program can change them before `step`.

        With priorities, this waits for all gradients, and `step` makes all updates at once. It raises the errors of
        `GradientReducer.finish`, also those of a backward.
        """
        if self._must_average():
            self._averager.adopt(self._reduced())
        self._is_synchronized = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients that are due, if there are any. It first averages those that are no averages yet.

        With priorities, and without `synchronize` before, it returns when it knows that no rank has an error. The
        other parameters are updated later, each when the next forward pass reads it from `model`. Their learning rate
        is that of this `step`. If the optimizer has hooks of its step, `step` waits for all gradients.

        Args:
            closure: as in torch. Its result is averaged over ranks, so that all ranks make the same decisions by it.

        Raises:
            UsageError: there is a closure, and a lag or priorities. Or with priorities, a parameter has got a gradient
                and was not looked up in `model` since the last step.

        It also raises the errors of `synchronize`. With priorities, the next forward may raise those of lost ranks.
        """
        if closure is not None:
            return self._apply(self._closure(closure))
        if self._must_average():
            reduced = self._reduced()
            if self._deferred is not None and isinstance(reduced, Arriving):
                reduced = self._deferred.defer(reduced)
            self._averager.adopt(reduced)
        return self._apply() if self._has_gradients else None

    step.hooked = True  # type: ignore[attr-defined]  # so that torch calls no hooks of it beside those of `optimizer`

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as `zero_grad` of torch does."""
        self._is_synchronized = False
        self._averager.averaged = {}
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as torch does, and copy its parameters from rank 0 to all ranks.

        All ranks call it, between two training steps.

        Raises:
            UsageError: there are hybrid groups, whose parameters cannot change.
            MismatchError: the ranks add different parameters; the message names the first that differs.
        """
        if self.hybrid is not None:
            raise UsageError(
                "hybrid groups exchange the parameters with which they started: create a new optimizer for others"
            )
        self._settle()
        before = set(self._parameters)
        self.optimizer.add_param_group(param_group)
        self._trainable.update()
        broadcast_parameters(self._world, {name: x for name, x in self._parameters.items() if name not in before})

    def flush(self) -> None:
        """Apply the gradients of all training steps in flight. Call it at the end, and before you save the model."""
        self._settle()
        for gradients in self.reducer.flush():
            for name in self._parameters:
                self._trainable.put(name, gradients.get(name))
            self._apply()

    def finish(self) -> None:
        """End the training: call `flush` and, with the argument `groups`, wait for the other groups of ranks.

        All ranks call it. Afterwards all ranks hold the same bits, and only `close` may follow.
        """
        self.flush()
        if self.hybrid is not None:
            self.hybrid.finish(self._parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the optimizer, with the state of this rank's reducer under the key "reducer".

        It holds tensors and plain values only, so ``torch.load(..., weights_only=True)`` takes it.
        """
        self._settle()
        return {**self.optimizer.state_dict(), "reducer": _with_arrays(self.reducer.state_dict(), tensor_of)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a result of `state_dict`, of this rank or another one, or of the wrapped optimizer alone.

        See `GradientReducer.load_state_dict` for the state of another rank.
        """
        self._settle()
        state = dict(state_dict)
        reducer = state.pop("reducer", None)
        self.optimizer.load_state_dict(state)
        self.reducer.verify_all()
        if reducer is not None:
            self.reducer.load_state_dict(_with_arrays(reducer, array_of))

    def close(self) -> None:
        """Close the reducer and remove all hooks. Afterwards the wrapped optimizer can be used alone again.

        With priorities, the updates that `step` has not made are made. It raises the errors of `synchronize`.
        """
        with contextlib.ExitStack() as stack:
            if self.hybrid is not None:
                stack.callback(self.hybrid.close)
            stack.callback(self.reducer.close)
            self._trainable.close()
            for watch in self._watches:
                watch.remove()
            if self._deferred is not None:
                self._deferred.close()

    def _reduced(self) -> Mapping[str, Any]:
        """Return the averaged gradients that are due, by name."""
        self._settle()
        self._is_end_queued = False
        self._notice_new_parameters()
        self.reducer.turn = 4 * (self._steps % 2) + self._turns % 4
        self._turns += 1
        own = self._trainable.own.items()
        reduced = self._averager.reduce(name for name, parameter in own if not is_applied(parameter.grad))
        self._has_gradients = bool(reduced) or (self._is_prompt and self._deferred is None)
        return reduced

    def _must_average(self) -> bool:
        """Return whether there are gradients to average, because no backward has or the program has set some.

        Raises:
            UnisonoError: the error of a backward.
        """
        if self._error is not None:
            error, self._error, self._turns = self._error, None, 0
            raise error
        if self._is_synchronized:
            return False
        if not self._ends_in_backward or not self._turns:
            return True
        self._notice_new_parameters()
        gradients = ((name, parameter.grad) for name, parameter in self._trainable.own.items())
        return any(each is not None and each is not self._averager.averaged.get(name) for name, each in gradients)

    def _notice_new_parameters(self) -> None:
        """Add hooks to the parameters that were unfrozen, added or replaced since the last time."""
        if self._trainable.update():
            self.reducer.verify_all()
        if self._trainable.added and self.hybrid is not None:
            name = self._trainable.added[0]
            self.reducer.complain(f"{name!r} is new, and hybrid groups exchange the parameters with which they started")

    def _gather(self, name: str) -> Callable[[Any], Any]:
        """Return the function that gathers a sparse gradient when the average of its placeholder is there."""

        def total(_: Any) -> Any:
            total = sparse.total_of(self._world, self._sparse_sums, self._parameters[name])
            return total / self._world.size if self._averages else total

        return total

    def _settle(self) -> None:
        """Make the updates that the last `step` deferred."""
        if self._deferred is not None:
            self._deferred.settle()

    def _apply(self, *closure: Callable[[], Any]) -> Any:
        """Apply gradients and, with the argument `groups`, exchange the changes with the other groups of ranks."""
        loss = self.optimizer.step(*closure)
        if not self._averages:
            mark_applied(parameter.grad for parameter in self._trainable.own.values())
        self._is_synchronized, self._averager.averaged = False, {}
        self._steps, self._turns = self._steps + 1, 0
        if self.hybrid is not None:
            self.hybrid.exchange(self._parameters)
        return loss

    def _accumulated(self, name: str, parameter: Any) -> None:
        """Take a gradient that backward has accumulated. It is the hook of each parameter."""
        if self._deferred is not None:
            self._update_before(self._deferred, name, parameter)
        self._is_synchronized = False
        if not self._syncs:
            self._averager.averaged.pop(name, None)
            return
        self._averager.ready(name)
        if self._ends_in_backward and not self._is_end_queued:
            self._is_end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Average all gradients at the end of a backward. `step` raises the error, because its callers expect it."""
        try:
            self._averager.adopt(self._reduced())
        except UnisonoError as error:
            self._error = self._error or error

    def _update_before(self, deferred: DeferredUpdates, name: str, parameter: Any) -> None:
        """Make deferred updates before the next gradient is passed; complain if `parameter` still lacked its update."""
        if deferred.overlooked(parameter):
            deferred.settle()
            self.reducer.complain(
                f"{name!r} has got a gradient, but was not looked up in model since the last step(): with priorities, "
                "read it as an attribute of its module in each forward"
            )
        elif self._syncs:
            deferred.make_all()

    def _closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        if self._deferred is not None:
            raise UsageError("a closure needs the updated parameters at once: use one without priorities")
        if not self._is_prompt:
            raise UsageError("a closure needs the gradients of this step at once: use one without lag")

        def averaged() -> Any:
            loss = closure()
            self.synchronize()
            return mean_loss(self._world, loss)

        return averaged


def _with_arrays(state: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the state of a reducer with its arrays converted: those of steps in flight, and those of compression."""

    def converted(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {name: convert(array) for name, array in arrays.items()}

    of_compression = {kind: converted(arrays) for kind, arrays in state.items() if isinstance(arrays, Mapping)}
    return {**state, **of_compression, "in_flight": list(map(converted, state["in_flight"]))}


def _module(model: Any) -> Any:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    return model
