"""The primitives of JAX for calls, one for each name, and their rules. `compatibility` registers them with JAX.

A primitive takes an array, or nothing for a barrier, and with ``ordered=False`` also a token. It returns the result, if
there is one, and the token. Ordered calls have an effect instead, by which JAX keeps them in order.

Used by: `collectives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from unisono.errors import UsageError
from unisono.frameworks.jax import compatibility as jaxes
from unisono.frameworks.jax.calls import NAMES, SUM, Call


def _is_ordered(*, call: Call, ordered: bool) -> bool:
    return ordered


def _shapes(*operands: Any, call: Call, ordered: bool) -> list[tuple[tuple[int, ...], Any]]:
    """Return the shape and dtype of each result."""
    tokens = [] if ordered else [(operands[-1].shape, operands[-1].dtype)]
    if call.name == "barrier":
        return tokens
    x = operands[0]
    return [(call.result_shape(x.shape), x.dtype), *tokens]


def _number(*operands: Any, results: Sequence[Any], call: Call, ordered: bool) -> int:
    if call.name == "barrier":
        return call.number((), "uint8")
    x = operands[0]
    return call.number(x.shape, x.dtype.name)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, ordered: bool) -> tuple[Any, Any]:
    results = _PRIMITIVES[call.name].bind(*primals, call=call, ordered=ordered)
    zeros = [jaxes.zeros_for(result) for result in results]
    if all(jaxes.is_zero(tangent) for tangent in tangents):
        return results, zeros
    if not ordered:
        raise UsageError(
            f"{call.name} with a token has no derivative, because a token does not order the calls of the derivative "
            "among those of the program: leave token out"
        )
    # The result, and then the tangent of the call: all ranks make these calls in this order.
    return results, [_tangent(call, jaxes.instantiated(tangents[0]))]


def _tangent(call: Call, tangent: Any) -> Any:
    """Return the tangent of the result, as calls that can be transposed.

    Raises:
        NotImplementedError: the operation has no derivative here.
    """
    if call.is_linear:
        return bind(call, tangent)
    assert call.op is not None
    if call.op.name == "avg" and call.name not in ("scan", "exscan"):
        return bind(call._replace(op=SUM), tangent) / call.comm.size
    raise NotImplementedError(
        f"{call.name} with op={call.op.name!r} has no derivative: only 'sum' and 'avg' have one; apply "
        "jax.lax.stop_gradient to x if none is needed"
    )


def _transpose(cotangents: Sequence[Any], x: Any, *, call: Call, ordered: bool) -> list[Any]:
    aval = jaxes.aval_of_unknown(x)
    transposed = bind(call.transposed(aval.shape), _cotangent(call, jaxes.instantiated(cotangents[0]), aval))
    if call.name == "scatter" and call.root != call.comm.rank:
        return [jnp.zeros(aval.shape, aval.dtype)]
    return [transposed]


def _cotangent(call: Call, cotangent: Any, aval: Any) -> Any:
    """Return the array of the transposed call; for a scatter, it has the shape of the result except at the root."""
    if call.name == "gather" and call.root != call.comm.rank:
        return jnp.zeros(aval.shape, aval.dtype)
    return cotangent


def _batch(operands: Sequence[Any], dimensions: Sequence[Any], *, call: Call, ordered: bool) -> tuple[Any, Any]:
    """Make one call of a batch: the batch is the first axis, or the second where the first is cut into parts."""
    if not ordered and dimensions[-1] is not None:
        raise UsageError("the token of a call must not be batched: make it outside of vmap")
    if call.name == "barrier" or dimensions[0] is None:
        return _PRIMITIVES[call.name].bind(*operands, call=call, ordered=ordered), [None] * _count(call, ordered)
    axis = 1 if call.distributes_rows else 0
    x = jnp.moveaxis(operands[0], dimensions[0], axis)
    results = _PRIMITIVES[call.name].bind(x, *operands[1:], call=call.batched(x.shape[axis]), ordered=ordered)
    return results, [axis, *[None] * (len(results) - 1)]


def _count(call: Call, ordered: bool) -> int:
    return (call.name != "barrier") + (not ordered)


def _primitive(name: str) -> Any:
    made = jaxes.primitive(f"unisono_{name}")
    jaxes.define_shapes(made, _shapes, _is_ordered)
    jaxes.define_derivatives(made, _jvp, _transpose)
    jaxes.define_batching(made, _batch)
    jaxes.define_lowering(made, _number, _is_ordered)
    return made


_PRIMITIVES = {name: _primitive(name) for name in NAMES}


def bind(call: Call, x: Any) -> Any:
    """Make an ordered call and return its result; None for a barrier, whose `x` is None."""
    operands = () if x is None else (x,)
    results = _PRIMITIVES[call.name].bind(*operands, call=call, ordered=True)
    return results[0] if results else None


def bind_after(token: Any, call: Call, x: Any) -> tuple[Any, Any]:
    """Make a call after the calls that `token` has passed through; return its result and the next token."""
    operands = (token,) if x is None else (x, token)
    results = _PRIMITIVES[call.name].bind(*operands, call=call, ordered=False)
    return (None, results[0]) if x is None else (results[0], results[1])
