"""Calls of collectives as data: what a rank passes, how it lies in memory, and how they are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from unisono.algorithms.contracts import CONTRACTS, Contract, Cut
from unisono.algorithms.registry import algorithms_of
from unisono.dtypes import DTYPES
from unisono.operations import OPERATIONS

COUNTED = ("allgatherv", "gatherv", "scatterv", "reduce_scatterv", "alltoallv")
COLLECTIVES = (*CONTRACTS, *COUNTED)
PREFIXES = ("scan", "exscan")
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]

ROWS = (0, 0, 1, 2, 3, 5, 17, 64, 1000, 5000)
RESTS = ((), (), (1,), (3,), (2, 2), (0,))
WAYS = ("new", "out", "in place", "plan")
LAYOUTS = ("C", "C", "F", "strided")
OFFSETS = (0, 0, 0, 1, 2, 4, 8, 63)
# No rank has more rows than this of the arrays of all ranks, which each rank computes.
_MOST_ROWS = 80_000


@dataclass(frozen=True)
class Case:
    """A call of one collective, as all ranks make it.

    Attributes:
        collective: the name of the method.
        dtype, op, algorithm: as users name them; `algorithm` is None for the tuner's choice.
        root: taken modulo the number of ranks.
        rows: the rows of `x`, or of each equal share of it.
        counts: the rows of the share of each rank, for methods that take counts; of more ranks than there are, too.
        rest: the shape of a row.
        way: "new" (without out), "out", "in place", or "plan" (a persistent call, with out).
        layout: how `x` lies: "C", "F" or "strided"; where `out` is like `x`, it lies so too, or in C order.
        offset: bytes by which the arrays lie beyond an address that is divisible by 64.
        wait: False for a call that goes on by itself and is waited for.
        seed: of the values.
    """

    collective: str
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    rows: int = 1
    counts: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()
    way: str = "new"
    layout: str = "C"
    offset: int = 0
    wait: bool = True
    algorithm: str | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """The collective's name in the registry of algorithms."""
        return self.collective.removesuffix("v")

    @property
    def contract(self) -> Contract:
        """What the collective promises."""
        return CONTRACTS[self.name]

    def __str__(self) -> str:
        return f"Case({', '.join(self._arguments())})"

    def counts_of(self, size: int) -> list[int]:
        """Return the rows of each rank's share."""
        return list(self.counts[:size]) if self.collective in COUNTED else [self.rows] * size

    def sent(self, size: int, rank: int) -> list[int]:
        """Return how many rows a rank sends to each, in an alltoall."""
        counts = self.counts_of(size)
        return [counts[(rank + 2 * peer) % size] for peer in range(size)] if self.collective in COUNTED else counts

    def received(self, size: int, rank: int) -> list[int]:
        """Return how many rows a rank receives from each, in an alltoall."""
        return [self.sent(size, peer)[rank] for peer in range(size)]

    def shape(self, size: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's `x`."""
        counts = self.counts_of(size)
        if self.name == "alltoall":
            rows = sum(self.sent(size, rank))
        else:
            rows = {Cut.SHARE: counts[rank], Cut.SHARES: sum(counts)}.get(self.contract.input, self.rows)
        return (rows, *self.rest)

    def program(self, size: int) -> str:
        """Return a program that makes this call, and checks what comes of it, on `size` ranks."""
        arguments = "".join(f"    {argument},\n" for argument in self._arguments())
        return _PROGRAM.format(size=size, arguments=arguments)

    def _arguments(self) -> list[str]:
        """Return the fields that are not what they are by default, as arguments."""
        first, *others = fields(self)
        changed = [field.name for field in others if getattr(self, field.name) != field.default]
        return [repr(getattr(self, first.name)), *(f"{name}={getattr(self, name)!r}" for name in changed)]


_PROGRAM = '''\
"""Run this on {size} ranks: unisono run -n {size} FILE"""

import unisono as un
from unisono.testing import Case, check_case

case = Case(
{arguments})
with un.init() as comm:  # or the communicator that is to be judged
    check_case(comm, case)
'''


def random_case(seed: int, number: int, size: int, collectives: Sequence[str] = COLLECTIVES) -> Case:
    """Return case `number` of those that `seed` stands for, which is the same on every rank and machine."""
    draw = random.Random(f"{seed} {number}")
    collective = draw.choice(collectives)
    if collective == "barrier":
        return Case(collective, wait=draw.random() < 0.5, algorithm=_algorithm(draw, collective))
    name = collective.removesuffix("v")
    dtype, op = _reduction(draw, name)
    rest = draw.choice(RESTS)
    rows = _MOST_ROWS // (size if CONTRACTS[name].input is Cut.VECTOR else size * size) // max(1, prod(rest))
    return Case(
        collective,
        dtype=dtype,
        op=op,
        root=draw.randrange(size) if _has_root(name) else 0,
        rows=1 if collective in COUNTED else min(rows, draw.choice(ROWS)),
        counts=tuple(min(rows, draw.choice(ROWS)) for _ in range(size)) if collective in COUNTED else (),
        rest=rest,
        way=draw.choice([way for way in WAYS if way != "in place" or name != "alltoall"]),
        layout=draw.choice(LAYOUTS),
        offset=draw.choice(OFFSETS),
        wait=draw.random() < 0.7,
        algorithm=_algorithm(draw, name),
        seed=draw.randrange(1 << 16),
    )


def _reduction(draw: random.Random, name: str) -> tuple[str, str]:
    """Return a dtype and an operation: "sum", which is not looked at, where there is none."""
    if not CONTRACTS[name].reduces:
        return draw.choice(list(DTYPES)), "sum"
    return draw.choice([(dtype, op) for dtype, op in REDUCTIONS if name not in PREFIXES or op != "avg"])


def _has_root(name: str) -> bool:
    return CONTRACTS[name].input_at_root or CONTRACTS[name].output_at_root


def _algorithm(draw: random.Random, name: str) -> str | None:
    return None if draw.random() < 0.4 else draw.choice(sorted(algorithms_of(name)))


def arguments_of(case: Case, size: int, rank: int) -> dict[str, Any]:
    """Return what a rank passes beside `x`, `out` and `wait`."""
    arguments: dict[str, Any] = {} if case.algorithm is None else {"algorithm": case.algorithm}
    if case.contract.reduces:
        arguments["op"] = case.op
    if _has_root(case.name):
        arguments["root"] = case.root % size
    if case.collective == "alltoallv":
        arguments.update(send_counts=case.sent(size, rank), recv_counts=case.received(size, rank))
    elif case.collective in COUNTED:
        arguments["counts"] = case.counts_of(size)
    return arguments
