"""Background calls and their `Work`, on real ranks and over the generic executor."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.array_kinds import INSTALLED, KINDS
from support.deadlines import DEADLINE_S, await_marks, eventually, leave_mark
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un

SHORT_S = 0.3
DROPPED = 5
Say = Callable[[Any], None]


JOBS = [(2, "shm"), (3, "tcp"), (3, "generic, buffered")]
ranks = ranks_fixture(*JOBS)
fresh_ranks = ranks_fixture(*JOBS, scope="function")


def never(world: un.Communicator, tag: int = 99, **given: Any) -> un.Work[Any]:
    """Return the work of a receive for which no rank sends a message."""
    return world.recv(np.zeros(4), (world.rank + 1) % world.size, tag, wait=False, **given)


# --- results -------------------------------------------------------------------------------------------------------


def results_of_every_way(world: un.Communicator) -> None:
    """Make each call twice, because the second one takes the path of the call cache."""
    x, total = np.full(5, world.rank + 1.0), world.size * (world.size + 1) / 2
    for _ in range(2):
        made = world.allreduce(x, wait=False).wait()
        assert isinstance(made, np.ndarray)
        assert made.tolist() == [total] * 5
        out = np.zeros(5)
        work = world.allreduce(x, out=out, wait=False)
        assert work.wait() is out
        assert out.tolist() == [total] * 5
        assert (work.done(), work.result() is out, work.wait() is out) == (True, True, True)
        same = x.copy()
        assert world.allreduce(same, out=same, wait=False).wait() is same
        assert same.tolist() == [total] * 5
        at_root = world.reduce(x, root=1, wait=False).wait()
        assert at_root is None if world.rank != 1 else at_root.tolist() == [total] * 5
        gathered = world.gather(x, root=0, wait=False).wait()
        assert gathered is None if world.rank else gathered.shape == (5 * world.size,)
        assert world.barrier(wait=False).wait() is None
        assert x.tolist() == [world.rank + 1.0] * 5


def test_a_work_has_the_result_of_the_call(ranks: Any) -> None:
    ranks.run_calls(results_of_every_way)


def plan_again_and_again(world: un.Communicator) -> list[float]:
    x = np.ones(3)
    double = world.plan("allreduce", x, out=x)
    seen = []
    for call in range(4):
        result = double(wait=False).wait() if call % 2 else double()
        assert result is x
        seen.append(float(x[0]))
    return seen


def test_persistent_call_may_run_without_waiting(ranks: Any) -> None:
    expected = [float(ranks.size**call) for call in range(1, 5)]
    assert ranks.run_calls(plan_again_and_again) == [expected] * ranks.size


def messages_both_ways(world: un.Communicator, count: int) -> bool:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    out = np.zeros(count, np.int64)
    sending = world.send(np.full(count, world.rank), after, 3, wait=False)
    receiving = world.recv(out, before, 3, wait=False)
    assert receiving.wait() is out
    assert sending.wait() is None
    return bool((out == before).all())


@pytest.mark.parametrize("count", [0, 1, 300_000])
def test_messages_may_run_without_waiting(ranks: Any, count: int) -> None:
    assert ranks.run_calls(messages_both_ways, count) == [True] * ranks.size


def call_by_both_ways(world: un.Communicator) -> list[float]:
    """Alternate blocking and background calls. The result of each call is the input of the next one."""
    x, works = np.ones(2000), []
    for call in range(40):
        if call % 3:
            works.append(world.allreduce(x, "avg", out=x, wait=False))
        else:
            world.allreduce(x, "sum", out=x)
    un.wait_all(works)
    return [float(x[0]), float(x[-1])]


def test_blocking_and_nonblocking_calls_run_in_program_order(ranks: Any) -> None:
    assert ranks.run_calls(call_by_both_ways) == [[float(ranks.size) ** 14] * 2] * ranks.size


def reduce_in_kind(world: un.Communicator, name: str) -> None:
    kind = KINDS[name]
    for _ in range(2):
        x = kind.make(np.full(6, world.rank + 1, np.float32))
        work = world.allreduce(x, wait=False)
        result = work.wait()
        assert type(result).__name__ == kind.result
        assert kind.read(result).tolist() == [world.size * (world.size + 1) / 2] * 6
        assert work.result() is result
        assert work.wait() is result


@pytest.mark.parametrize("name", [name for name in INSTALLED if "float32" in KINDS[name].dtypes])
def test_result_of_a_work_has_the_library_of_its_input(ranks: Any, name: str) -> None:
    ranks.run_calls(reduce_in_kind, name)


# --- arrays and works without other references ---------------------------------------------------------------------


def keep_many_in_flight(world: un.Communicator, calls: int) -> bool:
    xs = [np.full(10, float(index)) for index in range(calls)]
    works = [world.allreduce(x, wait=False) for x in xs]
    order = np.random.default_rng(world.rank).permutation(calls)
    return all(works[index].wait().tolist() == [index * world.size] * 10 for index in order.tolist())


def test_a_thousand_calls_may_be_in_flight(ranks: Any) -> None:
    assert all(ranks.run_calls(keep_many_in_flight, 1000 if isinstance(ranks, Ranks) else 200))


def drop_works(world: un.Communicator) -> list[float]:
    outs = [np.zeros(1000) for _ in range(DROPPED)]
    for index, out in enumerate(outs):
        world.allreduce(np.full(1000, float(index)), out=out, wait=False)
        gc.collect()
    world.barrier()
    return [float(out[-1]) for out in outs]


def test_dropped_works_still_complete(ranks: Any) -> None:
    assert ranks.run_calls(drop_works) == [[float(index * ranks.size) for index in range(DROPPED)]] * ranks.size


def is_let_go(array: weakref.ref[Any]) -> bool:
    gc.collect()
    return array() is None


def watch_arrays(world: un.Communicator, waits: bool) -> None:
    """Rank 0 calls long before the others. Its arrays must live until they call, and no longer."""
    world.barrier()
    if world.rank == 0:
        x, out = np.ones(50_000), np.zeros(50_000)
        watched = [weakref.ref(x), weakref.ref(out)]
        work = world.allreduce(x, out=out, wait=False)
        del x, out
        if not waits:
            del work
        gc.collect()
        assert all(array() is not None for array in watched)
        world.send(np.zeros(1), 1, 5)
        if waits:
            assert work.wait() is watched[1]()
            assert eventually(lambda: is_let_go(watched[0]))
            del work
        world.barrier()
        # Starting other calls drops the works of ended calls that the program does not hold.
        for _ in range(3):
            world.barrier(wait=False).wait()
        assert eventually(lambda: all(is_let_go(array) for array in watched))
        return
    if world.rank == 1:
        world.recv(np.zeros(1), 0, 5)
    world.allreduce(np.ones(50_000))
    world.barrier()
    for _ in range(3):
        world.barrier()


@pytest.mark.parametrize("waits", [True, False])
def test_arrays_live_exactly_until_their_call_ends(ranks: Any, waits: bool) -> None:
    ranks.run_calls(watch_arrays, waits)


# --- polling and waiting -------------------------------------------------------------------------------------------


def ask_too_early(world: un.Communicator) -> None:
    out = np.zeros(1)
    work = world.recv(out, (world.rank + 1) % world.size, 8, wait=False)
    assert not work.done()
    kind, text = error_of(work.result)
    assert kind == "UsageError"
    assert "wait()" in text
    for wrong in (-1, float("nan"), "soon"):
        assert error_of(lambda wrong=wrong: work.wait(wrong))[0] == "UsageError"
    world.barrier()
    world.send(np.ones(1), (world.rank - 1) % world.size, 8)
    assert eventually(work.done)
    assert work.result() is out
    assert out[0] == 1.0


def test_work_reports_whether_it_has_ended(ranks: Any) -> None:
    ranks.run_calls(ask_too_early)


def mistake_a_work_for_its_result(world: un.Communicator) -> None:
    work = world.allreduce(np.ones(3), wait=False)
    for use in (np.sum, np.asarray, lambda work: np.ones(3) + work, un.wait_all, un.wait_any):
        kind, text = error_of(lambda use=use: use(work))
        assert kind == "UsageError"
        assert "call wait()" in text
    work.wait()


def test_work_is_not_an_array(ranks: Any) -> None:
    ranks.run_calls(mistake_a_work_for_its_result)


def wait_for_all(world: un.Communicator) -> None:
    works = [world.allreduce(np.full(3, float(index)), wait=False) for index in range(5)]
    works.append(world.barrier(wait=False))
    *sums, nothing = un.wait_all(works, timeout_s=DEADLINE_S)
    assert [float(total[0]) for total in sums] == [float(index * world.size) for index in range(5)]
    assert nothing is None
    assert un.wait_all([]) == []
    assert un.wait_all(works, timeout_s=0.0)[4] is sums[4]


def test_wait_all_waits_for_several_works(ranks: Any) -> None:
    ranks.run_calls(wait_for_all)


def wait_for_any(world: un.Communicator) -> None:
    out, peer = np.zeros(1), (world.rank + 1) % world.size
    late, soon = world.recv(np.zeros(1), peer, 1, wait=False), world.recv(out, peer, 2, wait=False)
    world.send(np.full(1, 7.0), (world.rank - 1) % world.size, 2)
    assert un.wait_any([late, soon]) == 1
    assert soon.result() is out
    assert not late.done()
    assert un.wait_some([late, soon, soon]) == un.test_some([late, soon, soon]) == [1, 2]
    other = world.subgroup(range(world.size)).barrier(wait=False)
    assert un.wait_some([late, other]) == [1]  # works of two communicators
    assert un.test_any([late, soon]) == 1
    assert un.test_any([late]) is None
    assert un.test_some([late]) == un.test_some([]) == []
    assert not un.test_all([soon, late])
    assert un.test_all([soon])
    assert un.test_all([])
    world.barrier()
    world.send(np.ones(1), (world.rank - 1) % world.size, 1)
    late.wait()
    assert un.wait_any([late, soon]) == 0
    assert un.wait_some([late, soon]) == [0, 1]
    assert un.test_all([late, soon])
    for wait in (un.wait_any, un.wait_some):
        assert error_of(lambda wait=wait: wait([]))[0] == "UsageError"
    for use in (un.wait_some, un.test_some, un.test_any, un.test_all):
        assert "is a single Work" in error_of(lambda use=use: use(soon))[1]


def test_works_that_have_ended_are_found_among_several(ranks: Any) -> None:
    ranks.run_calls(wait_for_any)


def wait_in_two_threads(world: un.Communicator) -> list[float]:
    sums = []
    for index in range(20):
        work = world.allreduce(np.full(20_000, float(index)), wait=False)
        results: list[Any] = []
        others = [
            threading.Thread(target=lambda work=work, results=results: results.append(work.wait())) for _ in range(2)
        ]
        for other in others:
            other.start()
        mine = work.wait()
        for other in others:
            other.join()
        assert all(result is mine for result in results)
        sums.append(float(mine[-1]))
    return sums


def test_several_threads_may_wait_for_one_work(ranks: Any) -> None:
    assert ranks.run_calls(wait_in_two_threads) == [[float(i * ranks.size) for i in range(20)]] * ranks.size


# --- callbacks -----------------------------------------------------------------------------------------------------


def add_callbacks(world: un.Communicator) -> None:
    peer = (world.rank + 1) % world.size
    called: list[Any] = []
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    out = np.zeros(1)
    work = world.recv(out, peer, 4, wait=False)

    def fails(_: Any) -> None:
        raise ZeroDivisionError("a callback's own")

    same = called.append
    for callback in (lambda _: called.append("first"), fails, same, same, lambda _: called.append("last")):
        work.add_done_callback(callback)
    assert called == []
    world.barrier()
    world.send(np.ones(1), (world.rank - 1) % world.size, 4)
    assert eventually(lambda: len(called) == 4)
    assert called == ["first", work, work, "last"]
    assert work.result() is out
    assert any("callback" in record for record in records)
    here: list[Any] = []
    work.add_done_callback(lambda _: here.append(threading.current_thread()))  # added after the end of the call
    assert here == [threading.current_thread()]
    logging.getLogger("unisono").removeHandler(handler)
    world.barrier()


def test_callbacks_of_a_work_run_in_order_and_may_raise(ranks: Any) -> None:
    ranks.run_calls(add_callbacks)


def chain_calls_by_callbacks(world: un.Communicator) -> None:
    """A callback reads the result and makes another call, while this thread waits for the result of that call."""
    ended, seen = threading.Event(), []

    def again(work: un.Work[Any]) -> None:
        seen.append(float(work.result()[0]))
        if len(seen) == 10:
            ended.set()
        else:
            world.allreduce(work.result(), "sum", wait=False).add_done_callback(again)

    world.allreduce(np.ones(1), wait=False).add_done_callback(again)
    assert ended.wait(DEADLINE_S)
    assert seen == [float(world.size**call) for call in range(1, 11)]
    world.barrier()


def test_callback_of_a_work_may_start_another_call(ranks: Any) -> None:
    ranks.run_calls(chain_calls_by_callbacks)


def call_back_at_a_failure(world: un.Communicator) -> tuple[str, str]:
    failed: list[tuple[str, str]] = []
    never(world).add_done_callback(lambda work: failed.append(error_of(work.result)))
    if world.rank == 0:
        world.abort("out of patience")
    assert eventually(lambda: bool(failed))
    return failed[0]


def test_callbacks_are_called_when_a_call_fails(fresh_ranks: Any) -> None:
    for kind, text in fresh_ranks.run_calls(call_back_at_a_failure):
        assert kind == "AbortedError"
        assert "out of patience" in text


# --- await ---------------------------------------------------------------------------------------------------------


async def await_several(world: un.Communicator) -> None:
    works = [world.allreduce(np.full(3, float(index)), wait=False) for index in range(20)]
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while not works[-1].done():
            ticks += 1
            await asyncio.sleep(0)

    *sums, _ = await asyncio.gather(*works, tick())
    assert [float(values[0]) for values in sums] == [float(index * world.size) for index in range(20)]
    assert await works[3] is sums[3]


async def await_in_vain(world: un.Communicator) -> None:
    """Cancelling ends the waiting, not the call."""
    out, peer = np.zeros(1), (world.rank + 1) % world.size
    work = world.recv(out, peer, 6, wait=False)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(_result(work), 0.05)
    assert not work.done()
    world.barrier()
    world.send(np.ones(1), (world.rank - 1) % world.size, 6)
    assert await work is out


async def _result(work: un.Work[Any]) -> Any:
    return await work


def run_awaiting(world: un.Communicator, task: Callable[[un.Communicator], Any]) -> None:
    asyncio.run(task(world))


@pytest.mark.parametrize("task", [await_several, await_in_vain])
def test_works_may_be_awaited(ranks: Any, task: Any) -> None:
    ranks.run_calls(run_awaiting, task)


def leave_an_event_loop(world: un.Communicator) -> list[str]:
    """The event loop is closed before the call ends. The end of the call must not raise an error then."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("unisono").addHandler(handler)
    out, peer = np.zeros(1), (world.rank + 1) % world.size
    work = world.recv(out, peer, 6, wait=False)
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(_result(work), 0.05))
    called = threading.Event()
    work.add_done_callback(lambda _: called.set())
    world.barrier()
    world.send(np.ones(1), (world.rank - 1) % world.size, 6)
    assert called.wait(DEADLINE_S)
    logging.getLogger("unisono").removeHandler(handler)
    return records


def test_event_loop_may_close_before_an_awaited_work_ends(ranks: Any) -> None:
    assert ranks.run_calls(leave_an_event_loop) == [[]] * ranks.size


# --- failures ------------------------------------------------------------------------------------------------------


def time_out_unattended(world: un.Communicator, way: str, folder: Path) -> tuple[tuple[str, str], tuple[str, str], str]:
    if world.rank == world.size - 1:
        await_marks(folder, *range(world.rank))
        last = error_of(lambda: world.barrier(timeout_s=DEADLINE_S))
        return last, last, error_of(world.barrier)[0]
    if way == "message":
        work = never(world, timeout_s=SHORT_S)
    elif way == "collective":
        work = world.allreduce(np.ones(4), timeout_s=SHORT_S, wait=False)
    else:
        work = world.allreduce(np.ones(4), wait=False)
    waits = {"wait": lambda: work.wait(SHORT_S), "wait_all": lambda: un.wait_all([work, work], SHORT_S)}
    if way not in waits:
        assert eventually(work.done)
    first = error_of(waits.get(way, work.wait))
    leave_mark(folder, world.rank)
    return first, error_of(work.wait), error_of(world.barrier)[0]


@pytest.mark.parametrize("way", ["collective", "message", "wait", "wait_all"])
def test_timeout_of_a_work_ends_the_call_on_all_ranks(fresh_ranks: Any, way: str, tmp_path: Path) -> None:
    *others, last = fresh_ranks.run_calls(time_out_unattended, way, tmp_path)
    assert "CollectiveTimeoutError" in [first[0] for first, _, _ in others]
    for first, again, later in (*others, last):
        assert first[0] in ("CollectiveTimeoutError", "AbortedError")
        assert again == first
        assert later == "AbortedError"


def disagree(world: un.Communicator) -> list[str]:
    count = 3 if world.rank else 4
    work = world.allreduce(np.ones(count), wait=False)
    assert eventually(work.done)
    first = error_of(work.wait)
    assert f"float64[{count}]" in first[1] or "allreduce" in first[1]
    return [
        first[0],
        error_of(work.wait)[0],
        error_of(work.result)[0],
        error_of(lambda: world.barrier(wait=False).wait())[0],
    ]


def test_work_raises_mismatch_and_later_calls_are_aborted(fresh_ranks: Any) -> None:
    expected = ["MismatchError"] * 3 + ["AbortedError"]
    assert fresh_ranks.run_calls(disagree) == [expected] * fresh_ranks.size


def lose_a_peer(world: un.Communicator) -> list[str]:
    if world.rank == world.size - 1:
        world.close()
        return []
    work = world.allreduce(np.ones(4), wait=False)
    return [error_of(work.wait)[0], error_of(work.wait)[0], error_of(world.barrier)[0]]


def test_work_raises_peer_lost_when_a_peer_departs(fresh_ranks: Any) -> None:
    *others, _ = fresh_ranks.run_calls(lose_a_peer)
    assert others == [["PeerLostError", "PeerLostError", "AbortedError"]] * len(others)


def close_with_calls_in_flight(world: un.Communicator) -> list[str]:
    called = threading.Event()
    works = [never(world, 4), never(world, 5)]
    works[1].add_done_callback(lambda _: called.set())
    error_of(world.barrier)  # all ranks have made their calls before one closes
    world.close()
    assert called.wait(DEADLINE_S)
    assert all(work.done() for work in works)
    return [
        error_of(works[0].wait)[0],
        error_of(lambda: world.barrier(wait=False))[0],
        error_of(lambda: never(world))[0],
    ]


def test_closing_a_communicator_ends_its_works(fresh_ranks: Any) -> None:
    for first, *later in fresh_ranks.run_calls(close_with_calls_in_flight):
        assert first in ("UsageError", "AbortedError", "PeerLostError")
        assert later == ["UsageError"] * 2


def be_killed_or_lose(world: un.Communicator, say: Say) -> None:
    world.barrier()
    work = world.allreduce(np.ones(4), wait=False) if world.rank else never(world)
    say(os.getpid())
    if world.rank == 0:
        time.sleep(DEADLINE_S)
    say((error_of(work.wait), error_of(world.barrier)[0]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_work_raises_peer_lost_when_a_peer_is_killed(tmp_path: Path, transport: str) -> None:
    with Job(be_killed_or_lose, 3, tmp_path, transports=transport) as job:
        job.hear_all()
        job.signal(0, signal.SIGKILL)
        for rank in (1, 2):
            (kind, _), later = job.hear(rank)
            assert (kind, later) == ("PeerLostError", "AbortedError")


def be_interrupted(world: un.Communicator, say: Say) -> None:
    world.barrier()
    work = never(world) if world.rank else world.allreduce(np.ones(4), wait=False)
    say("ready")
    first = error_of(work.wait)
    say((first, error_of(work.wait)[0], error_of(world.barrier)[0]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_interrupt_ends_the_wait_for_a_work_and_aborts_the_others(tmp_path: Path, transport: str) -> None:
    with Job(be_interrupted, 3, tmp_path, transports=transport) as job:
        job.hear_all()
        time.sleep(0.3)
        job.signal(1, signal.SIGINT)
        for rank in range(3):
            (kind, text), again, later = job.hear(rank)
            assert kind == ("KeyboardInterrupt" if rank == 1 else "AbortedError")
            assert rank == 1 or "rank 1 was interrupted" in text
            assert (again, later) == ("AbortedError", "AbortedError")


def fork_with_calls_in_flight(world: un.Communicator, say: Say) -> None:
    """A forked child has the works of rank 1.

    Their waits are refused, and the child drops them and ends without an error.
    """
    world.barrier()
    work = world.allreduce(np.ones(50_000), wait=False) if world.rank == 1 else None
    plan = world.plan("allreduce", np.ones(3))
    for attempt in range(5 if world.rank == 1 else 0):
        work.add_done_callback(lambda _: None)  # this starts the thread of callbacks
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            called: list[Any] = []
            work.add_done_callback(called.append)
            results = [work.done(), called == [work], error_of(work.wait)[0], error_of(lambda: plan(wait=False))[0]]
            results += [
                error_of(lambda: world.barrier(wait=False))[0],
                error_of(lambda: never(world))[0],
                un.wait_any([work]),
            ]
            os.write(writing, repr(results).encode())
            del work, world, plan, called
            gc.collect()
            sys.exit(attempt)
        os.close(writing)
        with open(reading) as pipe:
            results = pipe.read()
        say((results, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == attempt))
    if world.rank == 1:
        world.send(np.ones(1), 0)
        say(float(work.wait()[0]))
        return
    if world.rank == 0:
        world.recv(np.zeros(1), 1)
    say(float(world.allreduce(np.ones(50_000))[0]))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_forked_child_with_calls_in_flight_is_refused_and_exits_cleanly(tmp_path: Path, transport: str) -> None:
    refused = repr([True, True, *["UsageError"] * 4, 0])
    with Job(fork_with_calls_in_flight, 2, tmp_path, transports=transport) as job:
        assert [job.hear(1) for _ in range(5)] == [(refused, True)] * 5
        assert job.hear_all() == [2.0, 2.0]


def exit_with_calls_in_flight(world: un.Communicator, say: Say) -> None:
    world.barrier()
    for tag in range(20):
        never(world, tag).add_done_callback(lambda _: None)
    say("ready")
    sys.exit(3)


def test_a_program_may_end_with_calls_and_callbacks_in_flight(tmp_path: Path) -> None:
    for attempt in range(3):
        directory = tmp_path / str(attempt)
        directory.mkdir()
        with Job(exit_with_calls_in_flight, 2, directory) as job:
            job.hear_all()
            assert [job.exit_code(rank) for rank in range(2)] == [3, 3]
