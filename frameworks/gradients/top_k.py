"""Compression "topk": each rank sends its largest elements, and keeps the others for later steps.

Theory of operation
-------------------
Each rank adds its gradient to its residual, and sends the `ratio` largest magnitudes with their indices to all ranks.
Every rank adds up the elements of all ranks, in the order of ranks. An element that has been sent leaves no residual.

Elements that wait miss the momentum that they would have had in the optimizer. So the rank may apply the momentum
before (*momentum correction*): it sums up velocities and not gradients, and ends the velocity of an element that it
sends. The optimizer must then have no momentum of its own. Sums of many steps may be large, so the rank may limit the
norm of its gradient before (*local clipping*).

Reference: Lin et al., "Deep gradient compression", arXiv:1712.01887.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unisono import Work
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.stages import Flat, Floats, Stages

_ENTRY_NBYTES = 8  # an index and an element


def largest(x: Array, count: int) -> Array:
    """Return the indices of the `count` largest magnitudes of a flat array, in ascending order; NaN is the largest."""
    if count >= x.size:
        return np.arange(x.size, dtype=np.int32)
    indices = np.argpartition(np.abs(x), x.size - count)[x.size - count :].astype(np.int32)
    indices.sort()
    return indices


@same_bits
def top_k(flat: Flat, *, ratio: float, momentum: float, clip: float) -> Stages:
    """Return the stages of a reduction of the largest elements.

    Args:
        flat: the memory. Its state is the residual, and with a momentum the velocity.
        ratio: the part of the elements that a rank sends.
        momentum: the momentum of momentum correction; 0 for none.
        clip: the limit of the norm of the gradients in this memory, which each rank divides by the root of the number
            of ranks; infinite for none.
    """
    residual, velocity = flat.state["residuals"], flat.state.get("velocities")
    comm, floats = flat.communicators[0], Floats(flat.memory)
    elements = sum(piece.stop - piece.start for piece in flat.pieces)
    count = max(1, math.ceil(ratio * elements)) if elements else 0
    own = np.zeros((1, count * _ENTRY_NBYTES), np.uint8)
    received = np.empty((comm.size, own.size), np.uint8)
    allgather = comm.plan("allgather", own, out=received, timeout_s=flat.timeout_s)
    limit = clip / math.sqrt(comm.size)
    weight = np.float32(comm.size if flat.op == "avg" else 1)

    @same_bits
    def start() -> Work[Any]:
        x = floats.read()
        if math.isfinite(limit):
            norm = float(np.linalg.norm(x))
            x = x * np.float32(min(1.0, limit / norm)) if norm else x
        if velocity is not None:
            velocity[...] *= np.float32(momentum)
            velocity[...] += x
            x = velocity
        with np.errstate(over="ignore", invalid="ignore"):
            residual[...] += x
        indices = largest(residual, count)
        own[0, : 4 * count].view(np.int32)[...] = indices
        own[0, 4 * count :].view(np.float32)[...] = residual[indices]
        residual[indices] = 0
        if velocity is not None:
            velocity[indices] = 0
        work: Work[Any] = allgather(wait=False)
        return work

    @same_bits
    def finish() -> None:
        floats.x[...] = 0
        for row in received:
            floats.x[row[: 4 * count].view(np.int32)] += row[4 * count :].view(np.float32)
        floats.x[...] /= weight
        floats.write_back()

    return Stages((start,), finish)
