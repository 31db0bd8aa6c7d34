"""Norms of gradients over all parameters and, if these are sharded, over all ranks; and scaling by norms.

Sums of squares are computed in float64, whatever the dtype, and added up over ranks in a fixed order, so that all ranks
scale by the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unisono import Communicator, UsageError
from unisono.frameworks.arrays import Array, FlatArray, Named, flatten, pairs_of, same_bits
from unisono.frameworks.data_parallel.parameters import check_writable

_CHUNK = 1 << 16
# torch adds this to a norm before it divides by it.
_EPSILON = 1e-6


@same_bits
def global_norm(arrays: Iterable[Any], world: Communicator | None = None) -> float:
    """Return the Euclidean norm of all elements of the arrays. It is NaN or infinite if an element is.

    Args:
        arrays: arrays of numpy, torch, JAX or TensorFlow, of floats or complex numbers; they are only read.
        world: the ranks, if each rank has a shard of its own. All ranks call it, and the norm is that of all shards.
            None if all ranks have the same arrays, as after an allreduce; then nothing is sent.

    Raises:
        UsageError: an argument is no array of floats or complex numbers; nothing has been sent.
        PeerLostError, CollectiveTimeoutError, AbortedError: as in any call.

    >>> import numpy as np, unisono as un
    >>> from unisono.data_parallel import global_norm
    >>> global_norm([np.array([3.0]), np.array([[4.0]], np.float32)])
    5.0
    >>> un.launch(lambda world: global_norm([np.array([3.0 + world.rank])], world), 2)
    [5.0, 5.0]
    """
    return math.sqrt(_squares(_lent(arrays), world).sum())


@same_bits
def clip_global_norm(arrays: Iterable[Any], max_norm: float, world: Communicator | None = None) -> float:
    """Scale the arrays in place so that their `global_norm` is at most `max_norm`; return the norm before that.

    The factor is that of ``torch.nn.utils.clip_grad_norm_``: max_norm / (norm + 1e-6), if that is less than 1.

    Args:
        arrays: as in `global_norm`. They are written only if the norm is finite and too large.
        max_norm: a positive number.
        world: as in `global_norm`.

    Raises:
        UsageError: as in `global_norm`, or an array cannot be written in place, such as one of JAX or a ``tf.Tensor``;
            nothing has been sent.
        FloatingPointError: the norm is infinite or not a number. All ranks that share it raise, and no array is
            changed.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm must be a positive number, not {max_norm!r}")
    lent = _lent(arrays)
    check_writable({f"array {index}": each for index, each in enumerate(lent)}, in_place=True)
    norm = math.sqrt(_squares(lent, world).sum())
    if not math.isfinite(norm):
        raise FloatingPointError(f"the norm of the gradients is {norm}: no gradient was changed")
    if norm + _EPSILON > max_norm:
        for array in lent:
            array.flat[...] = _combined(array.flat, max_norm / (norm + _EPSILON))
            array.put_back()
    return norm


@same_bits
def scale_by_larc(
    parameters: Named,
    gradients: Named,
    learning_rate: float,
    *,
    trust: float = 0.02,
    clip: bool = True,
    weight_decay: float = 0.0,
    world: Communicator | None = None,
) -> dict[str, float]:
    """Scale each gradient in place for a step with layer-wise adaptive rates (LARC); return the factors by name.

    The rate of a layer is trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖), and its gradient becomes (g + weight_decay · w) ·
    rate / learning_rate. With `clip`, the rate is at most `learning_rate`. The optimizer itself must not decay weights.
    A layer whose weights or gradients are all zero is not changed, and has the factor 1.

    Reference: You, Gitman, Ginsburg, "Large batch training of convolutional networks", arXiv:1708.03888 (2017);
    LARC is LARS with clipping.

    Args:
        parameters: the weights by name; they are only read.
        gradients: the gradients under the same names; they are written.
        learning_rate: the learning rate of the optimizer's next step, a positive number.
        trust: the trust coefficient, a positive number.
        clip: whether the rate is at most `learning_rate`.
        weight_decay: the weight decay, 0 or more.
        world: as in `global_norm`.

    Raises:
        UsageError: names, shapes or arguments do not fit, or a gradient cannot be written in place, such as one of JAX
            or a ``tf.Tensor``; nothing has been sent.
        FloatingPointError: a norm is not finite; the message names the parameter. Nothing has been written.
    """
    if not learning_rate > 0 or not trust > 0 or not weight_decay >= 0:
        raise UsageError("learning_rate and trust must be positive numbers, and weight_decay 0 or more")
    weights, lent = (
        {name: _float(flatten(x, name), name) for name, x in pairs_of(named)} for named in (parameters, gradients)
    )
    if weights.keys() != lent.keys() or any(weights[name].shape != lent[name].shape for name in weights):
        raise UsageError("parameters and gradients must have the same names and shapes")
    check_writable(lent, in_place=True)
    norms = np.sqrt(_squares([*(weights[name] for name in lent), *lent.values()], world))
    factors = {}
    for name, weight, gradient in zip(lent, *np.split(norms, 2), strict=True):
        if not math.isfinite(weight + gradient):
            raise FloatingPointError(
                f"{name!r} has the norm {weight} and its gradient {gradient}: no gradient was changed"
            )
        if weight and gradient:
            rate = trust * weight / (gradient + weight_decay * weight)
            factors[name] = float((min(rate, learning_rate) if clip else rate) / learning_rate)
    for name, factor in factors.items():
        lent[name].flat[...] = _combined(lent[name].flat, factor, weights[name].flat, factor * weight_decay)
        lent[name].put_back()
    return {name: factors.get(name, 1.0) for name in lent}


def _lent(arrays: Iterable[Any]) -> list[FlatArray]:
    return [_float(flatten(x, f"array {index}"), f"array {index}") for index, x in enumerate(arrays)]


def _float(lent: FlatArray, name: str) -> FlatArray:
    if lent.flat.dtype.kind in "biu":
        raise UsageError(f"{name} is {lent.described()}: pass arrays of floats or complex numbers")
    return lent


def _combined(a: Array, factor: float, b: Array | None = None, other: float = 0.0) -> Array:
    """Return factor · a + other · b. Floats of less than 4 bytes are computed in float32 and rounded once."""
    wide = np.result_type(a.dtype, np.float32) if a.dtype.itemsize < 4 else a.dtype
    scaled = a.astype(wide) * wide.type(factor)
    if b is not None and other:
        scaled += b.astype(wide) * wide.type(other)
    rounded: Array = scaled.astype(a.dtype, copy=False)
    return rounded


def _squares(lent: Sequence[FlatArray], world: Communicator | None) -> NDArray[np.float64]:
    """Return the sum of squares of each array, over all ranks unless `world` is None."""
    sums = np.array([_square(each.flat) for each in lent], np.float64)
    return sums if world is None else world.allreduce(sums, reproducible=True)


def _square(flat: Array) -> float:
    total = 0.0
    for start in range(0, flat.size, _CHUNK):  # so that the converted chunk stays in the cache
        part = flat[start : start + _CHUNK]
        wide = part.view(part.real.dtype) if part.dtype.kind == "c" else part
        wide = wide.astype(np.float64, copy=False)
        total += float(wide @ wide)
    return total
