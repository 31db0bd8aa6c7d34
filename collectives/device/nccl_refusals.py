"""Says which calls NCCL cannot carry out, for calls that name it and for the tuner."""

from __future__ import annotations

from unisono.collectives.calls.planning import CallSpec, as_request
from unisono.collectives.custom_ops.functions import is_by_function
from unisono.operations import operation
from unisono.transports.nccl.refusals import refusal


def refusal_by_nccl(spec: CallSpec, version: int | None = None) -> str | None:
    """Return the reason why NCCL, of this version, cannot carry out a call on one array; None if it can."""
    assert spec.dtype is not None, "a call on a device has an array"
    request = as_request(spec.algorithm)
    if is_by_function(spec.op):
        return "has no reductions by functions of Python"
    if spec.layout is not None and spec.layout.rows is not None:
        return "has no vector collectives"
    if request.reproducible or request.accumulate is not None:
        return "promises neither an order of contributions nor how often it rounds"
    reduced = [] if spec.op is None else [(spec.dtype, operation(spec.op))]
    return refusal(spec.collective, reduced, version)
