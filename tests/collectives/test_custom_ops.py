"""Reductions by Python functions: results, refusals, and functions that fail."""

from __future__ import annotations

import array
import asyncio
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.ranks import Job, LocalRanks, Ranks, ranks_fixture

import unisono as un
from unisono.collectives.custom_ops.exchanges import PREFIXES, WHOLE, draft_shared, draft_whole
from unisono.dtypes import DTYPES

Say = Callable[[Any], None]
PRIME = 65521


def affine(a: Any, b: Any) -> Any:
    """Return the composition of two affine maps x → m·x + c modulo a prime, packed as (m, c): first `a`, then `b`."""
    (m, c), (n, d) = ((packed.astype(np.uint64) >> 16, packed.astype(np.uint64) & 0xFFFF) for packed in (a, b))
    return ((m * n % PRIME) << 16 | (c * n + d) % PRIME).astype(np.uint32)


def first_nonzero(a: Any, b: Any) -> Any:
    return np.where(a != 0, a, b)


def right(a: Any, b: Any) -> Any:
    """Return the argument itself, whose memory the library overwrites afterwards."""
    return b


def as_list(a: Any, b: Any) -> Any:
    """Return a list, from which numpy makes an array of float64."""
    return [float(x + y) for x, y in zip(a, b, strict=True)]


SAME = np.empty(1 << 16, np.int64)


def in_the_same_array(a: Any, b: Any) -> Any:
    """Return a result in the same memory at each call."""
    return np.add(a, b, out=SAME[: a.size])


# For each function: the function, whether it is commutative, and its dtypes.
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
class CustomOpCall:
    """A call and the way of making it.

    `is_whole` says whether each rank combines all elements or a share; None leaves it open.
    """

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


def cases(collective: str) -> st.SearchStrategy[CustomOpCall]:
    def of(function: str) -> st.SearchStrategy[CustomOpCall]:
        is_vector = collective in WHOLE
        return st.builds(
            CustomOpCall,
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


def contributions(case: CustomOpCall, size: int) -> list[Any]:
    """Return the contributions of all ranks, with two dimensions and many zeros."""
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


def expected(case: CustomOpCall, xs: Sequence[Any], rank: int) -> Any:
    """Return the expected result of a rank; None if it has no result."""
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


def made(world: Any, case: CustomOpCall, x: Any) -> Any:
    """Make a call in the way of the case; return its result. The call may overwrite `x`."""
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


def check(world: Any, case: CustomOpCall) -> None:
    if case.is_whole is not None:
        draft = draft_whole if case.is_whole else draft_shared
        world._checker.reducer._cheapest = lambda kind: draft(kind, world.size, world.rank)
    xs = contributions(case, world.size)
    reference = expected(case, xs, world.rank)
    before = xs[world.rank].copy()
    result = made(world, case, xs[world.rank])
    if reference is None:
        assert result is None or result == [None, None]
        return
    if case.way in ("list", "group"):
        assert case.way == "group" or result.pop(1).size == 0
        assert result[0].tobytes() == result[1].tobytes()
        result = result[0]
    if case.collective == "exscan" and world.rank == 0 and case.way == "in place":
        reference = before
    assert result.dtype == reference.dtype
    assert result.shape == reference.shape
    np.testing.assert_array_equal(result, reference)
    if case.way != "in place":
        np.testing.assert_array_equal(xs[world.rank], before)


def check_fresh(world: Any, case: CustomOpCall) -> None:
    """Check a case on a new communicator, which has not yet chosen the way of carrying out such calls."""
    with world.dup() as fresh:
        check(fresh, case)
        world.barrier()  # a rank must not depart before the others have opened their channels to it


def check_several(world: Any, several: Sequence[Any]) -> None:
    for case in several:
        check_fresh(world, case)


COLLECTIVES = ("allreduce", "reduce", "reduce_scatter", "reduce_scatterv", "scan", "exscan")
JOBS = [(1, "shm"), (2, "shm"), (3, "tcp"), (4, "shm"), (5, "shm")]
GENERATE = [Phase.explicit, Phase.generate]


ranks = ranks_fixture(*JOBS)


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=4, deadline=None, derandomize=True, phases=GENERATE)
@given(data=st.data())
def test_custom_op_gives_the_result_of_a_loop_over_ranks(ranks: Ranks, collective: str, data: Any) -> None:
    ranks.run_calls(check_several, data.draw(st.lists(cases(collective), min_size=4, max_size=4)))


@pytest.mark.parametrize("collective", COLLECTIVES)
@settings(max_examples=10, deadline=None, derandomize=True, phases=GENERATE)
@given(size=st.integers(1, 7), data=st.data())
def test_generic_executor_gives_the_same_custom_reductions(collective: str, size: int, data: Any) -> None:
    counts = st.tuples(*[st.sampled_from([0, 1, 2, 5])] * 7)
    case = data.draw(cases(collective))
    object.__setattr__(case, "counts", data.draw(counts))
    LocalRanks(size, 8).run_calls(check, case)


# --- beside other calls ---------------------------------------------------------------------------------------------

# Every rank combines all elements if there are few. Of many elements, each rank combines a share.
SIZES = (3, 300_000)


def keep_order(world: Any, count: int) -> None:
    op = un.Op.from_function(np.add)
    xs = [np.full(count, world.rank + step, np.int64) for step in range(8)]
    works = []
    for x in xs:
        works += [world.allreduce(x, op, wait=False), world.allreduce(x, wait=False), world.scan(x, op, wait=False)]
        assert (world.allreduce(x, op) == world.allreduce(x)).all()
    for x, (total, other, prefix) in zip(xs, zip(*[iter(works)] * 3, strict=True), strict=True):
        assert (total.wait() == other.wait()).all()
        assert (prefix.wait() == world.scan(x)).all()


@pytest.mark.parametrize("count", SIZES)
def test_custom_ops_mix_blocking_and_nonblocking_calls(ranks: Ranks, count: int) -> None:
    ranks.run_calls(keep_order, count)


@pytest.mark.parametrize("count", SIZES)
def test_generic_executor_mixes_blocking_and_nonblocking_custom_ops(count: int) -> None:
    LocalRanks(3, 8).run_calls(keep_order, count)


def use_works(world: Any) -> list[Any]:
    op = un.Op.from_function(np.add)
    results: queue.Queue[float] = queue.Queue()
    work = world.allreduce(np.ones(300_000), op, wait=False)
    work.add_done_callback(lambda ended: results.put(float(ended.result()[0])))

    async def waiting() -> float:
        return float((await world.allreduce(np.ones(2), op, wait=False))[0])

    return [results.get(timeout=DEADLINE_S), asyncio.run(waiting()), un.wait_any([work]), un.wait_all([work])[0].size]


def test_works_of_custom_ops_call_back_and_can_be_awaited(ranks: Ranks) -> None:
    assert ranks.run_calls(use_works) == [[ranks.size, ranks.size, 0, 300_000]] * ranks.size


def in_two_threads(world: Any) -> None:
    op = un.Op.from_function(np.add)
    pair = [world.dup(), world.dup()]
    errors: list[BaseException] = []

    def call(comm: Any) -> None:
        try:
            for step in range(30):
                assert comm.allreduce(np.full(5, step), op).tolist() == [step * comm.size] * 5
        except BaseException as error:  # noqa: BLE001  (it is raised again by the first thread)
            errors.append(error)

    threads = [threading.Thread(target=call, args=(comm,)) for comm in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)
    world.barrier()
    for comm in pair:
        comm.close()


def test_custom_ops_run_in_two_threads_on_separate_communicators(ranks: Ranks) -> None:
    ranks.run_calls(in_two_threads)


def elsewhere(world: Any) -> None:
    """Reduce buffers, scalars and strided arrays, and reduce on a communicator with the ranks in reverse order."""
    op = un.Op.from_function(first_nonzero, commutative=False)
    buffer = array.array("q", [0, world.rank + 1])
    assert world.allreduce(buffer, op).tolist() == [0, 1]
    assert world.allreduce((buffer, memoryview(buffer)), op)[1].tolist() == [0, 1]
    assert world.allreduce(buffer, op, wait=False).wait().tolist() == [0, 1]
    assert int(world.scan(np.array(world.rank), op)) == min(world.rank, 1)
    wide = np.zeros((3, 6), np.float16)
    wide[:, ::2] = world.rank + 1
    out = np.zeros((3, 3), np.float16, order="F")
    assert world.allreduce(wide[:, ::2].T, op).tolist() == [[1.0] * 3] * 3
    assert (world.allreduce(np.asfortranarray(wide[:, ::2]), op, out=out) == 1).all()
    backwards = world.split(0, key=-world.rank)
    assert backwards.allreduce(buffer, op).tolist() == [0, world.size]
    world.barrier()
    backwards.close()


def test_custom_ops_accept_buffers_strided_arrays_and_subcommunicators(ranks: Ranks) -> None:
    ranks.run_calls(elsewhere)


def by_options(world: Any) -> list[int]:
    return [int(world.allreduce(np.full(count, world.rank), OP)[0]) for count in SIZES]


def test_algorithm_option_does_not_apply_to_custom_ops() -> None:
    assert un.launch(by_options, 3, options=un.Options(algorithm="bruck")) == [[3, 3]] * 3


def counted(world: Any) -> tuple[int, int]:
    """Return the bytes that a rank sends for many elements, and how often the function is called for an empty array."""
    calls = []

    def fn(a: Any, b: Any) -> Any:
        calls.append(a.size)
        return a

    before = sum(traffic.sent_nbytes for traffic in world.stats().values())
    world.allreduce(np.ones(1 << 17), un.Op.from_function(fn))
    sent = sum(traffic.sent_nbytes for traffic in world.stats().values()) - before
    calls.clear()
    world.allreduce(np.ones((0, 3)), un.Op.from_function(fn))
    return sent, len(calls)


def test_custom_op_sends_at_most_twice_the_array(ranks: Ranks) -> None:
    share = (1 << 20) // ranks.size
    for sent, calls in ranks.run_calls(counted):
        assert sent <= 2 * (ranks.size - 1) * share + 100 * ranks.size
        assert sent >= (ranks.size - 1) * share
        assert calls == 0


# --- refusals -------------------------------------------------------------------------------------------------------

OP = un.Op.from_function(np.add)
X = np.ones(4)
REFUSED: dict[str, tuple[type[un.UnisonoError], Callable[[Any], Any]]] = {
    "from_function needs a function": (un.UsageError, lambda world: un.Op.from_function("add")),  # type: ignore[arg-type]
    "commutative must be": (un.UsageError, lambda world: un.Op.from_function(np.add, 1)),  # type: ignore[arg-type]
    "accumulate is not for op add": (un.UsageError, lambda world: world.allreduce(X, OP, accumulate="float32")),
    "by 'ring' combines partial results on the way": (
        un.NoAlgorithmError,
        lambda world: world.allreduce(X, OP, algorithm="ring"),
    ),
    "has no algorithm": (un.UsageError, lambda world: world.explain("allreduce", 8, op=OP)),
    "out has dtype float32": (un.UsageError, lambda world: world.scan(X, OP, out=np.ones(4, np.float32))),
    "x has 3 rows": (un.UsageError, lambda world: world.reduce_scatter(X[:3], OP)),
    "x is not contiguous": (un.UsageError, lambda world: world.plan("allreduce", X[::2], op=OP)),
    "timeout_s must be": (un.UsageError, lambda world: world.allreduce(X, OP, timeout_s=-1.0)),
    "root must be": (un.UsageError, lambda world: world.reduce(X, OP, root=2)),
    "overlap": (un.UsageError, lambda world: world.allreduce(X[:3], OP, out=X[1:])),
}


def refused(world: Any) -> list[tuple[str, str]]:
    errors = []
    for _, call in REFUSED.values():
        try:
            call(world)
        except un.UnisonoError as error:
            errors.append((type(error).__name__, str(error)))
    world.allreduce(X, OP)
    return errors


def test_wrong_custom_reductions_are_refused() -> None:
    for errors in un.launch(refused, 2):
        for (kind, text), (reference, (error, _)) in zip(errors, REFUSED.items(), strict=True):
            assert kind == error.__name__
            assert reference in text


def test_reduce_local_applies_custom_op_from_left_to_right() -> None:
    dst = np.array([[1, 0], [0, 0]], order="F")
    op = un.Op.from_function(first_nonzero, commutative=False)
    assert un.reduce_local(dst, np.array([[2, 3], [0, 0]]), np.array([[4, 4], [4, 0]]), op=op) is dst
    assert dst.tolist() == [[1, 3], [4, 0]]
    wrong = un.Op.from_function(lambda a, b: a if b[0] else None)
    with pytest.raises(
        un.UsageError, match=r"<lambda>\(\) must return int64\[4\], like its arguments; it returned None"
    ):
        un.reduce_local(dst, np.ones_like(dst), np.zeros_like(dst), op=wrong)
    with pytest.raises(ZeroDivisionError):
        un.reduce_local(dst, dst, op=un.Op.from_function(lambda a, b: 1 / 0))
    assert dst.tolist() == [[1, 3], [4, 0]]


def test_custom_op_has_the_name_of_its_function() -> None:
    assert un.Op.from_function(affine).name == "affine()"
    assert un.Op.from_function(affine, commutative=False).name == "affine() in rank order"
    assert un.Op.from_function(partial(np.hypot)).name == "hypot()"
    assert un.Op.from_function(REFUSED.__contains__).name == "dict.__contains__()"  # type: ignore[arg-type]


# --- failures -------------------------------------------------------------------------------------------------------


def error_with_cause(call: Callable[[], Any]) -> tuple[str, str, str]:
    """Return the class, the text and the cause of the error that a call raises."""
    try:
        call()
    except (un.UnisonoError, KeyboardInterrupt) as error:
        return type(error).__name__, str(error), repr(error.__cause__)
    return "", "", ""


def raise_on_one_rank(world: Any, count: int, way: str) -> list[tuple[str, str, str]]:
    def fn(a: Any, b: Any) -> Any:
        if world.rank == 1:
            raise ValueError("no such thing")
        return a

    fn.__qualname__ = "fn"
    op = un.Op.from_function(fn)

    def call() -> None:
        x = np.ones(count)
        if way == "now":
            world.allreduce(x, op, timeout_s=DEADLINE_S)
        elif way == "later":
            world.allreduce(x, op, wait=False, timeout_s=DEADLINE_S).wait()
        else:
            world.plan("allreduce", x, op=op, timeout_s=DEADLINE_S)()
        world.barrier(timeout_s=DEADLINE_S)  # the next call of a rank that had ended its call before raises the error

    return [
        error_with_cause(call),
        error_with_cause(world.barrier),
        error_with_cause(lambda: world.allreduce(np.ones(count), op)),
    ]


@pytest.mark.parametrize("way", ["now", "later", "plan"])
@pytest.mark.parametrize("count", SIZES)
def test_exception_in_custom_op_on_one_rank_is_an_error_on_all_ranks(count: int, way: str) -> None:
    text = "fn() raised ValueError: no such thing"
    for rank, (first, *later) in enumerate(un.launch(raise_on_one_rank, 3, count, way)):
        assert first[0] == "AbortedError"
        assert text in first[1]
        assert "rank 1" in first[1]
        assert first[2] == ("ValueError('no such thing')" if rank == 1 else "None")
        assert [kind for kind, _, _ in later] == ["AbortedError"] * 2


def test_exception_in_custom_op_aborts_all_ranks_on_generic_executor() -> None:
    for kind, text, _ in LocalRanks(3, 8).run_calls(lambda world: raise_on_one_rank(world, 30, "now")[0]):
        assert kind == "AbortedError"
        assert "raised ValueError: no such thing" in text


WRONG: dict[str, Callable[[Any, Any], Any]] = {
    "it returned None": lambda a, b: None,
    "it returned float64[2]": lambda a, b: a[:2] * 1.0,
    "it returned int64[3,1]": lambda a, b: a[:, np.newaxis],
    "it returned int32[3]": lambda a, b: a.astype(np.int32),
    "it returned something of type int, which is int64[]": lambda a, b: 3,
    "it returned something of type list, which is float64[3]": lambda a, b: [0.5] * a.size,
    "it returned something of type list, which is no array": lambda a, b: [[1, 2], 3],
    "assignment destination is read-only": np.copyto,
}


def return_wrong(world: Any, text: str) -> tuple[str, str, str]:
    fn = WRONG.get(text, lambda a, b: world.allreduce(a, OP))
    return error_with_cause(lambda: world.allreduce(np.ones(3, np.int64), un.Op.from_function(fn)))


@pytest.mark.parametrize("text", [*WRONG, "made a call on the communicator"])
def test_error_says_what_a_custom_op_wrongly_returned_or_did(text: str) -> None:
    for kind, message, _ in LocalRanks(2, 8).run_calls(return_wrong, text):
        assert kind in ("AbortedError", "UsageError")
        assert text in message


MISMATCHES: dict[str, tuple[Any, Any]] = {
    "another function": (un.Op.from_function(np.add), un.Op.from_function(np.maximum)),
    "another order": (un.Op.from_function(np.add), un.Op.from_function(np.add, commutative=False)),
    "no function": (un.Op.from_function(np.add), "sum"),
}


def disagree(world: Any, which: str, count: int) -> tuple[str, str, str]:
    return error_with_cause(
        lambda: world.allreduce(np.ones(count), MISMATCHES[which][world.rank], timeout_s=DEADLINE_S)
    )


@pytest.mark.parametrize(("which", "count"), [("another function", 3), ("another order", 300_000), ("no function", 3)])
def test_ranks_with_different_custom_ops_get_a_mismatch_error(which: str, count: int) -> None:
    for kind, text, _ in un.launch(disagree, 2, which, count):
        assert kind == "MismatchError"
        assert "op=add()" in text


def be_interrupted(world: un.Communicator, say: Say, wait: bool) -> None:
    """Rank 1 is in an endless function, or waits for a call with one, and is interrupted there."""

    def fn(a: Any, b: Any) -> Any:
        if world.rank == 1:
            say("in the function")
            while True:
                time.sleep(0.1)
        return a

    def call() -> None:
        op = un.Op.from_function(fn)
        made = world.allreduce(np.ones(300_000), op) if wait else world.allreduce(np.ones(300_000), op, wait=False)
        if isinstance(made, un.Work):
            made.wait()

    say([error_with_cause(call), error_with_cause(world.barrier)])


@pytest.mark.parametrize("wait", [True, False])
def test_interrupt_in_a_custom_op_ends_the_call_on_all_ranks(wait: bool, tmp_path: Path) -> None:
    with Job(be_interrupted, 3, tmp_path, wait) as job:
        assert job.hear(1) == "in the function"
        time.sleep(0.3)
        job.signal(1, signal.SIGINT)
        for rank in range(3):
            first, second = job.hear(rank)
            assert first[0] == ("KeyboardInterrupt" if rank == 1 else "AbortedError")
            assert rank == 1 or "rank 1 aborted: interrupted" in first[1]
            assert second[0] == "AbortedError"
        if not wait:
            job.signal(1, signal.SIGKILL)  # its thread is still in the function


def be_late(world: Any, way: str) -> tuple[str, str, str]:
    def fn(a: Any, b: Any) -> Any:
        if world.rank == 1:
            time.sleep(1.5)
        return a

    op = un.Op.from_function(fn)

    def call() -> None:
        if way == "call":
            world.allreduce(np.ones(300_000), op, timeout_s=0.3)
        else:
            world.allreduce(np.ones(300_000), op, wait=False).wait(timeout_s=0.3)

    return error_with_cause(call)


@pytest.mark.parametrize("way", ["call", "work"])
def test_slow_custom_op_times_out_on_all_ranks(way: str) -> None:
    kinds = [kind for kind, _, _ in un.launch(be_late, 2, way)]
    assert "CollectiveTimeoutError" in kinds
    assert set(kinds) <= {"CollectiveTimeoutError", "AbortedError"}
