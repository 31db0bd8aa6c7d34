"""Proves the plans of neighbourhood collectives, for the neighbourhoods of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unisono.algorithms.ir.contracts import Contract, Cut
from unisono.algorithms.ir.neighbourhood import Neighbourhood
from unisono.algorithms.ir.plan import Buffer, Counts, Partition, Plan
from unisono.algorithms.verifier.block_meaning import BlockOrigin, BlockPromise, Length, PlanSet
from unisono.algorithms.verifier.verify import prove
from unisono.errors import PlanError

# INPUT is one share, or a share for each destination; OUTPUT is a share for each source.
_CONTRACTS = {
    "neighbor_allgather": Contract(Cut.SHARE, Cut.SHARES),
    "neighbor_alltoall": Contract(Cut.SHARES, Cut.SHARES),
}
_NO_PROMISE = BlockPromise(BlockOrigin(0, 0), 0)


def verify_neighbours(plans: Sequence[Plan], neighbourhoods: Sequence[Neighbourhood], segments: int = 1) -> None:
    """Prove that `plans`, one for each rank in order, exchange the blocks of all edges of `neighbourhoods`.

    Raises:
        PlanError: the plans are wrong, as in `verify_plans`; or the edges do not match.
    """
    prove(_NeighbourPlans(plans, neighbourhoods), segments, in_place=False, commutative=True)


class _NeighbourPlans(PlanSet):
    """The plans of all ranks of one neighbourhood collective, and the meaning of their blocks."""

    def __init__(self, plans: Sequence[Plan], neighbourhoods: Sequence[Neighbourhood]) -> None:
        self.plans, self.size, self.root, self.share_parts = plans, len(plans), 0, 1
        self.contract = _CONTRACTS[plans[0].collective]
        self._neighbourhoods = neighbourhoods
        self._gathers = self.contract.input is Cut.SHARE
        self._edges = matched_edges(neighbourhoods)
        for plan, neighbourhood in zip(plans, neighbourhoods, strict=True):
            inputs = 1 if self._gathers else len(neighbourhood.destinations)
            blocks = [plan.input.blocks, plan.output.blocks]
            if blocks != [inputs, len(neighbourhood.sources)]:
                expected = [inputs, len(neighbourhood.sources)]
                raise PlanError(f"rank {plan.rank}: INPUT and OUTPUT have {blocks} blocks, expected {expected}")

    def origins(self, rank: int) -> Sequence[BlockOrigin]:
        return [BlockOrigin(rank, block) for block in range(self.plans[rank].input.blocks)]

    def promise(self, rank: int, block: int) -> BlockPromise:
        edge = self._edges.get((rank, block))
        if edge is None:
            return _NO_PROMISE
        source, sent = edge
        return BlockPromise(BlockOrigin(source, 0 if self._gathers else sent), 1 << source)

    def length_numbers(self) -> list[list[int]]:
        numbers: dict[Length, int] = {}
        return [
            [numbers.setdefault(length, len(numbers)) for length in self.lengths(rank)] for rank in range(self.size)
        ]

    def homes(self, rank: int) -> list[int]:
        plan = self.plans[rank]
        return list(range(plan.input.blocks + plan.output.blocks))

    def _lengths(self, rank: int, buffer: Buffer) -> list[Length]:
        partition = self.plans[rank].partition(buffer)
        blocks = range(partition.blocks)
        if buffer is Buffer.SCRATCH:
            return []
        if self._gathers:
            return [
                self._length_of(partition, rank if buffer is Buffer.INPUT else self._source(rank, block), 0)
                for block in blocks
            ]
        if buffer is Buffer.INPUT:
            return [self._length_of(partition, rank, block) for block in blocks]
        return [self._length_of(partition, *self._edges.get((rank, block), (rank, -1 - block))) for block in blocks]

    def _source(self, rank: int, block: int) -> int:
        source = self._neighbourhoods[rank].sources[block]
        return -1 if source is None else source

    def _length_of(self, partition: Partition, rank: int, block: int) -> Length:
        varies = any(plan.output.counts is not Counts.OWN for plan in self.plans)
        return Length("count of an edge", rank, block) if varies else Length("share")


def matched_edges(neighbourhoods: Sequence[Neighbourhood]) -> Mapping[tuple[int, int], tuple[int, int]]:
    """Return, for each (receiver, block of OUTPUT), the (sender, block of INPUT) of its edge.

    Raises:
        PlanError: two ranks list different numbers of edges from one to the other.
    """
    edges: dict[tuple[int, int], tuple[int, int]] = {}
    sent = [neighbourhood.sent() for neighbourhood in neighbourhoods]
    received = [neighbourhood.received() for neighbourhood in neighbourhoods]
    for receiver, of_receiver in enumerate(received):
        for sender, of_sender in enumerate(sent):
            blocks, sources = of_receiver.get(sender, ()), of_sender.get(receiver, ())
            if len(blocks) != len(sources):
                raise PlanError(
                    f"rank {sender} sends {len(sources)} blocks to rank {receiver}, which receives {len(blocks)} of it"
                )
            edges |= {(receiver, block): (sender, source) for block, source in zip(blocks, sources, strict=True)}
    return edges
