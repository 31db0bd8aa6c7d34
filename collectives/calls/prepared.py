"""Checked calls: their arrays as an executor takes them, and the results as the user gets them.

Used by: `binding`, `checking`, the reducer for custom ops, and calls on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from unisono.collectives.calls.planning import CallSpec
from unisono.foundation.records import record
from unisono.operations import Op
from unisono.transports.contracts.call import AnyArray, Call
from unisono.transports.reductions.definition import lift


@record
class BoundArray:
    """One array of a call: the memory that the plan reads and writes, and the result for the user.

    Attributes:
        spec: the call spec.
        source, target: the flat arrays that the plan reads and writes; None if this rank reads or writes nothing.
        result: the array with the memory of `target`; None if this rank gets no result.
        is_packed: whether `source` is a copy of the user's array, which is not contiguous.
        is_in_place: whether `target` overlaps `source`, as the collective allows.
        convert: the function that makes the user's array from the completed `result`; None if `result` is that array.
        lifting: the premul_sum whose factor multiplies `source` before each run; None if nothing multiplies it.
    """

    spec: CallSpec
    source: AnyArray | None = None
    target: AnyArray | None = None
    result: Any = None
    is_packed: bool = False
    is_in_place: bool = False
    convert: Callable[[AnyArray], Any] | None = None
    lifting: Op | None = None

    @property
    def is_converted(self) -> bool:
        """Whether the plan works on other elements than those of the user's array: on products, or on bytes."""
        dtype = self.spec.dtype
        return self.lifting is not None or (dtype is not None and dtype.is_moved_as_bytes)

    def finish(self) -> Any:
        """Return the user's result. Call it only once, when the call has ended."""
        return self.result if self.convert is None else self.convert(self.result)

    def lifted(self, stage: AnyArray | None = None) -> AnyArray | None:
        """Return the array that the plan reads: `source`, or its product with the factor of `lifting`.

        Args:
            stage: memory for the product; None for a new array.

        Raises:
            UsageError: the factor of the operation is not in the range of the dtype.
        """
        if self.lifting is None or self.source is None:
            return self.source
        return lift(self.lifting, self.source, stage)


@record
class CheckedCall:
    """The arrays of a call in which this rank has found no error.

    Attributes:
        arrays: the arrays.
        gathered: the type in which the user passed several arrays and gets the results, list or tuple; None for a
            single array.
    """

    arrays: Sequence[BoundArray]
    gathered: type[Any] | None

    def finish(self) -> Any:
        """Return the user's result; None if this rank gets no result. Call it only once, when the call has ended."""
        results = [array.finish() for array in self.arrays]
        return self.gathered(results) if self.gathered and results[0] is not None else results[0]


@record
class PreparedCall(CheckedCall):
    """A checked call with its plan, for an executor; each array is an extent of `call`."""

    call: Call

    @property
    def targets(self) -> list[AnyArray | None]:
        """The arrays of OUTPUT, one for each extent."""
        return [array.target for array in self.arrays]

    def sources(self, stages: Sequence[AnyArray | None] | None = None) -> list[AnyArray | None]:
        """Return the arrays of INPUT, one for each extent, after multiplication by the factors of premul_sum.

        Args:
            stages: the arrays that an earlier call returned, which are overwritten; None for new ones.

        Raises:
            UsageError: the factor of an operation is not in the range of the dtype.
        """
        return [array.lifted(stages[index] if stages else None) for index, array in enumerate(self.arrays)]

    @property
    def can_be_cached(self) -> bool:
        """Whether the call cache may run an equal call directly on the memory of its arrays."""
        layout = self.arrays[0].spec.layout
        has_counts = layout is not None and layout.rows is not None
        return not has_counts and not any(array.is_packed or array.is_converted for array in self.arrays)
