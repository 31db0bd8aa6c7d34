"""`PhasedCall`: a collective on one GPU array across hosts, as one rank takes part in it."""

from __future__ import annotations

from typing import NamedTuple

from unisono.algorithms.ir.contracts import CONTRACTS
from unisono.collectives.calls.planning import CallSpec
from unisono.collectives.calls.prepared import BoundArray
from unisono.collectives.device.host_phases import PHASES, Inside, PhaseSegment, Rails
from unisono.collectives.device.routes import address_of
from unisono.operations import OPERATIONS, Lower, Op, operation


class PhasedCall:
    """A call on one array.

    Attributes:
        collective, dtype: of the call.
        op: the operation; None if nothing is reduced.
        whole: the elements of the whole vector.
        source, target: the addresses of INPUT and OUTPUT; 0 if this rank has none.
        phases: the phases inside hosts.
        partial: the operation within hosts; None if nothing is reduced.
        root: the number of the root's host, and of the root on it; None if there is no root.
    """

    def __init__(self, array: BoundArray, rails: Rails) -> None:
        spec = array.spec
        assert spec.dtype is not None, "an array has a dtype"
        assert spec.layout is not None, "a call on a device has an array"
        self._spec, self._rails = spec, rails
        self._contract = CONTRACTS[spec.collective]
        self.collective, self.dtype, self.whole = spec.collective, spec.dtype, spec.layout.whole
        self.source, self.target = address_of(array.source), address_of(array.target)
        self.phases = PHASES[spec.collective]
        self.root = None if spec.root is None else rails.place_of(spec.root)
        self.op = None if spec.op is None else operation(spec.op)
        self._between = None if self.op is None else _sum_of(self.op)
        self.partial = self.op if self.op is not None and self.op.factor is not None else self._between

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` elements."""
        return count * self.dtype.itemsize

    def takes_part(self, inside: Inside | None) -> bool:
        """Return whether the ranks of this host take part in a phase inside hosts."""
        return inside is not None and (not inside.at_root or self.root is None or self.root[0] == self._rails.host)

    def sends(self, segment: PhaseSegment) -> bool:
        """Return whether this rank has an INPUT in the call between hosts."""
        return self._is_in(segment) and self._contract.has_input(*self._place(segment))

    def receives(self, segment: PhaseSegment) -> bool:
        """Return whether this rank has an OUTPUT in the call between hosts."""
        return self._is_in(segment) and self._contract.has_output(*self._place(segment))

    def has_all(self, segment: PhaseSegment) -> bool:
        """Return whether the OUTPUT of the call between hosts is a part of INPUT, which this rank has."""
        rank, root = self._place(segment)
        return self._contract.input_at_root and rank == root

    def is_lowered(self, segment: PhaseSegment) -> bool:
        """Return whether this rank divides the result of the call between hosts, because it is an average."""
        return self.op is not None and self.op.lower is Lower.DIVIDE_BY_SIZE and not segment.between.of_all

    def spec_of(self, segment: PhaseSegment) -> CallSpec:
        """Return the call between hosts."""
        if segment.between.of_all:
            return self._spec._replace(algorithm=None)
        root = None if self.root is None else self.root[0]
        return self._spec._replace(op=self._between, root=root, algorithm=None)

    def _is_in(self, segment: PhaseSegment) -> bool:
        """Return whether this rank makes the call between hosts."""
        return segment.between.of_all or bool(self._rails.rail)

    def _place(self, segment: PhaseSegment) -> tuple[int, int]:
        """Return the positions of this rank and of the root among the ranks that make the call between hosts."""
        if segment.between.of_all:
            return self._rails.rank, self._spec.root or 0
        return self._rails.host, 0 if self.root is None else self.root[0]


class Part(NamedTuple):
    """A segment of a call."""

    call: PhasedCall
    segment: PhaseSegment

    def region_nbytes(self) -> tuple[int, int, int, int]:
        """Return the bytes of each memory that `Slot.reserve` lays out."""
        reads, inward, turned, between, outward, _ = self.segment
        is_packed, is_gathered = inward is not None and len(reads) > 1, self.segment.is_gathered
        elements = (
            between.elements,
            inward[0] if is_packed and inward else 0,
            inward[1] if turned and inward else 0,
            outward[1] if is_gathered and outward else 0,
        )
        return tuple(map(self.call.nbytes, elements))  # type: ignore[return-value]


def _sum_of(op: Op) -> Op:
    """Return the operation that combines parts of a reduction: a sum for an average, and behind factors."""
    return OPERATIONS["sum"] if op.lower is Lower.DIVIDE_BY_SIZE or op.factor is not None else op
