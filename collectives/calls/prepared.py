"""Calls that have been checked: what is needed to run them, start them, know them or keep them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.collectives.calls.planning import CallSpec
from unisono.operations import Op
from unisono.records import record
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.reductions.definition import lift


@record
class BoundArray:
    """An array of a call, and where its result goes.

    Attributes:
        kind: what decides about the call.
        source, target: what is read and what is written, flat; None where this rank has none.
        result: what the user gets, with the memory of `target`; None if nothing. But see `finish`.
        is_packed: whether `source` is a copy of the user's array, made because that is not contiguous.
        is_in_place: whether `target` is in the memory of `source`, as the collective allows.
        convert: what makes the array that the user gets from `result` once that is complete; None if it is that array.
        lifting: the operation by which `source` must be lifted before each run; None if it goes as it is.
    """

    kind: CallSpec
    source: AnyArray | None = None
    target: AnyArray | None = None
    result: Any = None
    is_packed: bool = False
    is_in_place: bool = False
    convert: Callable[[AnyArray], Any] | None = None
    lifting: Op | None = None

    def finish(self) -> Any:
        """Return what the user gets; to be called once, when the call is done."""
        return self.result if self.convert is None else self.convert(self.result)

    def lifted(self, stage: AnyArray | None = None) -> AnyArray | None:
        """Return what the plan reads: `source`, or `stage` or a new array with what it is lifted to.

        Raises:
            UsageError: the factor of the operation is not in the range of the dtype.
        """
        if self.lifting is None or self.source is None:
            return self.source
        return lift(self.lifting, self.source, stage)


@record
class CheckedCall:
    """The arrays of a call that is right as far as this rank can tell.

    Attributes:
        parts: the arrays.
        gathered: list or tuple, as the user gave them and gets the results; None of an array alone.
    """

    parts: Sequence[BoundArray]
    gathered: type[Any] | None

    def finish(self) -> Any:
        """Return what the user gets, None where this rank gets nothing; to be called once, when the call is done."""
        results = [part.finish() for part in self.parts]
        return self.gathered(results) if self.gathered and results[0] is not None else results[0]


@record
class PreparedCall(CheckedCall):
    """A call that the executor carries out, planned and chosen; each of the arrays is an extent of `call`."""

    call: Call

    @property
    def targets(self) -> list[AnyArray | None]:
        """OUTPUT, as executors take it."""
        return [part.target for part in self.parts]

    def sources(self, stages: Sequence[AnyArray | None] | None = None) -> list[AnyArray | None]:
        """Return INPUT, as executors take it, lifted where needed: into `stages`, if given, which it returned before.

        Raises:
            UsageError: as `BoundArray.lifted`.
        """
        return [part.lifted(stages[index] if stages else None) for index, part in enumerate(self.parts)]

    @property
    def can_be_known(self) -> bool:
        """Whether such arguments make the same call again, on the memory of the arrays as it is."""
        layout = self.parts[0].kind.layout
        has_counts = layout is not None and layout.rows is not None
        return not has_counts and not any(part.is_packed or part.lifting is not None for part in self.parts)
