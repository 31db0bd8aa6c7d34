"""Calls of collectives as data: what a rank passes, how it lies in memory, and how they are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from math import prod
from typing import Any

from unisono.algorithms.catalogue.registry import algorithms_of
from unisono.algorithms.ir.contracts import CONTRACTS, Contract, Cut
from unisono.dtypes import DTYPES
from unisono.errors import UsageError
from unisono.operations import OPERATIONS, Op, operation
from unisono.testing.functions import FUNCTIONS
from unisono.testing.sources import literal

COUNTED = ("allgatherv", "gatherv", "scatterv", "reduce_scatterv", "alltoallv")
COLLECTIVES = (*CONTRACTS, *COUNTED)
MESSAGES = ("send", "sendrecv")
OBJECTS = ("broadcast_object", "allgather_object", "gather_object", "scatter_object", "send_object")
PAIRED = (*MESSAGES, "send_object")
METHODS = (*COLLECTIVES, *MESSAGES, *OBJECTS)
PREFIXES = ("scan", "exscan")
# Where the result is like `x`, a list of arrays is as good.
LISTED = ("allreduce", "reduce", "broadcast", "scan", "exscan")
OPS = (*OPERATIONS, "premul_sum", *FUNCTIONS)
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPERATIONS if DTYPES[dtype].kind in OPERATIONS[op].kinds]
BY_FUNCTION = [(dtype, name) for name, function in FUNCTIONS.items() for dtype in function.dtypes]

ROWS = (0, 0, 1, 2, 3, 5, 17, 64, 1000, 5000)
RESTS = ((), (), (1,), (3,), (2, 2), (0,))
WAYS = ("new", "out", "in place", "plan")
LAYOUTS = ("C", "C", "F", "strided")
OFFSETS = (0, 0, 0, 1, 2, 4, 8, 63)
LISTS = (0, 0, 0, 0, 1, 3)
TAGS = (0, 0, 1, 1 << 20)
# No rank has more rows than this of the arrays of all ranks, which each rank computes.
_MOST_ROWS = 80_000


@dataclass(frozen=True)
class Case:
    """A call of one collective, as all ranks make it; or a message, or a call on objects.

    Attributes:
        collective: the name of the method.
        dtype, op, algorithm: as users name them; `algorithm` is None for the tuner's choice. The factors of
            "premul_sum" depend on the rank; the functions of Python have the names of `unisono.testing.functions`.
        root: taken modulo the number of ranks; it sends the message of "send" and "send_object".
        rows: the rows of `x`, or of each equal share of it.
        counts: the rows of the share of each rank, for methods that take counts; of more ranks than there are, too.
        rest: the shape of a row.
        way: "new" (without out), "out", "in place", or "plan" (a persistent call, with out).
        layout: how `x` lies: "C", "F" or "strided"; where `out` is like `x`, it lies so too, or in C order.
        offset: bytes by which the arrays lie beyond an address that is divisible by 64.
        wait: False for a call that goes on by itself and is waited for.
        seed: of the values.
        arrays: how many there are in the list that is passed, each a little other than the one before; 0 for no list.
        shift, tag: of messages, which go from a rank to the one that is so many further on, around the end.
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
    arrays: int = 0
    shift: int = 1
    tag: int = 0

    @property
    def name(self) -> str:
        """The collective's name in the registry of algorithms."""
        return self.collective.removesuffix("v") if self.collective in COUNTED else self.collective

    @property
    def reduces(self) -> bool:
        """Whether `op` is looked at."""
        return self.name in CONTRACTS and self.contract.reduces

    @property
    def contract(self) -> Contract:
        """What the collective promises."""
        return CONTRACTS[self.name]

    def __str__(self) -> str:
        return literal(self)

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

    def parts(self) -> list[Case]:
        """Return the calls that are as one with a list: of its arrays, one by one, whose dtypes are of one kind."""
        same = DTYPES[self.dtype].kind
        kind = [
            name for name in DTYPES if DTYPES[name].kind == same and (not self.reduces or is_defined(self.op, name))
        ]
        first = kind.index(self.dtype)
        return [
            replace(self, arrays=0, dtype=dtype, rows=self.rows + index, seed=self.seed + index)
            for index, dtype in enumerate(islice(cycle(kind[first:] + kind[:first]), self.arrays))
        ]

    def shape(self, size: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's `x`."""
        if self.collective not in COLLECTIVES:
            return (self.rows, *self.rest)
        counts = self.counts_of(size)
        if self.name == "alltoall":
            rows = sum(self.sent(size, rank))
        else:
            rows = {Cut.SHARE: counts[rank], Cut.SHARES: sum(counts)}.get(self.contract.input, self.rows)
        return (rows, *self.rest)


def is_defined(op: str, dtype: str) -> bool:
    """Return whether an operation, by the name that a case has for it, is one for a dtype."""
    if op in FUNCTIONS:
        return dtype in FUNCTIONS[op].dtypes
    return DTYPES[dtype].kind in operation("sum" if op == "premul_sum" else op).kinds


def random_case(seed: int, number: int, size: int, methods: Sequence[str] = METHODS, ops: Sequence[str] = OPS) -> Case:
    """Return case `number` of those that `seed` stands for, which is the same on every rank and machine.

    Raises:
        UsageError: none of the `ops` can be given to the method.
    """
    draw = random.Random(f"{seed} {number}")
    collective = draw.choice(methods)
    if collective == "barrier":
        return Case(collective, wait=draw.random() < 0.5, algorithm=_algorithm(draw, collective))
    if collective not in COLLECTIVES:
        return _random_message(draw, collective, size)
    name = Case(collective).name
    dtype, op = _reduction(draw, name, ops)
    rest = draw.choice(RESTS)
    rows = _MOST_ROWS // (size if CONTRACTS[name].input is Cut.VECTOR else size * size) // max(1, prod(rest))
    return Case(
        collective,
        dtype=dtype,
        op=op,
        root=draw.randrange(size) if has_root(name) else 0,
        rows=1 if collective in COUNTED else min(rows, draw.choice(ROWS)),
        counts=tuple(min(rows, draw.choice(ROWS)) for _ in range(size)) if collective in COUNTED else (),
        rest=rest,
        way=draw.choice([way for way in WAYS if way != "in place" or name != "alltoall"]),
        layout=draw.choice(LAYOUTS),
        offset=draw.choice(OFFSETS),
        wait=draw.random() < 0.7,
        algorithm=None if op in FUNCTIONS else _algorithm(draw, name),
        seed=draw.randrange(1 << 16),
        arrays=draw.choice(LISTS) if name in LISTED else 0,
    )


def _random_message(draw: random.Random, method: str, size: int) -> Case:
    """Return a call of a method that is no collective, or is one on objects."""
    rest = draw.choice(RESTS)
    return Case(
        method,
        dtype=draw.choice(list(DTYPES)),
        root=draw.randrange(size) if has_root(method) else 0,
        rows=min(_MOST_ROWS // size // max(1, prod(rest)), draw.choice(ROWS)),
        rest=rest,
        layout=draw.choice([layout for layout in LAYOUTS if layout != "F"]),
        offset=draw.choice(OFFSETS),
        wait=method != "send" or draw.random() < 0.7,
        seed=draw.randrange(1 << 16),
        shift=draw.randrange(size) if method in PAIRED else 1,
        tag=draw.choice(TAGS) if method in PAIRED else 0,
    )


def _reduction(draw: random.Random, name: str, ops: Sequence[str]) -> tuple[str, str]:
    """Return a dtype and an operation: "sum", which is not looked at, where there is none."""
    if not CONTRACTS[name].reduces:
        return draw.choice(list(DTYPES)), "sum"
    possible = [op for op in ops if name not in PREFIXES or op != "avg"]
    if not possible:
        raise UsageError(f"{name} takes none of the ops {', '.join(ops)}")
    op = draw.choice(possible)
    return draw.choice([dtype for dtype in DTYPES if is_defined(op, dtype)]), op


def has_root(name: str) -> bool:
    """Return whether one rank is not like the others in what `name`, a collective or another method, does."""
    if name in CONTRACTS:
        return CONTRACTS[name].input_at_root or CONTRACTS[name].output_at_root
    return name not in ("sendrecv", "allgather_object")


def _algorithm(draw: random.Random, name: str) -> str | None:
    return None if draw.random() < 0.4 else draw.choice(sorted(algorithms_of(name)))


def arguments_of(case: Case, size: int, rank: int) -> dict[str, Any]:
    """Return what a rank passes to a collective beside `x`, `out` and `wait`."""
    arguments: dict[str, Any] = {} if case.algorithm is None else {"algorithm": case.algorithm}
    if case.reduces:
        arguments["op"] = _operation_of(case, rank)
    if has_root(case.name):
        arguments["root"] = case.root % size
    if case.collective == "alltoallv":
        arguments.update(send_counts=case.sent(size, rank), recv_counts=case.received(size, rank))
    elif case.collective in COUNTED:
        arguments["counts"] = case.counts_of(size)
    return arguments


def _operation_of(case: Case, rank: int) -> str | Op:
    """Return what a rank passes as `op`."""
    if case.op in FUNCTIONS:
        return FUNCTIONS[case.op].op
    return Op.premul_sum(factor_of(case, rank)) if case.op == "premul_sum" else case.op


def factor_of(case: Case, rank: int) -> int:
    """Return by what a rank's contribution to a "premul_sum" is multiplied, so that the sum stays exact."""
    return rank % (2 if DTYPES[case.dtype].kind == "float8" else 3) + 1
