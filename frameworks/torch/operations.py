"""torch's reduction operations, and ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from unisono import Op, UsageError
from unisono.frameworks.torch.tensors import ONLY_MOVED

_Kind = dist.ReduceOp.RedOpType

# By the number of the kind, which is the hash of an operation, and the quickest to be had of it.
_OPERATIONS: Mapping[int, str] = {
    hash(kind): name
    for kind, name in (
        (_Kind.SUM, "sum"),
        (_Kind.AVG, "avg"),
        (_Kind.PRODUCT, "prod"),
        (_Kind.MIN, "min"),
        (_Kind.MAX, "max"),
        (_Kind.BAND, "band"),
        (_Kind.BOR, "bor"),
        (_Kind.BXOR, "bxor"),
    )
}
# Truths are bytes to torch, of which any but 0 is true: a sum is true where one is, a product where all are.
_OF_TRUTHS: Mapping[int, str] = {**_OPERATIONS, hash(_Kind.SUM): "lor", hash(_Kind.PRODUCT): "land"}


def operation(reduce_op: Any, dtype: Any) -> str | Op:
    """Return our operation for a ``dist.ReduceOp``, or a member of it, on tensors of a dtype.

    Raises:
        UsageError: there is none.
    """
    if dtype in ONLY_MOVED:
        raise UsageError(f"tensors of {dtype} are moved, but not reduced: convert them")
    name = (_OF_TRUTHS if dtype is torch.bool else _OPERATIONS).get(hash(reduce_op))
    if name is not None:
        return name
    if reduce_op == _Kind.PREMUL_SUM:
        factor = reduce_op.factor
        return Op.premul_sum(factor.item() if isinstance(factor, torch.Tensor) else factor)
    raise UsageError(f"there is no {reduce_op} here")
