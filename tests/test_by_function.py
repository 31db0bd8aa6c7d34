"""Reductions by functions of Python: what they give, what they refuse, and what comes of functions that fail."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from harness import LocalRanks
from hypothesis import Phase, given, settings, strategies as st
from native_ranks import Job, NativeRanks

import unisono as un
from unisono.collectives.calls import Place
from unisono.collectives.communicator import Communicator
from unisono.collectives.exchanges import PREFIXES, WHOLE, draft_shared, draft_whole
from unisono.dtypes import DTYPES
from unisono.options import Options

pytestmark = pytest.mark.timeout(240)

Say = Callable[[Any], None]
PRIME = 65521


def affine(a: Any, b: Any) -> Any:
    """Return the maps x → m·x + c modulo a prime, packed as (m, c), that apply `a` and then `b`: a product of matrices."""
    (m, c), (n, d) = ((each.astype(np.uint64) >> 16, each.astype(np.uint64) & 0xFFFF) for each in (a, b))
    return ((m * n % PRIME) << 16 | (c * n + d) % PRIME).astype(np.uint32)


def first_nonzero(a: Any, b: Any) -> Any:
    return np.where(a != 0, a, b)


def right(a: Any, b: Any) -> Any:
    """Return an argument itself, which is then overwritten by the library."""
    return b


def as_list(a: Any, b: Any) -> Any:
    """Return what numpy makes an array of float64 of."""
    return [float(x + y) for x, y in zip(a, b, strict=True)]


SAME = np.empty(1 << 16, np.int64)


def in_the_same_array(a: Any, b: Any) -> Any:
    """Return the same memory each time."""
    return np.add(a, b, out=SAME[: a.size])


# Functions, whether they are commutative, and dtypes.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], bool, tuple[str, ...]]] = {
    "affine": (affine, False, ("uint32",)),
    "first_nonzero": (first_nonzero, False, tuple(DTYPES)),
    "right": (right, False, ("complex64", "float8_e5m2", "int8")),
    "as_list": (as_list, True, ("float64",)),
    "hypot": (np.hypot, True, ("float16", "float32", "float64")),
    "maximum": (np.maximum, True, ("bool", "int16", "bfloat16", "float32")),
    "add": (np.add, True, ("float32", "bfloat16", "int64")),
    "method": (partial(np.minimum), True, ("uint8",)),
}
WAYS = ("new", "out", "in place", "later", "plan", "plan later", "list", "group")


@dataclass(frozen=True)
class Case:
    """A call, how it is made, and whether each rank combines all elements or a share; None for what is predicted."""

    collective: str
    function: str
    dtype: str
    rows: int
    counts: tuple[int, ...]
    root: int
    way: str
    is_whole: bool | None
    reproducible: bool
    seed: int


def cases(collective: str) -> st.SearchStrategy[Case]:
    def of(function: str) -> st.SearchStrategy[Case]:
        is_vector = collective in WHOLE
        return st.builds(
            Case,
            collective=st.just(collective),
            function=st.just(function),
            dtype=st.sampled_from(FUNCTIONS[function][2]),
            rows=st.sampled_from([0, 1, 2, 3, 5, 17, 1001]),
            counts=st.tuples(*[st.sampled_from([0, 1, 2, 5, 301])] * 5),
            root=st.integers(0, 4),
            way=st.sampled_from(WAYS if is_vector else tuple(way for way in WAYS if way != "list")),
            is_whole=st.sampled_from([None, True, False] if is_vector else [None]),
            reproducible=st.booleans(),
            seed=st.integers(0, 1000),
        )

    return st.sampled_from(sorted(FUNCTIONS)).flatmap(of)


def contributions(case: Case, size: int) -> list[Any]:
    """Return what each rank contributes: many zeros, and in two dimensions."""
    random = np.random.default_rng(case.seed)
    counted = case.collective == "reduce_scatterv"
    rows = sum(case.counts[:size]) if counted else case.rows * (size if case.collective == "reduce_scatter" else 1)
    high = 1 << 32 if case.dtype == "uint32" else 4
    whole = random.integers(0, high, (size, rows, 2)) * random.integers(0, 2, (size, rows, 2))
    return list(whole.astype(case.dtype))


def in_pairs(fn: Callable[[Any, Any], Any], xs: Sequence[Any]) -> Any:
    level = list(xs)
    while len(level) > 1:
        level = [combined(fn, *level[first : first + 2]) for first in range(0, len(level), 2)]
    return level[0]


def combined(fn: Callable[[Any, Any], Any], a: Any, *b: Any) -> Any:
    return np.asarray(fn(a.reshape(-1), b[0].reshape(-1))).reshape(a.shape).copy() if b and a.size else a


def expected(case: Case, xs: Sequence[Any], rank: int) -> Any:
    """Return what a rank gets; None for nothing."""
    fn, size = FUNCTIONS[case.function][0], len(xs)
    if case.collective in PREFIXES:
        before = xs[: rank + 1] if case.collective == "scan" else xs[:rank]
        return reduce(partial(combined, fn), before) if before else np.zeros_like(xs[0])
    total = in_pairs(fn, xs)
    if case.collective == "reduce":
        return total if rank == case.root % size else None
    if case.collective == "allreduce":
        return total
    counts = case.counts[:size] if case.collective == "reduce_scatterv" else (case.rows,) * size
    return total[sum(counts[:rank]) : sum(counts[: rank + 1])]


def made(world: Any, case: Case, x: Any) -> Any:
    """Return the result of a call that is made in the way of the case; `x` may be overwritten."""
    fn, commutative, _ = FUNCTIONS[case.function]
    op = un.Op.from_function(fn, commutative)
    arguments: dict[str, Any] = {"op": op, "reproducible": case.reproducible}
    own = slice(case.rows * world.rank, case.rows * (world.rank + 1))
    if case.collective == "reduce":
        arguments["root"] = case.root % world.size
    if case.collective == "reduce_scatterv":
        arguments["counts"] = counts = case.counts[: world.size]
        own = slice(sum(counts[: world.rank]), sum(counts[: world.rank + 1]))
    call = partial(getattr(world, case.collective), **arguments)
    like = x[own] if case.collective.startswith("reduce_scatter") else x
    if case.way in ("new", "later"):
        return call(x) if case.way == "new" else call(x, wait=False).wait()
    if case.way in ("out", "in place"):
        out = np.zeros_like(like) if case.way == "out" else like
        return call(x, out=out)
    if case.way.startswith("plan"):
        plan = world.plan(case.collective, x, **arguments)
        plan()
        return plan() if case.way == "plan" else plan(wait=False).wait()
    if case.way == "list":
        return call([x, x[:0], x.copy()])
    with world.group():
        works = [call(x), world.allreduce(np.ones(3)), call(x.copy())]
    assert works[1].result().tolist() == [world.size] * 3
    return [works[0].result(), works[2].result()]


def check(world: Any, case: Case) -> None:
    if case.is_whole is not None:
        draft = draft_whole if case.is_whole else draft_shared
        world._reducer._cheapest = lambda kind: draft(kind, world.size, world.rank)
    xs = contributions(case, world.size)
    wanted = expected(case, xs, world.rank)
    before = xs[world.rank].copy()
    result = made(world, case, xs[world.rank])
    if wanted is None:
        assert result is None or result == [None, None]
        return
    if case.way in ("list", "group"):
        assert case.way == "group" or result.pop(1).size == 0
        assert result[0].tobytes() == result[1].tobytes()
        result = result[0]
    if case.collective == "exscan" and world.rank == 0 and case.way == "in place":
        wanted = before
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape
    np.testing.assert_array_equal(result, wanted)
    if case.way != "in place":
        np.testing.assert_array_equal(xs[world.rank], before)


def check_fresh(world: Any, case: Case) -> None:
    """Check a case on a communicator that has not chosen how to carry out such calls."""
    with world.dup() as fresh:
        check(fresh, case)
        world.barrier()  # nobody may leave before the others have opened the channels that they do not use


COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "reduce_scatterv", "scan", "exscan")
JOBS = [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm"), (5, "shm")]
GENERATE = [Phase.explicit, Phase.generate]


@pytest.fixture(scope="module", params=JOBS, ids=lambda param: f"{param[0]} ranks, {param[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[NativeRanks]:
    with NativeRanks(*request.param) as started:
        yield started


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=25, deadline=None, derandomize=True, phases=GENERATE)
@given(data=st.data())
def test_a_reduction_by_a_function_gives_what_a_loop_over_ranks_gives(
    ranks: NativeRanks, collective: str, data: Any
) -> None:
    ranks.run_calls(check_fresh, data.draw(cases(collective)))


def locally(executor: Any, fn: Callable[..., Any], *args: Any) -> Any:
    with Communicator(executor, Place((tuple(range(executor.size)),), "local"), Options()) as world:
        return fn(world, *args)


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=15, deadline=None, derandomize=True, phases=GENERATE)
@given(size=st.integers(1, 7), data=st.data())
def test_the_generic_executor_gives_the_same(collective: str, size: int, data: Any) -> None:
    counts = st.tuples(*[st.sampled_from([0, 1, 2, 5])] * 7)
    case = data.draw(cases(collective))
    object.__setattr__(case, "counts", data.draw(counts))
    LocalRanks(size, 8).run(locally, check, case)
