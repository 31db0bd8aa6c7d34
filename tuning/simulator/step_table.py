"""Schedules: the steps of all ranks in a collective, as arrays for the simulator with one row for each step as written.

A row is a step of one rank in groups `first`, `first + stride`, … of its lane, `times` times. Its peer advances each
time. So a ring of 10,000 ranks has a few rows for each rank, not 20,000.

Most algorithms are *symmetric*: every rank does the same relative to its own number. Rank numbers are written in mixed
radix, and a rank is as far from its peer, digit by digit, as rank 0 from its own peer. A ring has one digit, recursive
doubling has binary digits, and a composition has the place in the host and the host. Then the plan of rank 0 and these
digits describe all ranks.

Symmetry is tested on the plans of some ranks (of all ranks up to `_ALL_RANKS`), and only for Unisono's own builders. If
the test fails, the plans of all ranks are built.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from unisono.algorithms.catalogue.algorithm import Algorithm, Builder
from unisono.algorithms.ir.contracts import CONTRACTS, Cut
from unisono.algorithms.ir.plan import (
    Buffer,
    Copy,
    Plan,
    Read,
    ReadReduce,
    Recv,
    RecvReduce,
    Reduce,
    Send,
    Signal,
    Span,
    Wait,
    Write,
)
from unisono.algorithms.ir.walk import walk
from unisono.errors import UsageError
from unisono.tuning.machine.topology import Floats, Ranks

# Kinds of rows: a message to a peer, a flag for a peer, a read or write of a peer's memory, and local work of a rank.
MESSAGE, FLAG, MAPPED, REDUCE, COPY = range(5)

_ALL_RANKS = 64
_RANDOM_RANKS = 12
_NOBODY = -1
EVERY = -1


class StepRow(NamedTuple):
    """A step of a rank as written; `share` is the length of its data as a multiple of the vector."""

    kind: int
    lane: int
    first: int
    stride: int
    times: int
    peer: int
    advance: int
    share: float


class After(NamedTuple):
    """A group of a rank (or of `EVERY` rank) that waits for a group of another lane of this rank."""

    rank: int
    lane: int
    group: int
    other: int
    earlier: int


class Schedule(NamedTuple):
    """The steps of all ranks as a table with one row for each step.

    A row has the columns of `StepRow`, and `rank`, whose step it is. The rows of a rank are in the order of its steps.

    Attributes:
        size: number of ranks.
        groups: for each lane, the number of its groups with all loops unrolled.
        after: for each group that waits for a group of another lane, the pair of both, without duplicates.
        is_symmetric: whether the schedule was made from the plan of rank 0.
        copies: how many copies of one schedule stand side by side, with the ranks of each after those of the one
            before.
    """

    size: int
    groups: tuple[int, ...]
    after: tuple[After, ...]
    is_symmetric: bool
    copies: int
    rank: Ranks
    kind: Ranks
    lane: Ranks
    first: Ranks
    stride: Ranks
    times: Ranks
    peer: Ranks
    advance: Ranks
    share: Floats

    @property
    def ranks(self) -> int:
        """The number of ranks of one copy."""
        return self.size // self.copies


def schedule(algorithm: Algorithm, size: int, root: int, params: Mapping[str, Any]) -> Schedule:
    """Return the schedule of an algorithm on `size` ranks.

    Raises:
        NoAlgorithmError, UsageError: the algorithm does not run on so many ranks or hosts, or with such parameters.
    """
    if params.get("varying"):
        raise UsageError("cannot simulate ranks with different numbers of elements")
    algorithm.check_supports(size)
    algorithm.check_parameters(params)
    first = algorithm.build(size, 0, root, **params)
    if isinstance(algorithm.build, Builder):
        rows, after = _rows(first), _after(first)
        for radices in _radices(algorithm, size, params):
            plans = (algorithm.build(size, rank, root, **params) for rank in _looked_at(size, radices))
            if all(_offsets(plan, radices) == rows and _after(plan) == after for plan in plans):
                return _of_symmetry(first, rows, radices)
    return _of_plans([first, *(algorithm.build(size, rank, root, **params) for rank in range(1, size))])


def _rows(plan: Plan) -> list[StepRow]:
    """Return the rows of a plan in the order of its steps; equal steps of consecutive groups are one row."""
    rows: list[StepRow] = []
    row_by_end: dict[tuple[float, ...], int] = {}
    for written in _written(plan):
        row, at = written, None
        key = (row.kind, row.lane, row.peer, row.share)
        if row.stride == 1 and not row.advance:
            at = row_by_end.pop((*key, row.first), None)
            if at is not None:
                row = rows[at]._replace(times=rows[at].times + row.times)
            end = (*key, row.first + row.times)
            row_by_end[end] = len(rows) if at is None else at
        if at is None:
            rows.append(row)
        else:
            rows[at] = row
    return rows


def _written(plan: Plan) -> Iterator[StepRow]:
    """Yield a row for each step as written."""
    shares = {buffer: _block_share(plan, buffer) for buffer in Buffer}
    for lane, first, stride, times, group in walk(plan):
        for step in group.steps:
            for kind, peer, advance, span in _parts(step, plan.rank):
                share = shares[span.buffer] * span.count if span else 0.0
                yield StepRow(
                    kind, lane, first, stride if times > 1 else 1, times, peer, advance if times > 1 else 0, share
                )


def _parts(step: Any, rank: int) -> list[tuple[int, int, int, Span | None]]:
    """Return the (kind, peer, advance, span) of each part of a step; a receive has none, because its sender has it."""
    if isinstance(step, Send):
        return [(MESSAGE, step.peer, step.peer_advance, step.src)]
    if isinstance(step, RecvReduce):
        return [(REDUCE, _NOBODY, 0, step.dst)]
    if isinstance(step, Copy):
        return [(COPY, _NOBODY, 0, step.dst)]
    if isinstance(step, Reduce):
        return [(REDUCE, _NOBODY, 0, step.dst)] * (len(step.sources) - 1)
    if isinstance(step, Read):
        return [(MAPPED, step.peer, step.peer_advance, step.dst)]
    if isinstance(step, Write):
        return [(MAPPED, step.peer, step.peer_advance, step.src)]
    if isinstance(step, ReadReduce):
        read = [(MAPPED, peer, 0, step.dst) for peer, _ in step.sources if peer != rank]
        return [*read, *[(REDUCE, _NOBODY, 0, step.dst)] * (len(step.sources) - 1)]
    if isinstance(step, Signal):
        return [(FLAG, step.peer, step.peer_advance, None)]
    assert isinstance(step, (Recv, Wait))
    return []


def _block_share(plan: Plan, buffer: Buffer) -> float:
    """Return the length of a block as a fraction of the vector. All blocks of a buffer count as equally long."""
    partition = plan.partition(buffer)
    if partition.blocks == 0:
        return 0.0
    whole_of = buffer if partition.like is None else partition.like
    contract = CONTRACTS[plan.collective]
    cut = contract.input if whole_of is Buffer.INPUT else contract.output
    if whole_of is Buffer.SCRATCH:
        return 1 / partition.blocks
    return (1 / plan.size if cut is Cut.SHARE else 1.0) / plan.partition(whole_of).blocks


def _after(plan: Plan) -> list[After]:
    """Return the waits for groups of other lanes, as if every rank had them."""
    return [
        After(EVERY, written.lane, number, *earlier)
        for written in walk(plan)
        if written.group.after
        for number in written.numbers()
        for earlier in written.group.after
    ]


def _radices(algorithm: Algorithm, size: int, params: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the digits, innermost first, in which the ranks of an algorithm may be symmetric."""
    candidates = [(size,), _digits(size, 2)]
    builder_params = algorithm.parameters()
    if "radix" in builder_params:
        candidates.append(_digits(size, params.get("radix", builder_params["radix"].default)))
    if hosts := params.get("hosts"):
        inside, across = len(hosts[0]) if isinstance(hosts[0], tuple) else 1, len(hosts)
        candidates += [
            (*inner, *outer)
            for inner in ((inside,), _digits(inside, 2))
            for outer in ((across,), _digits(across, 2))
            if prod(inner) * prod(outer) == size
        ]
    return [radices for radices in dict.fromkeys(candidates) if prod(radices) == size]


def _digits(size: int, radix: int) -> tuple[int, ...]:
    """Return `radix` as many times as their product makes `size`; nothing if no number of them does."""
    count, power = 0, 1
    while power < size and radix > 1:
        count, power = count + 1, power * radix
    return (radix,) * count if power == size else ()


def _looked_at(size: int, radices: Sequence[int]) -> list[int]:
    """Return the ranks whose plans are compared with that of rank 0, to find out whether the ranks are symmetric."""
    if size <= _ALL_RANKS:
        return list(range(1, size))
    powers = [prod(radices[:digit]) for digit in range(len(radices))]
    near = [power + step for power in (*powers, size // 2, size // 3, size) for step in (-1, 0, 1)]
    chance = random.Random(size).choices(range(1, size), k=_RANDOM_RANKS)
    return sorted({rank for rank in (*near, *chance) if 0 < rank < size})


def _offsets(plan: Plan, radices: Sequence[int]) -> list[StepRow]:
    """Return the rows of a plan with the peers that rank 0 has, if it is as far from them, digit by digit.

    Peers that advance do so along one digit only.
    """
    return [
        row if row.peer == _NOBODY else row._replace(peer=_between(plan.rank, row.peer, radices))
        for row in _rows(plan)
        if len(radices) == 1 or not row.advance or row.peer == _NOBODY
    ]


def _between(rank: int, peer: int, radices: Sequence[int]) -> int:
    offset, power = 0, 1
    for radix in radices:
        offset += (peer // power - rank // power) % radix * power
        power *= radix
    return offset


def _of_symmetry(plan: Plan, rows: Sequence[StepRow], radices: Sequence[int]) -> Schedule:
    ranks = np.arange(plan.size)
    nobody = np.full(plan.size, _NOBODY)
    peers = [nobody if row.peer == _NOBODY else _apart(ranks, row.peer, radices) for row in rows]
    columns = {name: np.repeat(column, plan.size) for name, column in _columns(rows).items()}
    columns["peer"] = np.concatenate([*peers, nobody[:0]])
    groups = tuple(plan.group_count(lane) for lane in range(len(plan.lanes)))
    return Schedule(plan.size, groups, tuple(_after(plan)), True, 1, np.tile(ranks, len(rows)), **columns)


def _apart(ranks: Ranks, offset: int, radices: Sequence[int]) -> Ranks:
    """Return the rank at the distance `offset` from each of `ranks`, added digit by digit."""
    peers: Ranks = ranks.copy()
    power = 1
    for radix in radices:
        if step := offset // power % radix:
            digit = ranks // power % radix
            peers = peers + ((digit + step) % radix - digit) * power
        power *= radix
    return peers


def _of_plans(plans: Sequence[Plan]) -> Schedule:
    rows_of_ranks = [_rows(plan) for plan in plans]
    after = [each._replace(rank=plan.rank) for plan in plans for each in _after(plan)]
    lanes = range(max(len(plan.lanes) for plan in plans))
    groups = tuple(max(plan.group_count(lane) for plan in plans if lane < len(plan.lanes)) for lane in lanes)
    rank = np.repeat(np.arange(len(plans)), [len(rows) for rows in rows_of_ranks])
    return Schedule(
        len(plans), groups, tuple(after), False, 1, rank, **_columns([row for rows in rows_of_ranks for row in rows])
    )


def _columns(rows: Sequence[StepRow]) -> dict[str, Any]:
    whole = [name for name in StepRow._fields if name != "share"]
    columns: dict[str, Any] = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in whole}
    return {**columns, "share": np.array([row.share for row in rows], np.float64)}
