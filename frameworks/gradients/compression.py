"""Gradients on the wire in fewer bytes than in memory, with error feedback.

Theory of operation. What a rank cannot say in the narrow form it keeps, as the *residual* of each element, and adds to
its next gradient; so in the long run nothing is lost (Seide et al. 2014; Karimireddy et al. 2019). Two forms:

- "float16" and "bfloat16" are rounded to, summed up in float32, and rounded once. What is lost in that second rounding,
  which no rank sees, is not kept.
- "int8" are blocks of `BLOCK` elements, each with a float32 scale, its largest magnitude / 127. Every rank sends each
  other its part of the bucket, quantised, sums up in float32 what it has received, and sends the result to all,
  quantised once more. Of that second error, which the owner of a part alone knows, it keeps as much as makes the result
  right when it is added to its own next gradient.

A gradient that is not finite stays so: alone in the narrow floats, and with its block in int8. It leaves no residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from unisono import Communicator, UsageError, Work
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.layout import Gradient
from unisono.transports.reductions.wire_formats import from_wire, to_wire, wire_nbytes

BLOCK = 256
_FLOATS = ("float16", "bfloat16", "float32", "float64")

Start: TypeAlias = Callable[[], Work[Any]]


class Stages(NamedTuple):
    """How flat memory is reduced in place, again and again.

    Attributes:
        starts: each of these computes what a collective needs and starts it; the first when the memory is ready, each
            other when the collective before has ended.
        finish: writes the memory, when the last collective has ended.

    Of these, only the first and `finish` use the memory and its residual.
    """

    starts: Sequence[Start]
    finish: Callable[[], None]


# ``compression(communicators, memory, residual, op, timeout_s)``: a communicator for each collective, flat memory, and
# its residual, flat float32.
Compression: TypeAlias = Callable[[Sequence[Communicator], Array, Array, str, float | None], Stages]


def check_compressible(gradients: Iterable[Gradient], compression: str) -> None:
    """Check that gradients are of floats.

    Raises:
        UsageError: one is not; names it.
    """
    for gradient in gradients:
        if gradient.dtype not in _FLOATS:
            what = (
                f"the gradient of {gradient.name!r} is of {gradient.dtype}, which cannot be compressed to {compression}"
            )
            raise UsageError(f"{what}: give it to another reducer, without compression")


class _Floats:
    """Memory as float32: itself, or a copy of what is wider or narrower."""

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.x = memory if memory.dtype == np.float32 else np.empty(memory.size, np.float32)

    def read(self) -> Array:
        if self.x is not self._memory:
            with np.errstate(over="ignore"):
                np.copyto(self.x, self._memory, casting="same_kind")
        return self.x

    def write_back(self) -> None:
        if self.x is not self._memory:
            np.copyto(self._memory, self.x, casting="same_kind")


def _narrow(
    form: str, communicators: Sequence[Communicator], memory: Array, residual: Array, op: str, timeout_s: float | None
) -> Stages:
    """Reduce in narrow floats: see `Compression`."""
    floats, wire = _Floats(memory), np.empty(memory.size, np.dtype(form))
    allreduce = communicators[0].plan("allreduce", wire, op=op, out=wire, accumulate="float32", timeout_s=timeout_s)

    def start() -> Work[Any]:
        to_wire(form, wire, floats.read(), residual)
        work: Work[Any] = allreduce(wait=False)
        return work

    @same_bits
    def finish() -> None:
        from_wire(form, floats.x, wire)
        floats.write_back()

    return Stages((start,), finish)


def _in_blocks(
    communicators: Sequence[Communicator], memory: Array, residual: Array, op: str, timeout_s: float | None
) -> Stages:
    """Reduce in blocks of int8: see `Compression`."""
    size, rank = communicators[0].size, communicators[0].rank
    part = -(-memory.size // (size * BLOCK)) * BLOCK  # elements of each rank, of which the last may lack some
    begin, end = (min(memory.size, turn * part) for turn in (rank, rank + 1))
    # The blocks that only fill up the last parts are zeros here, and so are their sums.
    wire = np.zeros((size, wire_nbytes("int8", part)), np.uint8)
    received, own = np.empty_like(wire), np.empty_like(wire[:1])
    floats, total, lost = _Floats(memory), np.empty(part, np.float32), np.empty(part, np.float32)
    alltoall = communicators[0].plan("alltoall", wire, out=received, timeout_s=timeout_s)
    allgather = communicators[1].plan("allgather", own, out=wire, timeout_s=timeout_s)
    weight = np.float32(size if op == "avg" else 1)

    def exchange() -> Work[Any]:
        to_wire("int8", wire.reshape(-1), floats.read(), residual)
        work: Work[Any] = alltoall(wait=False)
        return work

    def spread() -> Work[Any]:
        for turn, row in enumerate(received):
            from_wire("int8", total, row, adds=turn > 0)
        total[...] /= weight
        lost[...] = 0
        to_wire("int8", own[0], total, lost)
        work: Work[Any] = allgather(wait=False)
        return work

    @same_bits
    def finish() -> None:
        residual[begin:end] += weight * lost[: end - begin]
        from_wire("int8", floats.x, wire.reshape(-1))
        floats.write_back()

    return Stages((exchange, spread), finish)


COMPRESSIONS: Mapping[str, Compression] = {
    "float16": partial(_narrow, "float16"),
    "bfloat16": partial(_narrow, "bfloat16"),
    "int8": _in_blocks,
}
