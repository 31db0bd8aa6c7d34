"""Values that describe a call: its arguments, the signature that all ranks must share, and its plan."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import astuple, field, replace
from enum import IntEnum
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from unisono.algorithms.ir.binding import Shape
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Plan
from unisono.dtypes import DType
from unisono.operations import Op
from unisono.records import record

if TYPE_CHECKING:
    from numpy.typing import NDArray

AnyArray: TypeAlias = "NDArray[np.generic]"


# INPUT or OUTPUT of a call: flat C-contiguous arrays, one for each extent; one alone stands for a list of it, and None
# for what is not there.
Operand: TypeAlias = "AnyArray | Sequence[AnyArray | None] | None"


_MOST_SHOWN = 8


class MemoryType(IntEnum):
    """Where the memory of a message lies, numbered as in transports/native/core/memory_type.h."""

    HOST = 0
    CUDA = 1
    CUDA_MANAGED = 2


class Argument(NamedTuple):
    """What all ranks must agree on about an array of a call.

    The `shape` is that of an array of which all ranks have a like one, or of a row where each rank has counts of its
    own.
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
    """What all ranks must agree on in a call. Compared by `digest` in the header of every message.

    The `shape` is that of an array of which all ranks have a like one, or of a row where each rank has `counts` of its
    own (in rows), as far as all ranks know them. Where there are several arrays in one call, `others` are those after
    the first. `reproducible` and `accumulate` are what the user asked for; so is `asked`, the name of an algorithm,
    which is only shown: ranks agree if their `algorithm` is the same. `memory` is where the arrays are, if that is not
    the host.
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
        """64 bits of SHA-256 over all fields but `asked`; equal on two ranks exactly if the signatures are."""
        facts = repr(astuple(replace(self, asked=None)))
        return int.from_bytes(hashlib.sha256(facts.encode()).digest()[:8], "little")

    def __str__(self) -> str:
        """Return the call as the user wrote it: ``allreduce(float32[8], op=sum)``.

        Of several arrays, like ones that follow each other are counted: ``allreduce([2 × (float32[8], op=sum)])``.
        """
        return self._text

    @cached_property
    def _text(self) -> str:
        first = Argument(self.dtype, self.shape, self.order, self.op)
        what = _shown(_runs((first, *self.others))) if self.others else str(first)
        root = f"root={self.root}" if self.root is not None else ""
        counts = f"counts={_shown([str(count) for count in self.counts])}" if self.counts is not None else ""
        reproducible = "reproducible" if self.reproducible else ""
        accumulate = f"accumulate={self.accumulate}" if self.accumulate else ""
        asked = f"algorithm={self.asked}" if self.asked else ""
        memory = f"on a {self.memory}" if self.memory else ""
        parts = (what, memory, root, counts, asked, reproducible, accumulate)
        return f"{self.collective}({', '.join(part for part in parts if part)})"


def _runs(arguments: Sequence[Argument]) -> list[str]:
    """Return like arguments that follow each other as one, with their number."""
    runs = [(argument, sum(1 for _ in equal)) for argument, equal in groupby(arguments)]
    return [f"{number} × ({argument})" if number > 1 else f"({argument})" for argument, number in runs]


def _shown(items: Sequence[str]) -> str:
    """Return the first items, which suffice to recognise a call."""
    return f"[{', '.join(items[:_MOST_SHOWN])}{', …' if len(items) > _MOST_SHOWN else ''}]"


@record
class Extent:
    """A part of INPUT and OUTPUT with elements of one type, which are reduced by one operation.

    Attributes:
        elements: how many there are in INPUT and in OUTPUT.
        dtype, op: their type and the operation; op is None where nothing is reduced.
    """

    elements: tuple[int, int]
    dtype: DType
    op: Op | None


@record
class Call:
    """A collective call, validated and chosen, without its arrays; built once and used for any number of calls.

    Attributes:
        signature: what the ranks must agree on.
        plan: this rank's plan.
        shape: element counts of INPUT and OUTPUT, which are those of all extents together.
        extents: what INPUT and OUTPUT consist of, an extent for each array; none for a barrier.
        segments: number of segments that the plan is run over, at least 1.
    """

    signature: Signature
    plan: Plan
    shape: Shape
    extents: tuple[Extent, ...]
    segments: int = 1

    def is_shared(self, buffer: Buffer) -> bool:
        """Return whether each extent of a buffer is cut into shares of the ranks, and a block is one of each extent.

        Otherwise blocks are cut out of the extents as they lie one after the other.
        """
        if len(self.extents) < 2:
            return False
        contract = CONTRACTS[self.plan.collective]
        return (contract.input if buffer is Buffer.INPUT else contract.output) is Cut.SHARES


@record
class Usage:
    """How often a call has been run, and the seconds of those of its runs that were timed."""

    calls: int
    timed: int
    seconds: float


# Why a library does not carry out a call, (collective, bytes, what is reduced by what, arrays, ranks) → reason or None.
VendorRefusal: TypeAlias = Callable[[str, int, Sequence[tuple[DType, Op]], int, int], "str | None"]
