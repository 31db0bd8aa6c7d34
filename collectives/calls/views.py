"""Calls on arrays of other libraries in host memory, made on numpy views, so that the call cache can run them.

Used by: the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.arrays import adapters
from unisono.collectives.arrays.device_detection import on_device
from unisono.collectives.arrays.operands import LISTS
from unisono.collectives.calls.arguments import CallArguments, checked_lists, gets_result

# The classes of arrays that a call takes as they are. None stands for an array that this rank does not pass.
_OWN = frozenset({np.ndarray, type(None)})


def is_of_other_library(x: Any, out: Any) -> bool:
    """Return whether all arrays, or lists of arrays, are in host memory, and one of them is not numpy's."""
    return not (_classes(x) | _classes(out) <= _OWN or on_device(x, out))


def run_on_views(method: Callable[..., Any], arguments: CallArguments, rank: int) -> Any:
    """Call `method`, that of the collective, on numpy views of `x` and `out`; return the result in their library.

    The views are made anew in each call, because the program may have moved or resized an array since the last one.

    Raises:
        UsageError: `x` or `out` cannot be used. It also raises the errors of `method`.
    """
    contract, x, out = CONTRACTS[arguments.collective], arguments.x, arguments.out
    if type(out if x is None else x) in LISTS:
        checked_lists(x, out)
    options: dict[str, Any] = {"algorithm": arguments.algorithm, "timeout_s": arguments.timeout_s}
    if contract.reduces:
        options["op"] = arguments.op
    if contract.has_root:
        options["root"] = arguments.root
    writes = out is not None and gets_result(arguments.collective, rank, arguments.root)
    target = _viewed(adapters.view_to_write, out, "out") if writes else None
    # Views cost more than all else, so a call in place makes them once.
    source = target if writes and out is x else _viewed(adapters.view, x, "x")
    result = method(source, out=target, **options)
    if writes or result is None:
        return out if writes else None
    if type(x) in LISTS:
        return type(x)([adapters.adapter_of(array, "x").wrap(own, array) for own, array in zip(result, x, strict=True)])
    return adapters.adapter_of(x, "x").wrap(result, x)


def _classes(x: Any) -> set[type]:
    return set(map(type, x)) if type(x) in LISTS else {type(x)}


def _viewed(view: Callable[[Any, str], Any], x: Any, name: str) -> Any:
    """Return the view of an array, or a list of the views of a list of arrays; None for None."""
    if type(x) in LISTS:
        return [view(array, name) for array in x]
    return None if x is None else view(x, name)
