"""The sum of sparse tensors, as Gloo computes it, by `SparseSums`: an element of several ranks travels once."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import Array
from unisono.frameworks.sparse_sums import SparseSum, SparseSums
from unisono.frameworks.torch.calls.operations import operation
from unisono.frameworks.torch.calls.tensors import array_of, tensor_of
from unisono.frameworks.torch.calls.work import Work, WorkKeeper


def allreduce(communicator: Communicator, sums: SparseSums, tensor: Any, opts: Any, keeper: WorkKeeper) -> Work:
    """Start to replace a tensor in coordinate format by the sum of the tensors of all ranks.

    It waits only for a first exchange, of the shape of each rank.

    Raises:
        UsageError: `opts` asks for another operation, or the shape of the tensor differs between ranks.
    """
    if operation(opts.reduceOp, tensor.dtype) != "sum" or tensor.layout is not torch.sparse_coo:
        raise UsageError(
            "sparse tensors must be in coordinate format, and op must be SUM: otherwise pass tensor.to_dense()"
        )
    own = tensor.detach().coalesce()
    facts = np.array([own.sparse_dim(), *own.shape])
    all_facts = communicator.allgather(facts[np.newaxis])
    if (all_facts != facts).any():
        raise UsageError(f"sparse tensors must have one shape on all ranks; got {all_facts[:, 1:].tolist()}")
    started, total = _start(sums, own, wait=not opts.asyncOp)

    def finish() -> None:
        with torch.no_grad():
            tensor.copy_(total())

    return Work(started, [tensor], finish, keeper)


def total_of(communicator: Communicator, sums: SparseSums, parameter: Any) -> Any:
    """Return the sum of all ranks' sparse gradients of one parameter. All ranks call it, also those without a gradient.

    Raises:
        UsageError: the ranks' gradients differ in their number of sparse dimensions.
    """
    gradient = parameter.grad
    own = None if gradient is None else gradient.detach().coalesce()
    all_facts = communicator.allgather(np.array([0 if own is None else own.sparse_dim()]))
    dimensions = int(all_facts.max())
    if not np.isin(all_facts, (0, dimensions)).all():
        numbers = all_facts.tolist()
        raise UsageError(f"sparse gradients must have equal numbers of sparse dimensions on all ranks; got {numbers}")
    if own is None:
        indices = torch.empty((dimensions, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.detach().new_empty((0, *parameter.shape[dimensions:]))
        own = torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
    _, total = _start(sums, own, wait=True)
    return total()


def _start(sums: SparseSums, own: Any, *, wait: bool) -> tuple[SparseSum, Callable[[], Any]]:
    """Start the sum of coalesced tensors of one shape.

    Returns:
        The sum, and a function that returns it as a tensor when it has ended.
    """
    shape = tuple(own.shape[: own.sparse_dim()])
    values = array_of(own.values().resolve_conj().resolve_neg())
    started = sums.start(flat_indices(array_of(own.indices()), shape), values, prod(shape), wait=wait)

    def total() -> Any:
        indices, values = started.result()
        coordinates = torch.from_numpy(coordinates_of(indices, shape)).to(own.device)
        rows = tensor_of(values).to(own.device)
        return torch.sparse_coo_tensor(coordinates, rows, own.shape, is_coalesced=True, check_invariants=False)

    return started, total


def flat_indices(coordinates: Array, shape: tuple[int, ...]) -> Array:
    """Return the indices in C order of elements by their coordinates, one row for each axis."""
    indices = np.zeros(coordinates.shape[1], np.int64)
    for length, along in zip(shape, coordinates, strict=True):
        indices = indices * length + along
    return indices


def coordinates_of(indices: Array, shape: tuple[int, ...]) -> Array:
    """Return the coordinates of elements by their indices in C order."""
    coordinates = np.empty((len(shape), indices.size), np.int64)
    for axis in reversed(range(len(shape))):
        indices, coordinates[axis] = np.divmod(indices, shape[axis])
    return coordinates
