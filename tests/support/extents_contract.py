"""The contract of executors for a call on several arrays, in addition to `executor_contract`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from support.deadlines import DEADLINE_S
from support.executor_contract import Case, assert_same_bits, contributions

from unisono.algorithms.catalogue.registry import find
from unisono.algorithms.ir.binding import Shape
from unisono.dtypes import DTYPES
from unisono.operations import operation
from unisono.testing.memory import Guarded
from unisono.testing.oracles import reduced
from unisono.transports.contracts.call import Argument, Call, Extent, Signature


@dataclass(frozen=True)
class SeveralArrays:
    """One call on several arrays. Each case describes one array by its dtype, op, count, offset and `in_place`."""

    cases: tuple[Case, ...]
    collective: str = "allreduce"
    algorithm: str = "direct"
    segments: int = 1
    root: int | None = None

    def call(self, rank: int, size: int) -> Call:
        plan = find(self.collective, self.algorithm).build(size, rank, self.root or 0)
        first, *others = [Argument(case.dtype, (case.count,), "C", case.op) for case in self.cases]
        total = sum(case.count for case in self.cases)
        return Call(
            Signature(self.collective, *first, self.root, self.algorithm, segments=self.segments, others=tuple(others)),
            plan,
            Shape((total, total), {}),
            tuple(
                Extent((case.count, case.count), DTYPES[case.dtype], case.op and operation(case.op))
                for case in self.cases
            ),
            self.segments,
        )


def several_arrays(cases: st.SearchStrategy[Case], algorithms: list[str]) -> st.SearchStrategy[SeveralArrays]:
    """Return a strategy for allreduces of 1 to 6 arrays by one of the algorithms."""
    lists = st.lists(cases, min_size=1, max_size=6).map(tuple)
    return st.builds(SeveralArrays, lists, algorithm=st.sampled_from(algorithms), segments=st.integers(1, 4))


def check_several_arrays_are_reduced(ranks: Any, call: SeveralArrays) -> None:
    stacks = [contributions(case, ranks.size) for case in call.cases]
    for rank, results in enumerate(ranks.run(run_several, call, stacks)):
        for index, (case, stack, result) in enumerate(zip(call.cases, stacks, results, strict=True)):
            assert_same_bits(result, reduced(case.op, stack), f"array {index} on rank {rank} of {ranks.size}, {call}")


def check_several_arrays_are_broadcast(ranks: Any, call: SeveralArrays) -> None:
    stacks = [np.arange(ranks.size * case.count).reshape(ranks.size, -1).astype(case.dtype) for case in call.cases]
    for results in ranks.run(run_several, call, stacks):
        for stack, result in zip(stacks, results, strict=True):
            assert_same_bits(result, stack[call.root])


def run_several(executor: Any, call: SeveralArrays, stacks: list[Any]) -> list[Any]:
    """Run a call on row `rank` of each of `stacks`; return the outputs."""
    sources, targets = [], []
    for case, stack in zip(call.cases, stacks, strict=True):
        mine = stack[executor.rank]
        offset = case.offset * mine.itemsize
        sources.append(Guarded.of(mine, offset))
        targets.append(sources[-1] if case.in_place else Guarded.of(np.zeros_like(mine), offset))
    arrays = ([guard.array for guard in guards] for guards in (sources, targets))
    executor.start(call.call(executor.rank, executor.size), *arrays).wait(DEADLINE_S)
    assert all(target.is_intact() for target in targets), "elements outside the arrays were written"
    return [target.array.copy() for target in targets]
