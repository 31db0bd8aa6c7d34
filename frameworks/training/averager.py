"""`Averager`: averages the gradients of one optimizer over ranks, for the distributed optimizers of all frameworks.

Theory of operation
-------------------
A distributed optimizer has two parts. The `Trainable` of a framework knows its parameters, their gradients and its
hooks. The averager knows the rest of a training step:

1. A hook says that backward has accumulated a gradient: `ready` passes it to the `GradientReducer`, in the form in
   which it travels. With several backward passes in a step, only the last one passes it; `count` counts them.
2. At the end of backward or in `step`, `reduce` passes the gradients that no hook has passed, and returns the averages
   that are due. With a lag these are the gradients of an earlier step, or none.
3. `adopt` makes the averages the gradients of the parameters.

The ranks gather the elements of a sparse gradient instead of averaging them. All ranks must take part, also those that
have no gradient for this parameter. So the averager passes the reducer a placeholder: a dense tensor with one dimension
more than the parameter. A rank that gets an average of that form joins the gather.

Frameworks that compute all gradients of a step at once call `averages` or `average_list` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from unisono import GradientReducer, UsageError
from unisono.frameworks.gradients import agreement

# Returns the gradient that takes the place of a value that has been reduced.
Decode = Callable[[Any], Any]


class Trainable(Protocol):
    """The parameters of an optimizer in one framework, by name: see `unisono.frameworks.torch.training.trainable`."""

    named: dict[str, Any]

    def gradient(self, name: str) -> Any: ...
    def put(self, name: str, average: Any) -> Any: ...
    def moved(self, name: str, slot: Any) -> Any: ...
    def vacate_others(self, passed: Any) -> None: ...
    def is_sparse(self, gradient: Any) -> bool: ...
    def can_gather(self, gradient: Any) -> bool: ...
    def dense(self, gradient: Any) -> Any: ...
    def sparse(self, gradient: Any) -> Any: ...
    def placeholder(self, name: str) -> Any: ...
    def is_placeholder(self, name: str, average: Any) -> bool: ...


class Form(NamedTuple):
    """The form in which gradients travel, beside the compression of the reducer.

    Attributes:
        predivide: gradients are divided by it before they are reduced, and multiplied by it after.
        compressor: an object of the program whose method `compress` returns the array to send and a context, and whose
            method `decompress` takes both; None for none.
        sparse_as_dense: whether sparse gradients are reduced as dense ones.
    """

    predivide: float = 1.0
    compressor: Any = None
    sparse_as_dense: bool = False

    def encoded(self, gradient: Any) -> tuple[Any, Any]:
        """Return the array to reduce for a dense gradient, and the context that `decoded` needs; None for None."""
        if gradient is None:
            return None, None
        if self.predivide != 1.0:
            gradient = gradient / self.predivide
        return (gradient, None) if self.compressor is None else self.compressor.compress(gradient)

    def decoded(self, average: Any, context: Any) -> Any:
        """Return the gradient for an array that has been reduced; None for None."""
        if average is None:
            return None
        if self.compressor is not None:
            average = self.compressor.decompress(average, context)
        return average if self.predivide == 1.0 else average * self.predivide


class Averager:
    """The gradients of the parameters of one optimizer.

    Args:
        trainable: the parameters.
        reducer: returns the reducer. If it returns another one, the gradients that have been passed are forgotten.
        gather: called with the name of a sparse gradient when it is passed; returns the function that waits for those
            of all ranks and, called with the average of placeholders, returns their average. It is also called for a
            parameter without a gradient, if another rank has a sparse one. None if sparse gradients are an error.
        form: the form in which gradients travel.
        moves: whether gradients are moved to the slots of the reducer. With a lag, there are none.

    Attributes:
        remaining: by name, how many backwards the step still has, for those that `count` knows.
        passed: by name, the gradients of this step that the reducer has; None for one that travels in another form.
        averaged: by name, the gradients that are averages.
    """

    def __init__(
        self,
        trainable: Trainable,
        reducer: Callable[[], GradientReducer],
        gather: Callable[[str], Decode] | None,
        form: Form = Form(),  # noqa: B008 (it is a constant)
        *,
        moves: bool = True,
    ) -> None:
        self._trainable, self._open, self._gather, self._form, self._moves = trainable, reducer, gather, form, moves
        self._is_plain = form.predivide == 1.0 and form.compressor is None
        self._reducer: GradientReducer | None = None
        self._decode: dict[str, Decode] = {}  # by name, of gradients that do not travel as they are
        self._decoders: dict[str, Decode] = {}  # the same, of the gradients for which `reduce` has returned averages
        self.remaining: dict[str, int] = {}
        self.passed: dict[str, Any] = {}
        self.averaged: dict[str, Any] = {}

    def forget(self) -> None:
        """Forget the gradients of this step that have been passed and counted."""
        self.remaining, self._decode, self.passed = {}, {}, {}

    def count(self, name: str, passes: int) -> bool:
        """Count a backward of a parameter; return whether it is the last of the `passes` that a step has.

        Raises:
            AssertionError: the step has had as many.
        """
        remaining = self.remaining.get(name, passes)
        if remaining == 0:
            raise AssertionError(
                f"the gradient of {name!r} was computed more than backward_passes_per_step={passes} times before "
                "step(): call step(), or increase backward_passes_per_step"
            )
        self.remaining[name] = remaining - 1
        return remaining == 1

    def ready(self, name: str) -> None:
        """Pass the gradient of a parameter. A gradient that cannot be reduced is an error of `reduce`, on all ranks."""
        reducer, gradient = self._opened(), self._trainable.gradient(name)
        self.passed[name] = sent = gradient
        is_sparse = self._trainable.is_sparse(gradient)
        if is_sparse and not self._form.sparse_as_dense:
            sent = self._placeholder(reducer, name, gradient)
        elif is_sparse or not self._is_plain:
            sent, context = self._form.encoded(self._trainable.dense(gradient))
            self._decode[name] = partial(self._decoded, context, is_sparse)
            self.passed[name] = None
        elif self._moves:
            self.passed[name] = sent = self._trainable.moved(name, reducer.slot(name))
        reducer.ready(name, sent)

    def reduce(self, names: Iterable[str]) -> Mapping[str, Any]:
        """Pass the gradients of `names` that have not been passed, end the step, and return the averages that are due.

        All ranks call it; each passes its own names. If averages are due, a gradient of this step for which there is
        none is removed, because a later step raises its error. `adopt` takes the result.

        Raises:
            UnisonoError: those of `GradientReducer.finish`.
        """
        reducer = self._opened()
        for name in names:
            if name not in self.passed and self._trainable.gradient(name) is not None:
                self.ready(name)
        passed, self.passed, self.remaining, self.averaged = self.passed, {}, {}, {}
        self._decoders, self._decode = self._decode, {}
        self._trainable.vacate_others(passed.keys())
        for name, gradient in passed.items():
            if gradient is not None and self._trainable.gradient(name) is not gradient:
                reducer.complain(agreement.changed(name, "replaced").message)
        reduced = reducer.finish()
        for name in passed.keys() - reduced.keys() if reduced else ():
            self._trainable.put(name, None)
        return reduced

    def adopt(self, reduced: Mapping[str, Any]) -> None:
        """Wait for the averages in `reduced`, and make them the gradients of the parameters. All ranks call it.

        Raises:
            UnisonoError: a rank was lost while the ranks gather a sparse gradient.
        """
        for name, average in reduced.items():
            if name not in self._trainable.named:  # a parameter of other ranks
                continue
            decode = self._decoders.pop(name, None)
            if decode is None and self._gather is not None and self._trainable.is_placeholder(name, average):
                decode = self._gather(name)
            self.averaged[name] = self._trainable.put(name, average if decode is None else decode(average))

    def _placeholder(self, reducer: GradientReducer, name: str, gradient: Any) -> Any:
        """Begin to gather a sparse gradient, and return what the reducer gets in its place."""
        if self._gather is None or not self._trainable.can_gather(gradient):
            text = "can be used in coordinate format, and without lag and priorities"
            reducer.complain(f"the gradient of {name!r} is of the layout {gradient.layout}, which {text}")
        else:
            self._decode[name] = self._gather(name)
        return self._trainable.placeholder(name)

    def _decoded(self, context: Any, is_sparse: bool, average: Any) -> Any:
        gradient = self._form.decoded(average, context)
        return self._trainable.sparse(gradient) if is_sparse else gradient

    def _opened(self) -> GradientReducer:
        reducer = self._open()
        if reducer is not self._reducer:
            self._reducer, self.passed, self._decode = reducer, {}, {}
        return reducer


def average_list(gradients: Sequence[Any], reduce: Callable[[list[Any]], list[Any]], form: Form) -> list[Any]:
    """Return the averages of the gradients of a step, which travel in a form, or None where there is none.

    Args:
        gradients: dense gradients of one framework, or None where a variable has none.
        reduce: takes what travels, and returns the averages, as `averages` does with a reducer.
        form: the form.
    """
    encoded = [form.encoded(gradient) for gradient in gradients]
    reduced = reduce([sent for sent, _ in encoded])
    return [form.decoded(average, context) for average, (_, context) in zip(reduced, encoded, strict=True)]


def check_without_lag(options: Mapping[str, Any]) -> None:
    """Check that the arguments of a reducer have no lag, for optimizers that apply gradients right after `averages`.

    Raises:
        UsageError: they have a lag, so that the first steps would have no gradients to apply.
    """
    if lag := options.get("lag"):
        raise UsageError(
            f"lag={lag!r} cannot be used with this optimizer, which applies the gradients of a step at once, because "
            "the first steps with a lag have none: leave lag out"
        )


def averages(reducer: GradientReducer, gradients: Sequence[Any]) -> list[Any]:
    """Make a step of a reducer with all gradients of a step, and return the averages that are due, and None for others.

    Args:
        reducer: the reducer, which may overwrite the gradients.
        gradients: arrays, or None where there is no gradient. They are named by their places.
    """
    for place, gradient in enumerate(gradients):
        if gradient is not None:
            reducer.ready(f"gradient {place}", gradient)
    reduced = reducer.finish()
    return [reduced.get(f"gradient {place}") for place in range(len(gradients))]
