"""Calls on arrays of other libraries in host memory, made on numpy views, so that the call cache can run them.

Used by: the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.calls.arguments import CallArguments, gets_result


def is_of_other_library(x: Any, out: Any) -> bool:
    """Return whether an array in host memory is not numpy's."""
    return not adapters.are_of_numpy(x, out) and not on_device(x, out)


def run_on_views(method: Callable[..., Any], arguments: CallArguments, rank: int) -> Any:
    """Call `method`, that of the collective, on numpy views of `x` and `out`; return the result in their library.

    Raises:
        UsageError: `x` or `out` cannot be used. It also raises the errors of `method`.
    """
    contract, x, out = CONTRACTS[arguments.collective], arguments.x, arguments.out
    options: dict[str, Any] = {"algorithm": arguments.algorithm, "timeout_s": arguments.timeout_s}
    if contract.reduces:
        options["op"] = arguments.op
    if contract.has_root:
        options["root"] = arguments.root
    source = None if x is None else adapters.view(x, "x")
    writes = out is not None and gets_result(arguments.collective, rank, arguments.root)
    target = adapters.view_to_write(out, "out") if writes else None
    result = method(source, out=target, **options)
    if writes or result is None:
        return out if writes else None
    return adapters.adapter_of(x, "x").wrap(result, x)
