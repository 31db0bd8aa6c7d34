"""Calls of collectives as data: arguments, memory layout, and a random choice of them."""

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
# These take a list of arrays, because their results have the shapes of `x`.
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
# The most rows of the arrays of all ranks together, because each rank computes all of them.
_MOST_ROWS = 80_000


@dataclass(frozen=True)
class Case:
    """A call of one collective as all ranks make it, or a message, or a call on objects.

    Attributes:
        collective: the name of the method.
        dtype, op, algorithm: in the words of users; `algorithm` is None for the tuner's choice. The factors of
            "premul_sum" depend on the rank. Python functions have their names in `unisono.testing.functions`.
        root: taken modulo the number of ranks; for "send" and "send_object", the sender.
        rows: the rows of `x`, or of each equal share of it.
        counts: the rows of each rank's share, for methods with counts; there may be more counts than ranks.
        rest: the shape of a row.
        way: "new" (without out), "out", "in place", or "plan" (a persistent call with out).
        layout: the memory order of `x`: "C", "F" or "strided". An `out` of the same shape has the same order, or C.
        offset: bytes by which the arrays are away from an address that is divisible by 64.
        wait: False for a call that returns a work, which is waited for.
        seed: the seed of the values.
        arrays: the number of arrays in the list that is passed, each a little different; 0 for no list.
        shift, tag: of messages. Each goes from a rank to the rank `shift` further on, modulo the number of ranks.
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
        """The name of the collective in the registry of algorithms."""
        return self.collective.removesuffix("v") if self.collective in COUNTED else self.collective

    @property
    def reduces(self) -> bool:
        """Whether the collective uses `op`."""
        return self.name in CONTRACTS and self.contract.reduces

    @property
    def contract(self) -> Contract:
        """The contract of the collective."""
        return CONTRACTS[self.name]

    def __str__(self) -> str:
        return literal(self)

    def counts_of(self, size: int) -> list[int]:
        """Return the rows of each rank's share."""
        return list(self.counts[:size]) if self.collective in COUNTED else [self.rows] * size

    def sent(self, size: int, rank: int) -> list[int]:
        """Return the number of rows that a rank sends to each rank in an alltoall."""
        counts = self.counts_of(size)
        return [counts[(rank + 2 * peer) % size] for peer in range(size)] if self.collective in COUNTED else counts

    def received(self, size: int, rank: int) -> list[int]:
        """Return the number of rows that a rank receives from each rank in an alltoall."""
        return [self.sent(size, peer)[rank] for peer in range(size)]

    def parts(self) -> list[Case]:
        """Return the calls on single arrays that are equivalent to this call on a list, with dtypes of one kind."""
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
    """Return whether an op, by its name in cases, supports a dtype."""
    if op in FUNCTIONS:
        return dtype in FUNCTIONS[op].dtypes
    return DTYPES[dtype].kind in operation("sum" if op == "premul_sum" else op).kinds


def random_case(seed: int, number: int, size: int, methods: Sequence[str] = METHODS, ops: Sequence[str] = OPS) -> Case:
    """Return case `number` of a seed, which is the same on every rank and machine.

    Raises:
        UsageError: the method takes none of the `ops`.
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
    """Return a random message, or a random call on objects."""
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
    """Return a dtype and an op; the op is "sum" if the collective uses none."""
    if not CONTRACTS[name].reduces:
        return draw.choice(list(DTYPES)), "sum"
    possible = [op for op in ops if name not in PREFIXES or op != "avg"]
    if not possible:
        raise UsageError(f"{name} takes none of the ops {', '.join(ops)}")
    op = draw.choice(possible)
    return draw.choice([dtype for dtype in DTYPES if is_defined(op, dtype)]), op


def has_root(name: str) -> bool:
    """Return whether one rank has a special role in `name`, a collective or another method."""
    if name in CONTRACTS:
        return CONTRACTS[name].has_root
    return name not in ("sendrecv", "allgather_object")


def _algorithm(draw: random.Random, name: str) -> str | None:
    return None if draw.random() < 0.4 else draw.choice(sorted(algorithms_of(name)))


def arguments_of(case: Case, size: int, rank: int) -> dict[str, Any]:
    """Return the arguments of a rank besides `x`, `out` and `wait`."""
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
    """Return the argument `op` of a rank."""
    if case.op in FUNCTIONS:
        return FUNCTIONS[case.op].op
    return Op.premul_sum(factor_of(case, rank)) if case.op == "premul_sum" else case.op


def factor_of(case: Case, rank: int) -> int:
    """Return the factor of a rank's contribution to a "premul_sum", which keeps the sum exact."""
    return rank % (2 if DTYPES[case.dtype].kind == "float8" else 3) + 1
