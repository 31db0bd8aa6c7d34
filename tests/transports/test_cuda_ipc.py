"""Collectives of ranks that read each other's device memory: results, order, memory, refusals and failures."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from support.deadlines import eventually
from support.device_ranks import WAIT_S, DeviceCall, DeviceRank, check_calls, device_rank
from support.outcomes import error_of
from support.ranks import Job, LocalRanks, Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.algorithms.catalogue.registry import ALGORITHMS
from unisono.dtypes import DTYPES
from unisono.errors import CollectiveTimeoutError, UsageError
from unisono.operations import OPERATIONS, Op
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda.peers import collectives as device_collectives, peer_exchange

pytestmark = pytest.mark.timeout(120)

MAPPED = [
    (collective, name)
    for collective, by_name in ALGORITHMS.items()
    for name, algorithm in by_name.items()
    if algorithm.mapped
]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
IN_PLACE = ("allreduce", "broadcast", "reduce")
SMALL = {"slab_nbytes": 1024}
# The last count is longer than a small slab.
COUNTS = (0, 1, 7, 1000)
SEED = 7
PATIENCE_S = 20.0
WHY = "they have no peer access, or CUDA_VISIBLE_DEVICES hides it from this process"


def exchange_texts(executor: Any) -> None:
    """Exchange values of different lengths, some of them long."""
    for count in (0, 1, 100_000):
        values = peer_exchange.exchange(executor, ["x" * count * executor.rank], WAIT_S)
        assert [len(text) for (text,) in values] == [count * rank for rank in range(executor.size)]


def test_ranks_exchange_values_of_any_length() -> None:
    with start_ranks(3, "shm") as ranks:
        ranks.run(exchange_texts)


def calls_of_all(size: int) -> list[DeviceCall]:
    """Return calls of every collective, with every count, every root to test, and in place where that is possible."""
    return [
        DeviceCall(collective, name, count=count, root=root, in_place=in_place, offset=count % 2)
        for collective, name in MAPPED
        for count in COUNTS
        for root in ({0, size - 1} if collective in ROOTED else {None})
        for in_place in ([False, True] if collective in IN_PLACE else [False])
    ]


def random_calls(seed: int, number: int) -> list[DeviceCall]:
    """Return reductions of random dtypes by random ops that are defined for the dtype."""
    random = Random(seed)
    known = [
        (dtype, op)
        for dtype in DTYPES
        for op in (*OPERATIONS, "premul_sum")
        if DTYPES[dtype].kind in (OPERATIONS[op] if op in OPERATIONS else Op.premul_sum(2)).kinds
    ]
    chosen = random.sample(known, number)
    return [
        DeviceCall("allreduce", random.choice(("one_shot", "two_shot")), dtype, op, random.choice((3, 130)))
        for dtype, op in chosen
    ]


def run_threads(size: int, calls: list[DeviceCall], options: dict[str, Any], seed: int = SEED) -> None:
    """Run calls on ranks that are threads of this process and share a device."""
    gpu = GpuDouble(seed)

    def run_rank(executor: Any) -> None:
        rank = DeviceRank(executor, gpu, **options)
        for call in calls:
            rank.check(call)
        rank.close()

    LocalRanks(size, deadline_s=WAIT_S * 2).run(run_rank)
    assert gpu.leaks() == []
    gpu.close()


ranks = ranks_fixture((2, "shm"), (3, "shm"), (4, "shm"))


two = ranks_fixture((2, "shm"))


# Results.


@pytest.mark.parametrize("options", [{}, SMALL], ids=["large slabs", "small slabs"])
def test_device_collectives_are_right_between_processes(ranks: Ranks, options: dict[str, Any]) -> None:
    # Each number of ranks makes another third of the calls, because a job takes long.
    ranks.run(check_calls, SEED, calls_of_all(ranks.size)[ranks.size % 3 :: 3], options)


@pytest.mark.parametrize("options", [{}, SMALL], ids=["large slabs", "small slabs"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_device_collectives_are_right_between_threads(size: int, options: dict[str, Any]) -> None:
    run_threads(size, calls_of_all(size), options)


def test_device_collectives_of_processes_take_all_dtypes_and_ops(ranks: Ranks) -> None:
    ranks.run(check_calls, SEED, random_calls(SEED + ranks.size, 8), SMALL)


def test_device_collectives_of_threads_take_all_dtypes_and_ops() -> None:
    run_threads(3, random_calls(SEED, 12), SMALL)


# Order.


def call_often(executor: Any, seed: int, calls: int) -> None:
    """Call repeatedly, with random pauses on each rank. The result of each call is the input of the next one."""
    random = Random(seed * 10 + executor.rank)
    with device_rank(executor, seed, **SMALL) as rank:
        call = DeviceCall("allreduce", dtype="int64", op="sum", count=100)
        source = rank.array(np.full(100, rank.rank + 1))
        other = rank.array(np.zeros(100, np.int64))
        for _ in range(calls):
            if random.random() < 0.2:
                time.sleep(0.002)
            rank.start(call, source, other).wait(WAIT_S)
            source, other = other, source
        expected = rank.size * (rank.size + 1) // 2 * rank.size ** (calls - 1)
        np.testing.assert_array_equal(rank.values(source, 100, "int64"), expected)


@pytest.mark.parametrize("seed", [1, 2])
def test_device_calls_follow_each_other_without_waiting_for_the_gpu(ranks: Ranks, seed: int) -> None:
    ranks.run(call_often, seed, 20)


def start_many(executor: Any) -> None:
    """Start calls on different streams, and wait for the last one first."""
    with device_rank(executor, 3, **SMALL) as rank:
        call = DeviceCall("allreduce", dtype="int32", op="max", count=700)
        main, started = rank.stream, []
        for _ in range(4):
            rank.stream = rank.device.new_stream()
            operands = rank.operands(call)
            started.append((rank.stream, operands, rank.start(call, *operands)))
        for stream, (_, target), operation in reversed(started):
            operation.wait(WAIT_S)
            rank.stream = stream
            np.testing.assert_array_equal(rank.values(target, 700, "int32"), call.expected(rank.size, rank.rank))
            rank.device.end_stream(stream)
        rank.stream = main


def test_device_calls_may_be_awaited_in_any_order(two: Ranks) -> None:
    two.run(start_many)


def go_on_alone(executor: Any) -> None:
    with device_rank(executor, 4) as rank:
        call = DeviceCall("allreduce", count=50)
        operands = rank.operands(call)
        operation = rank.start(call, *operands)
        operation.run_in_background(WAIT_S)
        deadline = time.monotonic() + WAIT_S
        while not operation._finished and time.monotonic() < deadline:
            time.sleep(0.001)
        assert operation._finished
        np.testing.assert_array_equal(rank.values(operands[1], 50, "float32"), call.expected(rank.size, rank.rank))


def test_device_call_finishes_without_a_waiting_thread(two: Ranks) -> None:
    two.run(go_on_alone)


# Memory.


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def open_and_close(executor: Any, times: int) -> tuple[int, int]:
    """Use `times` communicators one after the other; return the numbers of open descriptors before and after."""
    gpu = GpuDouble(executor.rank)
    everybody = range(executor.size)

    def use() -> None:
        sub = executor.subgroup(everybody)
        rank = DeviceRank(sub, gpu)
        rank.check(DeviceCall("allreduce", count=3))
        rank.close()
        sub.close()

    for _ in range(7):  # the double keeps a few freed allocations, to recognise them
        use()
    before = descriptors()
    for _ in range(times):
        use()
    assert gpu.leaks() == []
    after = descriptors()
    gpu.close()
    return before, after


def test_device_communicators_free_their_resources_when_closed(two: Ranks) -> None:
    for before, after in two.run(open_and_close, 5):
        assert after <= before + 2


def slab_nbytes(gpu: GpuDouble) -> list[int]:
    """Return the sizes of the slabs that a rank has allocated or opened."""
    regions = gpu._regions.values()
    return sorted(each.nbytes for each in regions if not each.is_gone and each.kind in ("dedicated", "opened"))


def grow(executor: Any, flags: bool) -> list[list[int]]:
    """Make larger and larger calls, and a small one; return the sizes of all slabs before and after the large ones."""
    with device_rank(executor, 5, flags=flags) as rank:
        sizes = [slab_nbytes(rank.gpu)]
        for count in (600_000, 1_200_000, 2_400_000, 3):
            rank.check(DeviceCall("allreduce", "two_shot", count=count))

        def has_freed() -> bool:
            rank.collectives._tidy()
            return len(slab_nbytes(rank.gpu)) == len(sizes[0])

        assert eventually(has_freed)
        sizes.append(slab_nbytes(rank.gpu))
    return sizes


@pytest.mark.parametrize("flags", [True, False])
def test_slabs_that_larger_ones_replace_are_freed_when_no_rank_uses_them(two: Ranks, flags: bool) -> None:
    for before, after in two.run(grow, flags):
        assert before == [2 << 20] * 4
        assert after == [2 << 20, 2 << 20, 16 << 20, 16 << 20]


def count_traffic(executor: Any) -> Any:
    with device_rank(executor, 1) as rank:
        rank.check(DeviceCall("allreduce", "two_shot", count=1001))
        rank.check(DeviceCall("broadcast", root=1, count=10))
        return dict(rank.collectives.traffic())


def test_device_traffic_counts_the_bytes_read_from_peers(two: Ranks) -> None:
    first, second = two.run(count_traffic)
    of_first, of_second = first[1], second[0]
    assert of_first.transport == "cuda_ipc"
    # Each rank reads half of the other's INPUT and half of its OUTPUT, 501 or 500 elements, and rank 0 reads the root's
    # 40 bytes.
    assert of_first.received_nbytes == of_second.sent_nbytes == (501 + 500) * 4 + 40
    assert of_first.sent_nbytes == of_second.received_nbytes == (501 + 500) * 4


# Refusals.


def meet(executor: Any, gpus: list[dict[str, Any]]) -> str | None:
    gpu = GpuDouble(**gpus[executor.rank])
    rank = DeviceRank(executor, gpu)
    refusal = rank.collectives.refusal
    assert rank.collectives.refuses("allreduce") == refusal
    if refusal:
        with pytest.raises(UsageError, match=refusal):
            rank.run(DeviceCall())
    rank.close()
    assert gpu.leaks() == []
    gpu.close()
    return refusal


def test_all_ranks_refuse_gpus_that_one_rank_cannot_use(two: Ranks) -> None:
    here, there = {"uuid": "a"}, {"uuid": "b"}
    for gpus, expected in (
        ([here, here], None),
        ([here, there], f"rank 0: device b, of rank 1, cannot be reached from a: {WHY}"),
        ([{**here, "reaches": ["b"]}, there], f"rank 1: device a, of rank 0, cannot be reached from b: {WHY}"),
        ([{**here, "reaches": ["b"]}, {**there, "reaches": ["a"]}], None),
        ([here, {**here, "exports": False}], "rank 1: this device cannot export memory"),
    ):
        assert two.run(meet, gpus) == [expected, expected]


def meet_without_memory(executor: Any) -> str | None:
    """Let rank 1 fail to make the shared memory that rank 0 has to map."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    gpu = GpuDouble(uuid="a")  # created before the patch, because the double makes such memory itself
    peer_exchange.exchange(executor, None, WAIT_S)  # opens the links, which need such memory, too
    with pytest.MonkeyPatch.context() as patch:
        if executor.rank == 1:
            patch.setattr(os, "memfd_create", refuse)
        rank = DeviceRank(executor, gpu)
        refusal = rank.collectives.refusal
    rank.close()
    assert gpu.leaks() == []
    gpu.close()
    return refusal


def test_all_ranks_refuse_when_one_has_no_shared_memory(two: Ranks) -> None:
    first, second = two.run(meet_without_memory)
    assert first == second
    assert str(first).startswith(
        "rank 1: memory for other ranks of this host cannot be created: Function not implemented"
    )


def test_ranks_of_one_process_on_different_devices_are_refused() -> None:
    gpus = [{"uuid": "a", "reaches": ["b"]}, {"uuid": "b", "reaches": ["a"]}]
    expected = "rank 0: rank 1 is in this process too, but on another device, b"
    assert LocalRanks(2, deadline_s=WAIT_S).run(lambda executor: meet(executor, gpus)) == [expected] * 2


def refused(executor: Any) -> list[str | None]:
    with device_rank(executor, 1) as rank:
        ask = rank.collectives.refuses
        return [ask("scan"), ask("allreduce", "ring"), ask("allreduce", "no such"), ask("allreduce", "two_shot")]


def test_device_calls_without_a_plan_for_mapped_memory_are_refused(two: Ranks) -> None:
    scan, ring, unknown, two_shot = two.run(refused)[0]
    assert scan == "there is no scan over mapped memory"
    assert "Send" in str(ring)
    assert "no algorithm 'no such'" in str(unknown)
    assert two_shot is None


def call_after_close(executor: Any) -> None:
    with device_rank(executor, 1) as rank:
        rank.collectives.close(WAIT_S)
        with pytest.raises(UsageError, match="closed"):
            rank.run(DeviceCall())


def test_closed_device_communicator_refuses_calls(two: Ranks) -> None:
    two.run(call_after_close)


# Failures. Each of them ends its job.


def fail_together(how: dict[int, Any]) -> list[tuple[str, str]]:
    """Run `how[rank]` on each of two ranks in threads; return the error of each rank."""
    gpu = GpuDouble(SEED)

    def run_rank(executor: Any) -> tuple[str, str]:
        rank = DeviceRank(executor, gpu)
        outcome = error_of(lambda: how[rank.rank](rank))
        if not outcome[0]:
            outcome = error_of(lambda: rank.run(DeviceCall("barrier")))
        rank.synchronize()
        rank.collectives.close(WAIT_S)
        return outcome

    results = LocalRanks(2, deadline_s=WAIT_S).run(run_rank)
    gpu.close()
    return results


def wait_shortly(rank: DeviceRank) -> None:
    call = DeviceCall(count=5)
    rank.start(call, *rank.operands(call)).wait(0.2)


def abort(rank: DeviceRank) -> None:
    call = DeviceCall(count=5)
    rank.start(call, *rank.operands(call)).abort("the test says so")


def stay_away(rank: DeviceRank) -> None:
    while True:
        rank.executor.check("nothing")
        time.sleep(0.001)


def test_different_device_calls_are_a_mismatch_on_every_rank() -> None:
    sums, highest = DeviceCall(op="sum"), DeviceCall(op="max")
    for kind, text in fail_together({0: lambda rank: rank.run(sums), 1: lambda rank: rank.run(highest)}):
        assert kind == "MismatchError", text
        assert "allreduce(float32[8], op=" in text


def test_timeout_of_a_device_call_names_the_missing_rank() -> None:
    for kind, text in fail_together({0: wait_shortly, 1: stay_away}):
        assert kind == "CollectiveTimeoutError", text
        assert "rank 0 waited 0.2 s for rank 1" in text


def test_abort_ends_device_calls_on_all_ranks() -> None:
    for kind, text in fail_together({0: lambda rank: rank.run(DeviceCall(count=5)), 1: abort}):
        assert kind in ("AbortedError", ""), text


def test_failed_device_call_orders_its_pending_work_on_its_stream() -> None:
    gpu = GpuDouble(SEED, background=False)

    def run_rank(executor: Any) -> None:
        rank = DeviceRank(executor, gpu, slab_nbytes=1024)
        if rank.rank == 1:
            with pytest.raises(CollectiveTimeoutError):
                stay_away(rank)
        else:
            # Factors are multiplied into slabs at once: for one segment on this stream, and for another one beside it.
            call = DeviceCall(op="premul_sum", count=5000)
            operands = rank.operands(call)
            with pytest.raises(CollectiveTimeoutError):
                rank.start(call, *operands).wait(0.2)
            # the double traps this copy unless it is ordered behind the failed call's work
            rank.device.copy(*operands, 4 * call.count, rank.stream)
            rank.device.copy(*reversed(operands), 4 * call.count, rank.stream)
        rank.collectives.close(WAIT_S)  # the double traps a free of memory in use

    LocalRanks(2, deadline_s=WAIT_S).run(run_rank)
    gpu.close()


# The effect of a killed process's work on others: with flags, these release their streams. CUDA does not document the
# events of a killed process, so they may never happen.
ENDS = {
    "flags": {"flags": True},
    "events, given up": {"flags": False, "gives_up": True},
    "events, never done": {"flags": False, "gives_up": False},
}


def be_lost(world: un.Communicator, say: Any, end: str) -> None:
    """Call until a rank is killed.

    Report the error, the error of the next call, and whether the stream ended and the collectives closed in time.
    """
    gpu, ends = GpuDouble(world.rank, **ENDS[end]), end != "events, never done"
    rank = DeviceRank(world._executor, gpu, slab_nbytes=1 << 16)
    call = DeviceCall("allreduce", "two_shot", count=50_000)
    operands = rank.operands(call)

    def call_for_ever() -> None:
        for number in itertools.count():
            rank.start(call, *operands).wait(WAIT_S)
            if number == 1:
                say("ready")
            if number % 3 == 0 and ends:
                rank.synchronize()

    outcome = error_of(call_for_ever)
    later = error_of(lambda: rank.start(call, *operands))
    if ends:
        rank.synchronize()
    say((outcome, later, rank.collectives.close(PATIENCE_S if ends else 0.5)))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("size", "victim"), [(2, 1), (3, 0)])
def test_killed_rank_fails_device_calls_of_others_without_a_hang(
    tmp_path: Path, size: int, victim: int, end: str
) -> None:
    with Job(be_lost, size, tmp_path, end) as job:
        job.hear_all()
        job.signal(victim, signal.SIGKILL)
        for (kind, text), later, has_closed in job.hear_all(but=victim):
            assert kind == "PeerLostError", text
            assert f"rank {victim}" in text
            assert later[0] == "AbortedError"
            assert has_closed is (end != "events, never done")
        job.exit_code(victim)


def issue_alone(world: un.Communicator) -> list[bool]:
    """Issue a whole call on rank 0 before rank 1 makes it; return whether the stream was done, before and after."""
    with device_rank(world._executor, 5) as rank:
        call = DeviceCall("allreduce", "two_shot", count=300)
        operands = rank.operands(call)
        seen = []
        if rank.rank == 0:
            rank.start(call, *operands).wait(WAIT_S)
            rank.device.record(rank.event, rank.stream)
            time.sleep(0.01)
            seen.append(rank.device.done(rank.event))
        world.barrier()
        if rank.rank == 1:
            rank.start(call, *operands).wait(WAIT_S)
        result = rank.values(operands[1], call.count, call.dtype)
        np.testing.assert_array_equal(result, call.expected(rank.size, rank.rank))
        return [*seen, rank.device.done(rank.event)]


def test_device_call_by_flags_is_issued_without_looking_at_other_ranks(two: Ranks) -> None:
    assert two.run_calls(issue_alone) == [[False, True], [True]]


@pytest.mark.parametrize("size", [2, 4])
def test_device_collectives_are_right_between_processes_without_flags(size: int) -> None:
    with start_ranks(size, "shm") as ranks:
        ranks.run(check_calls, SEED, calls_of_all(size)[::5], SMALL, False)
        assert ranks.run(by_flags, [False, *[True] * (size - 1)]) == [False] * size


def by_flags(executor: Any, has_flags: list[bool]) -> bool:
    with device_rank(executor, 1, flags=has_flags[executor.rank]) as rank:
        rank.check(DeviceCall())
        return rank.collectives.channels[0].by_flags


def call_again(executor: Any) -> list[int]:
    """Make calls on the same arrays, also after slabs have grown; return how many runs of plans each call has made."""
    runs = list[int]()
    with device_rank(executor, 6) as rank, pytest.MonkeyPatch.context() as patch:
        made = list[Any]()
        run = device_collectives.SegmentRun
        patch.setattr(device_collectives, "SegmentRun", lambda *args: made.append(run(*args)) or made[-1])
        call, longer = DeviceCall(count=300, dtype="int64"), DeviceCall(count=1 << 19)
        operands, others = rank.operands(call), rank.operands(call)
        for number, on in enumerate((operands, operands, others, operands, None, operands, operands)):
            made.clear()
            if on is None:
                rank.check(longer)
            else:
                values = rank.gpu.view(on[0], 2400).view(np.int64)
                values[:] = number + rank.rank  # new values in the same memory
                rank.start(call, *on).wait(WAIT_S)
                total = rank.values(on[1], call.count, call.dtype)
                assert (total == executor.size * number + sum(range(executor.size))).all()
            runs.append(len(made))
    return runs


def test_device_call_on_the_same_arrays_is_issued_again_without_its_plan(two: Ranks) -> None:
    # The fifth call lets the slabs grow, so the sixth one has other addresses.
    assert two.run(call_again) == [[1, 0, 1, 0, 1, 1, 0]] * 2
