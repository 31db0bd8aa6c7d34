"""`Averaging`: lists of gradients of Keras and TensorFlow, averaged among ranks some of which may join."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unisono.compat.horovod.arguments import check_groups, gradient_op
from unisono.compat.horovod.compression import Compressor, HalfCompressor, NoneCompressor
from unisono.compat.horovod.process_sets import ProcessSet, global_process_set
from unisono.compat.horovod.reducers import JobReducer
from unisono.frameworks.training.averager import Form, average_list, averages


class Averaging:
    """Averages lists of gradients, of which each step has one. A framework has a class of its own.

    Ranks that have joined take part in the steps without gradients. Gradients of other shapes are those of another
    reducer, which is kept for later steps.

    Args:
        compression: the compressor. ``Compression.fp16`` is the "float16" of `GradientReducer`.
        sparse_as_dense: whether a sparse gradient is made dense. Otherwise ranks gather its values and indices.
        op: Average, Sum or Adasum.
        predivide: gradients are divided by it before they are averaged, and multiplied by it after.
        groups: checked, and without effect: all gradients of a step are passed in one call.
        process_set: the ranks.
        scale_local_gradients: whether gradients of local variables are divided by the number of ranks.
        reducers: reducers that are shared with other objects of the same arguments, by their gradients.

    Raises:
        ArgumentError, UsageError: an argument has a value that it cannot have.
    """

    def __init__(
        self,
        *,
        compression: type[Compressor] = NoneCompressor,
        sparse_as_dense: bool = False,
        op: int,
        predivide: float = 1.0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        reducers: dict[Any, JobReducer] | None = None,
    ) -> None:
        self._op = gradient_op(op, float(predivide), process_set)
        check_groups(groups)
        self._is_half = issubclass(compression, HalfCompressor)
        is_custom = not issubclass(compression, (NoneCompressor, HalfCompressor))
        self._form = Form(float(predivide), compression if is_custom else None, sparse_as_dense)
        self._process_set, self._scale_local_gradients = process_set, scale_local_gradients
        self._reducers: dict[Any, JobReducer] = {} if reducers is None else reducers
        self._local: set[Any] = set()

    def add_local(self, variable: Any) -> None:
        """Let the gradients of a variable stay those of this rank."""
        self._local.add(_key(variable))

    def is_local(self, variable: Any) -> bool:
        """Return whether the gradients of a variable stay those of this rank."""
        return _key(variable) in self._local

    def average(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Return the averages over ranks, in eager mode or in a graph.

        Args:
            gradients: gradients of the framework, or None where there is none.
            variables: the variable of each gradient; may be left out if no variable is local.
        """
        apart: dict[int, Any] = {}  # by place, the gradients that are not averaged as dense ones
        for place, gradient in enumerate(gradients):
            if self._local and self.is_local(variables[place]):
                is_scaled = self._scale_local_gradients and gradient is not None
                apart[place] = self._scaled(gradient) if is_scaled else gradient
            elif self._is_sparse(gradient) and not self._form.sparse_as_dense:
                apart[place] = self._gathered(gradient)
        result = [None if place in apart else self._dense(gradient) for place, gradient in enumerate(gradients)]
        if any(gradient is not None for gradient in result):
            result = average_list(result, self._reduced, self._form)
        return [apart.get(place, average) for place, average in enumerate(result)]

    def _scaled(self, gradient: Any) -> Any:
        """Return a gradient divided by the number of ranks."""
        return gradient / (self._process_set.size() or 1)

    def _is_sparse(self, gradient: Any) -> bool:
        """Return whether a gradient is sparse. The gradients of the backends torch and JAX of Keras are dense."""
        return False

    def _gathered(self, gradient: Any) -> Any:
        """Return the average of a sparse gradient."""
        raise NotImplementedError

    def _dense(self, gradient: Any) -> Any:
        """Return a gradient in the form in which it is averaged, and None for None."""
        return gradient

    def _reduced(self, gradients: list[Any]) -> list[Any]:
        """Return the averages of dense gradients."""
        return self._step(self._reducer(gradients), gradients)

    def _step(self, reducer: JobReducer, gradients: list[Any]) -> list[Any]:
        if not reducer.averages():
            return gradients
        with reducer.step() as opened:
            return averages(opened, gradients)

    def _reducer(self, gradients: Sequence[Any]) -> JobReducer:
        shapes = tuple(None if each is None else (str(each.dtype), str(each.shape)) for each in gradients)
        key = shapes, self._op, self._is_half, self._process_set
        if key not in self._reducers:
            signature = repr((shapes, self._op, self._is_half))
            self._reducers[key] = JobReducer(signature, self._process_set, self._op, is_half=self._is_half)
        return self._reducers[key]


def _key(variable: Any) -> Any:
    """Return an object that is equal for one variable only; variables themselves compare by their elements."""
    return variable.ref() if hasattr(variable, "ref") else id(variable)
