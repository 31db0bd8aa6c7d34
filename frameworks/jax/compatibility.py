"""Everything that depends on the version of JAX, 0.4.38 or newer: primitives, effects, tokens and custom calls.

Used by: `primitives`. JAX has no public interface for ordered effects, so this module uses its private modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax._src import core, dispatch, effects
from jax.interpreters import ad, batching, mlir

from unisono.errors import UsageError
from unisono.programs import xla_handler, xla_process

# The name of the custom call in compiled programs.
_TARGET = "unisono_call"
_PLATFORM = "cpu"

jax.ffi.register_ffi_target(_TARGET, xla_handler(), platform=_PLATFORM)


class CallEffect(effects.Effect):  # type: ignore[misc]
    """The effect of a call: JAX keeps all calls, and keeps them in the order of the program."""

    def __str__(self) -> str:
        return "Unisono"


EFFECT = CallEffect()
for allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    allowed.add_type(CallEffect)


def primitive(name: str) -> Any:
    """Return a new primitive with several results, which is compiled when it is called outside of programs."""
    made = core.Primitive(name)
    made.multiple_results = True
    made.def_impl(partial(dispatch.apply_primitive, made))
    return made


def define_shapes(of: Any, rule: Callable[..., Any], is_ordered: Callable[..., bool]) -> None:
    """Set the rule that returns the abstract results; the call has the effect if ``is_ordered(**params)``."""

    def abstract(*operands: Any, **params: Any) -> tuple[Sequence[Any], set[CallEffect]]:
        shapes = rule(*operands, **params)
        results = [core.ShapedArray(shape, dtype) for shape, dtype in shapes]
        return results, {EFFECT} if is_ordered(**params) else set()

    of.def_effectful_abstract_eval(abstract)


def define_derivatives(of: Any, jvp: Callable[..., Any], transpose: Callable[..., Any]) -> None:
    """Set the rule of forward derivatives, and that of the transpose, which is called with cotangents and operands."""
    ad.primitive_jvps[of] = jvp
    ad.primitive_transposes[of] = transpose


def define_batching(of: Any, rule: Callable[..., Any]) -> None:
    """Set the rule that makes one call of a batch; the dimension of an operand or result without a batch is None."""
    batching.primitive_batchers[of] = rule


def define_lowering(of: Any, number_of: Callable[..., int], is_ordered: Callable[..., bool]) -> None:
    """Lower the primitive to a custom call that carries ``number_of(*operands, results=, **params)``.

    On other platforms than the CPU, lowering raises `UsageError`.
    """

    def lower(context: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        number = number_of(*context.avals_in, results=context.avals_out, **params)
        ordered = is_ordered(**params)
        attributes = {"call": np.int64(number), "process": np.int64(xla_process()), "ordered": np.int64(ordered)}
        rule = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
        if not ordered:
            results: Sequence[Any] = rule(context, *operands, **attributes)
            return results
        with_token = context.replace(
            avals_in=[*context.avals_in, core.abstract_token], avals_out=[*context.avals_out, core.abstract_token]
        )
        *results, token = rule(with_token, *operands, context.tokens_in.get(EFFECT), **attributes)
        context.set_tokens_out(context.tokens_in.update_tokens(mlir.TokenSet({EFFECT: token})))
        return results

    def refuse(context: Any, *_: Any, **__: Any) -> Sequence[Any]:
        platforms = ", ".join(context.platforms or context.module_context.platforms)
        raise UsageError(
            f"{of.name} runs on the CPU only, and this program is compiled for {platforms}: compile it for the CPU, "
            "as by jax.jit under jax.default_device(jax.devices('cpu')[0])"
        )

    mlir.register_lowering(of, lower, platform=_PLATFORM)
    mlir.register_lowering(of, refuse)


def is_zero(tangent: Any) -> bool:
    """Return whether a tangent or cotangent is the symbol for zeros."""
    return type(tangent) is ad.Zero


def zeros_for(primal: Any) -> Any:
    """Return the symbol for a tangent of zeros of an array."""
    return ad.Zero.from_primal_value(primal) if hasattr(ad.Zero, "from_primal_value") else ad.Zero(core.typeof(primal))


def instantiated(tangent: Any) -> Any:
    """Return a tangent or cotangent as an array."""
    return ad.instantiate_zeros(tangent)


def aval_of_unknown(operand: Any) -> Any:
    """Return the abstract value of the operand of a transpose rule that the cotangent is for; None for another one."""
    return operand.aval if ad.is_undefined_primal(operand) else None
