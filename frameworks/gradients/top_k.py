"""Compression "topk": each rank sends its largest elements, and keeps the others for later steps.

Theory of operation
-------------------
Each rank adds its gradient to its residual, and sends the `ratio` largest magnitudes with their indices to all ranks.
Every rank adds up the elements of all ranks, in the order of ranks. An element that has been sent leaves no residual.

To gather these elements takes one collective. With many ranks or a large ratio, their elements would be more bytes than
all elements of the sum. Then `SparseSums` adds them up on the way.

Elements that wait miss the momentum that they would have had in the optimizer. So the rank may apply the momentum
before (*momentum correction*): it sums up velocities and not gradients, and ends the velocity of an element that it
sends. The optimizer must then have no momentum of its own. Sums of many steps may be large, so the rank may limit the
norm of its gradient before (*local clipping*).

Reference: Lin et al., "Deep gradient compression", arXiv:1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.stages import Flat, Floats, Stages
from unisono.frameworks.pending import Pending
from unisono.frameworks.sparse_sums import SparseSum

_ELEMENT_NBYTES = 4
_ENTRY_NBYTES = 4 + _ELEMENT_NBYTES  # an index and an element
# A function that sends indices and elements, and one that adds up those of all ranks when these have arrived.
_Exchange: TypeAlias = tuple[Callable[[Array, Array], Pending], Callable[[], None]]


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
    # The ranks agree on `ratio`, and so on the way: calls of both on one communicator would have no order.
    exchange = _summed if _is_summed(comm.size, ratio) else _gathered
    send, add_up = exchange(flat, count, floats.x)
    limit = clip / math.sqrt(comm.size)
    weight = np.float32(comm.size if flat.op == "avg" else 1)

    @same_bits
    def start() -> Pending:
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
        elements = residual[indices]
        residual[indices] = 0
        if velocity is not None:
            velocity[indices] = 0
        return send(indices, elements)

    @same_bits
    def finish() -> None:
        floats.x[...] = 0
        add_up()
        floats.x[...] /= weight
        floats.write_back()

    return Stages((start,), finish)


def top_k_way(ranks: int, *, ratio: float, **_: float) -> str:
    """Return the name of the exchange that carries the elements of so many ranks."""
    return "sparse sum" if _is_summed(ranks, ratio) else "allgather"


def _is_summed(ranks: int, ratio: float) -> bool:
    """Return whether the elements of all ranks are more bytes than all elements of the sum, in float32."""
    return ratio * ranks * _ENTRY_NBYTES > _ELEMENT_NBYTES


def _gathered(flat: Flat, count: int, x: Array) -> _Exchange:
    """Return the exchange that gathers `count` elements of each rank on all ranks, and adds them up in `x`."""
    own = np.zeros((1, count * _ENTRY_NBYTES), np.uint8)
    received = np.empty((flat.communicators[0].size, own.size), np.uint8)
    allgather = flat.communicators[0].plan("allgather", own, out=received, timeout_s=flat.timeout_s)

    def send(indices: Array, elements: Array) -> Pending:
        own[0, : 4 * count].view(np.int32)[...] = indices
        own[0, 4 * count :].view(np.float32)[...] = elements
        work: Pending = allgather(wait=False)
        return work

    def add_up() -> None:
        for row in received:
            x[row[: 4 * count].view(np.int32)] += row[4 * count :].view(np.float32)

    return send, add_up


def _summed(flat: Flat, count: int, x: Array) -> _Exchange:
    """Return the exchange that adds up the elements of all ranks on the way, and writes the sum to `x`."""
    del count
    started: list[SparseSum] = []

    def send(indices: Array, elements: Array) -> Pending:
        started[:] = [flat.sparse_sums.start(indices, elements, x.size, timeout_s=flat.timeout_s, wait=False)]
        return started[0]

    def add_up() -> None:
        indices, elements = started[0].result()
        x[indices] = elements

    return send, add_up
