"""Reduction operations as data: lift, combine, lower.

An operation works on a state: every contribution is *lifted* into it once, states are *combined* pairwise in any order
that the plan chooses, and each element of the result is *lowered* back exactly once. A sum has trivial lift and lower;
an average is a sum whose lowering divides by the number of contributions. The plan says where lowering happens (the
`lower` mark of its steps) and the verifier proves that it happens once, so that no executor has to know an operation.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from unisono.dtypes import DType
from unisono.errors import UsageError


class Combine(enum.IntEnum):
    """How two states become one; the numbers are shared with the native core."""

    SUM = 0
    PROD = 1
    MIN = 2
    MAX = 3


class Lower(enum.IntEnum):
    """How the final state becomes an element of the result."""

    IDENTITY = 0
    DIVIDE_BY_SIZE = 1


@dataclass(frozen=True, slots=True)
class Op:
    """A reduction operation.

    Attributes:
        name: what users pass as ``op=``.
        combine: how states are combined. NaN is propagated by min and max, as numpy.minimum does; integers wrap.
        lower: how a state becomes a result. Integer division truncates towards zero, as C and NCCL do.
        kinds: the kinds of dtype that it is defined for.
        commutative: whether operands may change places (all built-in operations: yes).
    """

    name: str
    combine: Combine
    lower: Lower
    kinds: frozenset[str]
    commutative: bool = True

    def check(self, dtype: DType) -> None:
        """Raise `UsageError` if the operation is not defined for `dtype`."""
        if dtype.kind not in self.kinds:
            raise UsageError(
                f"op {self.name!r} is not defined for {dtype.name}: it takes {', '.join(sorted(self.kinds))}"
            )


_ORDERED = frozenset({"integer", "float"})

OPERATIONS: dict[str, Op] = {
    "sum": Op("sum", Combine.SUM, Lower.IDENTITY, _ORDERED),
    "prod": Op("prod", Combine.PROD, Lower.IDENTITY, _ORDERED),
    "min": Op("min", Combine.MIN, Lower.IDENTITY, _ORDERED),
    "max": Op("max", Combine.MAX, Lower.IDENTITY, _ORDERED),
    "avg": Op("avg", Combine.SUM, Lower.DIVIDE_BY_SIZE, _ORDERED),
}


def operation(name: str | Op) -> Op:
    """Return the operation called `name`; an `Op` is returned as it is.

    Raises:
        UsageError: there is no such operation; the message lists those there are.
    """
    if isinstance(name, Op):
        return name
    found = OPERATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise UsageError(f"op must be one of {', '.join(OPERATIONS)}; got {name!r}")
    return found
