"""Sums of changes over the members of a swarm, whole or compressed with error feedback.

Theory of operation
-------------------
Each change has a weight, which is 1, or 0 if the member has not trained. A member that is lost takes change and weight
with it. So the sum of the weights counts the changes in the sum, also after the swarm has repeated the call.

- Without compression, and as "float16" or "bfloat16", the changes are added by an allreduce, in float32 or wider.
- In blocks, such as "int8", each member gets the codes and scales of all by an allgather. It decodes and adds them
  in float32 in the order of the contributors. So all members have the same bits, and no result is rounded again. Each
  member receives the bytes of all others: with 8 members, int4 costs half of an allreduce of float32.

A member keeps the part of its change that compression loses as *residuals*, and adds it to its next change. They count
from the moment when the call has ended. So a call that fails leaves them, and a repeated call sends the same bytes. The
residuals of a member that is lost are lost with it.

Example: A, B and C send 1.004 as 1.0, and keep 0.004. C dies, and A and B add 1.0 and 1.0, with the weight 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes  # noqa: F401  (gives numpy the name bfloat16)
import numpy as np

from unisono import UsageError
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.blocks import CODECS, Codec
from unisono.transports.reductions.wire_formats import to_wire

if TYPE_CHECKING:
    from unisono import Swarm

# (swarm, change, residuals, weight, timeout_s) → the sum of the changes, and that of the weights
SwarmSum: TypeAlias = "Callable[[Swarm, Array, Array, int, float | None], tuple[Array, int]]"


def swarm_sum(compression: str | None) -> SwarmSum:
    """Return the function that adds the changes of all members.

    Raises:
        UsageError: the compression cannot be used on a swarm.
    """
    if compression not in _SUMS:
        names = ", ".join(name for name in _SUMS if name is not None)
        raise UsageError(f"compression={compression!r} cannot be used on a swarm: pass one of {names}, or None")
    return _SUMS[compression]


def _whole(swarm: Swarm, change: Array, _: Array, weight: int, timeout_s: float | None) -> tuple[Array, int]:
    total, weights = swarm.allreduce([change, np.array([weight], np.float32)], "sum", timeout_s=timeout_s)
    return total, int(weights[0])


def _narrow(
    form: str, swarm: Swarm, change: Array, residuals: Array, weight: int, timeout_s: float | None
) -> tuple[Array, int]:
    wire, lost = np.empty(change.size, np.dtype(form)), residuals * np.float32(weight)
    to_wire(form, wire, change.astype(np.float32), lost)
    total, weights = swarm.allreduce(
        [wire, np.array([weight], np.float32)], "sum", timeout_s=timeout_s, accumulate="float32"
    )
    if weight:
        residuals[...] = lost
    return total, int(weights[0])


def _in_blocks(
    codec: Codec, swarm: Swarm, change: Array, residuals: Array, weight: int, timeout_s: float | None
) -> tuple[Array, int]:
    row, lost = np.zeros((1, codec.nbytes(change.size) + 1), np.uint8), residuals * np.float32(weight)
    codec.encode(row[0, :-1], change.astype(np.float32), lost)
    row[0, -1] = weight
    rows = swarm.allgather(row, timeout_s=timeout_s)
    if weight:
        residuals[...] = lost
    return _added(codec, rows, change.size)


@same_bits
def _added(codec: Codec, rows: Array, elements: int) -> tuple[Array, int]:
    total = np.zeros(elements, np.float32)
    for row in rows[rows[:, -1] > 0]:
        codec.decode(total, row[:-1].copy(), adds=True)
    return total, int(rows[:, -1].sum())


_SUMS: Mapping[str | None, SwarmSum] = {
    None: _whole,
    "float16": partial(_narrow, "float16"),
    "bfloat16": partial(_narrow, "bfloat16"),
    **{name: partial(_in_blocks, codec) for name, codec in CODECS.items()},
}
