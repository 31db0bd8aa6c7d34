"""Communicators of some of the ranks: their members, the separation of their calls, and their end."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.collectives.calls import places
from unisono.tuning.machine.levels import Processors

SHORT_S = 0.5
X = np.ones(8, np.float32)
Say = Callable[[Any], None]
bounded = settings(max_examples=12, deadline=None, derandomize=True)
small_or_extreme = st.one_of(st.integers(-2, 2), st.sampled_from([-(1 << 63), (1 << 63) - 1]))


four = ranks_fixture((4, "shm"), (4, "tcp"))


# Start ranks for one test, which may end their job.
fresh = ranks_fixture((4, "shm"), (4, "tcp"), scope="function")


# --- members -------------------------------------------------------------------------------------------------------


def split_and_compute(world: un.Communicator, colors: list[Any], keys: list[Any]) -> Any:
    part = world.split(colors[world.rank], keys[world.rank])
    if part is None:
        return None
    with part:
        x = np.arange(6) + 10 ** (world.rank % 4)
        root = part.size - 1
        results = [part.allreduce(x), part.allgather(x), part.scan(x), part.broadcast(x, root)]
        results.append(part.allgatherv(np.full(part.rank, world.rank), list(range(part.size))))
        facts = part.rank, part.size, part.world_ranks, part.hosts, part.local_rank
        return facts, [result.tolist() for result in results]


def split_by_model(colors: list[Any], keys: list[Any]) -> list[Any]:
    """Return the expected value of `split_and_compute`, by numpy."""
    models: list[Any] = [None] * len(colors)
    for color in {color for color in colors if color is not None}:
        members = [rank for rank, its in enumerate(colors) if its == color]
        members.sort(key=lambda rank: (rank if keys[rank] is None else keys[rank], rank))
        arrays = np.array([np.arange(6) + 10 ** (member % 4) for member in members])
        for rank, member in enumerate(members):
            facts = rank, len(members), tuple(members), (tuple(range(len(members))),), rank
            counted = np.repeat(members, range(len(members)))
            results = [arrays.sum(0), arrays.ravel(), arrays[: rank + 1].sum(0), arrays[-1], counted]
            models[member] = facts, [result.tolist() for result in results]
    return models


@bounded
@given(
    colors=st.lists(st.one_of(st.none(), small_or_extreme), min_size=4, max_size=4),
    keys=st.lists(st.one_of(st.none(), small_or_extreme), min_size=4, max_size=4),
)
def test_split_is_by_color_and_key(four: Ranks, colors: list[Any], keys: list[Any]) -> None:
    assert four.run_calls(split_and_compute, colors, keys) == split_by_model(colors, keys)


def split_by_place(world: un.Communicator) -> list[Any]:
    results: list[Any] = []
    for kind in ("shared", "host", "numa"):
        with world.split(type=kind, key=-world.rank) as part:
            results.append((part.world_ranks, int(part.allreduce(np.array(1)))))
    results += [error_of(lambda: world.split(type="hots")), error_of(lambda: world.split(0, type="host"))]
    return results


def test_split_by_place_joins_the_ranks_of_one_machine(four: Ranks) -> None:
    for rank, (shared, host, numa, (kind, text), (_, both)) in enumerate(four.run_calls(split_by_place)):
        assert host == numa == ((3, 2, 1, 0), 4)
        assert shared == (host if four.transport == "shm" else ((rank,), 1))  # no other rank shares memory over TCP
        assert kind == "UsageError"
        assert "type='hots' cannot be used: it must be one of 'shared', 'host', 'numa'; did you mean host?" in text
        assert "pass a color or a type to split(), not both" in both


NODES = {"numa": (frozenset({0, 1}), frozenset({2, 3}))}


def test_color_of_a_place_differs_by_host_and_by_numa_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = ((0, 1), (2, 3))
    monkeypatch.setattr(places, "processors", lambda: Processors(NODES))
    colors = {}
    for cores in ({0}, {1}, {2}, {1, 2}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: cores)
        colors[frozenset(cores)] = places.color_of_place("numa", hosts, 1)
    assert colors[frozenset({0})] == colors[frozenset({1})]
    assert len(set(colors.values())) == 3
    color_of = {kind: [places.color_of_place(kind, hosts, rank) for rank in range(4)] for kind in ("shared", "host")}
    first, same, other, _ = color_of["shared"]
    assert first == same != other
    assert len(set(color_of["host"])) == 1


def nest(world: un.Communicator) -> Any:
    """Split the upper three ranks off, reverse them, and take two of these."""
    if world.rank == 0:
        return None
    with world.subgroup([3, 2, 1]) as three:
        if three.rank == 2:
            return three.world_ranks, three.rank
        with three.subgroup([1, 0]) as two:
            result = np.zeros(1, int)
            two.sendrecv(np.array([world.rank]), 1 - two.rank, result, 1 - two.rank, tag=4)
            return two.world_ranks, two.rank, int(result[0]), sorted(two.stats())


def test_nested_subgroups_keep_their_requested_order(four: Ranks) -> None:
    none, *others = four.run_calls(nest)
    assert none is None
    assert others == [((3, 2, 1), 2), ((2, 3), 0, 3, [1]), ((2, 3), 1, 2, [0])]


def be_alone(world: un.Communicator) -> float:
    with world.subgroup([world.rank]) as alone:
        return float(alone.allreduce(np.full(3, world.rank + 1.0), "avg").sum())


def test_subgroup_may_have_a_single_rank(four: Ranks) -> None:
    assert four.run_calls(be_alone) == [3.0, 6.0, 9.0, 12.0]


def host_views(world: un.Communicator) -> Any:
    with world.local() as local:
        leaders = world.leaders()
        total = None if leaders is None else int(leaders.allreduce(np.array(1)))
        return local.world_ranks, int(local.allreduce(np.array(world.rank))), total


def test_host_and_leader_communicators_have_the_expected_ranks(four: Ranks) -> None:
    assert four.run_calls(host_views) == [((0, 1, 2, 3), 6, 1)] + [((0, 1, 2, 3), 6, None)] * 3


def plan_and_count(world: un.Communicator) -> Any:
    with world.split(world.rank % 2) as half:
        x = np.ones(100, np.float32)
        accumulate = half.plan("allreduce", x, out=x)
        for _ in range(3):
            accumulate()
        return float(x[0]), half.explain("allreduce", 400).choice, set(half.stats())


def test_subgroup_has_its_own_persistent_calls_stats_and_choices(four: Ranks) -> None:
    results = four.run_calls(plan_and_count)
    assert [row[0] for row in results] == [8.0] * 4
    assert len({row[1] for row in results}) == 1
    assert [row[2] for row in results] == [{1}, {1}, {0}, {0}]


# --- separate calls ------------------------------------------------------------------------------------------------


def gather_nothing(world: un.Communicator) -> int:
    """Gather empty arrays on a new communicator, which its first rank closes before the others begin."""
    with world.dup() as copy:
        if world.rank != 0:
            time.sleep(0.3)
        gathered = copy.gather(np.zeros(0), root=world.size - 1)
        return -1 if gathered is None else gathered.size


def test_rank_with_nothing_to_exchange_may_close_its_subgroup_early(fresh: Ranks) -> None:
    assert fresh.run_calls(gather_nothing) == [-1, -1, -1, 0]


def interleave(world: un.Communicator, seed: int) -> bool:
    """Call the world, halves, overlapping pairs and duplicates in a random order, which is the same on all ranks."""
    pairs = [(rank, (rank + 1) % world.size) for rank in range(world.size)]
    groups = [world, world.dup(), world.dup(), world.split(world.rank % 2)]
    groups += [world.subgroup(pair) if world.rank in pair else None for pair in pairs]
    dice, right = random.Random(seed), True
    for _ in range(60):
        group, count = groups[dice.randrange(len(groups))], dice.choice([1, 7, 50_000])
        if group is not None:
            x = np.full(count, world.rank + 1)
            right &= bool((group.allreduce(x) == sum(group.world_ranks) + group.size).all())
    for group in groups[1:]:
        if group is not None:
            group.close()
    return right


@bounded
@given(seed=st.integers(0, 1 << 30))
def test_overlapping_communicators_may_be_called_in_any_order(four: Ranks, seed: int) -> None:
    assert four.run_calls(interleave, seed) == [True] * 4


def cross(world: un.Communicator) -> list[int]:
    """Each rank calls two duplicates from two threads. Ranks differ in the duplicate on which they begin."""
    groups, results = [world.dup(), world.dup()], [0, 0]
    order = [0, 1] if world.rank % 2 == 0 else [1, 0]

    def reduce(index: int) -> None:
        for _ in range(20):
            results[index] += int(groups[index].allreduce(np.array(index + 1)))

    threads = [threading.Thread(target=reduce, args=(index,)) for index in order]
    for thread in threads:
        thread.start()
        time.sleep(0.005)
    for thread in threads:
        thread.join(DEADLINE_S)
    for group in groups:
        group.close()
    return results


def test_two_threads_on_two_communicators_do_not_wait_for_each_other(four: Ranks) -> None:
    assert four.run_calls(cross) == [[80, 160]] * 4


def share(world: un.Communicator) -> list[float]:
    """Two threads make the same calls on one communicator, which has not made such a call before."""
    totals = [0.0, 0.0]

    def reduce(index: int) -> None:
        for count in range(1, 40):
            totals[index] += float(shared.allreduce(np.ones(5000, np.float32), "sum")[count])

    with world.dup() as shared:
        threads = [threading.Thread(target=reduce, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        return totals


def test_threads_may_make_the_same_calls_on_one_communicator(four: Ranks) -> None:
    assert four.run_calls(share) == [[156.0, 156.0]] * 4


# --- wrong calls ---------------------------------------------------------------------------------------------------

WRONG = {
    "a colour that is no number": lambda world: world.split("red"),
    "a colour that is true": lambda world: world.split(True),
    "a colour of 65 bits": lambda world: world.split(1 << 63),
    "a key that is no number": lambda world: world.split(0, 1.5),
    "a rank that does not exist": lambda world: world.subgroup([world.rank, world.size]),
    "a negative rank": lambda world: world.subgroup([world.rank, -1]),
    "a rank twice": lambda world: world.subgroup([world.rank, world.rank]),
    "no ranks": lambda world: world.subgroup([]),
    "others": lambda world: world.subgroup([(world.rank + 1) % world.size]),
}


def err_then_go_on(world: un.Communicator, what: str) -> tuple[str, int]:
    error = error_of(lambda: WRONG[what](world)) if world.rank == 1 else ("", "")
    part = world.split(0)
    assert part is not None
    with part:
        return error[0], int(part.allreduce(np.array(1)))


@pytest.mark.parametrize("what", WRONG)
def test_wrong_subgroup_is_refused_locally_and_later_calls_work(four: Ranks, what: str) -> None:
    results = four.run_calls(err_then_go_on, what)
    assert [row[0] for row in results] == ["", "UsageError", "", ""]
    assert [row[1] for row in results] == [4] * 4


# --- closing -------------------------------------------------------------------------------------------------------


def close_in_turn(world: un.Communicator) -> list[str]:
    child = world.dup()
    grandchild, other = child.dup(), world.dup()
    child.close()
    child.close()
    kinds = [error_of(lambda comm=comm: comm.barrier())[0] for comm in (child, grandchild, other, world)]  # type: ignore[misc]
    world.close()
    return [*kinds, error_of(other.barrier)[0], error_of(lambda: world.split(0))[0], error_of(world.dup)[0]]


def test_closing_a_communicator_closes_its_descendants_only(fresh: Ranks) -> None:
    assert fresh.run_calls(close_in_turn) == [["UsageError", "UsageError", "", "", *["UsageError"] * 3]] * 4


def leave_one(world: un.Communicator) -> tuple[str, str]:
    """Rank 2 closes a subgroup, and the other ranks of the subgroup go on without it."""
    if world.rank == 0:
        return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))
    with world.subgroup([1, 2, 3]) as three:
        three.barrier()
        if world.rank != 2:
            return error_of(lambda: three.allreduce(X, algorithm="ring", timeout_s=DEADLINE_S))
    return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))


def test_peer_lost_error_of_a_subgroup_names_the_world_rank(fresh: Ranks) -> None:
    for kind, text in fresh.run_calls(leave_one):
        assert kind == "PeerLostError", text
        assert "rank 2" in text


def come_late(world: un.Communicator) -> tuple[str, str]:
    """Rank 1 closes a subgroup before rank 3 opens its first link there."""
    pair = world.subgroup([1, 3]) if world.rank % 2 else world
    if world.rank == 1:
        pair.close()
    world.barrier()
    if world.rank == 3:
        return error_of(lambda: pair.allreduce(X, timeout_s=DEADLINE_S))
    return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))


def test_late_call_on_a_subgroup_says_that_the_peer_departed(fresh: Ranks) -> None:
    for kind, text in fresh.run_calls(come_late):
        assert kind == "PeerLostError", text
        assert "rank 1" in text


def fork_and_go_on(world: un.Communicator) -> tuple[str, int]:
    """Fork a child of the last rank.

    A call of the child on a subgroup is refused; then all ranks reduce on the subgroup.
    """
    text = ""
    with world.dup() as group:
        if world.rank == world.size - 1:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(writing, error_of(group.barrier)[1].encode())
                os._exit(0)
            os.close(writing)
            os.waitpid(child, 0)
            with open(reading) as pipe:
                text = pipe.read()
        return text, int(group.allreduce(np.array(1)))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_subgroup_call_in_a_forked_child_is_refused(fresh: Ranks) -> None:
    *others, last = fresh.run_calls(fork_and_go_on)
    assert others == [("", 4)] * 3
    assert last[1] == 4
    assert "forked" in last[0]


def disagree(world: un.Communicator) -> tuple[str, str]:
    """Ranks 3 and 2 are ranks 0 and 1 of a subgroup, and make different calls on it. The other ranks call the world."""
    if world.rank < 2:
        return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))
    pair = world.subgroup([3, 2])
    return error_of(lambda: pair.allreduce(X if world.rank == 2 else X[:7]))


def test_mismatch_error_of_a_subgroup_names_world_ranks(fresh: Ranks) -> None:
    for kind, text in fresh.run_calls(disagree):
        assert kind == "MismatchError", text
        assert "rank 2 called allreduce(float32[8], op=sum) in ranks 3 and 2 at " in text
        assert "rank 3 called allreduce(float32[7], op=sum) in ranks 3 and 2 at " in text


def send_too_much(world: un.Communicator) -> tuple[str, str]:
    if world.rank < 2:
        return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))
    pair = world.subgroup([3, 2])
    return error_of(lambda: pair.send(X, 1, 5) if pair.rank == 0 else pair.recv(X[:3].copy(), 0, 5)) or error_of(
        pair.barrier
    )


def test_wrong_message_in_a_subgroup_names_the_world_rank_of_its_sender(fresh: Ranks) -> None:
    kind, text = fresh.run_calls(send_too_much)[2]
    assert kind == "MismatchError"
    assert "rank 2: rank 3 sent float32[8] with tag 5" in text


def call_parent_and_child(world: un.Communicator) -> tuple[str, str]:
    """Rank 3 calls the parent while rank 2 calls the child. Ranks 0 and 1 are in neither call."""
    if world.rank < 2:
        return error_of(lambda: world.barrier(timeout_s=DEADLINE_S))
    parent = world.subgroup([2, 3])
    with parent.dup() as child:
        if world.rank == 2:
            return error_of(lambda: child.barrier(timeout_s=SHORT_S))
        return error_of(lambda: parent.allreduce(X, timeout_s=DEADLINE_S))


def test_deadlock_of_parent_and_subgroup_times_out_naming_both_calls(fresh: Ranks) -> None:
    for kind, text in fresh.run_calls(call_parent_and_child):
        assert kind == "CollectiveTimeoutError", text
        assert "rank 2 waited 0.5 s in call #0 barrier() in ranks 2 and 3 at " in text
        assert "rank 3 has not called it (it is in allreduce(float32[8], op=sum) in ranks 2 and 3 at " in text
        assert "rank 0" not in text.split("[")[0]


def die_in_a_subgroup(world: un.Communicator, say: Say) -> None:
    half = world.split(world.rank % 2)
    assert half is not None
    half.barrier()
    if world.rank == 1:
        time.sleep(0.1)
        os._exit(3)
    deadline = time.monotonic() + DEADLINE_S
    error = ("", "")
    while not error[0] and time.monotonic() < deadline:
        error = error_of(lambda: half.allreduce(X))
    say((*error, error_of(world.barrier)[0]))


def test_a_death_ends_all_communicators_of_the_job(tmp_path: Path) -> None:
    with Job(die_in_a_subgroup, 4, tmp_path) as job:
        for kind, text, later in job.hear_all(but=1):
            assert (kind, later) == ("PeerLostError", "AbortedError"), text
            assert "rank 1" in text
