"""The sum of sparse tensors, as Gloo has it: what each rank has is gathered, and added up everywhere."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import torch

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import same_bits
from unisono.frameworks.torch.operations import operation
from unisono.frameworks.torch.tensors import Stage
from unisono.frameworks.torch.work import Kept, Several, Work


def allreduce(communicator: Communicator, tensor: Any, opts: Any, kept: Kept) -> Work:
    """Start to replace a tensor in coordinate format, of one shape on all ranks, by the sum of those of all ranks.

    Returns at once, but for the exchange of how many elements each rank has.

    Raises:
        UsageError: `opts` ask for another operation, or the tensor's shape is not the same on all ranks.
    """
    if operation(opts.reduceOp, tensor.dtype) != "sum" or tensor.layout is not torch.sparse_coo:
        raise UsageError("of sparse tensors there is only the sum, in coordinate format")
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

    return Work(Several(works), [tensor], finish, kept)
