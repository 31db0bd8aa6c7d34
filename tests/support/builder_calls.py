"""Calls of the registered algorithms on integers, for every executor, with the expected result of each rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from support.covering import pairwise
from support.deadlines import DEADLINE_S
from support.harness import call_of

from unisono.algorithms.catalogue.algorithm import Algorithm
from unisono.algorithms.ir.binding import split
from unisono.algorithms.ir.plan import Counts, Plan

REDUCING = ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
ROOTED = ("reduce", "broadcast", "gather", "scatter")


# --- moving data ---------------------------------------------------------------------------------------------------

Block = tuple[int, int]  # (source rank, target rank); the target is 0 if all ranks get the same data


def block(source: int, target: int, count: int) -> Any:
    return np.arange(count, dtype=np.int32) + 100 * source + 10000 * target


# The blocks in INPUT and OUTPUT of each collective, by (size, rank, root).
INPUT_BLOCKS: dict[str, Callable[[int, int, int], list[Block]]] = {
    "broadcast": lambda size, rank, root: [(root, 0)] if rank == root else [],
    "allgather": lambda size, rank, root: [(rank, 0)],
    "gather": lambda size, rank, root: [(rank, 0)],
    "scatter": lambda size, rank, root: [(root, target) for target in range(size)] if rank == root else [],
    "alltoall": lambda size, rank, root: [(rank, target) for target in range(size)],
}
OUTPUT_BLOCKS: dict[str, Callable[[int, int, int], list[Block]]] = {
    "broadcast": lambda size, rank, root: [(root, 0)],
    "allgather": lambda size, rank, root: [(source, 0) for source in range(size)],
    "gather": lambda size, rank, root: [(source, 0) for source in range(size)] if rank == root else [],
    "scatter": lambda size, rank, root: [(root, rank)],
    "alltoall": lambda size, rank, root: [(source, rank) for source in range(size)],
}


def equal_count(source: int, target: int) -> int:
    return 7


def differing_count(source: int, target: int) -> int:
    return (3 * source + 5 * target) % 4


@dataclass(frozen=True)
class Move:
    """One call that moves data. `counts` returns the number of elements that go from a source rank to a target rank."""

    algorithm: Algorithm
    size: int
    root: int = 0
    segments: int = 1
    counts: Callable[[int, int], int] = equal_count
    in_place: bool = False

    def data(self, table: dict[str, Callable[[int, int, int], list[Block]]], rank: int) -> list[Any]:
        blocks = table[self.algorithm.collective](self.size, rank, self.root)
        return [block(*ends, self.counts(*ends)) for ends in blocks]

    def run(self, executor: Any) -> tuple[Any, Any]:
        """Run the call on one rank; return OUTPUT and the expected OUTPUT."""
        return self.run_plan(executor, self.plan(executor.rank))

    def plan(self, rank: int) -> Plan:
        """Return the plan of a rank."""
        return self.algorithm.build(self.size, rank, self.root, **({"varying": True} if self.varying else {}))

    @property
    def varying(self) -> bool:
        """Whether the shares of the ranks differ in length."""
        return self.counts is differing_count

    def run_plan(self, executor: Any, plan: Plan) -> tuple[Any, Any]:
        """Run the call by `plan` instead of the plan of its algorithm; return as `run` does."""
        rank, varying = executor.rank, self.varying
        inputs, outputs = self.data(INPUT_BLOCKS, rank), self.data(OUTPUT_BLOCKS, rank)
        source, expected = (np.concatenate([np.zeros(0, np.int32), *blocks]) for blocks in (inputs, outputs))
        target = np.full_like(expected, -1)
        if self.in_place:
            source, target = in_one_memory(rank, inputs, source, outputs, target)
        elements = (source.size, target.size) if varying else self.elements()
        call = call_of(
            plan, "int32", elements, root=self.root, segments=self.segments, counts=self.all_counts(rank, varying)
        )
        executor.start(call, source, target).wait(DEADLINE_S)
        return target, expected

    def elements(self) -> tuple[int, int]:
        """Return the numbers of elements of INPUT and OUTPUT, which are equal on all ranks if no counts are passed."""
        share = equal_count(0, 0)
        whole = share * self.size
        return {
            "broadcast": (share, share),
            "allgather": (share, whole),
            "gather": (share, whole),
            "scatter": (whole, share),
            "alltoall": (whole, whole),
        }[self.algorithm.collective]

    def all_counts(self, rank: int, varying: bool) -> dict[Counts, list[int]]:
        ranks = range(self.size)
        if not varying:
            return {}
        if self.algorithm.collective == "alltoall":
            send, receive = ([self.counts(rank, peer) for peer in ranks], [self.counts(peer, rank) for peer in ranks])
            return {Counts.SEND: send, Counts.RECEIVE: receive}
        scatters = self.algorithm.collective == "scatter"
        return {Counts.RANKS: [self.counts(self.root, peer) if scatters else self.counts(peer, 0) for peer in ranks]}


def in_one_memory(rank: int, inputs: list[Any], source: Any, outputs: list[Any], target: Any) -> tuple[Any, Any]:
    """Return INPUT and OUTPUT in the same memory, if the rank has both: the shorter is block `rank` of the longer."""
    if not inputs or not outputs:
        return source, target
    longer, blocks = (source, inputs) if len(inputs) > len(outputs) else (target, outputs)
    start = sum(block.size for block in blocks[:rank]) if len(blocks) > 1 else 0
    part = longer[start : start + min(source.size, target.size)]
    if longer is source:
        return source, part
    part[...] = source
    return part, target


# --- reducing data -------------------------------------------------------------------------------------------------


def contribution(rank: int, elements: int) -> Any:
    return np.arange(elements, dtype=np.int64) * 7 + 1000**rank % 997


# The result of each collective on a rank, from the contributions of all ranks; None if the rank has no result.
RESULT: dict[str, Callable[[Any, int, int], Any]] = {
    "allreduce": lambda inputs, rank, root: inputs.sum(axis=0),
    "reduce": lambda inputs, rank, root: inputs.sum(axis=0) if rank == root else None,
    "scan": lambda inputs, rank, root: inputs[: rank + 1].sum(axis=0),
    "exscan": lambda inputs, rank, root: inputs[:rank].sum(axis=0) if rank else None,
    "reduce_scatter": lambda inputs, rank, root: inputs.sum(axis=0),
}


@dataclass(frozen=True)
class Reduction:
    """One reduction of vectors of `elements` elements. With `counts`, it is a reduce-scatter with these counts.

    `op` is "sum" or "avg". The average shows a plan that divides by the number of ranks twice or never.
    """

    algorithm: Algorithm
    size: int
    elements: int
    root: int = 0
    segments: int = 1
    counts: tuple[int, ...] = ()
    in_place: bool = False
    op: str = "sum"

    def own(self, rank: int) -> slice:
        """Return the part of the vector whose result a rank has."""
        if self.algorithm.collective != "reduce_scatter":
            return slice(0, self.elements)
        if self.counts:
            start = sum(self.counts[:rank])
            return slice(start, start + self.counts[rank])
        start, length = split(self.elements, self.size, rank)
        return slice(start, start + length)

    def run(self, executor: Any) -> tuple[Any, Any]:
        """Run the call on one rank; return OUTPUT and the expected OUTPUT."""
        return self.run_plan(executor, self.plan(executor.rank))

    def plan(self, rank: int) -> Plan:
        """Return the plan of a rank."""
        return self.algorithm.build(self.size, rank, self.root, **({"varying": True} if self.counts else {}))

    def run_plan(self, executor: Any, plan: Plan) -> tuple[Any, Any]:
        """Run the call by `plan` instead of the plan of its algorithm; return as `run` does."""
        rank = executor.rank
        inputs = np.stack([contribution(other, self.elements) for other in range(self.size)])
        source, own = inputs[rank].copy(), self.own(rank)
        target = source[own] if self.in_place else np.full(own.stop - own.start, -1)
        result = RESULT[self.algorithm.collective](inputs, rank, self.root)
        expected = target.copy() if result is None else result[own] // (self.size if self.op == "avg" else 1)
        call = call_of(
            plan,
            "int64",
            (self.elements, target.size),
            op=self.op,
            root=self.root,
            segments=self.segments,
            counts={Counts.RANKS: self.counts} if self.counts else None,
        )
        executor.start(call, source, target if call.plan.output.blocks else None).wait(DEADLINE_S)
        return target, expected


# --- any collective ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Barrier:
    """One barrier. Its OUTPUT is empty."""

    algorithm: Algorithm
    size: int

    def run(self, executor: Any) -> tuple[Any, Any]:
        """Run the barrier on one rank; return OUTPUT and the expected OUTPUT, which are both empty."""
        return self.run_plan(executor, self.algorithm.build(self.size, executor.rank))

    def run_plan(self, executor: Any, plan: Plan) -> tuple[Any, Any]:
        """Run the barrier by `plan` instead of the plan of its algorithm; return as `run` does."""
        executor.start(call_of(plan, None, (0, 0)), None, None).wait(DEADLINE_S)
        return np.zeros(0), np.zeros(0)


def call_on_integers(
    algorithm: Algorithm,
    size: int,
    root: int = 0,
    segments: int = 1,
    elements: int = 23,
    *,
    varying: bool = False,
    in_place: bool = False,
    op: str = "sum",
) -> Move | Reduction | Barrier:
    """Return a call of `algorithm`. If `varying`, the shares of the ranks differ in length, and some may be empty."""
    if algorithm.collective == "barrier":
        return Barrier(algorithm, size)
    if algorithm.collective in REDUCING:
        counts = tuple((5 * rank + 2) % 4 for rank in range(size)) if varying else ()
        length = sum(counts) if varying else elements
        return Reduction(algorithm, size, length, root, segments, counts, in_place, op)
    return Move(algorithm, size, root, segments, differing_count if varying else equal_count, in_place)


AnyCall: TypeAlias = "Move | Reduction | Barrier"


def calls_in_every_form(algorithm: Algorithm, size: int, forms: Sequence[tuple[int, int]]) -> list[AnyCall]:
    """Return calls of an algorithm that cover every pair of two parameters' values (`support.covering`).

    The parameters are the root, the pair (elements, segments) of `forms`, equal or differing shares, and whether INPUT
    and OUTPUT share memory. The list is empty if the algorithm does not support `size` ranks.
    """
    if algorithm.supports(size) is not None:
        return []
    roots = range(size) if algorithm.collective in ROOTED else (0,)
    varying = (False, True) if algorithm.varying else (False,)
    in_place = (False, True) if algorithm.in_place else (False,)
    return [
        call_on_integers(algorithm, size, root, segments, elements, varying=differs, in_place=shares_memory)
        for root, (elements, segments), differs, shares_memory in pairwise(roots, forms, varying, in_place)
    ]


def run_all(executor: Any, calls: Sequence[AnyCall]) -> list[str]:
    """Run calls one after the other on one rank; return a description of each wrong result."""
    problems = []
    for call in calls:
        try:
            result, expected = call.run(executor)
        except Exception as error:
            raise RuntimeError(f"{error}, in {call}") from error
        if not np.array_equal(result, expected):
            problems.append(f"{result}, not {expected}, of {call}")
    return problems


def check_all(ranks: Any, calls: Sequence[AnyCall]) -> None:
    """Run all calls in one job of `ranks`, and assert that all results are right."""
    for rank, problems in enumerate(ranks.run(run_all, calls)):
        assert problems == [], f"rank {rank}"


def assert_right(results: list[tuple[Any, Any]]) -> None:
    """Assert that the results of `run`, by rank, are right."""
    for rank, (result, expected) in enumerate(results):
        assert result.tolist() == expected.tolist(), f"rank {rank}"
