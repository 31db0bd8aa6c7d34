"""Everything that depends on the version of JAX, 0.5 or newer: primitives, effects, tokens and custom calls.

Used by: `primitives` and `xla`. JAX has no public interface for ordered effects and for the state of its processes, so
this module uses its private modules.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import compiler, core, dispatch, effects
from jax._src.distributed import global_state
from jax._src.xla_bridge import backends_are_initialized
from jax.interpreters import ad, batching, mlir

from unisono.errors import UsageError
from unisono.xla_programs import xla_handler, xla_process

# The name of the custom call in compiled programs.
_TARGET = "unisono_call"
_PLATFORM = "cpu"


def _minor_version() -> int:
    """Return the minor version of XLA's C interface, which only its header states."""
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    version = re.search(r"^#define XLA_FFI_API_MINOR (\d+)", header, re.MULTILINE)
    if version is None:
        raise ImportError("the header of XLA's C interface in jaxlib states no version: install another jaxlib")
    return int(version[1])


jax.ffi.register_ffi_target(_TARGET, xla_handler(_minor_version()), platform=_PLATFORM)


class CallEffect(effects.Effect):  # type: ignore[misc]
    """The effect of a call: JAX keeps all calls, and keeps them in the order of the program."""

    def __repr__(self) -> str:
        """Return the text that JAX shows where it forbids the effect, as in a program for several devices."""
        return "calls of unisono.jax, which need one process for each device, or token="


EFFECT = CallEffect()
for allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    allowed.add_type(CallEffect)


def is_in_use() -> bool:
    """Return whether JAX has chosen its devices and collectives, which it does when it is first used."""
    return bool(backends_are_initialized())


def leave_sigterm_alone() -> None:
    """Let SIGTERM end this process, although `jax.distributed` is initialised. Before JAX 0.6 it catches the signal."""
    if "jax_enable_preemption_service" in jax.config.values:
        jax.config.update("jax_enable_preemption_service", False)


def is_distributed() -> bool:
    """Return whether `jax.distributed` has been initialised."""
    return global_state.client is not None


def process_number() -> int:
    """Return the number of this process in `jax.distributed`."""
    return int(global_state.process_id)


# Whether this thread is compiling a program of `run_sum_over`, for which no callback is called.
_own = threading.local()


def call_when_compiled(callback: Callable[[Callable[[], str], np.ndarray], None]) -> None:
    """Call `callback` after each compilation, with a function that returns the optimised program, and its devices.

    The devices have the shape (replicas, partitions). An exception of `callback` leaves the call that compiles.
    """
    compile_program = compiler.compile_or_get_cached

    def compile_and_call(backend: Any, module: Any, devices: Any, options: Any, *others: Any, **named: Any) -> Any:
        compiled = compile_program(backend, module, devices, options, *others, **named)
        if not getattr(_own, "compiles", False):
            shape = options.num_replicas, options.num_partitions
            callback(compiled.hlo_modules()[0].to_string, np.asarray(devices, object).reshape(shape))
        return compiled

    compiler.compile_or_get_cached = compile_and_call


def run_sum_over(groups: Sequence[Sequence[Any]]) -> None:
    """Compile and run a program whose only collective is a sum over groups of devices. No device is in two groups."""
    devices = [device for group in groups for device in group]
    ends = list(itertools.accumulate(map(len, groups), initial=0))
    positions = [[*range(*pair)] for pair in itertools.pairwise(ends)]
    mesh = jax.sharding.Mesh(np.array(devices), ("i",))

    # Integers: with jax_debug_nans, JAX looks for NaNs in results, and this sum is not computed.
    def add() -> Any:
        return jax.lax.psum(jax.lax.axis_index("i"), "i", axis_index_groups=positions)[None]

    _own.compiles = True
    try:
        with jax.disable_jit(False):
            program = _shard_map(add, mesh=mesh, in_specs=(), out_specs=jax.sharding.PartitionSpec("i"))
            jax.block_until_ready(jax.jit(program)())
    finally:
        _own.compiles = False


def _shard_map(function: Callable[..., Any], **specs: Any) -> Callable[..., Any]:
    """Map a function over shards, without JAX's check on which shards its results depend."""
    if hasattr(jax, "shard_map"):
        return jax.shard_map(function, check_vma=False, **specs)  # type: ignore[no-any-return]
    from jax.experimental.shard_map import shard_map

    return shard_map(function, check_rep=False, **specs)  # type: ignore[no-any-return]


def drop_coordination() -> None:
    """Drop the connection to JAX's coordination service, so that the end of this process does not wait for others."""
    for connection in (global_state.client, global_state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(connection))  # its destructor would end the process by SIGABRT
    global_state.client = global_state.service = None


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

    Lowering raises `UsageError` on other platforms than the CPU, and for several devices of this process.
    """

    def lower(context: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        _check_one_device(of.name, context.module_context.axis_context)
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


def _devices_of(axes: Any) -> int:
    """Return the number of devices of a program: under shard_map, under pmap, or of sharded arrays."""
    if hasattr(axes, "mesh"):
        return int(axes.mesh.size)
    return int(axes.axis_env.nreps if hasattr(axes, "axis_env") else axes.num_devices)


def _check_one_device(name: str, axes: Any) -> None:
    """Check that a program, of which JAX knows `axes`, runs on one device of this process.

    Raises:
        UsageError: it runs on several, which would make its calls at the same time, in any order.
    """
    devices = _devices_of(axes)
    if devices > 1 and jax.local_device_count() > 1:
        raise UsageError(
            f"{name} is in a program for {devices} devices, and this process has {jax.local_device_count()}, which "
            "would make the call at the same time, in any order: start one process for each device"
        )


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
