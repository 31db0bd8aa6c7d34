"""The meaning of blocks: which data each block of a collective holds, and how long each block is.

A `PlanSet` is the plans of all ranks of one collective. Its contract says how buffers are cut, and its `BlockPromise`s
say what each block of OUTPUT must hold in the end.

The data that a block is about (its `BlockOrigin`) and its length (its `Length`) are separate. In an alltoall, every
block is about different data, but all blocks are equally long. With counts per rank, a block has the length of its
rank's count, wherever it travels. Two lengths are the same only if they are equal for all possible counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import Buffer, Counts, Partition, Plan
from unisono.errors import PlanError

ALL_RANKS = -1


class BlockOrigin(NamedTuple):
    """The data that a block is about: block `block` of the INPUT of `rank`, or of the INPUTs of all ranks combined."""

    rank: int
    block: int


class BlockPromise(NamedTuple):
    """The required content of a block of OUTPUT in the end: data of `origin` with the contributions of `ranks`.

    `ranks` is a set of ranks as bits. If it is empty, no step may write the block.
    """

    origin: BlockOrigin
    ranks: int


class Length(NamedTuple):
    """The length of a block. Two equal `Length`s are equal for all element counts; two different ones may differ."""

    kind: str
    first: int = 0
    second: int = 0


def _all_ranks(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(ALL_RANKS, block), (1 << size) - 1)


def _own_share_of_all_ranks(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(ALL_RANKS, rank), (1 << size) - 1)


def _ranks_up_to_own(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(ALL_RANKS, block), (2 << rank) - 1)


def _ranks_below_own(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(ALL_RANKS, block), (1 << rank) - 1)


def _vector_of_root(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(root, block), 1 << root)


def _own_share_of_root(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(root, rank), 1 << root)


def _share_of_each_rank(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(block, 0), 1 << block)


def _own_share_of_each_rank(size: int, rank: int, root: int, block: int) -> BlockPromise:
    return BlockPromise(BlockOrigin(block, rank), 1 << block)


# Collective → function of (size, rank, root, block) that returns what the block of OUTPUT must hold.
PROMISES: dict[str, Callable[[int, int, int, int], BlockPromise]] = {
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
    """The plans of all ranks of one collective, in the order of ranks, and the meaning of their blocks.

    Raises:
        PlanError: the plans are not of one collective that the verifier knows, or their buffers are not cut as the
            collective demands and alike on all ranks.
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
        self._combined_origins: list[BlockOrigin] = []  # the origins of INPUT in a reduction, which all ranks share
        self.blocks = max(1, *(max(plan.input.blocks, plan.output.blocks) for plan in plans))
        self.share_parts = max(max(plan.input.parts, plan.output.parts) for plan in plans)
        for plan in plans:
            self._check_buffer(plan, Buffer.INPUT, self.contract.input, self.contract.has_input(plan.rank, self.root))
            self._check_buffer(
                plan, Buffer.OUTPUT, self.contract.output, self.contract.has_output(plan.rank, self.root)
            )
            _check_scratch(plan)

    def origins(self, rank: int) -> Sequence[BlockOrigin]:
        """Return the origin of each block of INPUT."""
        blocks = range(self.plans[rank].input.blocks)
        if not self.contract.reduces:
            return [BlockOrigin(rank, block) for block in blocks]
        if not self._combined_origins:
            self._combined_origins = [BlockOrigin(ALL_RANKS, block) for block in blocks]
        return self._combined_origins

    def promise(self, rank: int, block: int) -> BlockPromise:
        """Return the content that a block of OUTPUT must have at the end."""
        share, part = divmod(block, self.share_parts)
        origin, ranks = self._promise(self.size, rank, self.root, share)
        return BlockPromise(BlockOrigin(origin.rank, origin.block * self.share_parts + part), ranks)

    def length_numbers(self) -> list[list[int]]:
        """Return, for every rank, a number for the length of each cell. Equal lengths have equal numbers."""
        numbers: dict[Length, int] = {}
        cache: dict[object, list[int]] = {}
        numbers_of_ranks: list[list[int]] = []
        for rank in range(self.size):
            of_rank: list[int] = []
            for buffer in Buffer:
                facts = self._facts_of_lengths(rank, buffer)
                if facts not in cache:
                    cache[facts] = [numbers.setdefault(length, len(numbers)) for length in self._lengths(rank, buffer)]
                of_rank += cache[facts]
            numbers_of_ranks.append(of_rank)
        return numbers_of_ranks

    def lengths(self, rank: int) -> list[Length]:
        """Return the length of each cell of a rank."""
        return [length for buffer in Buffer for length in self._lengths(rank, buffer)]

    def parts(self) -> int:
        """Return the number of blocks in the vector of which costs are multiples."""
        has_shares = self.contract.input in (Cut.SHARE, Cut.SHARES)
        return self.size * self.share_parts if has_shares else self._blocks(self.contract.input)

    def homes(self, rank: int) -> list[int]:
        """Return, for each cell of a rank, the cell of the same memory in a call in place: itself, or a cell of OUTPUT.

        In place, INPUT is OUTPUT. If one buffer is the share of one rank and the other holds the shares of all ranks,
        the first one is share `rank` of the other.
        """
        plan = self.plans[rank]
        inputs, outputs = plan.input.blocks, plan.output.blocks
        homes = list(range(inputs + outputs + plan.scratch.blocks))
        if inputs and outputs and self.contract.input is self.contract.output:
            homes[:inputs] = homes[inputs : inputs + outputs]
        elif inputs and outputs:
            own = range(rank * self.share_parts, (rank + 1) * self.share_parts)
            for part, of_all in enumerate(own):
                shared, home = (part, of_all) if self.contract.input is Cut.SHARE else (of_all, part)
                homes[shared] = inputs + home
        return homes

    def _facts_of_lengths(self, rank: int, buffer: Buffer) -> tuple[object, ...]:
        """Return all facts that determine the lengths of the blocks of a buffer. They are equal on many ranks."""
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
        shares = self._lengths_of_shares(rank, buffer, partition)
        if partition.parts == 1:
            return shares
        return [
            Length(f"part {part} of {partition.parts} of {kind}", first, second)
            for kind, first, second in shares
            for part in range(partition.parts)
        ]

    def _lengths_of_shares(self, rank: int, buffer: Buffer, partition: Partition) -> list[Length]:
        """Return the length of each share of a buffer with counts; the shares are its blocks if it has no parts."""
        blocks = range(partition.blocks // partition.parts)
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

        In a reduce_scatter, the shares are parts of a vector of any length. In other collectives, all shares are
        equally long.
        """
        if cut is Cut.VECTOR or cut is Cut.TOKEN:
            return Length("part", self.blocks, block)
        if cut is Cut.SHARE and self.varying:
            return Length("count of rank", rank)
        if self.contract.reduces:
            return Length("part", self.size, rank if cut is Cut.SHARE else block)
        return Length("share")

    def _blocks(self, cut: Cut) -> int:
        """Return the number of blocks of a buffer with this cut."""
        parts = self.share_parts
        return {Cut.VECTOR: self.blocks, Cut.TOKEN: 1, Cut.SHARE: parts, Cut.SHARES: self.size * parts}[cut]

    def _check_buffer(self, plan: Plan, buffer: Buffer, cut: Cut | None, present: bool) -> None:
        actual, expected = plan.partition(buffer), Partition(0)
        if cut is not None and present:
            counts = Counts.OWN
            if cut is Cut.SHARES and self.varying and self.contract.varying is not None:
                counts = self.contract.varying[buffer]
            parts = self.share_parts if cut in (Cut.SHARE, Cut.SHARES) else 1
            expected = Partition(self._blocks(cut), counts, parts=parts)
        if actual != expected:
            raise PlanError(
                f"rank {plan.rank}: {plan.collective} with an {buffer.name} of {_describe(actual)}, "
                f"expected {_describe(expected)}"
            )


def are_proved_by(plans: Sequence[Plan], proved: Sequence[Plan]) -> bool:
    """Return whether the proof of `proved` also proves `plans`.

    It does if all ranks take the same steps, and blocks that are equally long in `proved` are equally long in `plans`.

    Raises:
        PlanError: as `PlanSet`.
    """
    plan_sets = PlanSet(plans), PlanSet(proved)
    if any(_without_counts(one) != _without_counts(other) for one, other in zip(plans, proved, strict=True)):
        return False
    length_of: dict[int, int] = {}  # length in `proved` → length in `plans`
    return all(
        length_of.setdefault(length_proved, length) == length
        for lengths in zip(*(plan_set.length_numbers() for plan_set in plan_sets), strict=True)
        for length, length_proved in zip(*lengths, strict=True)
    )


def _without_counts(plan: Plan) -> tuple[object, ...]:
    blocks = [plan.partition(buffer).blocks for buffer in Buffer]
    return (plan.collective, plan.algorithm, plan.root, blocks, plan.permutation, plan.lanes)


def _check_belong_together(plans: Sequence[Plan]) -> None:
    """Check that the plans are those of all ranks of one collective that the verifier knows."""
    for rank, plan in enumerate(plans):
        facts = (plan.collective, plan.algorithm, plan.size, plan.root, plan.rank)
        expected = (plans[0].collective, plans[0].algorithm, len(plans), plans[0].root, rank)
        if facts != expected:
            raise PlanError(f"rank {rank}: (collective, algorithm, size, root, rank) is {facts}, expected {expected}")
    if not plans:
        raise PlanError("there are no plans")
    if plans[0].collective not in CONTRACTS:
        raise PlanError(
            f"the verifier does not know the collective {plans[0].collective!r}; it knows {', '.join(CONTRACTS)}"
        )
    if not 0 <= plans[0].root < len(plans):
        raise PlanError(f"the root {plans[0].root} is out of range: there are {len(plans)} ranks")


def _check_scratch(plan: Plan) -> None:
    """Check that SCRATCH takes its lengths from counts or from another buffer."""
    scratch = plan.scratch
    if not scratch.blocks:
        return
    if scratch.parts != 1:
        raise PlanError(
            f"rank {plan.rank}: SCRATCH is cut into parts: cut it like INPUT or OUTPUT, which may have parts"
        )
    if scratch.like is None and scratch.counts is Counts.OWN:
        raise PlanError(f"rank {plan.rank}: SCRATCH has no counts of its own: cut it like INPUT or OUTPUT")
    one = plan.size if scratch.like is None else plan.partition(scratch.like).blocks
    if scratch.block is not None:
        if scratch.like is None or not 0 <= scratch.block < one:
            raise PlanError(f"rank {plan.rank}: SCRATCH is like block {scratch.block}, which does not exist")
        one = 1
    if scratch.blocks != one * scratch.copies:
        raise PlanError(f"rank {plan.rank}: SCRATCH of {_describe(scratch)}, expected {scratch.copies} times {one}")


def _describe(partition: Partition) -> str:
    counts = "" if partition.counts is Counts.OWN else f" by Counts.{partition.counts.name}"
    parts = "" if partition.parts == 1 else f" in shares of {partition.parts}"
    return f"{partition.blocks} block{'' if partition.blocks == 1 else 's'}{parts}{counts}"
