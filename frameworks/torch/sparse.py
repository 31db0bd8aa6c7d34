"""The sum of sparse tensors, as Gloo computes it: all ranks gather the elements of all ranks and add them up."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import same_bits
from unisono.frameworks.torch.operations import operation
from unisono.frameworks.torch.tensors import Stage
from unisono.frameworks.torch.work import JoinedCalls, Work, WorkKeeper


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
    own, stage = tensor.detach().coalesce(), Stage()
    facts = np.array([own.values().size(0), own.sparse_dim(), *own.shape])
    all_facts = communicator.allgather(facts[np.newaxis])
    if (all_facts[:, 1:] != facts[1:]).any():
        raise UsageError(f"sparse tensors must have one shape on all ranks; got {all_facts[:, 2:].tolist()}")
    counts = all_facts[:, 0].tolist()
    works, gathered = [], []
    for part in (own.indices().t().contiguous(), own.values().contiguous()):
        row = prod(part.shape[1:])
        whole = part.new_empty((sum(counts), *part.shape[1:]))
        elements = [count * row for count in counts]
        works.append(communicator.allgatherv(stage.read(part), elements, out=stage.write(whole), wait=False))
        gathered.append(whole)

    @same_bits
    def finish() -> None:
        indices, values = gathered
        total = torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)
        stage.finish()
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    return Work(JoinedCalls(works), [tensor], finish, keeper)
