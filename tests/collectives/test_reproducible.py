"""Reductions with promised bits: reproducible ones, and those that round each element once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any, TypeAlias

import ml_dtypes  # it also registers the dtypes bfloat16 and float8 with numpy
import numpy as np
import pytest
from support.float_modes import MODES, mode
from support.ranks import LocalRanks, Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.algorithms.catalogue.algorithm import Order
from unisono.algorithms.catalogue.registry import find
from unisono.collectives.calls.planning import HostLayout, algorithm_request
from unisono.dtypes import DTYPES
from unisono.tuning.decide.choice import Question, choose

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
REDUCTIONS = ("allreduce", "reduce", "reduce_scatter")
CANONICAL = {"reproducible": True}
ONCE = {"accumulate": "float32"}
# The values of each dtype lie between this power of ten and its inverse.
DIGITS = {"float16": 3, "bfloat16": 6, "float32": 6, "float64": 12, "float8_e4m3fn": 2, "float8_e5m2": 3}


def values_of(rank: int, count: int, dtype: str) -> Any:
    """Return numbers of all magnitudes and both signs. At every second position, two neighbouring ranks nearly cancel.

    So each order of combination gives other bits. A longer array begins with the elements of a shorter one.
    """
    draw, shared = (np.random.default_rng(seed) for seed in (rank, 1000 + rank // 2))
    numbers, common = (
        (10.0 ** drawn.uniform(-DIGITS[dtype], DIGITS[dtype], count)) * drawn.choice([-1.0, 1.0], count)
        for drawn in (draw, shared)
    )
    cancelled = common if rank % 2 else -common
    return np.where(np.arange(count) % 2, numbers, cancelled + numbers * 1e-3).astype(dtype)


def combined(op: str, one: Any, other: Any, dtype: str) -> Any:
    """Return a combination of two arrays without rounding. Narrower dtypes than float32 are computed in float32."""
    wide = "float32" if dtype in NARROW else dtype
    combine = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum}[op]
    with np.errstate(all="ignore"):
        return combine(one.astype(wide), other.astype(wide))


def divided(op: str, total: Any, size: int) -> Any:
    return total / total.dtype.type(size) if op == "avg" else total


def by_tree(xs: Sequence[Any], op: str) -> Any:
    """Return the reduction by the balanced tree.

    Each combination is rounded, and for an average the last one is divided first.
    """
    dtype, level = xs[0].dtype.name, list(xs)
    while len(level) > 1:
        pairs = [combined(op, *level[first : first + 2], dtype) for first in range(0, len(level) - 1, 2)]
        pairs = [divided(op, pair, len(xs)) if len(level) == 2 else pair for pair in pairs]
        level = [pair.astype(dtype) for pair in pairs] + level[len(level) & ~1 :]
    return level[0]


def at_once(xs: Sequence[Any], op: str) -> Any:
    """Return the reduction in the order of ranks, rounded once."""
    total = xs[0].astype("float32")
    for x in xs[1:]:
        total = combined(op, total, x.astype("float32"), "float32")
    with np.errstate(over="ignore"):
        return divided(op, total, len(xs)).astype(xs[0].dtype)


# Rows per rank, an operation, and the ways of making the call.
Case: TypeAlias = tuple[int, str, Sequence[str]]
FEW: list[Case] = [(1, "sum", ["new"]), (40, "avg", ["in place"])]
ALL_WAYS = ["new", "new", "later", "plan", "in place"]
MANY: list[Case] = [(1, "sum", ALL_WAYS), (7, "avg", ALL_WAYS), (3001, "sum", ["new", "in place"])]


def made(world: un.Communicator, collective: str, x: Any, op: str, way: str, given: dict[str, Any]) -> Any:
    """Make a call in one of the ways; return its result."""
    call: Callable[..., Any] = getattr(world, collective)
    rows = len(x) // world.size
    copy = x.copy()
    own = copy[rows * world.rank : rows * (world.rank + 1)]
    return {
        "new": lambda: call(x, op, **given),
        "later": lambda: call(x, op, wait=False, **given).wait(timeout_s=100.0),
        "plan": world.plan(collective, copy, op=op, **given),
        "in place": lambda: call(copy, op, out=own if collective == "reduce_scatter" else copy, **given),
    }[way]()


def results(world: un.Communicator, cases: Sequence[Case], dtypes: Sequence[str], given: dict[str, Any]) -> list[Any]:
    """Return the bytes of the results of all reductions."""
    return [
        None if result is None else result.tobytes()
        for dtype, collective, (rows, op, ways) in product(dtypes, REDUCTIONS, cases)
        for way in ways
        for result in [made(world, collective, values_of(world.rank, rows * world.size, dtype), op, way, given)]
    ]


@cache
def reduced(model: Callable[..., Any], size: int, count: int, dtype: str, op: str) -> Any:
    return model([values_of(rank, count, dtype) for rank in range(size)], op)


def references(
    size: int, rank: int, cases: Sequence[Case], dtypes: Sequence[str], model: Callable[..., Any]
) -> list[bytes | None]:
    """Return the expected value of `results` on a rank."""
    actual: list[bytes | None] = []
    for dtype, collective, (rows, op, ways) in product(dtypes, REDUCTIONS, cases):
        total = reduced(model, size, rows * size, dtype, op)
        part = total[rows * rank : rows * (rank + 1)] if collective == "reduce_scatter" else total
        actual += [None if collective == "reduce" and rank else part.tobytes()] * len(ways)
    return actual


def check(
    run: Callable[..., list[Any]], size: int, cases: Sequence[Case], dtypes: Sequence[str], given: dict[str, Any]
) -> None:
    """Check the bits of all reductions, of short and of long arrays."""
    model = at_once if "accumulate" in given else by_tree
    for rank, result in enumerate(run(results, cases, dtypes, given)):
        assert result == references(size, rank, cases, dtypes, model), f"rank {rank} of {size}"


def local(size: int, **options: Any) -> Callable[..., list[Any]]:
    """Return a function that runs another one on communicators over the generic executor."""

    def call(executor: Any, fn: Callable[..., Any], *args: Any) -> Any:
        place = HostLayout((tuple(range(size)),), "local")
        return fn(un.Communicator(executor, place, un.Options(**options)), *args)

    return lambda fn, *args: LocalRanks(size, deadline_s=100.0).run(call, fn, *args)


# The verifier proves the order of the plans for every size up to 32. This test runs the plans of some sizes.
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 8, 13])
def test_reproducible_result_equals_the_balanced_tree(size: int) -> None:
    check(local(size), size, FEW, ["float16", "bfloat16", "float32"], CANONICAL)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 12])
def test_reduction_accumulated_in_float32_is_rounded_once(size: int) -> None:
    check(local(size), size, FEW, NARROW, ONCE)


def test_segments_do_not_change_reproducible_bits() -> None:
    few: list[Case] = [*MANY[:-1], (301, "sum", ["new"])]
    check(local(5, segment_nbytes=64), 5, few, ["float16", "float32"], CANONICAL)
    check(local(5, segment_nbytes=64), 5, few, ["bfloat16"], ONCE)


@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), (2, "shm"), (2, "tcp"), (3, "tcp"), (9, "shm")])
def test_native_ranks_give_reproducible_bits_over_every_transport(size: int, transport: str) -> None:
    with start_ranks(size, transport) as ranks:
        check(ranks.run_calls, size, MANY, ["float16", "bfloat16", "float32", "float64"], CANONICAL)
        check(ranks.run_calls, size, MANY, NARROW, ONCE)


def test_tree_and_sequential_orders_give_different_bits() -> None:
    """The orders must give different bits, because the tests above could not tell them apart otherwise."""
    xs = [values_of(rank, 100, "float16") for rank in range(5)]
    orders = [by_tree(xs, "sum"), at_once(xs, "sum"), by_tree(xs[::-1], "sum"), at_once(xs[::-1], "sum")]
    assert len({order.tobytes() for order in orders}) == 4


three = ranks_fixture((3, "shm"), (3, "tcp"))


def scanned(world: un.Communicator, count: int) -> tuple[list[float], list[float]]:
    x = values_of(world.rank, count, "float32")
    return world.scan(x, reproducible=True).tolist(), world.exscan(x, reproducible=True).tolist()


def test_reproducible_scan_combines_from_rank_to_rank(three: Ranks) -> None:
    for count in (5, 40_000):
        xs = [values_of(rank, count, "float32") for rank in range(3)]
        before = [np.zeros(count, "float32"), xs[0], xs[0] + xs[1]]
        for rank, result in enumerate(three.run_calls(scanned, count)):
            assert result == ((before[rank] + xs[rank]).tolist() if rank else xs[0].tolist(), before[rank].tolist())


def scanned_once(world: un.Communicator) -> list[bytes]:
    """Return the results of scans that round once, made in every way. Rank 0 of an exscan leaves its `out` as it is."""
    actual = []
    for dtype, count, op in product(NARROW, (0, 1, 1001), ("sum", "prod")):
        x = values_of(world.rank, count, dtype)
        for collective in ("scan", "exscan"):
            actual += [made(world, collective, x, op, way, ONCE) for way in ("new", "new", "later", "in place")]
            out = x.copy()
            plan = world.plan(collective, x, op=op, out=out, **ONCE)
            actual += [plan().copy(), plan().copy()]
        with world.group():
            works = [world.scan(array, op, wait=False, **ONCE) for array in (x, x[:1])]
        actual += [work.wait() for work in works]
        actual += world.exscan([x, x[:1]], op, **ONCE)
    return [array.tobytes() for array in actual]


def prefixes_once(size: int, rank: int) -> list[bytes]:
    """Return the expected value of `scanned_once` on a rank."""
    actual: list[Any] = []
    for dtype, count, op in product(NARROW, (0, 1, 1001), ("sum", "prod")):
        xs = [values_of(peer, count, dtype) for peer in range(size)]
        upto = at_once(xs[: rank + 1], op)
        before = at_once(xs[:rank], op) if rank else np.zeros_like(xs[0])
        kept = before if rank else xs[0]
        actual += [upto] * 6 + [before] * 3 + [kept] * 3
        actual += [upto, upto[:1], before, before[:1]]
    return [array.tobytes() for array in actual]


@pytest.mark.parametrize(("size", "transport"), [(1, "shm"), (2, "tcp"), (5, "shm")])
def test_scan_accumulated_in_float32_rounds_each_prefix_once(size: int, transport: str) -> None:
    with start_ranks(size, transport) as ranks:
        assert ranks.run_calls(scanned_once) == [prefixes_once(size, rank) for rank in range(size)]


@pytest.mark.parametrize("size", [3, 5])
def test_generic_executor_scan_in_float32_rounds_each_prefix_once(size: int) -> None:
    for options in ({}, {"segment_nbytes": 64}):
        assert local(size, **options)(scanned_once) == [prefixes_once(size, rank) for rank in range(size)]


def counted(world: un.Communicator, counts: Sequence[int]) -> tuple[bytes, bytes]:
    x = values_of(world.rank, sum(counts), "bfloat16")
    return (
        world.reduce_scatterv(x, counts, reproducible=True).tobytes(),
        world.reduce_scatterv(x, counts, accumulate="float32").tobytes(),
    )


def test_reproducible_reduce_scatterv_has_the_bits_of_the_model(three: Ranks) -> None:
    counts = (4000, 0, 3)
    xs = [values_of(rank, sum(counts), "bfloat16") for rank in range(3)]
    ends = np.cumsum(counts)[:-1]
    of_model = [np.split(model(xs, "sum"), ends) for model in (by_tree, at_once)]
    actual = three.run_calls(counted, counts)
    assert actual == [(of_model[0][rank].tobytes(), of_model[1][rank].tobytes()) for rank in range(3)]


# --- in every floating-point mode of a rank's thread ----------------------------------------------------------------


def added(a: Any, b: Any) -> Any:
    with np.errstate(over="ignore"):
        return a + b


def grouped(world: un.Communicator, x: Any) -> Any:
    with world.group():
        works = [world.allreduce(x), world.allreduce(x, "prod")]
    return np.concatenate([work.result() for work in works])


# The second call runs from the call cache, without Python.
CALLS: dict[str, Callable[[un.Communicator, Any], Any]] = {
    "sum": lambda world, x: world.allreduce(x),
    "sum again": lambda world, x: world.allreduce(x),
    "avg": lambda world, x: world.allreduce(x, "avg"),
    "prod": lambda world, x: world.allreduce(x, "prod"),
    "max": lambda world, x: world.allreduce(x, "max"),
    "later": lambda world, x: world.allreduce(x, wait=False).wait(timeout_s=100.0),
    "plan": lambda world, x: world.plan("allreduce", x)(),
    "group": grouped,
    "list": lambda world, x: world.allreduce([x, x[:3]])[1],
    "reproducible": lambda world, x: world.allreduce(x, reproducible=True),
    "accumulated": lambda world, x: world.allreduce(x, accumulate=DTYPES[x.dtype.name].accumulate),
    "reduce": lambda world, x: world.reduce(x, root=1),
    "reduce_scatter": lambda world, x: world.reduce_scatter(x),
    "scan": lambda world, x: world.scan(x),
    "function": lambda world, x: world.allreduce(x, un.Op.from_function(added)),
    "factor": lambda world, x: world.allreduce(x, un.Op.premul_sum(1.1)),
    "local": lambda world, x: un.reduce_local(x.copy(), x, x),
}


def in_mode(world: un.Communicator, name: str, repeats: Sequence[int]) -> dict[tuple[str, str, int], bytes]:
    """Make all calls on subnormal, rounded and large numbers, with rank 0 in a floating-point mode.

    Return the results.
    """
    numbers = []
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        limits = ml_dtypes.finfo(dtype) if dtype == "bfloat16" else np.finfo(dtype)
        few = np.array([limits.smallest_subnormal, 1 + limits.eps, limits.max], limits.dtype)
        numbers += [np.tile(few * few.dtype.type(1 - world.rank / 8), count).astype(dtype) for count in repeats]
    with mode(name if world.rank == 0 else "default"):
        result = {(what, x.dtype.name, x.size): call(world, x) for x in numbers for what, call in CALLS.items()}
    return {key: b"" if array is None else array.tobytes() for key, array in result.items()}


@pytest.mark.parametrize(("size", "transport"), [(3, "generic"), (3, "shm"), (2, "tcp")])
def test_floating_point_mode_of_the_program_does_not_change_bits(size: int, transport: str) -> None:
    with start_ranks(size, transport) if transport != "generic" else nullcontext() as ranks:
        run = local(size) if ranks is None else ranks.run_calls
        repeats = (4,) if ranks is None else (4, 8000)  # the longer arrays are processed in several pieces
        usual = run(in_mode, "default", repeats)
        for name in MODES:
            for got, expected in zip(run(in_mode, name, repeats), usual, strict=True):
                assert [key for key in usual[0] if got[key] != expected[key]] == [], name


# --- costs ---------------------------------------------------------------------------------------------------------


def sent_nbytes(world: un.Communicator, given: dict[str, Any]) -> int:
    x = values_of(world.rank, 300_000, "float16")
    before = sum(peer.sent_nbytes for peer in world.stats().values())
    world.allreduce(x, **given)
    return sum(peer.sent_nbytes for peer in world.stats().values()) - before


@pytest.mark.parametrize("given", [CANONICAL, ONCE], ids=str)
def test_reproducible_allreduce_sends_the_minimum(three: Ranks, given: dict[str, Any]) -> None:
    assert three.run_calls(sent_nbytes, given) == [2 * 2 * 2 * 100_000] * 3


@pytest.mark.parametrize("order", ["canonical", "at_once"])
@pytest.mark.parametrize("collective", REDUCTIONS)
def test_tuner_has_an_algorithm_for_every_requested_order(collective: str, order: Order) -> None:
    hosts = (tuple(range(32)), tuple(range(32, 64)))
    for nbytes, size, commutative, varying in product((0, 64, 1 << 30), (1, 2, 3, 64), (True, False), (True, False)):
        question = Question(
            collective,
            nbytes,
            size,
            "tcp",
            commutative,
            varying=varying and collective == "reduce_scatter",
            order=order,
        )
        for asked in (question, replace(question, hosts=hosts if size == 64 else ())):
            chosen = find(collective, choose(asked).algorithm)
            assert chosen.order == order
            if order == "canonical":
                assert chosen.cost_of(size, {}).sent <= 2 * (size - 1) / size


def explained(world: un.Communicator) -> list[str]:
    asked = [
        world.explain("allreduce", 1 << 20, dtype, **given)
        for dtype, given in [
            ("float32", CANONICAL),
            ("int32", CANONICAL),
            ("int32", {}),
            ("bfloat16", ONCE),
            ("float32", ONCE),
            ("float32", {}),
        ]
    ]
    return [explanation.choice.algorithm for explanation in asked]


def test_reproducible_integers_use_the_default_algorithm(three: Ranks) -> None:
    canonical, integers, default_integers, once, wide, default = three.run_calls(explained)[0]
    assert (canonical, once) == ("balanced_tree", "all_pairs")
    assert integers == default_integers
    assert wide == default


def calls_from_the_cache(world: un.Communicator) -> bool:
    """Make calls that take the dispatcher's path. Then block that path, and make the same calls from the cache."""
    x = np.ones(100, "float16")
    kinds: list[dict[str, Any]] = [CANONICAL, ONCE, {**CANONICAL, **ONCE}, {}]
    first = [world.allreduce(x, **given) for given in kinds]
    world._dispatch = None  # type: ignore[assignment, method-assign]
    second = [world.allreduce(x, **given) for given in kinds]
    del world._dispatch
    return all(one.tobytes() == other.tobytes() for one, other in zip(first, second, strict=True))


def test_call_cache_knows_reproducible_and_accumulate_arguments(three: Ranks) -> None:
    assert three.run_calls(calls_from_the_cache) == [True] * 3
    assert algorithm_request("ring", True, None) is algorithm_request("ring", True, None)


# --- refusals ------------------------------------------------------------------------------------------------------

X = np.ones(6, "float16")

WRONG: dict[str, tuple[Callable[[un.Communicator], Any], str]] = {
    "another accumulator": (
        lambda world: world.allreduce(X, accumulate="float64"),
        "UsageError: accumulate='float64' is not possible for float16: pass 'float32'",
    ),
    "no dtype": (
        lambda world: world.allreduce(X, accumulate="float"),
        "UsageError: accumulate must be None or one of bool",
    ),
    "no name": (
        lambda world: world.reduce(X, accumulate=np.float32),
        "UsageError: accumulate must be None or one of bool",
    ),
    "no truth": (lambda world: world.allreduce(X, reproducible="no"), "UsageError: reproducible must be True or False"),
    "no algorithm": (
        lambda world: world.allreduce(X, algorithm=[], reproducible=True),
        "UsageError: algorithm and accumulate must be names",
    ),
    "an algorithm of another order": (
        lambda world: world.allreduce(X, algorithm="ring", reproducible=True),
        "ring does not combine by the balanced tree",
    ),
    "an algorithm that rounds again": (
        lambda world: world.reduce(X, algorithm="binomial", accumulate="float32"),
        "binomial does not combine all contributions at once",
    ),
    "a scan that rounds after each rank": (
        lambda world: world.scan(X, algorithm="linear", accumulate="float32"),
        "linear does not combine all contributions at once",
    ),
    "an average of some": (
        lambda world: world.exscan(X, "avg", accumulate="float32"),
        "UsageError: op 'avg' is not defined for exscan",
    ),
    "a plan of what does not reduce": (
        lambda world: world.plan("broadcast", X, reproducible=True),
        "UsageError: broadcast combines nothing, so it has no op",
    ),
}


def refused(world: un.Communicator, what: str) -> tuple[str, float]:
    text = ""
    try:
        WRONG[what][0](world)
    except un.UnisonoError as error:
        text = f"{type(error).__name__}: {error}"
    return text, float(world.allreduce(X, reproducible=True)[0])


@pytest.mark.parametrize("what", WRONG)
def test_wrong_reproducible_call_is_refused_and_later_calls_work(three: Ranks, what: str) -> None:
    for error, after in three.run_calls(refused, what):
        assert WRONG[what][1] in error
        assert after == 3.0


def disagreeing(world: un.Communicator, dtype: str, given: dict[str, Any]) -> str:
    try:
        world.allreduce(np.ones(100, dtype), **(given if world.rank == 1 else {}))
        world.barrier()  # the next call of a rank that had ended its call before raises the error
    except un.MismatchError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("dtype", "given", "shown"),
    [
        ("float32", CANONICAL, "allreduce(float32[100], op=sum, reproducible)"),
        ("int64", CANONICAL, "allreduce(int64[100], op=sum, reproducible)"),
        ("float16", ONCE, "allreduce(float16[100], op=sum, accumulate=float32)"),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ranks_with_different_reproducible_arguments_mismatch(
    transport: str, dtype: str, given: dict[str, Any], shown: str
) -> None:
    with start_ranks(2, transport) as ranks:
        for message in ranks.run_calls(disagreeing, dtype, given):
            assert shown in message
