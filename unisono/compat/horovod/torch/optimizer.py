"""`DistributedOptimizer`: averages gradients while backward computes others, by the `GradientReducer` of Unisono."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from unisono.compat.horovod.arguments import Adasum, Average, gradient_op
from unisono.compat.horovod.errors import ArgumentError
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.torch.averaging import Averaging
from unisono.compat.horovod.torch.calls import grouped_allreduce_async, synchronize
from unisono.compat.horovod.torch.compression import Compression
from unisono.errors import UsageError
from unisono.frameworks.torch.training.trainable import TorchTrainable
from unisono.frameworks.training.averager import Form


def _shared(name: str) -> property:
    """Return an attribute of a distributed optimizer that is one of its plain optimizer."""
    return property(lambda self: getattr(self._plain, name), lambda self, value: setattr(self._plain, name, value))


class _Sharing:
    """The attributes that a distributed optimizer shares with the optimizer that it was made of.

    The program may go on using the plain optimizer: a scheduler that was made before keeps it, and changes the learning
    rates of its groups. So state, groups and defaults are attributes of the plain one only. A library may also have put
    a method into the plain one, as schedulers and profilers do with `step`. It hides no method of the distributed
    optimizer, which calls it in place of that of the class.
    """

    _plain: Any

    state = _shared("state")
    param_groups = _shared("param_groups")
    defaults = _shared("defaults")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set the state of the plain optimizer, as `load_state_dict` of torch does."""
        self._plain.__setstate__(state)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies and pickles, whose gradients nobody would average."""
        raise UsageError(
            "a DistributedOptimizer cannot be copied or pickled, because hooks of this process average its gradients: "
            "copy its state_dict(), or pass a copy of the optimizer of torch to hvd.DistributedOptimizer"
        )

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the optimizer of torch."""
        method = vars(self._plain).get(name) or getattr(super(), name)
        return method(*arguments, **options)


class _Distributed(_Sharing):
    """The methods of an optimizer that averages gradients. The class of the wrapped optimizer comes behind this one."""

    _averaging: Averaging
    _is_synchronized = False
    _synchronizes = True

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, so that the program can read or clip them before `step`.

        Parameters without a gradient on this rank count as zeros.

        Raises:
            HorovodInternalError: a rank was lost, or ranks disagree.
        """
        self._averaging.finish()
        self._is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Make `step` inside the block use gradients as they are, after `synchronize`."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backwards accumulate gradients before they are averaged."""
        self._averaging.set_passes(passes)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average the gradients and apply them. Inside `skip_synchronize`, only apply them.

        Args:
            closure: computes the gradients, as in torch; they are averaged after each call of it.
        """
        if not self._synchronizes:
            self._is_synchronized = False
            return self._call("step", closure)
        if closure is not None:
            return self._call("step", self._averaged(closure))
        if self._is_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(): "
                "the gradients are averaged twice",
                stacklevel=2,
            )
        self.synchronize()
        self._is_synchronized = False
        return self._call("step")

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Reset the gradients, as torch does.

        Raises:
            AssertionError: backward has computed gradients that `step` or `synchronize` has not averaged yet.
        """
        if self._averaging.has_begun:
            raise AssertionError(
                "zero_grad() was called after backward and before step() or synchronize(), while gradients were being "
                "averaged: call it after step()"
            )
        self._call("zero_grad", *arguments, **options)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a state, as torch does. Backwards that were not followed by a step do not count."""
        self._averaging.restart()
        self._call("load_state_dict", state_dict)

    def _averaged(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def averaged() -> Any:
            loss = closure()
            self._averaging.finish()
            return loss

        return averaged


class _DistributedAdasum(_Sharing):
    """The methods of an optimizer that combines the updates of ranks by Adasum. Each rank applies its own gradients."""

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: each rank accumulates its own gradients."""

    def synchronize(self) -> None:
        """Do nothing, because gradients are not averaged."""

    def skip_synchronize(self) -> NoReturn:
        """Raise an error: there is no synchronisation to skip."""
        raise AssertionError("an optimizer with op=Adasum combines updates and not gradients: call step() alone")

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients of this rank, and replace the changes by the Adasum of those of all ranks."""
        parameters = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        before = [parameter.clone() for parameter in parameters]
        loss = self._call("step", closure)
        changes = [parameter - start for parameter, start in zip(parameters, before, strict=True)]
        combined = synchronize(grouped_allreduce_async(changes, op=Adasum))
        for parameter, start, change in zip(parameters, before, combined, strict=True):
            parameter.copy_(start + change)
        return loss


def DistributedOptimizer(  # noqa: N802  (the name of Horovod, whose result is an optimizer)
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, parameters and state whose `step` averages gradients over ranks.

    A hook passes each gradient to a `GradientReducer` as soon as backward has computed it. It has these methods beside
    those of the optimizer: `synchronize`, `skip_synchronize` and `set_backward_passes_per_step`.

    Args:
        optimizer: the optimizer. The result shares its parameters, options and state, and replaces it.
        named_parameters: ``model.named_parameters()``. Without it parameters are numbered, so all ranks must have them
            in the same order.
        compression: the form in which gradients travel. ``Compression.fp16`` is the "float16" of `GradientReducer`,
            which also corrects rounding errors.
        backward_passes_per_step: how many backwards accumulate gradients before they are averaged.
        op: Average, Sum or Adasum. With Adasum each rank applies its own gradients, and `step` combines the changes.
            With Sum, call `zero_grad` in each step: a sum that ``.grad`` still holds counts again for each rank, as in
            Horovod.
        gradient_predivide_factor: gradients are divided by it before the sum, and multiplied by it after. For Average.
        num_groups: an old form of `groups`.
        groups: checked, and without effect: the reducer measures how large its buckets should be.
        sparse_as_dense: whether sparse gradients are averaged as dense ones. Otherwise ranks gather their values.
        process_set: the ranks whose gradients are averaged. Other ranks apply their own.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have, two parameters have the same name, or a
            parameter of the optimizer has none.
    """
    chosen = gradient_op(op, gradient_predivide_factor, process_set)
    _check_groups(groups if groups is not None else num_groups or None)
    pairs = None if named_parameters is None else list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs or ()):
        raise ArgumentError(
            "named_parameters must be pairs of a name and a parameter, as model.named_parameters() gives"
        )
    trainable = TorchTrainable(optimizer, pairs)
    if chosen == "adasum":
        return _extended(optimizer, _DistributedAdasum)
    distributed = _extended(optimizer, _Distributed)
    is_custom = compression not in (Compression.none, Compression.fp16)
    distributed._averaging = Averaging(
        trainable,
        op=chosen,
        form=Form(float(gradient_predivide_factor), compression if is_custom else None, sparse_as_dense),
        is_half=compression is Compression.fp16,
        passes=backward_passes_per_step,
        process_set=process_set,
    )
    return distributed


def _extended(optimizer: Any, methods: type) -> Any:
    """Return an optimizer that shares everything with `optimizer`, and has further methods."""
    if isinstance(optimizer, (_Distributed, _DistributedAdasum)):
        raise ArgumentError("optimizer is distributed already: pass the optimizer of torch")
    extended_class: Any = type(type(optimizer).__name__, (methods, type(optimizer)), {})
    extended = extended_class.__new__(extended_class)
    hiding = {
        name for each in extended_class.__mro__[: extended_class.__mro__.index(_Sharing) + 1] for name in vars(each)
    }
    extended.__dict__.update({name: value for name, value in vars(optimizer).items() if name not in hiding})
    extended._plain = optimizer
    return extended


def _check_groups(groups: Any) -> None:
    """Check the argument `groups`; raises `ArgumentError`."""
    if groups is None:
        return
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        return
    if not isinstance(groups, (list, tuple)):
        raise ArgumentError(f"groups must be a positive number or lists of parameters, not {groups!r}")
    parameters = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in parameters):
        raise ArgumentError("groups must be lists of parameters, which are tensors")
    if len({id(parameter) for parameter in parameters}) != len(parameters):
        raise ArgumentError("a parameter occurs twice in groups: put it into one")
