"""Running a program for one process on all ranks."""

from __future__ import annotations

import importlib.util
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import unisono as un
from unisono.frameworks.transparent.changes import Changes
from unisono.frameworks.transparent.imports import after_import


def main(arguments: Sequence[str]) -> None:
    """Run ``train.py ...`` or ``-m package.module ...`` on this rank, and close the communicator."""
    with un.init() as world:
        if world.rank:
            os.environ["TQDM_DISABLE"] = "1"
        run(world, arguments)


def run(world: un.Communicator, arguments: Sequence[str], write: Callable[[str], None] | None = None) -> dict[str, Any]:
    """Run a program on all ranks as ``python train.py ...`` would; return the variables of its module.

    Libraries that the program imports stay changed, also after its end.

    Args:
        world: the ranks.
        arguments: the file of the program and its arguments, or ``-m``, the module and its arguments.
        write: writes a line of the report of changes; by default, rank 0 writes it to standard error.

    Raises:
        UsageError: the program cannot be changed safely.
    """
    is_module = arguments[0] == "-m"
    words = arguments[1:] if is_module else arguments
    file = os.path.abspath(_file_of(words[0]) if is_module else words[0])
    changes = Changes(world, file, write)
    after_import("torch", partial(_change_torch, changes))
    after_import("keras", partial(_change_keras, changes))
    _begin_alike(world)
    with _argv(words, "" if is_module else os.path.dirname(file)), _output_of(world.rank):
        if is_module:
            variables = runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            variables = runpy.run_path(file, run_name="__main__")
    if not changes.has_training:
        changes.note(
            "warning: the program has made no optimizer of torch and has called no fit of Keras, so each rank has "
            "done the same work alone"
        )
    return variables


def _file_of(module: str) -> str:
    """Return the file of a module, or of the ``__main__`` of a package."""
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec.origin if spec is not None and spec.origin else module


def _change_torch(changes: Changes, torch: Any) -> None:
    from unisono.frameworks.transparent import torch_files, torch_loaders, torch_optimizers

    torch.manual_seed(changes.world.broadcast_object(torch.initial_seed()))
    for module in (torch_optimizers, torch_loaders, torch_files):
        module.change(changes, torch)


def _change_keras(changes: Changes, keras: Any) -> None:
    from unisono.frameworks.transparent import keras_training

    keras_training.change(changes, keras)


def _begin_alike(world: un.Communicator) -> None:
    """Set the random generators of Python and numpy on all ranks to their state on rank 0."""
    python, numpy = world.broadcast_object((random.getstate(), np.random.get_state()))
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def _argv(words: Sequence[str], folder: str) -> Iterator[None]:
    """Set `sys.argv` to the arguments of the program, and let the program import modules from its folder."""
    before, sys.argv = sys.argv, list(words)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before
        sys.path.remove(folder)


@contextmanager
def _output_of(rank: int) -> Iterator[None]:
    """Drop the standard output of all ranks but rank 0. Standard error is not dropped."""
    if rank == 0:
        yield
        return
    before = sys.stdout
    with Path(os.devnull).open("w") as nowhere:
        sys.stdout = nowhere
        try:
            yield
        finally:
            sys.stdout = before
