"""The calls that NCCL carries out with Unisono's meaning, and NCCL's numbers for their dtypes and operations, as data.

NCCL promises neither the order in which it combines contributions nor how often it rounds on the way. So `nccl.native`
promises only what NCCL does: a call with the same arguments on the same communicator gives the same elements on all
ranks. Minimum and maximum are for integers only, because NCCL does not define them for NaN.

Source: NCCL 2.30, nccl.h, `ncclDataType_t` and `ncclRedOp_t`, https://docs.nvidia.com/deeplearning/nccl/user-guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from unisono.dtypes import DType
from unisono.operations import Combine, Lower, Op

# Elements that are only moved travel as bytes.
BYTE = 1
DTYPES = MappingProxyType(
    {
        "int8": 0,
        "uint8": 1,
        "int32": 2,
        "uint32": 3,
        "int64": 4,
        "uint64": 5,
        "float16": 6,
        "float32": 7,
        "float64": 8,
        "bfloat16": 9,
        "float8_e4m3fn": 10,
        "float8_e5m2": 11,
    }
)
# Reductions of these need at least this version.
_FLOAT8_VERSION = 22400
_INTEGERS = frozenset({"integer"})
_NUMBERS = frozenset({"integer", "float", "float8"})
# Combination → its number, and the kinds of dtype for which NCCL and Unisono mean the same.
_OPERATIONS = {
    Combine.SUM: (0, _NUMBERS),
    Combine.PROD: (1, _NUMBERS),
    Combine.MAX: (2, _INTEGERS),
    Combine.MIN: (3, _INTEGERS),
}
_AVERAGE = 4
COLLECTIVES = frozenset(
    {"allreduce", "reduce", "reduce_scatter", "broadcast", "allgather", "gather", "scatter", "alltoall"}
)


def refusal(collective: str, reduced: Sequence[tuple[DType, Op]], version: int | None = None) -> str | None:
    """Return the reason why NCCL cannot carry out such a call, as text; None if it can. It is equal on all ranks.

    Args:
        collective: its name.
        reduced: the dtype and operation of each array that is reduced.
        version: the version of NCCL, if it is known already.
    """
    if collective not in COLLECTIVES:
        return f"has no {collective}"
    for dtype, op in reduced:
        _, kinds = _OPERATIONS.get(op.combine, (0, frozenset[str]()))
        if not kinds or op.factor is not None:
            return f"has no operation {op.name!r}"
        if dtype.name not in DTYPES:
            return f"does not reduce {dtype.name}"
        if dtype.kind not in kinds:
            return f"has no {op.name!r} of {dtype.name} that is the same as Unisono's"
        if dtype.name.startswith("float8") and version is not None and version < _FLOAT8_VERSION:
            return f"reduces {dtype.name} from version 2.24 on"
    return None


def operation_number(op: Op) -> int:
    """Return NCCL's number of an operation that `refusal` accepts."""
    return _AVERAGE if op.lower is Lower.DIVIDE_BY_SIZE else _OPERATIONS[op.combine][0]
