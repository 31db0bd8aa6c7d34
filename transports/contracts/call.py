"""Values that describe a call: its arguments, its signature, its extents and its plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Plan
from unisono.dtypes import DType
from unisono.errors import UsageError
from unisono.foundation.records import record
from unisono.operations import Op

if TYPE_CHECKING:
    from numpy.typing import NDArray

AnyArray: TypeAlias = "NDArray[np.generic]"


# INPUT or OUTPUT of a call: one flat C-contiguous array for each extent, or None for one that is absent. A single array
# stands for a list of one.
Operand: TypeAlias = "AnyArray | Sequence[AnyArray | None] | None"


_MOST_SHOWN = 8
_MOST_NBYTES = (1 << 63) - 1
# The collective of the signatures of `send` and `recv`.
MESSAGE = "send/recv"


class MemoryType(IntEnum):
    """The kind of memory of a message. The numbers are those of transports/native/core/endpoint/memory_type.h."""

    HOST = 0
    CUDA = 1
    CUDA_MANAGED = 2


class Argument(NamedTuple):
    """The facts about one array of a call on which all ranks must agree.

    The `shape` is that of the array, which is equal on all ranks. In a vector collective, where each rank has a count
    of its own, it is the shape of one row.
    """

    dtype: str | None
    shape: tuple[int, ...] | None
    order: str
    op: str | None

    def __str__(self) -> str:
        """Return the argument as the user wrote it: ``float32[8], op=sum``."""
        shape = ",".join(str(extent) for extent in self.shape or ())
        array = f"{self.dtype}[{shape}]" if self.dtype else ""
        order = "order=F" if self.order == "F" else ""
        op = f"op={self.op}" if self.op else ""
        return ", ".join(part for part in (array, order, op) if part)


@record(slots=False)
class Signature:
    """The facts of a call on which all ranks must agree. Every message carries its `digest`, which receivers compare.

    Attributes:
        collective: the name of the collective.
        dtype, shape, order, op: those of the first array, as in `Argument`.
        root: the root, or None.
        algorithm: the name of the chosen algorithm.
        segments: the number of segments.
        counts: in a vector collective, the rows of each rank, if all ranks know them.
        reproducible, accumulate: the options of the call, as the user requested them.
        others: the arguments of the arrays after the first.
        memory: where the arrays are, if not on the host.
        asked: the algorithm that the user requested. It is only shown: ranks agree if their `algorithm` is equal.
    """

    collective: str
    dtype: str | None
    shape: tuple[int, ...] | None
    order: str
    op: str | None
    root: int | None
    algorithm: str
    segments: int
    counts: tuple[int, ...] | None = None
    reproducible: bool = False
    accumulate: str | None = None
    others: tuple[Argument, ...] = ()
    memory: str = ""
    asked: str | None = field(default=None, compare=False)

    @cached_property
    def digest(self) -> int:
        """The first 64 bits of SHA-256 over all fields but `asked`; equal signatures have equal digests."""
        facts = repr((*_agreed(self), *map(tuple, self.others)))
        return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "little")

    def agrees(self, other: Signature) -> bool:
        """Return whether messages of both calls may meet: whether their digests are equal.

        The two ends of a `send` and a `recv` also agree if they have as many elements, and one of their arrays is flat.
        """
        if self.digest == other.digest or self.collective != MESSAGE:
            return self.digest == other.digest
        shapes = (self.shape or (), other.shape or ())
        return any(len(shape) == 1 for shape in shapes) and self._flat().digest == other._flat().digest

    def _flat(self) -> Signature:
        return replace(self, shape=(prod(self.shape or ()),))

    def __str__(self) -> str:
        """Return the call as the user wrote it: ``allreduce(float32[8], op=sum)``.

        Equal neighbours among several arrays are counted: ``allreduce([2 × (float32[8], op=sum)])``.
        """
        return self._text

    @cached_property
    def _text(self) -> str:
        first = Argument(self.dtype, self.shape, self.order, self.op)
        arrays = _shown(_runs((first, *self.others))) if self.others else str(first)
        root = f"root={self.root}" if self.root is not None else ""
        counts = f"counts={_shown([str(count) for count in self.counts])}" if self.counts is not None else ""
        reproducible = "reproducible" if self.reproducible else ""
        accumulate = f"accumulate={self.accumulate}" if self.accumulate else ""
        asked = f"algorithm={self.asked}" if self.asked else ""
        memory = f"on a {self.memory}" if self.memory else ""
        parts = (arrays, memory, root, counts, asked, reproducible, accumulate)
        return f"{self.collective}({', '.join(part for part in parts if part)})"


# All that the digest covers, except `others`.
_agreed = attrgetter(*(name for name in Signature.__match_args__ if name not in ("others", "asked")))


def _runs(arguments: Sequence[Argument]) -> list[str]:
    """Return a text for each run of equal neighbouring arguments, such as "3 × (float32[8])"."""
    runs = [(argument, sum(1 for _ in equal)) for argument, equal in groupby(arguments)]
    return [f"{number} × ({argument})" if number > 1 else f"({argument})" for argument, number in runs]


def _shown(items: Sequence[str]) -> str:
    """Return the first 8 items as a list; they suffice to recognise a call."""
    return f"[{', '.join(items[:_MOST_SHOWN])}{', …' if len(items) > _MOST_SHOWN else ''}]"


@record
class Extent:
    """The part of INPUT and OUTPUT that one array of a call occupies.

    Attributes:
        elements: the number of elements in INPUT and in OUTPUT.
        dtype, op: their dtype, and the operation that reduces them; op is None if nothing is reduced.
    """

    elements: tuple[int, int]
    dtype: DType
    op: Op | None

    @classmethod
    def of(cls, elements: tuple[int, int], dtype: DType, op: Op | None) -> Extent:
        """Return the extent of so many elements of `dtype`, which are uint8 if `dtype` is moved as bytes.

        Raises:
            UsageError: no memory can have so many bytes.
        """
        if max(elements) * dtype.itemsize > _MOST_NBYTES:
            raise UsageError(f"{max(elements)} elements of {dtype.name} are more than any memory has: pass fewer")
        return cls((elements[0] * dtype.units, elements[1] * dtype.units), dtype.moved, op)


def moved(array: AnyArray, dtype: DType) -> AnyArray:
    """Return a flat contiguous array of `dtype` as executors take it: a view of bytes if `dtype` is moved as bytes."""
    return array.view(np.uint8) if dtype.is_moved_as_bytes else array


@record
class Call:
    """A collective call without its arrays: validated, and with its plan. It is built once and run any number of times.

    Attributes:
        signature: the facts on which all ranks must agree.
        plan: the plan of this rank.
        shape: the element counts of INPUT and OUTPUT, over all extents together.
        extents: an extent for each array; none for a barrier.
        segments: the number of segments, at least 1.
    """

    signature: Signature
    plan: Plan
    shape: Shape
    extents: tuple[Extent, ...]
    segments: int = 1

    def is_shared(self, buffer: Buffer) -> bool:
        """Return whether each extent of a buffer is cut into a share for each rank, so that a block is a share of all.

        Otherwise the blocks are cut out of the whole buffer, in which the extents follow each other.
        """
        if len(self.extents) < 2:
            return False
        contract = CONTRACTS[self.plan.collective]
        return (contract.input if buffer is Buffer.INPUT else contract.output) is Cut.SHARES


@record
class Usage:
    """How often a call has run: the number of runs, the number of timed runs, and the seconds of the timed ones."""

    calls: int
    timed: int
    seconds: float


# (collective, nbytes, (dtype, op) of each reduction, number of arrays, number of ranks) → the reason why a library
# cannot carry out such a call, or None if it can.
VendorRefusal: TypeAlias = Callable[[str, int, Sequence[tuple[DType, Op]], int, int], "str | None"]
