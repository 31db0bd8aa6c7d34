"""Compression in blocks of `BLOCK` elements with float32 scales: int8, float8, int4 and one bit.

Theory of operation
-------------------
Each rank owns a part of the memory. Every rank sends each owner its part, quantised. The owner sums up in float32 and
sends the result to all ranks, quantised again. Only the owner knows the error of this second quantisation, so it adds
the error to its residual. Its next gradient then corrects the result.

A block of one bit keeps the sign of each element, and the means of those that are negative and of the others (Seide et
al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech DNNs",
Interspeech 2014). Their scales are those of a column of a matrix. A block takes its place, because it is a part of a
row of weights of one neuron in the layouts of torch.

All elements of a block are NaN if one of them is not finite, and leave no residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (gives numpy the name float8_e4m3fn)
import numpy as np

from unisono import Work
from unisono.frameworks.arrays import Array, same_bits
from unisono.frameworks.gradients.stages import Flat, Floats, Stages
from unisono.transports.reductions.wire_formats import from_wire, to_wire, wire_nbytes

BLOCK = 256


class Codec(NamedTuple):
    """Converts float32 to a wire format in blocks and back. Arguments and results are those of `to_wire`.

    Attributes:
        nbytes: ``nbytes(elements)`` returns the bytes of that number of elements on the wire.
        encode: ``encode(wire, x, residual)`` writes ``x + residual``, and the rounding error to `residual`.
        decode: ``decode(x, wire, adds=False)`` writes the elements to `x`, or adds them.
    """

    nbytes: Callable[[int], int]
    encode: Callable[[Array, Array, Array], None]
    decode: Callable[..., None]


class BlockForm(NamedTuple):
    """The form of a block on the wire: the codes of its elements as bytes, and then its float32 scales.

    Attributes:
        code_nbytes: the bytes of the codes.
        scales: the number of scales.
        quantise: returns the codes and scales of finite rows of `BLOCK` elements.
        restore: returns the rows for codes and scales. It works on single elements, so all ranks get the same bits.
    """

    code_nbytes: int
    scales: int
    quantise: Callable[[Array], tuple[Array, Array]]
    restore: Callable[[Array, Array], Array]

    @property
    def nbytes(self) -> int:
        """The bytes of a block."""
        return self.code_nbytes + 4 * self.scales


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


@same_bits
def _encode(form: BlockForm, wire: Array, x: Array, residual: Array) -> None:
    rows = np.zeros((_blocks(x.size), BLOCK), np.float32)
    flat = rows.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):
        np.add(x, residual, out=flat[: x.size])
    is_finite = np.isfinite(rows).all(axis=1)
    rows[~is_finite] = 0
    codes, scales = form.quantise(rows)
    rows -= form.restore(codes, scales)
    residual[...] = flat[: x.size]
    scales[~is_finite] = np.nan
    blocks = wire[: len(rows) * form.nbytes].reshape(-1, form.nbytes)
    blocks[:, : form.code_nbytes] = codes
    blocks[:, form.code_nbytes :] = scales.view(np.uint8)
    if not is_finite.all():
        residual[np.repeat(~is_finite, BLOCK)[: x.size]] = 0


@same_bits
def _decode(form: BlockForm, x: Array, wire: Array, *, adds: bool = False) -> None:
    blocks = wire[: _blocks(x.size) * form.nbytes].reshape(-1, form.nbytes)
    scales = np.ascontiguousarray(blocks[:, form.code_nbytes :]).view(np.float32)
    elements = form.restore(blocks[:, : form.code_nbytes], scales).reshape(-1)[: x.size]
    if adds:
        x += elements
    else:
        x[...] = elements


def _divided(rows: Array, most: float) -> tuple[Array, Array]:
    """Return rows divided by their scales, which are their largest magnitudes / `most`, and these scales."""
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(most)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    inverse[~np.isfinite(inverse)] = 0
    return rows * inverse, scales


def _to_float8(rows: Array) -> tuple[Array, Array]:
    divided, scales = _divided(rows, 448)
    return np.clip(divided, -448, 448).astype("float8_e4m3fn").view(np.uint8), scales


def _from_float8(codes: Array, scales: Array) -> Array:
    return _FLOATS_OF_8_BITS[codes] * scales


def _to_int4(rows: Array) -> tuple[Array, Array]:
    divided, scales = _divided(rows, 7)
    codes = (np.rint(divided) + np.float32(8)).astype(np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, scales


def _from_int4(codes: Array, scales: Array) -> Array:
    rows = np.empty((len(codes), BLOCK), np.float32)
    rows[:, ::2] = codes & 15
    rows[:, 1::2] = codes >> 4
    rows -= np.float32(8)
    rows *= scales
    return rows


def _to_one_bit(rows: Array) -> tuple[Array, Array]:
    is_negative = rows < 0
    negatives = is_negative.sum(axis=1, dtype=np.float32)
    below = np.minimum(rows, 0).sum(axis=1) / np.maximum(negatives, 1)
    above = np.maximum(rows, 0).sum(axis=1) / np.maximum(BLOCK - negatives, 1)
    return np.packbits(is_negative, axis=1), np.stack([above, below], axis=1).astype(np.float32)


def _from_one_bit(codes: Array, scales: Array) -> Array:
    return np.where(np.unpackbits(codes, axis=1), scales[:, 1:], scales[:, :1])


_FLOATS_OF_8_BITS: Array = np.arange(256, dtype=np.uint8).view("float8_e4m3fn").astype(np.float32)

# By name, the forms of blocks that numpy converts.
FORMS: Mapping[str, BlockForm] = {
    "float8": BlockForm(BLOCK, 1, _to_float8, _from_float8),
    "int4": BlockForm(BLOCK // 2, 1, _to_int4, _from_int4),
    "onebit": BlockForm(BLOCK // 8, 2, _to_one_bit, _from_one_bit),
}


def _nbytes(form: BlockForm, elements: int) -> int:
    return _blocks(elements) * form.nbytes


# By name, all codecs in blocks. Native code converts int8.
CODECS: Mapping[str, Codec] = {
    "int8": Codec(partial(wire_nbytes, "int8"), partial(to_wire, "int8"), partial(from_wire, "int8")),
    **{
        name: Codec(partial(_nbytes, form), partial(_encode, form), partial(_decode, form))
        for name, form in FORMS.items()
    },
}


def in_blocks(codec: Codec, flat: Flat) -> Stages:
    """Return the stages of a reduction in blocks. Its state is the residual."""
    memory, residual = flat.memory, flat.state["residuals"]
    size, rank = flat.communicators[0].size, flat.communicators[0].rank
    part = -(-memory.size // (size * BLOCK)) * BLOCK  # elements per rank; the last parts may be shorter
    begin, end = (min(memory.size, owner * part) for owner in (rank, rank + 1))
    # The last parts are padded with blocks of zeros, whose sums are zero.
    wire = np.zeros((size, codec.nbytes(part)), np.uint8)
    received, own = np.empty_like(wire), np.empty_like(wire[:1])
    floats, total, lost = Floats(memory), np.empty(part, np.float32), np.empty(part, np.float32)
    alltoall = flat.communicators[0].plan("alltoall", wire, out=received, timeout_s=flat.timeout_s)
    allgather = flat.communicators[1].plan("allgather", own, out=wire, timeout_s=flat.timeout_s)
    weight = np.float32(size if flat.op == "avg" else 1)
    gaps = flat.gaps()

    def exchange() -> Work[Any]:
        codec.encode(wire.reshape(-1), floats.read(), residual)
        work: Work[Any] = alltoall(wait=False)
        return work

    def share_result() -> Work[Any]:
        for source, row in enumerate(received):
            codec.decode(total, row, adds=source > 0)
        total[...] /= weight
        lost[...] = 0
        codec.encode(own[0], total, lost)
        work: Work[Any] = allgather(wait=False)
        return work

    @same_bits
    def finish() -> None:
        residual[begin:end] += weight * lost[: end - begin]
        codec.decode(floats.x, wire.reshape(-1))
        for gap in gaps:  # a bit has no zero
            floats.x[gap] = residual[gap] = 0
        floats.write_back()

    return Stages((exchange, share_result), finish)
