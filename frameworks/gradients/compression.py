"""Compression of gradients: fewer bytes on the wire than in memory, with error feedback.

Theory of operation
-------------------
A compressed form loses a part of each element. The rank keeps that part as the *residual* of the element and adds it to
its next gradient, so that nothing is lost in the long run (Seide et al. 2014; Karimireddy et al. 2019). The forms:

- "float16" and "bfloat16": each rank rounds its elements, the sum is computed in float32, and the result is rounded
  once. No rank keeps the loss of that second rounding, because no rank sees it.
- "int8", "float8", "int4" and "onebit": blocks of elements with scales (`blocks`).
- "topk": the largest elements with their indices (`top_k`).
- "powersgd": two narrow matrices for a wide one (`power_sgd`).

An element that is not finite stays so: by itself in the narrow floats and with "topk", with all its block in blocks,
and with all its matrix with "powersgd". It leaves no residual.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unisono import UsageError, Work
from unisono.foundation.near_names import did_you_mean
from unisono.frameworks.arrays import same_bits
from unisono.frameworks.gradients.blocks import CODECS, in_blocks
from unisono.frameworks.gradients.layout import Gradient
from unisono.frameworks.gradients.power_sgd import power_sgd
from unisono.frameworks.gradients.stages import Flat, Floats, Stages
from unisono.frameworks.gradients.top_k import top_k, top_k_way
from unisono.transports.reductions.wire_formats import from_wire, to_wire

_FLOATS = ("float16", "bfloat16", "float32", "float64")
# The kinds of state that are the same on all ranks. The others belong to a rank.
SHARED_STATE = frozenset({"bases"})


class Setting(NamedTuple):
    """A number of a compression that programs may set.

    Attributes:
        default: its value; its type is that of all values.
        least, most: the limits of its values.
    """

    default: float
    least: float
    most: float


class Compression(NamedTuple):
    """A compressed form.

    Attributes:
        stages: ``stages(flat, **settings)`` returns the stages of a reduction.
        calls: the collectives of a reduction. Each has a communicator of its own.
        way: ``way(ranks, **settings)`` returns a name for the exchange, if `calls` does not say it; else None.
        itemsize: the bytes of an element on the wire, about. Elements of narrower dtypes are not compressed.
        state: the kinds of state of each element.
        settings: the settings by name.
        on_device: whether GPUs compress it.
    """

    stages: Callable[..., Stages]
    calls: tuple[str, ...]
    itemsize: float
    state: tuple[str, ...] = ("residuals",)
    settings: Mapping[str, Setting] = {}
    on_device: bool = False
    way: Callable[..., str] | None = None

    def described(self, ranks: int) -> str:
        """Return the names of the exchanges of a reduction among so many ranks."""
        return ", ".join(self.calls) if self.way is None else self.way(ranks)


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


def _narrow(form: str, flat: Flat) -> Stages:
    """Return the stages of a reduction in narrow floats."""
    memory, residual = flat.memory, flat.state["residuals"]
    floats, wire = Floats(memory), np.empty(memory.size, np.dtype(form))
    allreduce = flat.communicators[0].plan(
        "allreduce", wire, op=flat.op, out=wire, accumulate="float32", timeout_s=flat.timeout_s
    )

    def start() -> Work[Any]:
        to_wire(form, wire, floats.read(), residual)
        work: Work[Any] = allreduce(wait=False)
        return work

    @same_bits
    def finish() -> None:
        from_wire(form, floats.x, wire)
        floats.write_back()

    return Stages((start,), finish)


def _blocks(name: str, itemsize: float, *, on_device: bool = False) -> Compression:
    return Compression(partial(in_blocks, CODECS[name]), ("alltoall", "allgather"), itemsize, on_device=on_device)


COMPRESSIONS: Mapping[str, Compression] = {
    "float16": Compression(partial(_narrow, "float16"), ("allreduce",), 2, on_device=True),
    "bfloat16": Compression(partial(_narrow, "bfloat16"), ("allreduce",), 2, on_device=True),
    "int8": _blocks("int8", 1, on_device=True),
    "float8": _blocks("float8", 1),
    "int4": _blocks("int4", 0.5),
    "onebit": _blocks("onebit", 0.125),
    "topk": Compression(
        top_k,
        ("allgather",),
        0.125,
        ("residuals", "velocities"),
        {
            "ratio": Setting(0.01, 1e-9, 1.0),
            "momentum": Setting(0.0, 0.0, math.nextafter(1, 0)),
            "clip": Setting(math.inf, 1e-300, math.inf),
        },
        way=top_k_way,
    ),
    "powersgd": Compression(
        power_sgd, ("allreduce", "allreduce"), 0.125, ("residuals", "bases"), {"rank": Setting(4, 1, 1 << 16)}
    ),
}


@functools.cache
def compression_of(text: str) -> Compression:
    """Return the compression that a text names, with its settings: such as "int8" or "topk:ratio=0.001,momentum=0.9".

    Raises:
        UsageError: there is no such compression or setting, or a setting has a value that it cannot have.
    """
    name, _, rest = text.partition(":") if isinstance(text, str) else (text, "", "")
    row = COMPRESSIONS.get(name)
    if row is None:
        hint = did_you_mean(str(name), COMPRESSIONS)
        raise UsageError(f"compression must be one of {', '.join(COMPRESSIONS)}, or None, not {text!r}{hint}")
    values = {key: setting.default for key, setting in row.settings.items()}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        values[key] = _number(text, row.settings.get(key), key, value, row.settings)
    state = tuple(kind for kind in row.state if kind != "velocities" or values["momentum"])
    way = None if row.way is None else partial(row.way, **values)
    return row._replace(stages=partial(row.stages, **values), state=state, way=way)


def _number(text: str, setting: Setting | None, key: str, value: str, settings: Mapping[str, Setting]) -> float:
    if setting is None:
        known = f"its settings are {', '.join(settings)}" if settings else "it has no settings"
        raise UsageError(f"compression {text!r} sets {key!r}, and {known}{did_you_mean(key, settings)}")
    try:
        number = type(setting.default)(value)
    except ValueError:
        number = math.nan
    if not setting.least <= number <= setting.most:
        kind = "an integer" if isinstance(setting.default, int) else "a number"
        limits = f"{kind} from {setting.least:g} to {setting.most:g}"
        raise UsageError(f"compression {text!r} sets {key} to {value!r}: it must be {limits}")
    return number
