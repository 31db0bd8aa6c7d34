"""Families: the plans of all ranks of a collective, what it promises of each block, and what the blocks mean.

A collective is described by its contract, and by what each block of OUTPUT holds in the end. What a block is *about*
(its `Origin`) and how long it is (its `Length`) are two things: in an alltoall, every block is about other data and all
are equally long; with counts per rank, the length of a block is that of its rank's count wherever the block travels.
Two lengths are the same object of proof only if they are equal for all counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Counts, Partition, Plan
from unisono.errors import PlanError

ALL_RANKS = -1


class Origin(NamedTuple):
    """What a block is about: block `block` of the INPUT of `rank`, or of all ranks' INPUTs, which are combined."""

    rank: int
    block: int


class Promise(NamedTuple):
    """What a block of OUTPUT holds in the end: `origin`, with contributions of `ranks` (bits); of none: untouched."""

    origin: Origin
    ranks: int


class Length(NamedTuple):
    """The length of a block: equal lengths are equal for all element counts, different ones may differ."""

    kind: str
    first: int = 0
    second: int = 0


def _all_ranks(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(ALL_RANKS, block), (1 << size) - 1)


def _own_share_of_all_ranks(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(ALL_RANKS, rank), (1 << size) - 1)


def _ranks_up_to_own(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(ALL_RANKS, block), (2 << rank) - 1)


def _ranks_below_own(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(ALL_RANKS, block), (1 << rank) - 1)


def _vector_of_root(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(root, block), 1 << root)


def _own_share_of_root(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(root, rank), 1 << root)


def _share_of_each_rank(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(block, 0), 1 << block)


def _own_share_of_each_rank(size: int, rank: int, root: int, block: int) -> Promise:
    return Promise(Origin(block, rank), 1 << block)


# What a block of OUTPUT holds, as a function of (size, rank, root, block).
PROMISES: dict[str, Callable[[int, int, int, int], Promise]] = {
    "allreduce": _all_ranks,
    "reduce": _all_ranks,
    "reduce_scatter": _own_share_of_all_ranks,
    "scan": _ranks_up_to_own,
    "exscan": _ranks_below_own,
    "broadcast": _vector_of_root,
    "scatter": _own_share_of_root,
    "gather": _share_of_each_rank,
    "allgather": _share_of_each_rank,
    "alltoall": _own_share_of_each_rank,
    "barrier": _all_ranks,
}


class PlanSet:
    """The plans of all ranks of one collective, in the order of ranks, and what their blocks mean.

    Raises:
        PlanError: the plans are not of one collective that the verifier knows, or their buffers are not cut as the
            collective demands and in the same way on all ranks.
    """

    def __init__(self, plans: Sequence[Plan]) -> None:
        _check_belong_together(plans)
        self.plans = plans
        self.size, self.root = len(plans), plans[0].root
        self.contract = CONTRACTS[plans[0].collective]
        self._promise = PROMISES[plans[0].collective]
        self.varying = any(
            plan.partition(buffer).counts is not Counts.OWN
            for plan in plans
            for buffer in (Buffer.INPUT, Buffer.OUTPUT)
        )
        self._of_all_ranks: list[Origin] = []  # what INPUT is about where all ranks' are combined, the same on each
        self.blocks = max(1, *(max(plan.input.blocks, plan.output.blocks) for plan in plans))
        for plan in plans:
            self._check_buffer(plan, Buffer.INPUT, self.contract.input, self.contract.has_input(plan.rank, self.root))
            self._check_buffer(
                plan, Buffer.OUTPUT, self.contract.output, self.contract.has_output(plan.rank, self.root)
            )
            _check_scratch(plan)

    def origins(self, rank: int) -> Sequence[Origin]:
        """Return what each block of INPUT is about."""
        blocks = range(self.plans[rank].input.blocks)
        if not self.contract.reduces:
            return [Origin(rank, block) for block in blocks]
        if not self._of_all_ranks:
            self._of_all_ranks = [Origin(ALL_RANKS, block) for block in blocks]
        return self._of_all_ranks

    def promise(self, rank: int, block: int) -> Promise:
        """Return what a block of OUTPUT must hold in the end."""
        return self._promise(self.size, rank, self.root, block)

    def length_numbers(self) -> list[list[int]]:
        """Return the lengths of the cells of every rank as numbers, equal for equal lengths."""
        numbers: dict[Length, int] = {}
        known: dict[object, list[int]] = {}
        found: list[list[int]] = []
        for rank in range(self.size):
            of_rank: list[int] = []
            for buffer in Buffer:
                facts = self._facts_of_lengths(rank, buffer)
                if facts not in known:
                    known[facts] = [numbers.setdefault(length, len(numbers)) for length in self._lengths(rank, buffer)]
                of_rank += known[facts]
            found.append(of_rank)
        return found

    def lengths(self, rank: int) -> list[Length]:
        """Return the length of each cell of a rank."""
        return [length for buffer in Buffer for length in self._lengths(rank, buffer)]

    def parts(self) -> int:
        """Return how many blocks of the plans make up the vector that costs are multiples of."""
        return self.size if self.contract.input in (Cut.SHARE, Cut.SHARES) else self._blocks(self.contract.input)

    def homes(self, rank: int) -> list[int]:
        """Return, for each cell of a rank, the cell whose memory it is in place: the cell itself, or one of OUTPUT.

        In place, INPUT is OUTPUT; where one of them is one share of what the other holds of all ranks, it is block
        `rank` of the other.
        """
        plan = self.plans[rank]
        inputs, outputs = plan.input.blocks, plan.output.blocks
        homes = list(range(inputs + outputs + plan.scratch.blocks))
        if inputs and outputs and self.contract.input is self.contract.output:
            homes[:inputs] = homes[inputs : inputs + outputs]
        elif inputs and outputs:
            shared = 0 if self.contract.input is Cut.SHARE else rank
            homes[shared] = inputs + (rank if self.contract.input is Cut.SHARE else 0)
        return homes

    def _facts_of_lengths(self, rank: int, buffer: Buffer) -> tuple[object, ...]:
        """Return all that the lengths of the blocks of a buffer depend on, of which many ranks have the same."""
        partition = self.plans[rank].partition(buffer)
        whole_of = buffer if partition.like is None else partition.like
        whole = self.plans[rank].partition(whole_of)
        cut = self.contract.input if whole_of is Buffer.INPUT else self.contract.output
        by_rank = whole.counts in {Counts.SEND, Counts.RECEIVE} or cut is Cut.SHARE
        return (buffer, partition, whole, rank if by_rank else None)

    def _lengths(self, rank: int, buffer: Buffer) -> list[Length]:
        """Return the length of each block of a buffer."""
        partition = self.plans[rank].partition(buffer)
        if partition.like is not None:
            whole = self._lengths(rank, partition.like)
            return (whole if partition.block is None else [whole[partition.block]]) * partition.copies
        blocks = range(partition.blocks)
        if partition.counts is Counts.RANKS:
            return [Length("count of rank", block) for block in blocks]
        if partition.counts is Counts.SEND:
            return [Length("count of pair", rank, block) for block in blocks]
        if partition.counts is Counts.RECEIVE:
            return [Length("count of pair", block, rank) for block in blocks]
        cut = self.contract.input if buffer is Buffer.INPUT else self.contract.output
        return [] if cut is None else [self._own_length(rank, cut, block) for block in blocks]

    def _own_length(self, rank: int, cut: Cut, block: int) -> Length:
        """Return the length of a block of a buffer that is cut evenly.

        The shares of a reduce_scatter are parts of a vector of any length; elsewhere shares are equally long.
        """
        if cut is Cut.VECTOR or cut is Cut.TOKEN:
            return Length("part", self.blocks, block)
        if cut is Cut.SHARE and self.varying:
            return Length("count of rank", rank)
        if self.contract.reduces:
            return Length("part", self.size, rank if cut is Cut.SHARE else block)
        return Length("share")

    def _blocks(self, cut: Cut) -> int:
        """Return the number of blocks of a buffer that is cut like this."""
        return {Cut.VECTOR: self.blocks, Cut.TOKEN: 1, Cut.SHARE: 1, Cut.SHARES: self.size}[cut]

    def _check_buffer(self, plan: Plan, buffer: Buffer, cut: Cut | None, present: bool) -> None:
        found, expected = plan.partition(buffer), Partition(0)
        if cut is not None and present:
            counts = Counts.OWN
            if cut is Cut.SHARES and self.varying and self.contract.varying is not None:
                counts = self.contract.varying[buffer]
            expected = Partition(self._blocks(cut), counts)
        if found != expected:
            raise PlanError(
                f"rank {plan.rank}: {plan.collective} with an {buffer.name} of {_describe(found)}, "
                f"expected {_describe(expected)}"
            )


def are_proved_by(plans: Sequence[Plan], proved: Sequence[Plan]) -> bool:
    """Return whether `plans` are right because the plans of `proved` are.

    So it is if all ranks do the same and blocks that are equally long in `proved` are equally long in `plans`.

    Raises:
        PlanError: as `PlanSet`.
    """
    families = PlanSet(plans), PlanSet(proved)
    if any(_without_counts(one) != _without_counts(other) for one, other in zip(plans, proved, strict=True)):
        return False
    becomes: dict[int, int] = {}
    return all(
        becomes.setdefault(length_proved, length) == length
        for lengths in zip(*(family.length_numbers() for family in families), strict=True)
        for length, length_proved in zip(*lengths, strict=True)
    )


def _without_counts(plan: Plan) -> tuple[object, ...]:
    blocks = [plan.partition(buffer).blocks for buffer in Buffer]
    return (plan.collective, plan.algorithm, plan.root, blocks, plan.permutation, plan.lanes)


def _check_belong_together(plans: Sequence[Plan]) -> None:
    """Check that the plans are one per rank of one collective that the verifier knows."""
    for rank, plan in enumerate(plans):
        facts = (plan.collective, plan.algorithm, plan.size, plan.root, plan.rank)
        expected = (plans[0].collective, plans[0].algorithm, len(plans), plans[0].root, rank)
        if facts != expected:
            raise PlanError(f"rank {rank}: (collective, algorithm, size, root, rank) is {facts}, expected {expected}")
    if not plans:
        raise PlanError("there are no plans")
    if plans[0].collective not in CONTRACTS:
        raise PlanError(f"the verifier does not know the collective {plans[0].collective!r}: {', '.join(CONTRACTS)}")
    if not 0 <= plans[0].root < len(plans):
        raise PlanError(f"the root {plans[0].root} is none of {len(plans)} ranks")


def _check_scratch(plan: Plan) -> None:
    """Check that the lengths of the blocks of SCRATCH are those of counts or of another buffer."""
    scratch = plan.scratch
    if not scratch.blocks:
        return
    if scratch.like is None and scratch.counts is Counts.OWN:
        raise PlanError(f"rank {plan.rank}: SCRATCH has no counts of its own; cut it like INPUT or OUTPUT")
    one = plan.size if scratch.like is None else plan.partition(scratch.like).blocks
    if scratch.block is not None:
        if scratch.like is None or not 0 <= scratch.block < one:
            raise PlanError(f"rank {plan.rank}: SCRATCH is like block {scratch.block}, which does not exist")
        one = 1
    if scratch.blocks != one * scratch.copies:
        raise PlanError(f"rank {plan.rank}: SCRATCH of {_describe(scratch)}, expected {scratch.copies} times {one}")


def _describe(partition: Partition) -> str:
    counts = "" if partition.counts is Counts.OWN else f" by Counts.{partition.counts.name}"
    return f"{partition.blocks} block{'' if partition.blocks == 1 else 's'}{counts}"
