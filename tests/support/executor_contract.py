"""The contract of executors, as checks over a harness of `ranks`.

A harness has `size` and ``run(fn, *args) -> list of results by rank``. `run` calls ``fn(executor, *args)`` on each
rank, closes each executor when its rank has finished, and has a deadline. Ranks may be threads or processes. So the
functions that run on ranks are module-level, and their arguments and results can be pickled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from support import handmade_plans
from support.deadlines import DEADLINE_S, await_marks, eventually, leave_mark
from support.harness import call_of, make_call

from unisono.algorithms.ir.plan import Counts, Send
from unisono.dtypes import DTYPES
from unisono.errors import AbortedError, MismatchError, PeerLostError, PlanError, UnisonoError
from unisono.testing import oracles
from unisono.testing.differences import difference
from unisono.testing.memory import Guarded
from unisono.testing.oracles import reduced
from unisono.transports.contracts.transport import Traffic

# The time limit of calls that cannot end. All ranks but the missing one must have made the call by then, because an
# error also names ranks that are late.
SHORT_S = 1.0
# For checks that do not depend on the algorithm.
FEW_ALLREDUCES = ["direct", "ring", "recursive_doubling", "double_binary_tree", "hierarchical"]

FLOATS = [name for name, dtype in DTYPES.items() if dtype.kind == "float"]
ARITHMETIC = ("sum", "prod", "min", "max", "avg")


@dataclass(frozen=True)
class Case:
    """One collective call. `offset` is the number of elements before each array in its allocation."""

    collective: str = "allreduce"
    algorithm: str = "direct"
    dtype: str | None = "float32"
    op: str | None = "sum"
    count: int = 8
    root: int | None = None
    segments: int = 1
    in_place: bool = False
    offset: int = 0

    def call(self, rank: int, size: int) -> Any:
        facts = {name: getattr(self, name) for name in ("dtype", "count", "op", "root", "segments")}
        return make_call(self.collective, self.algorithm, size, rank, **facts)


# Calls that differ from `Case()` in one property.
DIVERGENT = {
    "dtype": Case(dtype="int32"),
    "op": Case(op="max"),
    "count": Case(count=9),
    "nothing to send": Case(count=0),
    "collective": Case("broadcast", "binomial", op=None, root=0),
}


# --- inputs and expected results -----------------------------------------------------------------------------------


def contributions(case: Case, size: int) -> Any:
    """Return an array (size, count) whose reductions are exact in the dtype, in any order."""
    return oracles.contributions(case.dtype, case.op, size, case.count)


def assert_same_bits(result: Any, expected: Any, what: str = "") -> None:
    assert not (wrong := difference(result, expected)), f"{what}: {wrong}"


# --- functions that run on ranks -----------------------------------------------------------------------------------


def run_case(executor: Any, case: Case, stack: Any) -> Any:
    """Run `case` on row `rank` of `stack`; return the output."""
    mine = stack[executor.rank]
    source = Guarded.of(mine, case.offset * mine.itemsize)
    target = source if case.in_place else Guarded.of(np.zeros_like(mine), case.offset * mine.itemsize)
    executor.start(case.call(executor.rank, executor.size), source.array, target.array).wait(DEADLINE_S)
    assert target.is_intact(), "elements outside the array were written"
    if not case.in_place:
        assert_same_bits(source.array, mine, "INPUT was written")
    return target.array.copy()


def outcome(run: Any) -> tuple[str, str, str | None]:
    """Return (class, text, state of the buffers) of the error that `run` raises; the class is "" if there is none."""
    try:
        run()
    except UnisonoError as error:
        return type(error).__name__, str(error), error.buffers
    return "", "", None


def attempt(executor: Any, case: Case, timeout_s: float = DEADLINE_S) -> tuple[str, str, str | None]:
    """Run `case` on ones; return its outcome."""
    source = np.ones(case.count, case.dtype)

    def run() -> None:
        executor.start(case.call(executor.rank, executor.size), source, np.zeros_like(source)).wait(timeout_s)

    return outcome(run)


# --- results -------------------------------------------------------------------------------------------------------


def check_allreduce(ranks: Any, case: Case) -> None:
    stack = contributions(case, ranks.size)
    for rank, result in enumerate(ranks.run(run_case, case, stack)):
        assert_same_bits(result, reduced(case.op, stack), f"rank {rank} of {ranks.size}, {case}")


def check_broadcast(ranks: Any, case: Case) -> None:
    nbytes = case.count * DTYPES[case.dtype].itemsize
    generator = np.random.default_rng(case.count)
    # The byte of a boolean is 0 or 1.
    raw = generator.integers(0, 2 if case.dtype == "bool" else 256, (ranks.size, nbytes), dtype=np.uint8)
    stack = raw.view(case.dtype) if nbytes else np.zeros((ranks.size, 0), case.dtype)
    for rank, result in enumerate(ranks.run(run_broadcast, case, stack)):
        assert_same_bits(result, stack[case.root], f"rank {rank} of {ranks.size}, {case}")


def run_broadcast(executor: Any, case: Case, stack: Any) -> Any:
    values = stack[executor.rank]
    guarded = Guarded.of(values, case.offset * values.itemsize)
    target = guarded.array
    source = target if case.in_place else values.copy()
    is_root = executor.rank == case.root
    operation = executor.start(case.call(executor.rank, executor.size), source if is_root else None, target)
    operation.wait(DEADLINE_S)
    assert guarded.is_intact(), "elements outside the array were written"
    return target.copy()


def check_narrow_floats_are_rounded_once(ranks: Any, dtype: str, op: str) -> None:
    case = Case(dtype=dtype, op=op, count=257)
    stack = np.random.default_rng(5).standard_normal((ranks.size, case.count)).astype(dtype)
    wide = stack[0].astype(np.float32)
    for row in stack[1:]:
        wide = wide + row.astype(np.float32)
    expected = (wide / np.float32(ranks.size) if op == "avg" else wide).astype(dtype)
    for result in ranks.run(run_case, case, stack):
        assert_same_bits(result, expected, f"{dtype} {op}")


def check_all_ranks_get_the_same_bits(ranks: Any, algorithm: str, dtype: str, segments: int) -> None:
    case = Case(algorithm=algorithm, dtype=dtype, count=101, segments=segments)
    stack = np.random.default_rng(6).standard_normal((ranks.size, case.count)).astype(dtype)
    results = ranks.run(run_case, case, stack)
    for result in results[1:]:
        assert_same_bits(result, results[0], algorithm)
    exact = stack.astype(np.float64).sum(axis=0)
    tolerance = ranks.size * float(ml_dtypes.finfo(dtype).eps) * np.abs(stack.astype(np.float64)).sum(axis=0)
    assert (np.abs(results[0].astype(np.float64) - exact) <= tolerance).all()


def check_nan_and_infinity_are_propagated(ranks: Any, algorithm: str, dtype: str) -> None:
    for op in ARITHMETIC:
        stack = np.ones((ranks.size, 6), dtype)
        stack[0, 0], stack[-1, 1], stack[-1, 2] = np.nan, np.nan, np.inf
        results = ranks.run(run_case, Case(algorithm=algorithm, dtype=dtype, op=op, count=6), stack)
        for result in results:
            wide = result.astype(np.float64)
            assert np.isnan(wide[:2]).all(), op
            assert wide[2] == (1.0 if op == "min" and ranks.size > 1 else np.inf), op
            assert wide[3:].tolist() == [ranks.size if op == "sum" else 1.0] * 3, op


def check_barrier(ranks: Any) -> None:
    spans = ranks.run(run_barrier)
    assert max(begin for begin, _ in spans) <= min(end for _, end in spans)


def run_barrier(executor: Any) -> tuple[float, float]:
    """Return the times at which this rank began and ended its barrier, by a clock that all processes share."""
    time.sleep(0.02 if executor.rank == executor.size - 1 else 0.0)
    begin = time.monotonic()
    case = Case("barrier", "dissemination", None, None, 0)
    executor.start(case.call(executor.rank, executor.size), None, None).wait(DEADLINE_S)
    return begin, time.monotonic()


def check_many_calls_in_a_row(ranks: Any, calls: int = 30) -> None:
    expected = [[float(call) for call in range(calls)]] * ranks.size
    assert ranks.run(run_many_broadcasts, calls) == expected


def run_many_broadcasts(executor: Any, calls: int) -> list[float]:
    """Broadcast from each rank in turn. Only their sequence numbers tell the messages of two calls apart."""
    values = [np.full(5, float(call if executor.rank == call % executor.size else -1)) for call in range(calls)]
    for call, value in enumerate(values):
        case = Case("broadcast", "binomial", "float64", None, 5, root=call % executor.size)
        executor.start(case.call(executor.rank, executor.size), value, value).wait(DEADLINE_S)
    return [float(value[-1]) for value in values]


def check_calls_may_be_awaited_in_any_order(ranks: Any) -> None:
    for first, second in ranks.run(run_two_allreduces):
        assert (first, second) == (ranks.size * 1.0, ranks.size * 2.0)


def run_two_allreduces(executor: Any) -> tuple[float, float]:
    arrays = [np.full(1000, 1.0, np.float32), np.full(1000, 2.0, np.float32)]
    case = Case(algorithm="ring", count=1000)
    call = case.call(executor.rank, executor.size)
    operations = [executor.start(call, array, array) for array in arrays]
    for operation in operations if executor.rank % 2 else reversed(operations):
        operation.wait(DEADLINE_S)
    return float(arrays[0][-1]), float(arrays[1][0])


def check_traffic_is_what_the_plan_says(ranks: Any, case: Case) -> None:
    stack = contributions(case, ranks.size)
    counted = ranks.run(run_and_count, case, stack)
    for rank, traffic in enumerate(counted):
        messages, nbytes = planned_traffic(case, rank, ranks.size)
        assert sum(peer.sent_messages for peer in traffic.values()) == messages
        assert sum(peer.sent_nbytes for peer in traffic.values()) == nbytes
        for other, peer in traffic.items():
            mirror = counted[other][rank]
            assert (peer.sent_messages, peer.sent_nbytes) == (mirror.received_messages, mirror.received_nbytes)


def run_and_count(executor: Any, case: Case, stack: Any) -> dict[int, Traffic]:
    """Run `case`; return what it added to the counters, by peer."""
    before = dict(executor.traffic())
    run_case(executor, case, stack)
    return {peer: _added(before.get(peer), traffic) for peer, traffic in executor.traffic().items()}


def _added(before: Traffic | None, after: Traffic) -> Traffic:
    counters = [field.name for field in fields(Traffic) if field.name != "transport"]
    return Traffic(after.transport, *(getattr(after, name) - getattr(before, name, 0) for name in counters))


def planned_traffic(case: Case, rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of messages and bytes that `rank` sends by its plan. Every segment of a block is a message."""
    call = case.call(rank, size)
    messages = nbytes = 0
    for lane in range(len(call.plan.lanes)):
        for group in call.plan.groups(lane):
            for step in group.steps:
                if isinstance(step, Send):
                    blocks = call.plan.partition(step.src.buffer).blocks
                    length = len(np.array_split(np.empty(case.count), blocks)[step.src.start % blocks])
                    messages += min(length, case.segments)
                    nbytes += length * DTYPES[case.dtype].itemsize
    return messages, nbytes


# --- plans beyond the registered algorithms ------------------------------------------------------------------------


def check_lanes_wait_for_each_other(ranks: Any, segments: int) -> None:
    for rank, result in enumerate(ranks.run(run_shift, segments)):
        assert result == [((rank - 1) % ranks.size) * 100 + i for i in range(7)]


def run_shift(executor: Any, segments: int) -> list[int]:
    plan = handmade_plans.shift_in_two_lanes(executor.size, executor.rank)
    source = (np.arange(7) + 100 * executor.rank).astype(np.int32)
    target = np.zeros_like(source)
    executor.start(call_of(plan, "int32", (7, 7), segments=segments), source, target).wait(DEADLINE_S)
    return [int(value) for value in target]


def check_spans_wrap_and_blocks_are_permuted(ranks: Any, count: int, segments: int) -> None:
    permutation = tuple(np.random.default_rng(ranks.size).permutation(ranks.size).tolist())
    expected = np.empty((ranks.size, count), np.int64)
    for rank, block in enumerate(permutation):
        expected[block] = np.arange(count) + 1000 * rank
    for result in ranks.run(run_allgather, permutation, count, segments):
        assert_same_bits(result, expected.reshape(-1))


def run_allgather(executor: Any, permutation: tuple[int, ...], count: int, segments: int) -> Any:
    plan = handmade_plans.allgather_bruck(executor.size, executor.rank, permutation)
    source = np.arange(count) + 1000 * executor.rank
    target = np.full(count * executor.size, -1)
    call = call_of(plan, "int64", (count, count * executor.size), segments=segments)
    executor.start(call, source, target).wait(DEADLINE_S)
    return target


def check_shares_may_be_cut_into_parts(ranks: Any, segments: int) -> None:
    for counts in ([5] * ranks.size, [3 * rank % 4 for rank in range(ranks.size)]):
        expected = [1000 * rank + i for rank, count in enumerate(counts) for i in range(count)]
        assert ranks.run(run_both_ways, counts, segments) == [expected] * ranks.size


def run_both_ways(executor: Any, counts: list[int], segments: int) -> list[int]:
    plan = handmade_plans.allgather_both_ways(executor.size, executor.rank, varying=len(set(counts)) > 1)
    source = np.arange(counts[executor.rank], dtype=np.int32) + 1000 * executor.rank
    target = np.full(sum(counts), -1, np.int32)
    elements = source.size, target.size
    call = call_of(plan, "int32", elements, segments=segments, counts={Counts.RANKS: counts})
    executor.start(call, source, target).wait(DEADLINE_S)
    return [int(value) for value in target]


def check_every_peer_may_have_its_own_count(ranks: Any, segments: int) -> None:
    counts = np.random.default_rng(ranks.size).integers(0, 6, (ranks.size, ranks.size)).tolist()
    for rank, result in enumerate(ranks.run(run_alltoallv, counts, segments)):
        assert result == [peer * 100 + rank for peer in range(ranks.size) for _ in range(counts[peer][rank])]


def run_alltoallv(executor: Any, counts: list[list[int]], segments: int) -> list[int]:
    rank, size = executor.rank, executor.size
    plan = handmade_plans.alltoallv_direct(size, rank)
    sent, received = counts[rank], [row[rank] for row in counts]
    source = np.repeat(np.arange(size) + 100 * rank, sent).astype(np.int16)
    target = np.full(sum(received), -1, np.int16)
    lengths = {Counts.SEND: sent, Counts.RECEIVE: received}
    call = call_of(plan, "int16", (source.size, target.size), segments=segments, counts=lengths)
    executor.start(call, source, target).wait(DEADLINE_S)
    return [int(value) for value in target]


def check_wide_spans_are_reduced(ranks: Any, case: Case) -> None:
    stack = contributions(case, ranks.size)
    assert_same_bits(ranks.run(run_reduce, case, stack)[0], reduced(case.op, stack))


def run_reduce(executor: Any, case: Case, stack: Any) -> Any:
    plan = handmade_plans.reduce_chain_of_wide_blocks(executor.size, executor.rank)
    source = stack[executor.rank].copy()
    target = np.zeros_like(source)
    call = call_of(plan, case.dtype, (case.count, case.count), op=case.op, segments=case.segments)
    executor.start(call, source, target).wait(DEADLINE_S)
    return target


# --- messages outside collectives ----------------------------------------------------------------------------------


def check_messages_are_matched_by_tag_and_in_order(ranks: Any) -> None:
    assert ranks.run(run_tags)[-1] == [40, 20, 10, 11, 30]


def run_tags(executor: Any) -> list[int]:
    """Rank 0 sends to the last rank, which receives the tags in another order."""
    last, dtype = executor.size - 1, DTYPES["int64"]
    if executor.rank == 0:
        sent = [(1, 10), (2, 20), (3, 30), (1, 11), (2**31 - 1, 40)]
        arrays = [np.full(3, value) for _, value in sent]
        for operation in [executor.send(array, dtype, last, tag) for array, (tag, _) in zip(arrays, sent, strict=True)]:
            operation.wait(DEADLINE_S)
    if executor.rank != last:
        return []
    received = []
    for tag in (2**31 - 1, 2, 1, 1, 3):
        array = np.zeros(3, np.int64)
        executor.recv(array, dtype, 0, tag).wait(DEADLINE_S)
        received.append(int(array[2]))
    return received


def check_neighbours_exchange_messages(ranks: Any, count: int) -> None:
    for rank, result in enumerate(ranks.run(run_exchange, count)):
        assert_same_bits(result, np.full(count, (rank - 1) % ranks.size, "bfloat16"))


def run_exchange(executor: Any, count: int) -> Any:
    dtype = DTYPES["bfloat16"]
    mine, other = np.full(count, executor.rank, ml_dtypes.bfloat16), np.zeros(count, ml_dtypes.bfloat16)
    operations = [
        executor.send(mine, dtype, (executor.rank + 1) % executor.size, 0),
        executor.recv(other, dtype, (executor.rank - 1) % executor.size, 0),
    ]
    for operation in operations:
        operation.wait(DEADLINE_S)
    return other


# A synchronous send of each length: its end is looked at after each of these steps of the receiver.
SYNCHRONOUS = {
    "sent": (False, False),
    "probed": (False, False),
    "taken": (False, False),
    "second received": (False, True),
    "first received": (True, True),
}


def check_synchronous_sends_end_with_their_receive(ranks: Any) -> None:
    for length in (0, 5, 70_000, 3_000_000):
        states = ranks.run(run_synchronous, length)[0]
        assert states == SYNCHRONOUS, length


def run_synchronous(executor: Any, length: int) -> dict[str, tuple[bool, ...]]:
    """Rank 0 sends two messages of one tag to the last rank, which takes the first one, and receives it last."""
    byte, last, states = DTYPES["uint8"], executor.size - 1, {}
    arrays = [np.full(length, number, np.uint8) for number in range(2)]
    token, done = np.zeros(1, np.uint8), []
    if executor.rank == 0:
        done = [executor.send(array, byte, last, 1, synchronous=True) for array in arrays]
        for operation in done:
            operation.run_in_background(DEADLINE_S)
        for step, expected in SYNCHRONOUS.items():
            executor.recv(token, byte, last, 2).wait(DEADLINE_S)
            for operation, has_ended in zip(done, expected, strict=True):
                if has_ended:
                    operation.wait(DEADLINE_S)
            states[step] = tuple(operation.ended() for operation in done)
            executor.send(token, byte, last, 2).wait(DEADLINE_S)
    elif executor.rank == last:
        for step in synchronous_steps(executor, arrays):
            assert step in SYNCHRONOUS
            executor.send(token, byte, 0, 2).wait(DEADLINE_S)
            executor.recv(token, byte, 0, 2).wait(DEADLINE_S)
    return states


def synchronous_steps(executor: Any, expected: list[Any]) -> Iterator[str]:
    byte, out = DTYPES["uint8"], np.full_like(expected[1], 9)
    yield "sent"
    probe = executor.probe(None, 1, once=False)
    probe.wait(DEADLINE_S)
    assert probe.message().count == out.size
    yield "probed"
    taken = executor.probe(None, None, once=False, takes=True)
    taken.wait(DEADLINE_S)
    assert np.frombuffer(taken.host_copy() or b"", np.uint8).tolist() == expected[0].tolist()
    yield "taken"
    executor.recv(out, byte, None, None).wait(DEADLINE_S)
    np.testing.assert_array_equal(out, expected[1])
    yield "second received"
    taken.acknowledge(DEADLINE_S)
    yield "first received"


def check_synchronous_sends_in_both_directions_end(ranks: Any) -> None:
    assert ranks.run(run_both_synchronously) == [list(range(ranks.size))] * ranks.size


def run_both_synchronously(executor: Any) -> list[int]:
    """Every rank sends to every rank and itself synchronously, while receives are posted."""
    byte, everyone = DTYPES["uint8"], range(executor.size)
    outs = [np.full(70_000, 255, np.uint8) for _ in everyone]
    receives = [executor.recv(outs[rank], byte, rank, 5) for rank in everyone]
    for rank in everyone:
        mine = np.full(70_000, executor.rank, np.uint8)
        executor.send(mine, byte, rank, 5, synchronous=True).wait(DEADLINE_S)
    for receive in receives:
        receive.wait(DEADLINE_S)
    return [int(out[-1]) for out in outs]


# --- background calls ----------------------------------------------------------------------------------------------


def check_background_calls_end_without_a_waiter(ranks: Any) -> None:
    assert ranks.run(run_unattended) == [True] * ranks.size


def run_unattended(executor: Any) -> bool:
    """Watch the arrays to see that the calls have ended, because polling the operations would drive them."""
    case = Case(algorithm="ring", count=5000)
    call, dtype = case.call(executor.rank, executor.size), DTYPES["float32"]
    before, after = (executor.rank - 1) % executor.size, (executor.rank + 1) % executor.size
    sums = [np.full(case.count, 1 + index, np.float32) for index in range(3)]
    sent, received = np.full(9, executor.rank + 1, np.float32), np.zeros(9, np.float32)
    operations = [executor.start(call, array, array) for array in sums]
    operations += [executor.send(sent, dtype, after, 1), executor.recv(received, dtype, before, 1)]
    for operation in operations:
        operation.run_in_background(DEADLINE_S)
    ended = eventually(lambda: received[-1] == before + 1 and all((array == array[0]).all() for array in sums))
    ended = ended and eventually(lambda: [array[-1] for array in sums] == [executor.size * (1 + i) for i in range(3)])
    for operation in operations:
        operation.wait(DEADLINE_S)  # returns at once
    return ended and all(operation.ended() and operation.poll() for operation in operations)


def check_many_calls_may_be_in_flight(ranks: Any, calls: int) -> None:
    assert ranks.run(run_many_in_flight, calls) == [[float(ranks.size * call) for call in range(calls)]] * ranks.size


def run_many_in_flight(executor: Any, calls: int) -> list[float]:
    """Every fifth call is waited for at once, and others end in between; the rest is waited for backwards."""
    case = Case(count=8)
    call = case.call(executor.rank, executor.size)
    arrays, results = [np.full(8, index, np.float32) for index in range(calls)], np.zeros((calls, 8), np.float32)
    operations = []
    for index, (array, result) in enumerate(zip(arrays, results, strict=True)):
        if index % 5 == 0:
            executor.run(call, array, result, DEADLINE_S)
            continue
        operations.append(executor.start(call, array, result))
        operations[-1].run_in_background(DEADLINE_S)
    for operation in reversed(operations):
        operation.wait(DEADLINE_S)
    return [float(result[-1]) for result in results]


def check_ends_are_counted(ranks: Any) -> None:
    assert all(seen >= 10 for seen in ranks.run(run_until_ten_have_ended))


def run_until_ten_have_ended(executor: Any) -> int:
    case = Case()
    call = case.call(executor.rank, executor.size)
    arrays = [np.ones(case.count, np.float32) for _ in range(10)]
    first = seen = executor.wait_for_end(0, 0.0)
    operations = [executor.start(call, array, array.copy()) for array in arrays]
    for operation in operations:
        operation.run_in_background(DEADLINE_S)
    while seen < first + 10:
        seen = executor.wait_for_end(seen, DEADLINE_S)
    assert all(operation.poll() for operation in operations)
    return int(seen - first)


def check_a_background_call_times_out(ranks: Any, algorithm: str, folder: Path) -> None:
    """The last rank calls only after the others' time limit. Their next call raises that error once."""
    *others, last = ranks.run(run_unattended_and_missed, Case(algorithm=algorithm), folder)
    kinds = [[kind for kind, _, _ in outcomes] for outcomes in others]
    assert kinds == [["CollectiveTimeoutError", "AbortedError"]] * len(others)
    assert any(f"rank {ranks.size - 1}" in outcomes[0][1] for outcomes in others)
    assert last[0][0] in ("CollectiveTimeoutError", "AbortedError")


def run_unattended_and_missed(executor: Any, case: Case, folder: Path) -> list[tuple[str, str, str | None]]:
    array = np.ones(case.count, case.dtype)
    if executor.rank == executor.size - 1:
        await_marks(folder, *range(executor.rank))
        first = attempt(executor, case)
    else:
        operation = executor.start(case.call(executor.rank, executor.size), array, array.copy())
        operation.run_in_background(SHORT_S)
        first = attempt(executor, case)
        leave_mark(folder, executor.rank)
    return [first, attempt(executor, case)]


def check_closing_ends_calls_in_flight(ranks: Any) -> None:
    for ended, kind in ranks.run(run_close_in_flight):
        assert ended
        assert kind in ("UsageError", "AbortedError", "PeerLostError")


def run_close_in_flight(executor: Any) -> tuple[bool, str]:
    """Close the executor during a receive for which no rank sends a message."""
    operation = executor.recv(np.zeros(4, np.float32), DTYPES["float32"], (executor.rank + 1) % executor.size, 0)
    operation.run_in_background(DEADLINE_S)
    executor.close()
    return operation.ended(), outcome(lambda: operation.wait(DEADLINE_S))[0]


# --- misuse and faults ---------------------------------------------------------------------------------------------


def check_mapped_steps_are_refused(ranks: Any, reason: str) -> None:
    for kind, text, _ in ranks.run(run_mapped):
        assert kind == PlanError.__name__
        assert f"allreduce by one_shot {reason}" in text


def run_mapped(executor: Any) -> tuple[str, str, str | None]:
    call = call_of(handmade_plans.allreduce_one_shot(executor.size, executor.rank), "float32", (4, 4), op="sum")
    return outcome(lambda: executor.start(call, np.ones(4, np.float32), np.ones(4, np.float32)))


def check_a_late_rank_is_waited_for(ranks: Any) -> None:
    stack = np.ones((ranks.size, 8), np.float32)
    for result in ranks.run(run_late, Case(algorithm="ring"), stack):
        assert_same_bits(result, np.full(8, ranks.size, np.float32))


def run_late(executor: Any, case: Case, stack: Any) -> Any:
    time.sleep(0.1 if executor.rank == executor.size - 1 else 0.0)
    return run_case(executor, case, stack)


def check_a_missing_rank_is_named_by_a_timeout(ranks: Any, algorithm: str, folder: Path) -> None:
    """The last rank makes the call only after the others' time limit, and gets an error as well."""
    *others, missing = ranks.run(run_missing, Case(algorithm=algorithm), folder)
    kinds = [[kind for kind, _, _ in outcomes] for outcomes in others]
    assert kinds == [["CollectiveTimeoutError", "AbortedError"]] * len(others)
    assert any(f"rank {ranks.size - 1}" in text for (_, text, _), _ in others)
    assert all("allreduce(float32[8], op=sum)" in text for (_, text, _), _ in others)
    assert missing[0][0] in ("CollectiveTimeoutError", "AbortedError")
    assert missing[1][0] == "AbortedError"


def run_missing(executor: Any, case: Case, folder: Path) -> list[tuple[str, str, str | None]]:
    if executor.rank == executor.size - 1:
        await_marks(folder, *range(executor.rank))
    first = attempt(executor, case, SHORT_S)
    leave_mark(folder, executor.rank)
    return [first, attempt(executor, case, SHORT_S)]


def check_a_rank_that_leaves_is_lost(ranks: Any, algorithm: str) -> None:
    """The last rank closes its executor while the others make a call."""
    *others, last = ranks.run(run_leave, Case(algorithm=algorithm))
    assert last == []
    assert [kind for (kind, _, _), _ in others] == [PeerLostError.__name__] * len(others)
    assert any(f"rank {ranks.size - 1}" in text for (_, text, _), _ in others)
    assert [kind for _, (kind, _, _) in others] == [AbortedError.__name__] * len(others)


def run_leave(executor: Any, case: Case) -> list[tuple[str, str, str | None]]:
    if executor.rank == executor.size - 1:
        executor.close()
        return []
    return [attempt(executor, case), attempt(executor, case)]


def check_mismatch_is_an_error_on_every_rank(ranks: Any, common: Case, divergent: Case) -> None:
    """The last rank makes another call. If a rank has ended its call before, its next call raises the error."""
    signatures = [str(case.call(0, ranks.size).signature) for case in (common, divergent)]
    for outcomes in ranks.run(run_mismatch, common, divergent):
        kind, text, _ = next(outcome for outcome in outcomes if outcome[0])
        assert kind == MismatchError.__name__, outcomes
        assert all(signature in text for signature in signatures), text
        assert f"rank {ranks.size - 1} called" in text or "where rank" in text


def run_mismatch(executor: Any, common: Case, divergent: Case) -> list[tuple[str, str, str | None]]:
    mine = divergent if executor.rank == executor.size - 1 else common
    return [attempt(executor, mine), attempt(executor, Case())]


def check_mismatched_messages_are_an_error(ranks: Any, dtype: str, count: int) -> None:
    """Rank 0 sends a message that does not fit the last rank's receive. If its send has ended, its next call raises."""
    for outcomes in ranks.run(run_mismatched_message, dtype, count):
        kind, text, _ = next(outcome for outcome in outcomes if outcome[0])
        assert kind == MismatchError.__name__, outcomes
        assert "float32[4]" in text
        assert f"{dtype}[{count}]" in text


def run_mismatched_message(executor: Any, dtype: str, count: int) -> list[tuple[str, str, str | None]]:
    last, first = executor.size - 1, ("", "", None)
    if executor.rank == 0:
        first = outcome(lambda: executor.send(np.ones(4, "float32"), DTYPES["float32"], last, 0).wait(DEADLINE_S))
    elif executor.rank == last:
        first = outcome(lambda: executor.recv(np.ones(count, dtype), DTYPES[dtype], 0, 0).wait(DEADLINE_S))
    return [first, attempt(executor, Case())]


def check_abort_by_one_rank_ends_all(ranks: Any) -> None:
    for rank, (ended, later) in enumerate(ranks.run(run_abort)):
        assert ended[0] == AbortedError.__name__, rank
        assert "out of patience" in ended[1]
        assert later[0] == AbortedError.__name__


def run_abort(executor: Any) -> list[tuple[str, str, str | None]]:
    """Rank 0 aborts a call before the last rank makes it. That call of the last rank raises the error."""
    case = Case(algorithm="ring", count=100)
    source = np.ones(100, np.float32)

    def run() -> None:
        operation = executor.start(case.call(executor.rank, executor.size), source, source)
        if executor.rank == 0:
            operation.abort("out of patience")
        operation.wait(DEADLINE_S)

    time.sleep(0.1 if executor.rank == executor.size - 1 else 0.0)
    return [outcome(run), attempt(executor, case)]


def check_a_closed_executor_refuses_calls(ranks: Any) -> None:
    for kind, _, _ in ranks.run(run_closed):
        assert kind == "UsageError"


def run_closed(executor: Any) -> tuple[str, str, str | None]:
    executor.close()
    executor.close()
    return attempt(executor, Case())


def check_arrays_that_do_not_fit_are_refused(ranks: Any) -> None:
    for kinds in ranks.run(run_misfits):
        assert kinds == ["UsageError"] * len(kinds)


def run_misfits(executor: Any) -> list[str]:
    call = Case().call(executor.rank, executor.size)
    fitting = np.ones(8, np.float32)
    misfits = [None, np.ones(8), np.ones(7, np.float32), np.ones((2, 4), np.float32), np.ones(16, np.float32)[::2]]
    sources = [outcome(lambda array=array: executor.start(call, array, fitting))[0] for array in misfits]
    return sources + [outcome(lambda array=array: executor.start(call, fitting, array))[0] for array in misfits]


# --- subgroups -----------------------------------------------------------------------------------------------------


def allreduce_in(executor: Any, algorithm: str) -> list[float]:
    x, y = np.full(5, executor.members[executor.rank] + 1.0), np.zeros(5)
    call = make_call("allreduce", algorithm, executor.size, executor.rank, dtype="float64", count=5, op="sum")
    executor.run(call, x, y, DEADLINE_S)
    return y.tolist()


def reduce_in_subgroups(executor: Any, algorithm: str) -> Any:
    """Reduce among all ranks, among all in reverse order, among the odd or the even ranks, and again among all."""
    backwards = range(executor.size)[::-1]
    same_parity = range(executor.rank % 2, executor.size, 2)
    groups = [
        executor,
        executor.subgroup(backwards),
        executor.subgroup(same_parity),
        executor.subgroup(backwards),
        executor,
    ]
    sums = [allreduce_in(group, algorithm) for group in groups]
    kinds = []
    for group in groups[1:-1]:
        group.close()
        kinds.append(attempt(group, Case())[0])
    return [group.members for group in groups], sums, kinds, allreduce_in(executor, algorithm)


def check_subgroups(ranks: Any, algorithm: str) -> None:
    size = ranks.size
    all_ranks = tuple(range(size))
    for rank, (members, sums, kinds, last) in enumerate(ranks.run(reduce_in_subgroups, algorithm)):
        same_parity = all_ranks[rank % 2 :: 2]
        assert members == [all_ranks, all_ranks[::-1], same_parity, all_ranks[::-1], all_ranks]
        total = size * (size + 1) / 2
        assert (kinds, last) == (["UsageError"] * 3, sums[0])
        assert sums == [[value] * 5 for value in (total, total, sum(same_parity) + len(same_parity), total, total)]


def fail_in_a_subgroup(executor: Any) -> tuple[str, str]:
    """The last two ranks make calls of different lengths in a subgroup, and the other ranks make another call."""
    last = executor.size - 1
    pair = executor.subgroup([last, last - 1]) if executor.rank >= last - 1 else executor
    count = 4 if executor.rank == last else 5
    call = make_call("allreduce", "direct", pair.size, pair.rank, dtype="float32", count=count, op="sum")
    try:
        pair.run(call, np.ones(count, "float32"), np.ones(count, "float32"), DEADLINE_S)
        executor.run(
            Case("barrier", "dissemination", None, None, 0).call(executor.rank, executor.size), None, None, DEADLINE_S
        )
    except UnisonoError as error:
        return type(error).__name__, error.message
    return "", ""


def check_that_a_failure_in_a_subgroup_ends_the_job(ranks: Any) -> None:
    last = ranks.size - 1
    for kind, text in ranks.run(fail_in_a_subgroup):
        assert kind == "MismatchError", text
        assert f"rank {last} called allreduce(float32[4], op=sum)" in text
        assert f"rank {last - 1} called allreduce(float32[5], op=sum)" in text
