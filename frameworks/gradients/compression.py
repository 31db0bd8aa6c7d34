"""Compression of gradients: fewer bytes on the wire than in memory, with error feedback.

Theory of operation
-------------------
Rounding to the narrow form loses a part of each element. The rank keeps that part as the *residual* of the element and
adds it to its next gradient, so that nothing is lost in the long run (Seide et al. 2014; Karimireddy et al. 2019).
There are two forms:

- "float16" and "bfloat16": each rank rounds its elements, the sum is computed in float32, and the result is rounded
  once. No rank keeps the loss of that second rounding, because no rank sees it.
- "int8": blocks of `BLOCK` elements, each with a float32 scale, which is its largest magnitude / 127. Each rank owns a
  part of the bucket. Every rank sends each owner its part, quantised. The owner sums up in float32 and sends the result
  to all ranks, quantised again. Only the owner knows the error of this second quantisation, so it adds the error to its
  residual. Its next gradient then corrects the result.

An element that is not finite stays so: by itself in the narrow floats, and with all its block in int8. It leaves no
residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from unisono import Communicator, UsageError, Work
from unisono.foundation.near_names import did_you_mean
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.layout import Gradient
from unisono.transports.reductions.wire_formats import from_wire, to_wire, wire_nbytes

BLOCK = 256
_FLOATS = ("float16", "bfloat16", "float32", "float64")

Start: TypeAlias = Callable[[], Work[Any]]


class Stages(NamedTuple):
    """The stages of a compressed reduction of flat memory in place. Each training step uses them again.

    Attributes:
        starts: functions that each prepare and start a collective: the first one when the memory is ready, each other
            one when the collective before it has ended.
        finish: a function that writes the result to the memory when the last collective has ended.

    Only ``starts[0]`` and `finish` use the memory and its residual.
    """

    starts: Sequence[Start]
    finish: Callable[[], None]


# ``compression(communicators, memory, residual, op, timeout_s)``: a communicator for each collective, flat memory, and
# its residual, a flat float32 array.
Compression: TypeAlias = Callable[[Sequence[Communicator], Array, Array, str, float | None], Stages]


def check_compressible(gradients: Iterable[Gradient], compression: str) -> None:
    """Check that all gradients are of floats.

    Raises:
        UsageError: one is not; the message names it.
    """
    for gradient in gradients:
        if gradient.dtype not in _FLOATS:
            raise UsageError(
                f"the gradient of {gradient.name!r} is of {gradient.dtype}, which cannot be compressed to "
                f"{compression}: pass it to another reducer, without compression"
            )


class _Floats:
    """Memory as float32: the memory itself, or a float32 copy if it has another dtype."""

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
    """Return the stages of a reduction in narrow floats, for the arguments of `Compression`."""
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
    """Return the stages of a reduction in blocks of int8, for the arguments of `Compression`."""
    size, rank = communicators[0].size, communicators[0].rank
    part = -(-memory.size // (size * BLOCK)) * BLOCK  # elements per rank; the last parts may be shorter
    begin, end = (min(memory.size, owner * part) for owner in (rank, rank + 1))
    # The last parts are padded with blocks of zeros, whose sums are zero.
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

    def share_result() -> Work[Any]:
        for source, row in enumerate(received):
            from_wire("int8", total, row, adds=source > 0)
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

    return Stages((exchange, share_result), finish)


COMPRESSIONS: Mapping[str, Compression] = {
    "float16": partial(_narrow, "float16"),
    "bfloat16": partial(_narrow, "bfloat16"),
    "int8": _in_blocks,
}


def check_compression(compression: str) -> None:
    """Check that there is a compression of this name.

    Raises:
        UsageError: there is none.
    """
    if compression not in COMPRESSIONS:
        hint = did_you_mean(str(compression), COMPRESSIONS)
        raise UsageError(f"compression must be one of {', '.join(COMPRESSIONS)}, or None, not {compression!r}{hint}")


def communicators_of(compression: str | None) -> int:
    """Return how many communicators the collectives of a reduction need."""
    return 2 if compression == "int8" else 1
