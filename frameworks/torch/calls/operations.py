"""The operations of Unisono for the reduction operations of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from unisono import Op, UsageError
from unisono.frameworks.torch.calls.tensors import ONLY_MOVED

_Kind = dist.ReduceOp.RedOpType

# The key is the hash of the kind, which is also the hash of an operation of this kind and the fastest to compute.
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
# A boolean of torch is a byte, and any value but 0 is true. So a sum of booleans is "lor", and a product is "land".
_BOOL_OPERATIONS: Mapping[int, str] = {**_OPERATIONS, hash(_Kind.SUM): "lor", hash(_Kind.PRODUCT): "land"}
# By the dtypes whose operations differ from `_OPERATIONS`. A dtype that can only be moved has none.
_BY_DTYPE: Mapping[Any, Mapping[int, str]] = {torch.bool: _BOOL_OPERATIONS, **{dtype: {} for dtype in ONLY_MOVED}}


def operation(reduce_op: Any, dtype: Any) -> str | Op:
    """Return the operation of Unisono for a ``dist.ReduceOp``, or a member of it, on tensors of a dtype.

    Raises:
        UsageError: Unisono has no such operation, or cannot reduce the dtype.
    """
    name = _BY_DTYPE.get(dtype, _OPERATIONS).get(hash(reduce_op))
    if name is not None:
        return name
    if dtype in ONLY_MOVED:
        raise UsageError(f"tensors of {dtype} can be moved but not reduced: convert them to another dtype")
    if reduce_op == _Kind.PREMUL_SUM:
        _, factor = reduce_op.__getstate__()  # older versions of torch do not have `factor`
        return Op.premul_sum(factor.item() if isinstance(factor, torch.Tensor) else factor)
    raise UsageError(f"the operation {reduce_op} is not supported: use SUM, AVG, PRODUCT, MIN or MAX")
