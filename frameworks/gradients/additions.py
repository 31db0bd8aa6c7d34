"""Gradients that ranks give for the first time after the first step, such as those of a layer that was unfrozen.

They have no place in the flat memory of that step. So they are averaged by themselves when the step ends, and get a
place in the layout of the next step.
"""

from __future__ import annotations

import numpy as np

from unisono import Communicator
from unisono.frameworks.gradients import agreement
from unisono.frameworks.gradients.compression import check_compressible
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.memory import Memory


def average_new(
    world: Communicator, memory: Memory, op: str, compression: str | None, timeout_s: float | None, *, zeros: bool
) -> tuple[Gradient, ...]:
    """Average the new gradients of a step, add the results to its memory, and return what was added.

    All ranks call it; nothing of it is compressed.

    Args:
        world: the ranks.
        memory: of the step, which has ended.
        op: "avg" or "sum".
        compression: what later steps will compress these gradients to, or None.
        timeout_s: of each reduction.
        zeros: whether a gradient that a rank does not have counts as zeros.

    Raises:
        MismatchError: the ranks have other new gradients.
        UsageError: one cannot be compressed.
        PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
    """
    own = [Gradient(name, lent.shape, lent.flat.dtype.name) for name, lent in memory.new.items()]
    gradients = agreement.agree_on_new(world, own, zeros=zeros)
    if compression is not None:
        check_compressible(gradients, compression)
    for gradient in gradients:
        lent = memory.new.get(gradient.name)
        x = np.zeros(gradient.shape, gradient.dtype) if lent is None else lent.flat.reshape(gradient.shape).copy()
        memory.add(gradient.name, world.allreduce(x, op, out=x, timeout_s=timeout_s))
    return gradients
