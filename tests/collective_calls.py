"""Calls of every collective by its method: what a rank passes, how it lies in memory, and what numpy says must come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import executor_contract as contract
import numpy as np
from harness import by_messages
from hypothesis import strategies as st

import unisono as un
from unisono.algorithms.contracts import CONTRACTS
from unisono.dtypes import DTYPES
from unisono.tuning.choice import Question, choose

COUNTED = ("allgatherv", "gatherv", "scatterv", "reduce_scatterv", "alltoallv")
COLLECTIVES = tuple(name for name in CONTRACTS if name != "barrier") + COUNTED
PREFIXES = ("scan", "exscan")
UNTOUCHED = 5
MOST_RANKS = 5


@dataclass(frozen=True)
class Shares:
    """One call. `rows` is the equal share of each rank, `counts` are shares of their own; `rest` is a row's shape.

    `way` is "new" (without out), "out", "in place", or "plan" (with out); `layout` of `x` is "C", "F", "strided"
    or "unaligned", as out is then too. Without `waits`, the call goes on by itself until its result is asked for.
    """

    collective: str
    dtype: str
    op: str
    root: int
    rows: int
    counts: tuple[int, ...]
    rest: tuple[int, ...]
    way: str
    layout: str
    algorithm: str | None
    waits: bool

    @property
    def name(self) -> str:
        return self.collective.removesuffix("v")

    @property
    def reduces(self) -> bool:
        return CONTRACTS[self.name].reduces

    def counts_of(self, size: int) -> list[int]:
        return list(self.counts[:size]) if self.collective in COUNTED else [self.rows] * size

    def sent(self, size: int, rank: int) -> list[int]:
        """Return how many rows a rank sends to each, in an alltoall."""
        counts = self.counts_of(size)
        return [counts[(rank + 2 * peer) % size] for peer in range(size)] if self.collective in COUNTED else counts

    def received(self, size: int, rank: int) -> list[int]:
        return [self.sent(size, peer)[rank] for peer in range(size)]


def cases(collective: str) -> st.SearchStrategy[Shares]:
    """Return calls of one method."""
    name = collective.removesuffix("v")
    reductions = [(dtype, op) for dtype, op in contract.REDUCTIONS if name not in PREFIXES or op != "avg"]
    if CONTRACTS[name].reduces:
        return st.sampled_from(reductions).flatmap(lambda reduction: _cases(collective, *reduction))
    return st.sampled_from(list(DTYPES)).flatmap(lambda dtype: _cases(collective, dtype, "sum"))


def _cases(collective: str, dtype: str, op: str) -> st.SearchStrategy[Shares]:
    name = collective.removesuffix("v")
    return st.builds(
        Shares,
        collective=st.just(collective),
        dtype=st.just(dtype),
        op=st.just(op),
        root=st.integers(0, MOST_RANKS - 1),
        rows=st.sampled_from([0, 1, 2, 3, 5000]),
        counts=st.tuples(*[st.sampled_from([0, 0, 1, 2, 3, 4000])] * MOST_RANKS),
        rest=st.sampled_from([(), (1,), (3,), (2, 2), (0,)]),
        way=st.sampled_from(["new", "out", "plan"] + ["in place"] * (collective != "alltoallv")),
        layout=st.sampled_from(["C", "C", "F", "strided", "unaligned"]),
        algorithm=st.sampled_from([None, *by_messages(name)]),
        waits=st.booleans(),
    )


def is_refused(case: Shares, size: int, link: str) -> bool:
    """Return whether the algorithm cannot be used there."""
    everyone = (tuple(range(size)),)
    question = Question(
        *(case.name, 0, size, link),
        algorithm=case.algorithm or "auto",
        varying=case.collective in COUNTED,
        hosts=everyone,
        inside=link,
    )
    try:
        choose(question)
    except un.NoAlgorithmError:
        return True
    return False


# --- what each rank has, and gets ----------------------------------------------------------------------------------


def inputs(case: Shares, size: int) -> list[Any]:
    """Return the `x` of each rank; of those that need none, something else that must not matter."""
    counts = case.counts_of(size)
    rows = {
        "alltoall": [sum(case.sent(size, rank)) for rank in range(size)],
        "allgather": counts,
        "gather": counts,
        "scatter": [sum(counts)] * size,
        "reduce_scatter": [sum(counts)] * size,
    }.get(case.name, [case.rows] * size)
    if case.reduces:
        shape = (rows[0], *case.rest)
        like = contract.Case(dtype=case.dtype, op=case.op, count=int(np.prod(shape)))
        return [row.reshape(shape) for row in contract.contributions(like, size)]
    return [numbered(rank, (rows[rank], *case.rest), case.dtype) for rank in range(size)]


def numbered(rank: int, shape: tuple[int, ...], dtype: str) -> Any:
    values = (np.arange(int(np.prod(shape))) * 3 + 7 * rank) % (2 if dtype == "bool" else 61)
    return values.astype(dtype).reshape(shape)


def results(case: Shares, size: int) -> list[Any]:
    """Return what each rank gets; None where it gets nothing, or where its `out` is left as it is."""
    xs, root = inputs(case, size), case.root % size
    starts = np.cumsum([0, *case.counts_of(size)])
    own = [slice(starts[rank], starts[rank + 1]) for rank in range(size)]
    like = contract.Case(dtype=case.dtype, op=case.op)
    total = contract.expected(like, np.stack(xs)) if case.reduces else None
    everything = np.concatenate(xs) if case.name in ("allgather", "gather") else None
    if case.name in PREFIXES:
        ends = [rank + (case.name == "scan") for rank in range(size)]
        return [contract.expected(like, np.stack(xs[:end])) if end else None for end in ends]
    if case.name == "alltoall":
        parts = [np.split(x, np.cumsum(case.sent(size, rank))[:-1]) for rank, x in enumerate(xs)]
        return [np.concatenate([parts[peer][rank] for peer in range(size)]) for rank in range(size)]
    of_rank = {
        "allreduce": lambda rank: total,
        "reduce": lambda rank: total if rank == root else None,
        "reduce_scatter": lambda rank: total[own[rank]],
        "broadcast": lambda rank: xs[root],
        "allgather": lambda rank: everything,
        "gather": lambda rank: everything if rank == root else None,
        "scatter": lambda rank: xs[root][own[rank]],
    }[case.name]
    return [of_rank(rank) for rank in range(size)]


# --- what runs on ranks --------------------------------------------------------------------------------------------


def laid_out(values: Any, layout: str) -> Any:
    """Return an array of these values that lies in memory like that."""
    if layout == "F":
        return np.array(values, order="F")
    if layout == "strided":
        wide = np.zeros((*values.shape, 2), values.dtype)
        wide[..., 0] = values
        return wide[..., 0]
    if layout == "unaligned":
        memory = np.frombuffer(b"\0" + values.tobytes(), np.uint8).copy()
        return memory[1:].view(values.dtype).reshape(values.shape)
    return values.copy()


def run_shares(world: un.Communicator, case: Shares) -> tuple[str, list[Any]]:
    """Make a call twice; return the error of the first, if there is one, and what came of each."""
    size, rank = world.size, world.rank
    values, wanted = inputs(case, size)[rank], results(case, size)[rank]
    has_out = wanted is not None or case.name == "exscan"
    shape = values.shape if wanted is None else wanted.shape
    before = np.full(int(np.prod(shape)), 1).astype(case.dtype)
    offset = 2 * before.itemsize + (case.layout == "unaligned")
    memory, raw = contract.guarded(before.view(np.uint8), offset)
    flat = raw.view(case.dtype)
    out = flat.reshape(shape)
    # The result lies as x does, where it is like x.
    order = "F" if case.layout == "F" and CONTRACTS[case.name].input is CONTRACTS["allreduce"].input else "C"
    out = flat.reshape(shape[::-1]).T if order == "F" else out
    x, out = in_place(case, size, rank, values, out) if case.way == "in place" else (laid_out(values, case.layout), out)
    makes_new = case.way == "new" and (case.name != "scatter" or rank == case.root % size)
    x = laid_out(values, order) if case.way == "plan" and case.layout != "unaligned" else x
    given = {} if makes_new else {"out": out}
    try:
        call = call_of(world, case, x, given)
    except un.UnisonoError as error:
        return type(error).__name__, []
    told = []
    for _ in range(2):
        x[...] = values
        if case.way != "in place":
            flat[...] = np.full(len(flat), UNTOUCHED % 2).astype(case.dtype)
        try:
            result = call() if case.waits else call(wait=False).wait()
        except un.UnisonoError as error:
            return type(error).__name__, []
        assert (result is None) == (not has_out)
        assert result is None or makes_new or result is out
        assert case.way == "in place" or x.tobytes() == values.tobytes()
        contract.assert_guards_intact(memory, raw, offset)
        told.append(None if result is None else np.array(result))
    return "", told


def call_of(world: un.Communicator, case: Shares, x: Any, given: dict[str, Any]) -> Callable[..., Any]:
    """Return what makes the call: a plan, or the method with its arguments."""
    arguments = {**arguments_of(case, world.size, world.rank), **given}
    if case.way == "plan":
        return world.plan(case.collective, x, **arguments)
    return partial(getattr(world, case.collective), x, **arguments)


def arguments_of(case: Shares, size: int, rank: int) -> dict[str, Any]:
    arguments: dict[str, Any] = {"algorithm": case.algorithm}
    if case.reduces:
        arguments["op"] = case.op
    if case.name in ("reduce", "broadcast", "gather", "scatter"):
        arguments["root"] = case.root % size
    if case.collective == "alltoallv":
        arguments.update(send_counts=case.sent(size, rank), recv_counts=np.array(case.received(size, rank)))
    elif case.collective in COUNTED:
        arguments["counts"] = case.counts_of(size)
    return arguments


def in_place(case: Shares, size: int, rank: int, values: Any, out: Any) -> tuple[Any, Any]:
    """Return `x` and `out` in the same memory, where the rank has both, with the values in `x`."""
    start = sum(case.counts_of(size)[:rank])
    is_root = rank == case.root % size
    if case.name == "allgather" or (case.name == "gather" and is_root):
        return out[start : start + len(values)], out
    x = laid_out(values, "unaligned" if case.layout == "unaligned" else "C")
    if case.name == "reduce_scatter" or (case.name == "scatter" and is_root):
        return x, x[start : start + len(out)]
    return x, out if case.name in ("gather", "scatter") else x


def check(case: Shares, told: list[tuple[str, list[Any]]], size: int, link: str) -> None:
    """Check what `run_shares` returned on each rank."""
    refusal = "NoAlgorithmError" if is_refused(case, size, link) else ""
    for rank, (error, found) in enumerate(told):
        # No algorithm exchanges in place.
        wrong = case.collective == "alltoall" and case.way == "in place" and inputs(case, size)[rank].size
        assert error == (refusal or ("UsageError" if wrong else "")), f"rank {rank}, {case}"
        wanted = results(case, size)[rank]
        for result in found:
            if wanted is not None:
                contract.assert_same_bits(result, wanted, f"rank {rank} of {size}, {case}")
