"""`Averaging`: the gradients of an optimizer of torch, averaged among ranks some of which may join."""

from __future__ import annotations

from typing import Any

import torch

from unisono.compat.horovod import job
from unisono.compat.horovod.arguments import Average, Sum, check_passes
from unisono.compat.horovod.process_sets import ProcessSet
from unisono.compat.horovod.reducers import JobReducer
from unisono.compat.horovod.torch.calls import sparse_allreduce_async
from unisono.errors import UnisonoError
from unisono.frameworks.torch.training.trainable import TorchTrainable, weak
from unisono.frameworks.training.averager import Averager, Decode, Form


class Averaging:
    """The gradients of one optimizer.

    Args:
        trainable: the parameters of the optimizer.
        op: "avg" or "sum".
        form: the form in which gradients travel.
        is_half: whether the reducer compresses them to float16.
        passes: how many backwards accumulate gradients before they are averaged.
        process_set: the ranks.
    """

    def __init__(
        self, trainable: TorchTrainable, *, op: str, form: Form, is_half: bool, passes: int, process_set: ProcessSet
    ) -> None:
        self._trainable, self._op, self._process_set = trainable, op, process_set
        signature = repr([(name, tuple(parameter.shape)) for name, parameter in trainable.own.items()])
        self._reducer = JobReducer(signature, process_set, op, is_half=is_half)
        self._averager = Averager(trainable, self._reducer.opened, self._gather, form)
        self.set_passes(passes)
        trainable.hook(weak(self._accumulated), trainable.own)

    @property
    def has_begun(self) -> bool:
        """Return whether gradients of this step are being averaged."""
        return bool(self._averager.passed)

    def set_passes(self, passes: int) -> None:
        """Set how many backwards accumulate gradients before they are averaged; raises `ArgumentError`."""
        check_passes(passes)
        self._passes = passes
        self._averager.remaining = {}

    def restart(self) -> None:
        """Forget the backwards that were not followed by a step."""
        with self._reducer.lock:
            self._averager.forget()

    def finish(self) -> None:
        """Wait until all gradients of this step are averaged, those of missing backwards included.

        Raises:
            HorovodInternalError: a rank was lost, or ranks disagree.
        """
        if not self._reducer.averages():
            self._averager.remaining = {}
            return
        with self._reducer.step():
            self._trainable.update()
            names = [name for name, parameter in self._trainable.own.items() if parameter.requires_grad]
            for name in names:
                if self._trainable.gradient(name) is None:
                    self._trainable.put(name, torch.zeros_like(self._trainable.own[name]))
            self._averager.adopt(self._averager.reduce(names))

    def _accumulated(self, name: str, parameter: Any) -> None:
        """Count a backward of a parameter, and pass its gradient if it was the last one of the step."""
        with self._reducer.lock:
            if self._averager.count(name, self._passes) and self._reducer.averages():
                try:
                    self._averager.ready(name)
                except UnisonoError as error:
                    job.raise_explained(error)

    def _gather(self, name: str) -> Decode:
        """Start to gather a sparse gradient; return the function that waits for it."""
        op = Average if self._op == "avg" else Sum
        gradient = self._trainable.gradient(name)
        wait = sparse_allreduce_async(gradient, f"{self._reducer.name}.{name}", op, self._process_set)
        return lambda _: wait()
