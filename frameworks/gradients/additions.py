"""New gradients: ranks pass them for the first time after the first step, for example when a layer is unfrozen.

A new gradient has no place in the memory of the current step. So each one is averaged by a call of its own when the
step ends, and gets a place in the layout of the next step.
"""

from __future__ import annotations

from unisono import Communicator
from unisono.frameworks.gradients import agreement
from unisono.frameworks.gradients.compression import check_compressible
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.step_memory import StepMemory


def average_new(
    world: Communicator, memory: StepMemory, op: str, compression: str | None, timeout_s: float | None, *, zeros: bool
) -> tuple[Gradient, ...]:
    """Average the new gradients of a training step, add the results to `memory`, and return the new gradients.

    All ranks call it. New gradients are not compressed.

    Args:
        world: the ranks.
        memory: the memory of the step, which has ended.
        op: "avg" or "sum".
        compression: the compression of later steps, or None.
        timeout_s: the time limit of each reduction.
        zeros: whether a gradient that a rank has not passed counts as zeros.

    Raises:
        MismatchError: the ranks have different new gradients.
        UsageError: later steps cannot compress a new gradient.
        PeerLostError, CollectiveTimeoutError, AbortedError: a reduction failed.
    """
    own = [Gradient(name, lent.shape, lent.flat.dtype.name) for name, lent in memory.new.items()]
    gradients = agreement.agree_on_new(world, own, zeros=zeros)
    if compression is not None:
        check_compressible(gradients, compression)
    for gradient in gradients:
        x = memory.new_array(gradient)
        memory.add(gradient.name, world.allreduce(x, op, out=x, timeout_s=timeout_s))
    return gradients
