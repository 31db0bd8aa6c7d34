"""The sum of sparse tensors, as Gloo computes it: all ranks gather the elements of all ranks and add them up."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import same_bits
from unisono.frameworks.torch.calls.operations import operation
from unisono.frameworks.torch.calls.tensors import CallTensors
from unisono.frameworks.torch.calls.work import JoinedCalls, Work, WorkKeeper


def allreduce(communicator: Communicator, tensor: Any, opts: Any, keeper: WorkKeeper) -> Work:
    """Start to replace a tensor in coordinate format by the sum of the tensors of all ranks.

    It waits only for a first exchange, of the number of elements of each rank.

    Raises:
        UsageError: `opts` asks for another operation, or the shape of the tensor differs between ranks.
    """
    if operation(opts.reduceOp, tensor.dtype) != "sum" or tensor.layout is not torch.sparse_coo:
        raise UsageError(
            "sparse tensors must be in coordinate format, and op must be SUM: otherwise pass tensor.to_dense()"
        )
    own = tensor.detach().coalesce()
    facts = np.array([own.values().size(0), own.sparse_dim(), *own.shape])
    all_facts = communicator.allgather(facts[np.newaxis])
    if (all_facts[:, 1:] != facts[1:]).any():
        raise UsageError(f"sparse tensors must have one shape on all ranks; got {all_facts[:, 2:].tolist()}")
    works, total = _gathered(communicator, own, all_facts[:, 0].tolist())

    def finish() -> None:
        with torch.no_grad():
            tensor.copy_(total())

    return Work(JoinedCalls(works), [tensor], finish, keeper)


def total_of(communicator: Communicator, parameter: Any) -> Any:
    """Return the sum of all ranks' sparse gradients of one parameter. All ranks call it, also those without a gradient.

    Raises:
        UsageError: the ranks' gradients differ in their number of sparse dimensions.
    """
    gradient = parameter.grad
    own = None if gradient is None else gradient.detach().coalesce()
    facts = np.array([[0, 0] if own is None else [own.values().size(0), own.sparse_dim()]])
    all_facts = communicator.allgather(facts)
    dimensions = int(all_facts[:, 1].max())
    if not np.isin(all_facts[:, 1], (0, dimensions)).all():
        numbers = all_facts[:, 1].tolist()
        raise UsageError(f"sparse gradients must have equal numbers of sparse dimensions on all ranks; got {numbers}")
    if own is None:
        indices = torch.empty((dimensions, 0), dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[dimensions:]))
        own = torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)
    works, total = _gathered(communicator, own, all_facts[:, 0].tolist())
    for work in works:
        work.wait()
    return total()


def _gathered(communicator: Communicator, own: Any, counts: list[int]) -> tuple[list[Any], Callable[[], Any]]:
    """Start to gather the elements of coalesced tensors of `counts` elements on the ranks.

    Returns:
        The calls, and a function that returns the sum of the tensors when the calls have ended.
    """
    works, gathered, stage = [], [], CallTensors()
    for part in (own.indices().t().contiguous(), own.values().contiguous()):
        row = prod(part.shape[1:])
        whole = part.new_empty((sum(counts), *part.shape[1:]))
        elements = [count * row for count in counts]
        works.append(communicator.allgatherv(stage.read(part), elements, out=stage.write(whole), wait=False))
        gathered.append(whole)

    @same_bits
    def total() -> Any:
        indices, values = gathered
        stage.finish()
        return torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=False).coalesce()

    return works, total
