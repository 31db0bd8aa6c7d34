"""Schedules: what all ranks do in a collective, as arrays for the simulator, one row for each step as written.

A row stands for a step of one rank, in group `first`, `first + stride`, … of its lane, `times` times; its peer advances
each time. So a ring of 10,000 ranks has a few rows for each rank, not 20,000.

Most algorithms are *symmetric*: seen from each rank, all others do the same. Ranks are written with digits of mixed
radix, and a rank is as far from its peer, digit by digit, as rank 0 from its own: one digit for a ring, binary digits
for recursive doubling, places in hosts and hosts for a composition. Then the plan of rank 0 and these digits say what
all do. That is looked for in the plans of some ranks, of all of them up to `_ALL_RANKS`, and only for Unisono's own
builders; where it is not found, the plans of all ranks are built.
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
    as_written,
)
from unisono.errors import UsageError
from unisono.tuning.machine.topology import Floats, Ranks

# Kinds of rows: data and flags to a peer; data read of, or written to, its memory; and work of a rank on its own.
MESSAGE, FLAG, MAPPED, REDUCE, COPY = range(5)

_ALL_RANKS = 64
_RANDOM_RANKS = 12
_NOBODY = -1
EVERY = -1


class Row(NamedTuple):
    """A step of a rank as written; `share` is what it moves or combines, as a multiple of the vector."""

    kind: int
    lane: int
    first: int
    stride: int
    times: int
    peer: int
    advance: int
    share: float


class After(NamedTuple):
    """A group of a rank, or of `EVERY` one, that waits for a group of another of its lanes."""

    rank: int
    lane: int
    group: int
    other: int
    earlier: int


class Schedule(NamedTuple):
    """What all ranks do: columns of `Row`, and the rank of each. The rows of each rank stand in the order of its steps.

    Attributes:
        size: number of ranks.
        groups: for each lane, the number of groups as run.
        after: what waits for groups of other lanes, without duplicates.
        is_symmetric: whether it was made of the plan of rank 0.
    """

    size: int
    groups: tuple[int, ...]
    after: tuple[After, ...]
    is_symmetric: bool
    rank: Ranks
    kind: Ranks
    lane: Ranks
    first: Ranks
    stride: Ranks
    times: Ranks
    peer: Ranks
    advance: Ranks
    share: Floats


def schedule(algorithm: Algorithm, size: int, root: int, params: Mapping[str, Any]) -> Schedule:
    """Return the schedule of an algorithm on so many ranks.

    Raises:
        NoAlgorithmError, UsageError: it does not run on so many ranks or hosts, or with such parameters.
    """
    if params.get("varying"):
        raise UsageError("shares that differ in length are not simulated")
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


def _rows(plan: Plan) -> list[Row]:
    """Return the rows of a plan, in the order of its steps; what goes on in the next group is one row with it."""
    found: list[Row] = []
    going_on: dict[tuple[float, ...], int] = {}
    for written in _written(plan):
        row, at = written, None
        what = (row.kind, row.lane, row.peer, row.share)
        if row.stride == 1 and not row.advance:
            at = going_on.pop((*what, row.first), None)
            if at is not None:
                row = found[at]._replace(times=found[at].times + row.times)
            end = (*what, row.first + row.times)
            going_on[end] = len(found) if at is None else at
        if at is None:
            found.append(row)
        else:
            found[at] = row
    return found


def _written(plan: Plan) -> Iterator[Row]:
    """Yield a row for each step as written."""
    shares = {buffer: _block_share(plan, buffer) for buffer in Buffer}
    for lane, items in enumerate(plan.lanes):
        first = 0
        for item in items:
            times, groups = as_written(item)
            stride = len(groups) if times > 1 else 1
            for offset, group in enumerate(groups):
                for step in group.steps:
                    for kind, peer, advance, span in _parts(step, plan.rank):
                        share = shares[span.buffer] * span.count if span else 0.0
                        yield Row(kind, lane, first + offset, stride, times, peer, advance if times > 1 else 0, share)
            first += times * len(groups)


def _parts(step: Any, rank: int) -> list[tuple[int, int, int, Span | None]]:
    """Return the (kind, peer, advance, span) of what a step does; what is received is known from its sender."""
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
    """Return the length of a block of a buffer, as a multiple of the vector; blocks are taken to be equally long."""
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
    """Return what waits for groups of other lanes, as if every rank did."""
    found = []
    for lane, items in enumerate(plan.lanes):
        first = 0
        for item in items:
            times, groups = as_written(item)
            for offset, group in enumerate(groups):
                for at in range(first + offset, first + times * len(groups), len(groups)) if group.after else ():
                    found += [After(EVERY, lane, at, other, earlier) for other, earlier in group.after]
            first += times * len(groups)
    return found


def _radices(algorithm: Algorithm, size: int, params: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Return the digits, the innermost ones first, in which the ranks of an algorithm may be symmetric."""
    found = [(size,), _digits(size, 2)]
    own = algorithm.parameters()
    if "radix" in own:
        found.append(_digits(size, params.get("radix", own["radix"].default)))
    if hosts := params.get("hosts"):
        inside, across = len(hosts[0]) if isinstance(hosts[0], tuple) else 1, len(hosts)
        found += [
            (*inner, *outer)
            for inner in ((inside,), _digits(inside, 2))
            for outer in ((across,), _digits(across, 2))
            if prod(inner) * prod(outer) == size
        ]
    return [radices for radices in dict.fromkeys(found) if prod(radices) == size]


def _digits(size: int, radix: int) -> tuple[int, ...]:
    """Return as many times `radix` as make `size`; nothing if none do."""
    count, power = 0, 1
    while power < size and radix > 1:
        count, power = count + 1, power * radix
    return (radix,) * count if power == size else ()


def _looked_at(size: int, radices: Sequence[int]) -> list[int]:
    """Return the ranks whose plans are compared with that of rank 0."""
    if size <= _ALL_RANKS:
        return list(range(1, size))
    powers = [prod(radices[:digit]) for digit in range(len(radices))]
    near = [power + step for power in (*powers, size // 2, size // 3, size) for step in (-1, 0, 1)]
    chance = random.Random(size).choices(range(1, size), k=_RANDOM_RANKS)
    return sorted({rank for rank in (*near, *chance) if 0 < rank < size})


def _offsets(plan: Plan, radices: Sequence[int]) -> list[Row]:
    """Return the rows of a plan with the peers that rank 0 has, if it is as far from them, digit by digit.

    Peers that advance do so along one digit only.
    """
    return [
        row if row.peer == _NOBODY else row._replace(peer=_between(plan.rank, row.peer, radices))
        for row in _rows(plan)
        if len(radices) == 1 or not row.advance or row.peer == _NOBODY
    ]


def _between(rank: int, peer: int, radices: Sequence[int]) -> int:
    found, power = 0, 1
    for radix in radices:
        found += (peer // power - rank // power) % radix * power
        power *= radix
    return found


def _of_symmetry(plan: Plan, rows: Sequence[Row], radices: Sequence[int]) -> Schedule:
    ranks = np.arange(plan.size)
    nobody = np.full(plan.size, _NOBODY)
    peers = [nobody if row.peer == _NOBODY else _apart(ranks, row.peer, radices) for row in rows]
    columns = {name: np.repeat(column, plan.size) for name, column in _columns(rows).items()}
    columns["peer"] = np.concatenate([*peers, nobody[:0]])
    groups = tuple(plan.group_count(lane) for lane in range(len(plan.lanes)))
    return Schedule(plan.size, groups, tuple(_after(plan)), True, np.tile(ranks, len(rows)), **columns)


def _apart(ranks: Ranks, offset: int, radices: Sequence[int]) -> Ranks:
    """Return who is as far from each of `ranks` as `offset` is from 0, digit by digit."""
    found: Ranks = ranks.copy()
    power = 1
    for radix in radices:
        if step := offset // power % radix:
            digit = ranks // power % radix
            found = found + ((digit + step) % radix - digit) * power
        power *= radix
    return found


def _of_plans(plans: Sequence[Plan]) -> Schedule:
    found = [_rows(plan) for plan in plans]
    after = [each._replace(rank=plan.rank) for plan in plans for each in _after(plan)]
    lanes = range(max(len(plan.lanes) for plan in plans))
    groups = tuple(max(plan.group_count(lane) for plan in plans if lane < len(plan.lanes)) for lane in lanes)
    rank = np.repeat(np.arange(len(plans)), [len(rows) for rows in found])
    return Schedule(len(plans), groups, tuple(after), False, rank, **_columns([row for rows in found for row in rows]))


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    whole = [name for name in Row._fields if name != "share"]
    columns: dict[str, Any] = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in whole}
    return {**columns, "share": np.array([row.share for row in rows], np.float64)}
