"""Groups of calls, and lists of arrays: the results of single calls, in few messages.

An error sends no message at all.
"""

from __future__ import annotations

import array
import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names bfloat16 and float8)
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.array_kinds import StandardArray
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.algorithms.ir.contracts import CONTRACTS

Run = Callable[..., list[Any]]
JOBS = [(1, "shm"), (2, "shm"), (2, "tcp"), (3, "tcp"), (4, "shm")]
KINDS = [("float32", "sum"), ("int8", "max"), ("float64", "avg"), ("bfloat16", "prod"), ("uint16", "bor")]


some = ranks_fixture(*JOBS, (3, "generic, buffered"))


@pytest.fixture(scope="module")
def run(some: Ranks) -> Run:
    return some.run_calls


def same(results: list[Any], expected: list[Any]) -> None:
    for result, other in zip(results, expected, strict=True):
        if other is None:
            assert result is None
        else:
            assert result.dtype == other.dtype
            np.testing.assert_array_equal(result, other)


def arrays_of(rank: int) -> list[Any]:
    return [np.full((2, index), rank % 2 + 1).astype(dtype) for index, (dtype, _) in enumerate(KINDS)]


# --- results -------------------------------------------------------------------------------------------------------


def every_call(world: Any) -> list[Any]:
    """Make calls of every kind. Each returns its result or, in a group, its work."""
    x = np.arange(2.0 * world.size) + world.rank
    counts = [1] * world.size
    made = [world.allreduce(array, op) for array, (_, op) in zip(arrays_of(world.rank), KINDS, strict=True)]
    made += [world.broadcast(x, root=world.size - 1), world.reduce(x, root=0), world.allgather(x)]
    made += [world.reduce_scatter(x), world.alltoall(x), world.scan(x), world.exscan(x), world.gather(x, root=0)]
    made += [world.allgatherv(x[:1], counts), world.scatter(x, out=np.zeros(2)), world.allreduce(x, wait=False)]
    made += [world.broadcast(np.int16([world.rank]), root=world.size - 1), world.reduce(x[::2], "max", 0)]
    made += [world.allreduce(x, un.Op.premul_sum(world.rank + 1)), world.barrier()]
    return made


def in_group_and_alone(world: Any) -> None:
    expected = [result.wait() if isinstance(result, un.Work) else result for result in every_call(world)]
    for _ in range(3):  # the second time, the call is in the cache
        with world.group():
            works = every_call(world)
        same([work.result() for work in works], expected)


def test_group_equals_its_single_calls(run: Run) -> None:
    run(in_group_and_alone)


PROMISES: list[dict[str, Any]] = [{"reproducible": True}, {"accumulate": "float32"}]


def noise(rank: int, dtype: str, count: int) -> Any:
    return np.random.default_rng(rank).normal(scale=100, size=count).astype(dtype)


def promised_bits(world: Any, given: dict[str, Any]) -> None:
    dtypes = ["bfloat16", "float16"] if "accumulate" in given else ["float32", "int32", "bfloat16", "float64"]
    x = [noise(world.rank, dtype, 5 * index + 7) for index, dtype in enumerate(dtypes)]
    for call in (world.allreduce, partial(world.reduce, root=world.size - 1)):
        expected = [call(array, **given) for array in x]
        for _ in range(2):
            same(list(call(x, **given) or [None] * len(x)), expected)
            with world.group():
                works = [call(array, **given) for array in x]
                plain = world.allreduce(x[0])
            same([work.result() for work in works], expected)
            same([plain.result()], [world.allreduce(x[0])])


@pytest.mark.parametrize("given", PROMISES, ids=str)
def test_grouped_reduction_gives_the_promised_bits_of_single_calls(run: Run, given: dict[str, Any]) -> None:
    run(promised_bits, given)


def lists_and_alone(world: Any, collective: str, kind: type, wait: bool) -> None:
    x = kind(arrays_of(world.rank))
    call = getattr(world, collective)
    expected = [call(array) for array in x]
    makers = {
        "new": lambda _: None,
        "out": lambda x: kind(np.zeros_like(array) for array in x),
        "in place": lambda x: x,
    }
    for where, make_out in makers.items():
        for _ in range(2):
            x = kind(arrays_of(world.rank))
            out = make_out(x)
            # rank 0 of an exscan leaves its `out` as it is
            if (collective, where, world.rank) == ("exscan", "in place", 0):
                expected = arrays_of(0)
            results = call(x, out=out) if wait else call(x, out=out, wait=False).wait()
            if expected[0] is None:
                assert results is None
            else:
                assert type(results) is kind
                same(list(results), expected)
                assert out is None or all(one is other for one, other in zip(results, out, strict=True))


@pytest.mark.parametrize("collective", ["allreduce", "reduce", "broadcast", "scan", "exscan"])
def test_list_equals_calls_on_its_arrays(run: Run, collective: str) -> None:
    for kind, wait in product([list, tuple], [True, False]):
        run(lists_and_alone, collective, kind, wait)


SHARED = ["allgather", "reduce_scatter", "alltoall", "gather", "scatter"]


def share_lists(world: Any, collective: str, where: str) -> tuple[list[Any], list[Any] | None]:
    """Return arrays of different shapes and dtypes with rows for all ranks, and an `out` for each on request."""
    size, rank = world.size, world.rank
    rows = {"allgather": 2, "gather": 2}.get(collective, 2 * size)
    x = [
        (np.arange(rows * index).reshape(rows, index) + 10 * rank).astype(dtype)
        for index, (dtype, _) in enumerate(KINDS)
    ]
    grows = rows == 2
    shapes = [(2 * size, *array.shape[1:]) if grows else (rows // size, *array.shape[1:]) for array in x]
    if collective == "alltoall":
        shapes = [array.shape for array in x]
    out = [np.zeros(shape, array.dtype) for shape, array in zip(shapes, x, strict=True)]
    if where == "in place" and grows:
        for array, to in zip(x, out, strict=True):
            to[2 * rank : 2 * rank + 2] = array
        return [to[2 * rank : 2 * rank + 2] for to in out], out
    if where == "in place":
        return x, [array[2 * rank : 2 * rank + 2] for array in x]
    needs_out = where == "out" or collective == "scatter"
    return x, out if needs_out else None


def share_lists_and_alone(world: Any, collective: str, where: str) -> None:
    call = getattr(world, collective)
    if collective == "reduce_scatter":
        call = partial(call, op="sum")
    # The second call finds the prepared call in the cache.
    for kind, wait in [(list, True), (tuple, True), (list, False), (list, True)]:
        x, out = share_lists(world, collective, where)
        outs = [None] * len(x) if out is None else out
        expected = [call(array, out=to) for array, to in zip(x, outs, strict=True)]
        expected = [value if value is None else value.copy() for value in expected]
        x, out = share_lists(world, collective, where)
        given_x, given_out = kind(x), out and kind(out)
        result = call(given_x, out=given_out) if wait else call(given_x, out=given_out, wait=False).wait()
        if expected[0] is None:
            assert result is None
        else:
            assert type(result) is kind
            same(list(result), expected)


@pytest.mark.parametrize(
    ("collective", "where"),
    [
        (collective, where)
        for collective in SHARED
        for where in ("new", "out", "in place")
        if (collective, where) != ("alltoall", "in place")
    ],
)
def test_list_of_shares_equals_calls_on_its_arrays(run: Run, collective: str, where: str) -> None:
    run(share_lists_and_alone, collective, where)


def lists_by_every_algorithm(world: Any, collective: str) -> list[str]:
    call, names = getattr(world, collective), []
    for name in ALGORITHMS[collective]:
        x, out = share_lists(world, collective, "new")
        outs = [None] * len(x) if out is None else out
        try:
            expected = [call(array, out=to, algorithm=name) for array, to in zip(x, outs, strict=True)]
        except un.NoAlgorithmError:
            continue
        result = call(x, out=share_lists(world, collective, "new")[1], algorithm=name)
        same(result or [None] * len(x), expected)
        names.append(name)
    return names


@pytest.mark.parametrize("collective", SHARED)
def test_lists_of_shares_work_with_every_algorithm(run: Run, collective: str) -> None:
    for names in run(lists_by_every_algorithm, collective):
        assert names


def lists_in_group(world: Any) -> None:
    with world.group():
        several = world.allreduce([np.ones(2), np.full(3, 2.0)])
        one = world.allreduce(np.full(1, world.rank), "max")
        nothing = world.allreduce([])
        at_root = world.reduce([np.ones(1)], root=0)
    assert [array.tolist() for array in several.result()] == [[world.size] * 2, [2.0 * world.size] * 3]
    assert one.result().tolist() == [world.size - 1]
    assert nothing.result() == []
    assert (at_root.result() is None) == (world.rank > 0)


def test_group_may_mix_lists_and_arrays(run: Run) -> None:
    run(lists_in_group)


def equal_roots(world: Any) -> None:
    """Pass equal roots as different objects. Calls with equal roots are fused."""
    roots = [0, np.int64(0)] if world.rank else [np.int64(0), 0]
    with world.group():
        works = [world.broadcast(np.full(2, world.rank + index), root=roots[index % 2]) for index in range(10)]
    assert [work.result().tolist() for work in works] == [[index] * 2 for index in range(10)]


def test_group_treats_equal_roots_of_different_types_alike(run: Run) -> None:
    run(equal_roots)


def kept_arrays(world: Any) -> None:
    for _ in range(2):  # the second time, the call is in the cache
        x = np.ones(3)
        kept = weakref.ref(x)
        with world.group():
            work = world.allreduce(x)
        del x
        assert kept() is None
        assert work.result().tolist() == [world.size] * 3


def test_work_of_a_group_does_not_keep_its_input_alive() -> None:
    with start_ranks(2, "shm") as ranks:
        ranks.run_calls(kept_arrays)


def empty_lists(world: Any) -> None:
    assert world.allreduce([]) == []
    assert world.broadcast((), wait=False).wait() == ()
    with world.group():
        pass


def test_call_on_an_empty_list_does_nothing(run: Run) -> None:
    run(empty_lists)


def plan_of_list(world: Any) -> None:
    x, out = [np.ones(3), np.ones(2, "int32")], [np.zeros(3), np.zeros(2, "int32")]
    total = world.plan("allreduce", x, out=out)
    scaled = world.plan("allreduce", x, op=un.Op.premul_sum(2))
    for times in (1, 2, 3):
        x[0][...], x[1][...] = times, times
        assert [array.tolist() for array in total()] == [[times * world.size] * 3, [times * world.size] * 2]
        assert scaled(wait=False).wait()[1].tolist() == [2 * times * world.size] * 2
    assert out[1].tolist() == [3 * world.size] * 2


def test_persistent_call_accepts_a_list(run: Run) -> None:
    run(plan_of_list)


def group_of_messages(world: Any) -> float:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    x, out = np.full(100_000, float(world.rank)), np.zeros(100_000)
    with world.group():
        world.send(x, after)
        total = world.allreduce(np.ones(1))
        received = world.recv(out, before)
    assert received.result() is out
    assert total.result()[0] == world.size
    return float(out[-1])


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_messages_of_a_group_do_not_wait_for_each_other(transport: str) -> None:
    with start_ranks(3, transport) as ranks:
        assert ranks.run_calls(group_of_messages) == [2.0, 0.0, 1.0]


def groups_in_groups(world: Any) -> None:
    with world.group():
        first = world.allreduce(np.ones(1))
        with world.group():
            second = world.allreduce(np.ones(1))
        with pytest.raises(un.UsageError, match="with-block"):
            second.wait()
    assert first.result()[0] == second.result()[0] == world.size


def test_nested_group_ends_with_the_outer_group(run: Run) -> None:
    run(groups_in_groups)


def arrays_of_others(world: Any) -> None:
    x = [StandardArray(np.ones(3)), array.array("q", [1, 2]), np.ones(2, "float32")]
    out = [memoryview(bytearray(16)).cast("q"), np.zeros(2, "float32")]
    with world.group():
        works = [world.allreduce(values, un.Op.premul_sum(2)) for values in x]
    for results in ([work.result() for work in works], world.allreduce(x, un.Op.premul_sum(2))):
        assert [type(result) for result in results] == [StandardArray, np.ndarray, np.ndarray]
        assert results[0].values.tolist() == [2.0 * world.size] * 3
        assert results[1].tolist() == [2 * world.size, 4 * world.size]
    assert world.allreduce(x[1:], out=out)[0].tolist() == [world.size, 2 * world.size]


def test_grouped_results_have_the_array_type_of_their_inputs(run: Run) -> None:
    run(arrays_of_others)


def torch_tensors(world: Any) -> None:
    torch = pytest.importorskip("torch")
    x = [torch.ones(3), torch.ones(2, dtype=torch.bfloat16)]
    with world.group():
        works = [world.allreduce(array, un.Op.premul_sum(2)) for array in x]
    for results in ([work.result() for work in works], world.allreduce(x, un.Op.premul_sum(2))):
        assert [result.tolist() for result in results] == [[2.0 * world.size] * 3, [2.0 * world.size] * 2]
        assert [type(result) for result in results] == [torch.Tensor] * 2


def test_grouped_torch_tensors_come_back_as_tensors(run: Run) -> None:
    pytest.importorskip("torch")
    run(torch_tensors)


# --- messages ------------------------------------------------------------------------------------------------------


def messages_of(world: Any, call: Callable[[], Any]) -> int:
    def sent() -> int:
        return sum(traffic.sent_messages for traffic in world.stats().values())

    before = sent()
    call()
    return sent() - before


def group_of_hundred(world: Any, x: list[Any]) -> None:
    with world.group():
        for index, array in enumerate(x):
            world.allreduce(array, ("sum", "max", "avg")[index % 3])


def messages_of_hundred(world: Any) -> tuple[int, int, int]:
    x = [np.ones(16, ("float32", "float64", "int16")[index % 2]) for index in range(100)]
    one = messages_of(world, lambda: world.allreduce(x[0]))
    return one, messages_of(world, partial(group_of_hundred, world, x)), messages_of(world, lambda: world.allreduce(x))


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (4, "shm"), (2, "tcp"), (3, "tcp")])
def test_hundred_fused_calls_send_no_more_messages_than_two_calls(size: int, transport: str) -> None:
    with start_ranks(size, transport) as ranks:
        for one, group, as_list in ranks.run_calls(messages_of_hundred):
            assert 0 < group <= 2 * one
            assert 0 < as_list <= 2 * one


def shares_of_hundred(world: Any, collective: str) -> tuple[int, int, int]:
    x = [np.ones(4 * world.size, ("float32", "float64", "int16")[index % 3]) for index in range(100)]
    out = [np.ones(4, array.dtype) for array in x] if collective == "scatter" else None
    call = getattr(world, collective)

    def group() -> None:
        with world.group():
            for array, to in zip(x, out or [None] * len(x), strict=True):
                call(array, out=to)

    one = messages_of(world, lambda: call(x[0], out=out and out[0]))
    return one, messages_of(world, group), messages_of(world, lambda: call(x, out=out))


@pytest.mark.parametrize(("size", "transport"), [(2, "shm"), (4, "shm"), (3, "tcp")])
def test_hundred_fused_share_calls_send_no_more_messages_than_two(size: int, transport: str) -> None:
    with start_ranks(size, transport) as ranks:
        for collective in SHARED:
            messages = ranks.run_calls(shares_of_hundred, collective)
            assert sum(one for one, _, _ in messages) > 0, collective
            for one, group, as_list in messages:
                assert group <= 2 * one, collective
                assert as_list <= 2 * one, collective


# --- random groups -------------------------------------------------------------------------------------------------

CALLS = st.fixed_dictionaries(
    {
        "collective": st.sampled_from([name for name in CONTRACTS if name != "barrier"]),
        "dtype": st.sampled_from(["int32", "uint8", "int64"]),  # sums of these dtypes are never rounded
        "op": st.sampled_from(["sum", "max", "prod"]),
        "root": st.integers(0, 2),
        "shape": st.lists(st.integers(0, 3), max_size=2).map(tuple),
        "has_out": st.booleans(),
    }
)


def make(world: Any, call: dict[str, Any], seed: int) -> Any:
    """Make a call; return its result or, in a group, its work."""
    contract = CONTRACTS[call["collective"]]
    root = call["root"] % world.size
    shape = (2 * world.size, *call["shape"])
    x = np.random.default_rng([seed, world.rank]).integers(0, 3, shape).astype(call["dtype"])
    arguments: dict[str, Any] = {"op": call["op"]} if contract.reduces else {}
    if contract.input_at_root or contract.output_at_root:
        arguments["root"] = root
    if call["has_out"] or call["collective"] == "scatter":
        rows = {"scatter": 2, "reduce_scatter": 2, "gather": 2 * world.size**2, "allgather": 2 * world.size**2}
        out_shape = (rows.get(call["collective"], 2 * world.size), *call["shape"])
        arguments["out"] = np.zeros(out_shape, call["dtype"])
    return getattr(world, call["collective"])(x, **arguments)


def adapter_of(world: Any, call: dict[str, Any]) -> tuple[str, int | None]:
    contract = CONTRACTS[call["collective"]]
    has_root = contract.input_at_root or contract.output_at_root
    return call["collective"], call["root"] % world.size if has_root else None


def any_group(world: Any, calls: list[dict[str, Any]]) -> None:
    expected = [make(world, call, seed) for seed, call in enumerate(calls)]
    kinds = {adapter_of(world, call) for call in calls}
    works: list[Any] = []

    def group() -> None:
        with world.group():
            works[:] = [make(world, call, seed) for seed, call in enumerate(calls)]

    for _ in range(2):  # the second time, the call is in the cache
        messages = messages_of(world, group)
        same([work.result() for work in works], expected)
        # Each algorithm for so small calls sends a rank two messages and two flags at most.
        assert messages <= 4 * len(kinds) * (world.size - 1)


ranks = ranks_fixture((2, "shm"), (3, "shm"), (3, "tcp"))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(calls=st.lists(CALLS, min_size=1, max_size=12))
def test_random_group_equals_its_single_calls(ranks: Ranks, calls: list[dict[str, Any]]) -> None:
    ranks.run_calls(any_group, calls)


# --- errors --------------------------------------------------------------------------------------------------------

MEMORY = np.zeros(8)
WRONG: dict[str, Callable[[Any], Any]] = {
    "an error of the program": lambda world: 1 / 0,
    "an operation that is not defined": lambda world: world.allreduce(np.ones(1, bool), "sum"),
    "an out of another shape": lambda world: world.allreduce(np.ones(2), out=np.ones(3)),
    "an out in another array": lambda world: [
        world.allreduce(MEMORY[0:4], out=MEMORY[4:8]),
        world.allreduce(MEMORY[2:6]),
    ],
    "outs of unequal number": lambda world: world.allreduce([np.ones(2)], out=[]),
    "a list with counts": lambda world: world.allgatherv([np.ones(2)], [2] * world.size),
    "a list of which one cannot be shared": lambda world: world.reduce_scatter(
        [np.ones(world.size), np.ones((world.size + 1, 0) if world.size > 1 else ())]
    ),
    "an out in the rest of an array in place": lambda world: [
        world.reduce_scatter(MEMORY[: world.size], out=MEMORY[world.rank : world.rank + 1]),
        world.reduce_scatter(np.ones(world.size), out=MEMORY[(world.rank + 1) % world.size :][:1]),
    ],
    "a time limit that is none": lambda world: world.allreduce(np.ones(1), timeout_s=-1),
    "a root that does not exist": lambda world: world.broadcast(np.ones(2), root=7),
    "an algorithm that does not exist": lambda world: world.allreduce(np.ones(2), algorithm="none"),
    "an algorithm that is no name": lambda world: world.allreduce(np.ones(2), algorithm=[]),
    "a factor out of range": lambda world: world.allreduce(np.ones(2, "int8"), un.Op.premul_sum(1000)),
    "an accumulator of another dtype": lambda world: world.allreduce(
        [np.ones(2, "bfloat16"), np.ones(2)], accumulate="float32"
    ),
    "bits that no algorithm has together": lambda world: world.allreduce(
        [np.ones(2, "bfloat16"), np.ones(2, "float32")], reproducible=True, accumulate="float32"
    ),
    "an object": lambda world: world.broadcast_object("x"),
    "an object to a rank": lambda world: world.send_object("x", (world.rank + 1) % world.size),
    "a split": lambda world: world.split(0),
    "a sendrecv": lambda world: world.sendrecv(np.ones(2), 0, np.zeros(2), 0),
    "a message to nobody": lambda world: world.send(np.ones(2), 9),
    "an end that is awaited": lambda world: world.allreduce(np.ones(2)).wait(),
    "a work of which something is asked": lambda world: un.wait_any([world.allreduce(np.ones(2))]),
}


def err_in_group(world: Any, what: str) -> tuple[int, list[str], float]:
    works: list[Any] = []
    before = dict(world.stats())
    with pytest.raises((un.UnisonoError, ZeroDivisionError)), world.group():  # noqa: PT012
        works += [world.allgather(np.ones(2)), world.allreduce(np.ones(2))]
        WRONG[what](world)
    added = sum(traffic.sent_messages for traffic in world.stats().values())
    added -= sum(traffic.sent_messages for traffic in before.values())
    errors = []
    for work in works:
        with pytest.raises(un.UnisonoError) as error:
            work.result()
        errors.append(type(error.value).__name__)
    return added, errors, float(world.allreduce(np.ones(1))[0])


@pytest.mark.parametrize("what", WRONG)
def test_group_with_a_wrong_call_sends_nothing(run: Run, what: str) -> None:
    results = run(err_in_group, what)
    for sent, errors, later in results:
        assert sent == 0
        assert set(errors) <= {"UsageError", "NoAlgorithmError"}
        assert later == len(results)


def disagree(world: Any) -> str:
    x = [np.ones(2), np.ones(3, "float32" if world.rank else "int32")]
    try:
        with world.group():
            works = [world.allreduce(array) for array in x]
    except un.UnisonoError as error:
        assert [work.done() for work in works] == [True, True]
        with pytest.raises(type(error)):
            works[1].wait()
        return f"{type(error).__name__}: {error.message}"
    return ""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_mismatch_error_shows_the_array_of_a_group_that_differs(transport: str) -> None:
    with start_ranks(2, transport) as ranks:
        for text in ranks.run_calls(disagree):
            assert text.startswith("MismatchError")
            assert "float64[2]" in text
            assert "int32[3]" in text


# --- works ---------------------------------------------------------------------------------------------------------


def callbacks_and_await(world: Any) -> tuple[list[float], float]:
    seen: list[float] = []

    async def ask(work: Any) -> float:
        return float((await work)[0])

    with world.group():
        work = world.allreduce(np.ones(1))
        work.add_done_callback(lambda ended: seen.append(float(ended.result()[0])))
        world.allreduce(np.ones(1))
        assert not seen
    work.add_done_callback(lambda ended: seen.append(-1.0))
    return seen, asyncio.run(ask(work))


def test_works_of_a_group_call_back_and_can_be_awaited(run: Run) -> None:
    results = run(callbacks_and_await)
    assert results == [([float(len(results)), -1.0], float(len(results)))] * len(results)


def closed_in_group(world: Any) -> str:
    with pytest.raises(un.UsageError) as error, world.group():  # noqa: PT012
        work = world.allreduce(np.ones(1))
        world.close()
    with pytest.raises(un.UsageError):
        work.wait()
    return error.value.message


def test_communicator_closed_inside_a_group_runs_none_of_its_calls() -> None:
    assert all("closed" in text for text in un.launch(closed_in_group, 2))
