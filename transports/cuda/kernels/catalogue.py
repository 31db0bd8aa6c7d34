"""The kernels by operation and dtype, as C++ source.

Each kernel is compiled by itself, so a program waits only for those that it uses. The parameters of kernels are
declared here (`reduce.cuh`, `scale.cuh`, `extents.cuh`, `quantise.cuh`). Blocks and grids have one dimension,
and grids may have any size.

Reductions have variants, which macros choose. All compute the same bits. `make gpu` measures them, so that the fastest
ones can be kept (`_kept`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from unisono.dtypes import DTYPES, DType
from unisono.errors import UsageError
from unisono.operations import OPERATIONS, Combine, Lower, Op

KERNELS = Path(__file__).parent
# The arithmetic that GPUs and processors share.
SHARED = Path(__file__).parents[2] / "native" / "core" / "kernels"
SHARED_HEADERS = ("kernel_operations.h", "narrow_floats.h", "unaligned.h")

BLOCK_THREADS = 512  # the threads of a block, unless macros say otherwise
MOST_SOURCES = 8  # up to this many, the number is part of the kernel


Macros: TypeAlias = tuple[tuple[str, int], ...]

VARIANTS: dict[str, Macros] = {
    "plain": (),
    "cache hints": (("UNISONO_CACHE_HINTS", 1),),
    "pipelined": (("UNISONO_PIPELINED", 1),),
    "whole waves": (("UNISONO_WHOLE_WAVES", 1),),
    "small blocks": (("UNISONO_BLOCK_THREADS", 256), ("UNISONO_BLOCKS", 3)),
    "reciprocals": (("UNISONO_RECIPROCALS", 1),),
    "pipelined reciprocals": (("UNISONO_PIPELINED", 1), ("UNISONO_RECIPROCALS", 1)),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel.

    Attributes:
        name: its entry point.
        source: its C++ source. It includes a file of `KERNELS`, which includes others and those of `SHARED`.
        macros: the macros that choose its variant, by name, with their values.
    """

    name: str
    source: str
    macros: Macros = ()

    @property
    def threads(self) -> int:
        """The number of threads of a block."""
        return dict(self.macros).get("UNISONO_BLOCK_THREADS", BLOCK_THREADS)


_CPP = {"float32": "float", "float64": "double", "complex64": "Complex<float>", "complex128": "Complex<double>"}
_CPP |= {name: f"{name}_t" for name, dtype in DTYPES.items() if dtype.kind == "integer"} | {"bool": "uint8_t"}

_NARROW = {"float16": "Half", "bfloat16": "BrainHalf", "float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}

_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

_OPERATIONS = {
    Combine.SUM: "PlainSum",
    Combine.PROD: "Prod",
    Combine.MIN: "Min",
    Combine.MAX: "Max",
    Combine.BAND: "BitAnd",
    Combine.BOR: "BitOr",
    Combine.BXOR: "BitXor",
    Combine.LAND: "LogicalAnd",
    Combine.LOR: "LogicalOr",
    Combine.LXOR: "LogicalXor",
    Combine.MINLOC: "Located<Less>",
    Combine.MAXLOC: "Located<Greater>",
}

# For booleans, which are bytes of 0 or 1, the minimum is "and", and the maximum is "or".
_OF_BOOLEANS = {
    Combine.MIN: Combine.BAND,
    Combine.LAND: Combine.BAND,
    Combine.MAX: Combine.BOR,
    Combine.LOR: Combine.BOR,
    Combine.LXOR: Combine.BXOR,
}
_TRUTHS = {
    "float16": "Narrow<Truths<Float16, uint16_t>>",
    "bfloat16": "Narrow<Truths<BFloat16, uint16_t>>",
    "float8_e4m3fn": "Narrow<Truths<Float8E4M3, uint8_t>>",
    "float8_e5m2": "Narrow<Truths<Float8E5M2, uint8_t>>",
}
_LOGICAL = (Combine.LAND, Combine.LOR, Combine.LXOR)
_BITWISE = (Combine.BAND, Combine.BOR, Combine.BXOR)


def reduction(dtype: DType, op: Op, sources: int, variant: str | None = None) -> Kernel:
    """Return the kernel that reduces `sources` arrays of `dtype` by `op`, as `transports.reductions.reduce_into` does.

    Up to `MOST_SOURCES` addresses are parameters of the kernel. The kernel for more sources reads their addresses from
    device memory. The divisor of an average must be at least 1; other operations ignore it.

    Args:
        dtype: the dtype of the arrays.
        op: the operation.
        sources: the number of arrays.
        variant: the name in `VARIANTS`; None: the one that is kept for such reductions.

    Raises:
        UsageError: the operation is not defined for the dtype, or is a Python function.
    """
    op.check(dtype)
    if op.combine is Combine.FUNCTION:
        raise UsageError(f"{op.name} is a Python function, which GPUs cannot run: use a named operation")
    combine = _OF_BOOLEANS.get(op.combine, op.combine) if dtype.kind == "bool" else op.combine
    operation = "Sum" if op.lower is Lower.DIVIDE_BY_SIZE else _OPERATIONS[combine]
    parts, element = _element(dtype, combine)
    # Named after the arithmetic, because a plan may combine with an operation first and lower with it later.
    result = "avg" if op.lower is Lower.DIVIDE_BY_SIZE else combine.name.lower()
    suffix = "" if variant is None else f"_{variant.replace(' ', '_')}"
    if sources <= MOST_SOURCES:
        name = f"{dtype.name}_{result}_{sources}{suffix}"
        call = f"UNISONO_REDUCE({name}, {parts}, {sources}, {element}, {operation})"
    else:
        name = f"{dtype.name}_{result}_many{suffix}"
        call = f"UNISONO_REDUCE_MANY({name}, {parts}, {element}, {operation})"
    return Kernel(name, _text("reduce", call), VARIANTS[variant or _kept(dtype, op, sources)])


def _kept(dtype: DType, op: Op, sources: int) -> str:
    """Return the variant of a reduction that is used. It is chosen by its machine code, until a GPU measures all.

    A pack of 8-bit floats makes so many states that a thread has no loads under way while it combines them, unless it
    has loaded another tile before. A division takes tens of instructions, and most jobs have 2ⁿ ranks.
    """
    if sources > MOST_SOURCES:
        return "plain"  # other kernels
    is_pipelined = dtype.name in _FLOAT8 and op.combine not in _LOGICAL
    divides = op.lower is Lower.DIVIDE_BY_SIZE and dtype.kind in ("float", "float8", "complex")
    named = "pipelined" if is_pipelined else "", "reciprocals" if divides else ""
    return " ".join(filter(None, named)) or "plain"


def _text(file: str, call: str = "") -> str:
    return f'#include "{file}.cuh"\nusing namespace unisono::cuda;\n{call}\n'


def _element(dtype: DType, combine: Combine) -> tuple[int, str]:
    """Return the number of parts of an element that are combined separately, and the C++ type of a part."""
    if dtype.name in _NARROW:
        return 1, (_TRUTHS if combine in _LOGICAL else _NARROW)[dtype.name]
    if dtype.kind == "complex" and combine is Combine.SUM:
        return 2, f"Plain<{_CPP['float32' if dtype.itemsize == 8 else 'float64']}>"
    return 1, f"{'Bitwise' if combine in _BITWISE else 'Plain'}<{_CPP[dtype.name]}>"


def scaling(dtype: DType) -> Kernel:
    """Return the kernel that multiplies an array of `dtype` by a factor of the accumulation dtype.

    Raises:
        UsageError: `dtype` has no products.
    """
    OPERATIONS["prod"].check(dtype)
    name = f"{dtype.name}_scale"
    return Kernel(name, _text("scale", f"UNISONO_SCALE({name}, {_element(dtype, Combine.PROD)[1]})"))


COPY_EXTENTS = Kernel("copy_extents", _text("extents"))

_QUANTISED = {"float16": "Half", "bfloat16": "BrainHalf", "float32": "Plain<float>"}
_CODES = {
    "int8": "Int8Codes",
    "float8_e4m3fn": "E4M3Codes",
    "float8_e5m2": "E5M2Codes",
    "float16": "HalfCodes",
    "bfloat16": "BrainHalfCodes",
}


def quantise(dtype: DType, codes: DType) -> Kernel:
    """Return the kernel that converts an array of `dtype` to codes and scales, with error feedback.

    Raises:
        UsageError: `dtype` is not float16, bfloat16 or float32, or `codes` has no fewer bits, or is none of int8,
            float8_e4m3fn, float8_e5m2, float16 and bfloat16.
    """
    return _quantisation("quantise", dtype, codes)


def dequantise(dtype: DType, codes: DType) -> Kernel:
    """Return the kernel that adds up rows of codes and scales to an array of `dtype`; raises as `quantise` does."""
    return _quantisation("dequantise", dtype, codes)


def _quantisation(way: str, dtype: DType, codes: DType) -> Kernel:
    if dtype.name not in _QUANTISED or codes.name not in _CODES or codes.itemsize >= dtype.itemsize:
        takes = f"{', '.join(_QUANTISED)} are quantised to fewer bits of {', '.join(_CODES)}"
        raise UsageError(f"{dtype.name} cannot be quantised to {codes.name}: {takes}")
    name = f"{way}_{dtype.name}_{codes.name}"
    call = f"UNISONO_{way.upper()}({name}, {_QUANTISED[dtype.name]}, {_CODES[codes.name]})"
    return Kernel(name, _text("quantise", call))
