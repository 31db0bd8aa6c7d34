"""One-sided access on ranks in processes: operations, epochs, atomicity, locks, wrong calls, and the end of windows."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.deadlines import DEADLINE_S
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES

TRANSPORTS = ["shm", "tcp"]
SIZE = 3
Say = Callable[[Any], None]


ranks = ranks_fixture(*[(SIZE, kind) for kind in TRANSPORTS])


def raised(call: Callable[[], Any]) -> Any:
    """Return the error of Unisono that `call` raises, or None."""
    try:
        call()
    except un.UnisonoError as error:
        return error
    return None


# --- random programs against a serial oracle -----------------------------------------------------------------------

LENGTH = 40
NAMES = ["int64", "uint8", "int32", "complex128", "float32"]


def places(random: np.random.Generator, low: int, high: int) -> Any:
    """Return a random place within the positions from `low` to `high` - 1, and its positions."""
    kind = random.integers(3)
    if kind == 0:
        at = int(random.integers(low, high))
        return at, np.arange(at, int(random.integers(at, high + 1)))
    if kind == 1:
        start, stop = sorted(random.integers(low, high, 2).tolist())
        step = int(random.integers(1, 4))
        return slice(start, stop, step), np.arange(start, stop, step)
    positions = random.permutation(np.arange(low, high))[: random.integers(high - low)]
    return positions, positions


def program(seed: int, size: int, dtype: str) -> list[list[tuple[int, str, int, Any, Any, Any, str]]]:
    """Return phases of operations (origin, verb, target, place, positions, values, op); those of a phase commute."""
    random = np.random.default_rng(seed)
    phases = []
    for _ in range(5):
        adds, phase = random.integers(2), []
        op = str(random.choice(["sum", "bxor", "max"] if np.dtype(dtype).kind in "iu" else ["sum"]))
        for origin in range(size):
            for _ in range(4):
                target = int(random.integers(size))
                share = LENGTH // size
                low, high = (0, LENGTH) if adds else (origin * share, origin * share + share)
                at, positions = places(random, low, high)
                values = random.integers(0, 4, positions.size).astype(dtype)
                verb = str(random.choice(["accumulate", "get_accumulate"])) if adds else "put"
                phase.append((origin, verb, target, at, positions, values, op if adds else "replace"))
        phases.append(phase)
    return phases


def carry_out(parts: Any, step: tuple[Any, ...]) -> None:
    _, _, target, _, positions, values, op = step
    functions = {"sum": np.add, "bxor": np.bitwise_xor, "max": np.maximum, "replace": lambda _, value: value}
    parts[target, positions] = functions[op](parts[target, positions], values)


def random_programs(world: un.Communicator, seeds: range, kind: str) -> int:
    checked = 0
    for seed in seeds:
        dtype = NAMES[seed % len(NAMES)]
        own = np.zeros(LENGTH, dtype) if kind == "own" or (kind == "mixed" and world.rank == 1) else LENGTH
        oracle = np.zeros((world.size, LENGTH), dtype)
        with world.window(own, dtype) as window:
            for number, phase in enumerate(program(seed, world.size, dtype)):
                epoch = [window.fence, window.lock_all][(seed + number) % 2]
                with epoch():
                    for origin, verb, target, at, _, values, op in phase:
                        if origin != world.rank or not (values.size or isinstance(at, (slice, np.ndarray))):
                            continue
                        if verb == "put":
                            window.put(values, target, at)
                        else:
                            getattr(window, verb)(values, target, at, op)
                window.fence()
                for step in phase:
                    carry_out(oracle, step)
                assert window.array.tolist() == oracle[world.rank].tolist(), (seed, number)
                other = (world.rank + 1 + number) % world.size
                assert window.get(other).tolist() == oracle[other].tolist(), (seed, number)
                window.fence(last=True)
                checked += 1
    return checked


@pytest.mark.parametrize("kind", ["new", "own", "mixed"])
def test_random_programs_leave_the_parts_that_a_serial_program_leaves(ranks: Ranks, kind: str) -> None:
    assert ranks.run_calls(random_programs, range(10), kind) == [50] * SIZE


# --- single operations ---------------------------------------------------------------------------------------------


def all_operations(world: un.Communicator) -> Any:
    nxt = (world.rank + 1) % world.size
    with world.window((2, 3), "float64") as window:
        with window.fence():
            window.put(np.arange(6.0).reshape(2, 3), nxt)
        assert window.array.tolist() == [[0, 1, 2], [3, 4, 5]]
        window.fence()
        before = window.get_accumulate(np.array([1.0, 1.0]), nxt, at=[5, 0], op="prod")
        old = window.fetch_and_op(0.5, nxt, at=1, op="replace")
        swaps = [window.compare_and_swap(9.0, expected, nxt, at=2).tolist() for expected in (7.0, 2.0, 2.0)]
        out = np.zeros(2)
        again = window.get(nxt, at=1, out=out)
        atomic = window.get_accumulate(np.zeros(1), nxt, at=2, op="no_op")
        single = window.get(nxt, at=4)
        window.accumulate(-1, nxt, at=4)
        window.flush(nxt)
        work = window.get(nxt, slice(3, None), wait=False)
        late = np.zeros(1)
        window.get(nxt, 0, out=late, wait=False)
        window.flush_all()
        window.fence(last=True)
        assert type(old) is np.float64
        assert again is out
        return (
            before.tolist(),
            old,
            swaps,
            out.tolist(),
            atomic.tolist(),
            single.tolist(),
            work.wait().tolist(),
            late[0],
        )


def test_every_operation_returns_what_it_should(ranks: Ranks) -> None:
    expected = [5.0, 0.0], 1.0, [2.0, 2.0, 9.0], [0.5, 9.0], [9.0], [4.0], [3.0, 3.0, 5.0], 0.0
    assert ranks.run_calls(all_operations) == [expected] * SIZE


def large_operations(world: un.Communicator) -> None:
    length = (3 << 20) // 8 + 5  # several requests
    x, positions = np.arange(length), np.arange(length)[::-1].copy()
    with world.window(length if world.rank else np.zeros(length, int), "int64") as window:
        with window.lock_all():
            for target in range(world.size):
                window.accumulate(x, target, op="sum")
                window.get_accumulate(x, target, positions)
        window.fence()
        total = world.size * (length - 1)
        assert (window.array == total).all()
        assert (window.get(0, slice(None, None, -2)) == total).all()
        window.fence()
        window.put(x[: length // 3], (world.rank + 1) % world.size, slice(0, 3 * (length // 3), 3))
        window.fence()
        assert (window.array[: 3 * (length // 3) : 3] == x[: length // 3]).all()


def test_operations_of_several_mebibytes_are_whole(ranks: Ranks) -> None:
    ranks.run_calls(large_operations)


def every_dtype(world: un.Communicator) -> None:
    for name in DTYPES:
        with world.window(4, name) as window, window.fence():
            one = np.ones(1, window.dtype)
            op = "lor" if name == "bool" else "sum"
            for target in range(world.size):
                window.accumulate(one, target, at=3, op=op)
                assert window.get(target, 0).tolist() == [0]
        assert window.array.astype(complex).tolist() == [0, 0, 0, 1 if name == "bool" else world.size]


def test_windows_have_every_dtype(ranks: Ranks) -> None:
    ranks.run_calls(every_dtype)


def views_and_lengths(world: un.Communicator) -> Any:
    with world.window(8 * world.rank, "uint8") as window:
        pairs = window.view("float64")
        with window.fence():
            if world.rank == 0:
                pairs.put(np.array([1.5, 2.5]), 2)
            refused = raised(lambda: window.get(0, 0))
        return window.lengths, pairs.lengths, pairs.array.tolist(), str(refused)


def test_parts_have_lengths_of_their_own_and_views_of_other_dtypes(ranks: Ranks) -> None:
    results = ranks.run_calls(views_and_lengths)
    assert [result[:2] for result in results] == [((0, 8, 16), (0, 1, 2))] * SIZE
    assert [result[2] for result in results] == [[], [0.0], [1.5, 2.5]]
    assert all("element 0 is not in the window of rank 0, which has 0 elements" in result[3] for result in results)


def shared_parts(world: un.Communicator, contiguous: bool) -> Any:
    with world.window(3, "int32", contiguous=contiguous) as window:
        window.fence()
        window.array[:] = world.rank
        window.sync()
        window.fence()
        try:
            parts = [window.shared(rank) for rank in range(world.size)]
        except un.UsageError as error:
            return str(error)
        parts[0][world.rank] = 10 + world.rank  # each rank another element
        window.fence(last=True)
        addresses = [part.__array_interface__["data"][0] for part in parts]
        return parts[0].tolist(), parts[1].tolist(), np.diff(addresses).tolist()


def test_ranks_of_a_host_use_parts_of_each_other_as_arrays(ranks: Ranks) -> None:
    for contiguous, distance in ((False, 64), (True, 12)):
        results = ranks.run_calls(shared_parts, contiguous)
        if ranks.transport == "shm":
            assert results == [([10, 11, 12], [1, 1, 1], [distance] * 2)] * SIZE
        else:
            assert all("does not map the part of rank" in result for result in results)


# --- atomicity and locks -------------------------------------------------------------------------------------------


def contended(world: un.Communicator, rounds: int) -> Any:
    """Let all ranks change the same elements; return the tickets of this rank and the sums that rank 0 has."""
    tickets, sums = [], []
    with world.window(np.zeros(1, np.int64) if world.rank else 1, "int64") as window, window.lock_all():
        tickets += [int(window.fetch_and_op(1, 0)) for _ in range(rounds)]
    for name in ("int8", "float16", "float32", "complex128", "int64"):
        with world.window(2, name) as window:
            with window.lock_all():
                for _ in range(30):
                    window.accumulate(np.ones(2, name), 0)
                mine = 0
                while mine < 10:  # add by compare-and-swap
                    seen = window.get_accumulate(np.zeros(1, name), 0, at=1, op="no_op")[0]
                    added = np.array(seen + np.array(1, name), name)
                    mine += window.compare_and_swap(added, seen, 0, at=1) == seen
            window.fence()
            sums.append(window.get(0).astype(complex).real.tolist())
            window.fence(last=True)
    return tickets, sums


def test_accumulates_fetches_and_swaps_are_atomic(ranks: Ranks) -> None:
    results = ranks.run_calls(contended, 200)
    every = [ticket for tickets, _ in results for ticket in tickets]
    assert sorted(every) == list(range(200 * SIZE))
    assert all(tickets == sorted(tickets) for tickets, _ in results)
    assert [sums for _, sums in results] == [[[30 * SIZE, 40 * SIZE]] * 5] * SIZE


def mixed_accumulates(world: un.Communicator, own: bool) -> Any:
    """Let all ranks change the part of rank 0 by whole arrays, by strides and by single elements."""
    length, rounds = 20_000, 20
    ones, tickets = np.ones(length, np.int64), []
    with world.window(np.zeros(length, np.int64) if own else length, "int64") as window:
        with window.lock_all():
            for _ in range(rounds):
                window.accumulate(ones, 0)
                tickets += [int(window.fetch_and_op(10**6, 0, at=5)) // 10**6 for _ in range(20)]
                window.accumulate(ones[::2], 0, at=slice(0, length, 2))
        window.fence()
        total = window.get(0)
    return tickets, [int(total[place]) for place in (0, 1, 5, length - 1)], int(total.sum())


@pytest.mark.parametrize("own", [False, True])
def test_large_and_small_accumulates_are_atomic_together(ranks: Ranks, own: bool) -> None:
    results, calls = ranks.run_calls(mixed_accumulates, own), 20 * SIZE
    assert sorted(ticket for tickets, _, _ in results for ticket in tickets) == list(range(20 * calls))
    single = 20 * calls * 10**6
    expected = [2 * calls, calls, calls + single, calls], 30_000 * calls + single
    assert [(places, total) for _, places, total in results] == [expected] * SIZE


def exclusive_counts(world: un.Communicator, rounds: int) -> Any:
    with world.window(2, "int64") as window:
        for _ in range(rounds):
            for target in range(world.size):
                with window.lock(target):
                    first, second = window.get(target)
                    assert first == second
                    window.put(first + 1, target, 0)
                    window.flush(target)
                    window.put(second + 1, target, 1)
            with window.lock(world.rank, exclusive=False), window.lock((world.rank + 1) % world.size, exclusive=False):
                for target in (world.rank, (world.rank + 1) % world.size):
                    first, second = window.get(target)
                    assert first == second
        window.fence()
        return window.array.tolist()


def test_exclusive_locks_exclude_all_others(ranks: Ranks) -> None:
    assert ranks.run_calls(exclusive_counts, 40) == [[40 * SIZE] * 2] * SIZE


def served_while_computing(world: un.Communicator) -> Any:
    with world.window(2, "int64") as window:
        if world.rank == 0:
            while window.array[0] < world.size - 1:  # makes no call at all
                pass
            window.fence()
            return window.array.tolist()
        with window.lock(0):
            window.accumulate(10 + world.rank, 0, at=1)
            window.fetch_and_op(1, 0)
        window.fence()
        return None


def test_target_need_not_take_part(ranks: Ranks) -> None:
    assert ranks.run_calls(served_while_computing)[0] == [2, 23]


# --- post, start, complete, wait -----------------------------------------------------------------------------------


def neighbours(world: un.Communicator, rounds: int) -> Any:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    seen = []
    with world.window(2, "int64") as window:
        for number in range(rounds):
            window.post([left, right])
            with window.start((left, right)):
                outside = raised(lambda: window.get(world.rank))
                window.put(10 * number + world.rank, left, at=1)
                window.put(10 * number + world.rank, right, at=0)
            if number % 2:
                window.wait()
            else:
                while not window.test():
                    time.sleep(0.001)
            seen.append(window.array.tolist())
        with_self = (
            window.post([world.rank]),
            window.start([world.rank]),
            window.put(5, world.rank),
            window.complete(),
        )
        window.wait()
        assert with_self[2] is None
        return seen, str(outside), int(window.array[0])


def test_groups_open_epochs_by_post_and_start(ranks: Ranks) -> None:
    for rank, (seen, outside, own) in enumerate(ranks.run_calls(neighbours, 6)):
        left, right = (rank - 1) % SIZE, (rank + 1) % SIZE
        assert seen == [[10 * number + left, 10 * number + right] for number in range(6)]
        assert f"no epoch allows access to rank {rank}" in outside
        assert own == 5


# --- wrong calls ---------------------------------------------------------------------------------------------------


def wrong_calls(world: un.Communicator) -> list[str]:
    """Make wrong calls; return their errors. All of them leave the window usable."""
    errors = []

    def refuse(call: Callable[[], Any]) -> None:
        error = raised(call)
        assert type(error) is un.UsageError, error
        errors.append(error.message)

    for arguments in (("x",), (-1,), (2**62,), ((2, -3),), (3, "nonsense"), ([1.5],), (3, "O")):
        refuse(lambda arguments=arguments: world.window(*arguments))
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for array in (read_only, np.zeros((4, 4)).T, np.zeros(6)[::2], np.zeros(3, object)):
        refuse(lambda array=array: world.window(array))
    with world.window(4, "int64") as window:
        x = np.arange(4)
        refuse(lambda: window.put(x, 1))
        refuse(lambda: window.flush(0))
        refuse(lambda: window.unlock(0))
        refuse(window.unlock_all)
        refuse(window.complete)
        refuse(window.wait)
        with window.fence():
            refuse(lambda: window.put(x, world.size))
            refuse(lambda: window.put(x, -1))
            refuse(lambda: window.put(x, "0"))
            refuse(lambda: window.put(x, 0, at=1))
            refuse(lambda: window.put(x, 0, at=-1))
            refuse(lambda: window.put(x, 0, at=slice(0, 9)))
            assert errors[-1].startswith("slice(0, 9, None) is not in the window of rank 0")
            refuse(lambda: window.put(x, 0, at=slice(0, 3)))
            refuse(lambda: window.put(x[:2], 0, at=[0, 4]))
            refuse(lambda: window.put(x[:2], 0, at=[0, -1]))
            refuse(lambda: window.put(x[:2], 0, at=[0.5, 1]))
            refuse(lambda: window.put(x, 0, at="0"))
            refuse(lambda: window.put(x.astype("int32"), 0))
            refuse(lambda: window.put(1.5, 0))
            refuse(lambda: window.put(2**63, 0))
            refuse(lambda: window.put("x", 0))
            refuse(lambda: window.accumulate(x, 0, op="avg"))
            refuse(lambda: window.accumulate(x, 0, op="summ"))
            refuse(lambda: window.accumulate(x, 0, op="minloc"))
            refuse(lambda: window.accumulate(x, 0, op=un.Op.from_function(np.add)))
            refuse(lambda: window.accumulate(x, 0, op=un.Op.premul_sum(2)))
            refuse(lambda: window.get(0, out=np.zeros(4)))
            refuse(lambda: window.get(0, out=np.zeros(5, int)))
            refuse(lambda: window.get(0, out=read_only))
            refuse(lambda: window.get(0, slice(0, 2), out=x))
            refuse(lambda: window.get_accumulate(x, 0, out=np.zeros(3, int)))
            refuse(lambda: window.fetch_and_op(x, 0))
            refuse(lambda: window.fetch_and_op(1, 0, at=slice(0, 2)))
            refuse(lambda: window.compare_and_swap(1, 2, 0, at=[1]))
            refuse(lambda: window.compare_and_swap(1, 2.5, 0))
            refuse(lambda: window.get(0, timeout_s=-1, wait=False))
            refuse(lambda: window.view("nonsense"))
            refuse(lambda: window.shared(7))
        with window.lock(0, exclusive=False):
            refuse(window.fence)
            refuse(lambda: window.lock(0))
            refuse(window.lock_all)
            refuse(lambda: window.start([1]))
            refuse(window.free)
            refuse(lambda: window.get(1))
        with window.lock_all():
            refuse(lambda: window.unlock(0))
            refuse(lambda: window.lock(0))
        refuse(lambda: window.start([0, 0]))
        refuse(lambda: window.post([9]))
        refuse(lambda: window.post(3))
        window.post([])
        refuse(lambda: window.post([]))
        refuse(window.fence)
        window.wait()
        with window.start([]):
            refuse(window.fence)
            refuse(lambda: window.lock(0))
            refuse(lambda: window.start([]))
        with window.fence():
            window.put(x, world.rank)
        assert window.array.tolist() == [0, 1, 2, 3]
    refuse(lambda: window.put(x, 0))
    refuse(window.fence)
    window.free()
    return errors


def test_wrong_calls_are_refused_and_change_nothing(ranks: Ranks) -> None:
    first, *others = ranks.run_calls(wrong_calls)
    assert len(first) > 60
    assert [errors == first for errors in others] == [True] * (SIZE - 1)
    assert "beyond the range" not in first[0]


def refused_by_target(world: un.Communicator) -> Any:
    from unisono.collectives.windows.elements import Selection

    with world.window(np.zeros(4), "float64") as window:
        errors = []
        with window.fence():
            if world.rank == 1:
                target, element = window._opened.targets[0], window._element
                for where in (Selection(3, 2), Selection(-1, 1), Selection(0, 3, 2), Selection(0, 1, 1, np.array([4]))):
                    target.put(element, where, np.ones(where.elements))
                    errors.append(raised(lambda: window.flush(0)))
                target.accumulate(element, 4, Selection(0, 1), np.ones(1))  # band of floats
                errors.append(raised(lambda: window.flush(0)))
                errors.append(raised(lambda: target.get(element, Selection(0, 5), np.zeros(5)).wait(5)))
                errors.append(raised(lambda: target.unlock(True, 5)))
                window.put(1.5, 0, at=3)
        assert all(error.peer == 0 for error in errors)
        return [f"{type(error).__name__}: {error.message}" for error in errors], window.array.tolist()


def test_target_refuses_what_its_part_does_not_hold_and_names_the_range(ranks: Ranks) -> None:
    results = ranks.run_calls(refused_by_target)
    refused = "UsageError: rank 0 refused an operation: "
    assert results[1][0] == [
        refused + f"{count} elements from element {start} on are not all in its window, which has 4 elements"
        for count, start in ((2, 3), (1, -1), (3, 0), (1, 0))
    ] + [
        refused + "the operation on 1 elements from element 0 on is not defined for their dtype",
        refused + "5 elements from element 0 on are not all in its window, which has 4 elements",
        refused + "this rank does not hold its lock",
    ]
    assert results[0][1] == [0, 0, 0, 1.5]


def disagree(world: un.Communicator) -> Any:
    errors = [
        raised(lambda: world.window(3, "int64" if world.rank else "int32")),
        raised(lambda: world.window(3, contiguous=world.rank == 0)),
    ]
    return [type(error) for error in errors], int(world.allreduce(np.array(1)))


def test_ranks_that_disagree_on_a_window_learn_it_and_go_on(ranks: Ranks) -> None:
    assert ranks.run_calls(disagree) == [([un.MismatchError] * 2, SIZE)] * SIZE


def lacks_memory(world: un.Communicator) -> Any:
    error = raised(lambda: world.window(1 << 50 if world.rank == 1 else 3, "uint8"))
    return type(error), error.message, error.peer, int(world.allreduce(np.array(1)))


def test_all_ranks_learn_which_one_has_no_memory_for_its_part(ranks: Ranks) -> None:
    text = f"rank 1 has no memory for its part of {1 << 50} bytes: pass a smaller shape there"
    assert ranks.run_calls(lacks_memory) == [(un.UsageError, text, 1, SIZE)] * SIZE


# --- the end of windows --------------------------------------------------------------------------------------------


def closed_with_communicator(world: un.Communicator) -> Any:
    part = world.dup()
    window = part.window(3, "int64")
    window.lock(0, exclusive=False)
    if world.rank == 0:
        window.put(4, 0)
    world.barrier()
    part.close()
    array = window.array.tolist()
    error = raised(lambda: window.get(0))
    window.free()
    world.barrier()
    return array[:1] if world.rank == 0 else None, str(error)


def test_window_is_closed_with_its_communicator(ranks: Ranks) -> None:
    for rank, (array, error) in enumerate(ranks.run_calls(closed_with_communicator)):
        assert array == ([4] if rank == 0 else None)
        assert "this window is closed" in error


def used_by_forked_child(world: un.Communicator) -> int:
    with world.window(1, "int64") as window:
        with window.fence():
            child = os.fork()
            if child == 0:
                errors = [raised(lambda rank=rank: window.put(9, rank)) for rank in range(world.size)]
                os._exit(0 if all("forked from a rank" in str(error) for error in errors) else 1)
            _, status = os.waitpid(child, 0)
            window.put(1, world.rank)
        assert window.array.tolist() == [1]
        return status


def test_forked_child_cannot_use_the_window_of_its_parent(ranks: Ranks) -> None:
    assert ranks.run_calls(used_by_forked_child) == [0] * SIZE


def many_windows(world: un.Communicator, count: int) -> Any:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(count):
        with world.window(10) as window, window.fence():
            window.put(1.0, (world.rank + 1) % world.size)
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - before


def test_freed_windows_leave_no_descriptors(ranks: Ranks) -> None:
    ranks.run_calls(many_windows, 1)
    assert all(more <= 3 for more in ranks.run_calls(many_windows, 8))


def hold_lock_and_die(world: un.Communicator, say: Say, kind: str) -> Any:
    window = world.window(np.zeros(2) if kind == "own" else 2, "float64")
    if world.rank == 2:
        window.lock(0)
    world.barrier()
    if world.rank == 2:
        say("locked")
        time.sleep(DEADLINE_S)
    say("ready")
    error = raised(lambda: window.lock(0)) if world.rank == 0 else raised(window.lock_all)
    survivors = world.shrink()
    after = raised(lambda: window.put(1.0, 1))
    total = int(survivors.allreduce(np.array(1)))
    with survivors.window(1) as another, another.fence():
        another.put(3.0, 1 - survivors.rank)
    survivors.close()
    say((type(error).__name__, type(after).__name__, total, float(another.array[0])))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_death_of_the_holder_ends_the_wait_for_its_lock(tmp_path: Path, transport: str) -> None:
    with Job(hold_lock_and_die, 3, tmp_path, "new", transports=transport) as job:
        assert job.hear(2) == "locked"
        assert job.hear_all(but=2) == ["ready"] * 2
        job.signal(2, signal.SIGKILL)
        assert job.hear_all(but=2) == [("PeerLostError", "AbortedError", 2, 3.0)] * 2


def die_within_the_gate(world: un.Communicator, say: Say, kind: str) -> Any:
    """Rank 2 makes accumulates that close the gate of rank 0's part for most of the time, until it is killed."""
    window = world.window(np.zeros(1 << 17) if kind == "own" else 1 << 17, "float64")
    ones = np.ones(1 << 17)
    window.lock_all()
    world.barrier()

    def accumulate_without_end() -> None:
        for step in itertools.count():
            if step == 1:
                say("ready")
            if world.rank == 2 or step % 2:
                window.accumulate(ones, 0)
            else:
                window.fetch_and_op(1.0, 0, 5)
            window.flush(0)

    error = raised(accumulate_without_end)
    survivors = world.shrink()
    with survivors.window(1 << 10) as another, another.fence():
        another.accumulate(np.ones(1 << 10), 0)
    survivors.close()
    say((type(error).__name__, float(another.array[0])))


@pytest.mark.parametrize("kind", ["new", "own"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_death_within_the_gate_of_accumulates_ends_those_of_others(tmp_path: Path, transport: str, kind: str) -> None:
    with Job(die_within_the_gate, 3, tmp_path, kind, transports=transport) as job:
        assert job.hear_all() == ["ready"] * 3
        job.signal(2, signal.SIGKILL)
        assert [job.hear(0), job.hear(1)] == [("PeerLostError", 2.0), ("PeerLostError", 0.0)]


def leave_early(world: un.Communicator, say: Say) -> None:
    window = world.window(1, "int64")
    if world.rank == 1:
        window.lock(0)
        window.put(8, 0)
        window.flush(0)
        if 0 not in window._opened.memory:
            window.unlock(0)
        world.close()
        return
    while not world._executor.session.control.departed(1):
        time.sleep(0.01)
    time.sleep(1)  # longer than a suspicion lasts
    window.lock(0)  # rank 1 has given it back
    say((world._executor.has_failed(), int(window.array[0])))
    world.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_that_leaves_gives_its_locks_back_and_fails_no_other(tmp_path: Path, transport: str) -> None:
    with Job(leave_early, 2, tmp_path, transports=transport) as job:
        assert job.hear(0) == (False, 8)


def wait_in_vain(world: un.Communicator, say: Say) -> Any:
    window = world.window(1)
    if world.rank == 1:
        window.lock(0)
    world.barrier()
    if world.rank == 0:
        error = raised(lambda: window.lock(0, timeout_s=0.3))
        say((type(error).__name__, str(error)))
        return
    error = raised(world.barrier)
    say((type(error).__name__, ""))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lock_that_is_held_too_long_is_a_timeout(tmp_path: Path, transport: str) -> None:
    with Job(wait_in_vain, 2, tmp_path, transports=transport) as job:
        name, text = job.hear(0)
        assert name == "CollectiveTimeoutError"
        assert "rank 0 waited 0.3 s" in text
        assert "rank 1" in text
        assert job.hear(1)[0] == "CollectiveTimeoutError"


def send_garbage(world: un.Communicator, say: Say, nbytes: int) -> Any:
    window = world.window(np.zeros(1))
    if world.rank == 1:
        executor = window._opened.executor
        executor.send(np.full(nbytes, 255, np.uint8), DTYPES["uint8"], 0, 1).wait(5)
    error = None
    while error is None:
        error = raised(world.barrier)
    say((type(error).__name__, str(error)))


@pytest.mark.parametrize("nbytes", [5, 64])
def test_request_that_no_rank_sends_fails_the_job(tmp_path: Path, nbytes: int) -> None:
    with Job(send_garbage, 2, tmp_path, nbytes, transports="shm") as job:
        for name, text in job.hear_all():
            assert name == "InternalError"
            assert "for a window" in text
