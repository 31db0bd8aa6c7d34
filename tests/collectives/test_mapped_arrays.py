"""Arrays of `unisono.empty`: their properties, and calls on them, which have the same results as on other arrays."""

from __future__ import annotations

import gc
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.harness import message_algorithms
from support.ranks import Job, Ranks, ranks_fixture

import unisono as un
from unisono.dtypes import DTYPES

bounded = settings(max_examples=40, deadline=None, derandomize=True)


ranks = ranks_fixture((2, "shm"), (3, "shm"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_returns_an_aligned_zeroed_numpy_array(dtype: str) -> None:
    array = un.empty((3, 5), dtype)
    assert type(array) is np.ndarray
    assert (array.shape, array.dtype) == ((3, 5), np.dtype(dtype))
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.flags.aligned
    assert array.ctypes.data % 64 == 0
    assert not array.any()
    array[...] = 1
    assert (array == 1).all()


@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2), (), 1, (2, 3), [4, 1], np.int64(7), (np.int8(2),)])
def test_empty_accepts_the_shapes_of_numpy(shape: Any) -> None:
    assert un.empty(shape, "f4").shape == np.empty(shape, "f4").shape


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, "3", None, (2, None)])
def test_empty_refuses_a_wrong_shape(shape: Any) -> None:
    with pytest.raises(un.UsageError, match="shape"):
        un.empty(shape, "f4")


@pytest.mark.parametrize(
    ("dtype", "advice"), [(object, "astype"), ([("a", "g")], "field"), (">f4", "byte order"), ("no dtype", "dtype")]
)
def test_empty_refuses_unsupported_dtype_with_advice(dtype: Any, advice: str) -> None:
    with pytest.raises(un.UsageError, match=advice):
        un.empty(4, dtype)


@pytest.mark.parametrize("elements", [1 << 44, 1 << 61, 1 << 70])
def test_empty_raises_memory_error_when_memory_does_not_suffice(elements: int) -> None:
    with pytest.raises(MemoryError):
        un.empty(elements, "f8")


def files() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if "unisono" in name]


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("unisono-arena")


def test_memory_is_freed_with_the_last_view() -> None:
    gc.collect()
    before = mappings(), len(os.listdir("/proc/self/fd"))
    array = un.empty(1000, "f4")
    view = array[10:20].view(np.uint8)
    del array
    view[:] = 3
    assert mappings() == before[0] + 1
    del view
    assert (mappings(), len(os.listdir("/proc/self/fd"))) == before


def test_forked_child_has_its_own_copy_of_an_array_of_empty() -> None:
    array = un.empty(1000, "i4")
    array[:] = 5
    child = os.fork()
    if child == 0:
        ok = bool((array == 5).all())
        array[:] = 6
        os._exit(0 if ok and bool((array == 6).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (array == 5).all()


# --- on real ranks -------------------------------------------------------------------------------------------------


def array_in(where: str, count: int, offset: int, room: Any) -> Any:
    """Return `count` elements at `offset` in ordinary memory, in a new arena, or in an arena for all calls."""
    if where == "ordinary":
        return np.empty(count + offset, np.int32)[offset:]
    if where == "own":
        return un.empty(count + offset, np.int32)[offset:]
    return room[offset : offset + count]


_ROOMS: dict[int, Any] = {}  # the shared arena of each rank, by its rank


def contribution(rank: int, count: int) -> Any:
    return (np.arange(count, dtype=np.int32) % 1013) * (rank + 1)


def reduced_and_broadcast(
    world: un.Communicator, count: int, places: list[tuple[str, str, int, int]], algorithm: str, *, in_place: bool
) -> Any:
    where, where_out, offset, offset_out = places[world.rank]
    room = _ROOMS.setdefault(0, un.empty(2_000_000, np.int32))
    x = array_in(where, count, offset, room[:1_000_000])
    out = x if in_place else array_in(where_out, count, offset_out, room[1_000_000:])
    x[:] = contribution(world.rank, count)
    world.allreduce(x, out=out, algorithm=algorithm)
    kept = in_place or np.array_equal(x, contribution(world.rank, count))
    root = count % world.size
    copied = world.broadcast(x if world.rank == root else out, root, out=None if in_place else out)
    return out.copy() if in_place else None, copied.copy(), kept


PLACE = st.tuples(
    *[st.sampled_from(("ordinary", "own", "shared"))] * 2, st.integers(0, 5000), st.sampled_from((0, 1, 15, 16, 4097))
)
COUNTS = st.one_of(st.integers(0, 5000), st.integers(2000, 900_000))


@given(
    count=COUNTS,
    places=st.lists(PLACE, min_size=3, max_size=3),
    algorithm=st.sampled_from(message_algorithms("allreduce")),
    in_place=st.booleans(),
)
@bounded
def test_results_do_not_depend_on_arrays_being_in_arenas(
    ranks: Ranks, count: int, places: list[tuple[str, str, int, int]], algorithm: str, in_place: bool
) -> None:
    total = contribution(0, count) * (ranks.size * (ranks.size + 1) // 2)
    root = count % ranks.size
    call = partial(reduced_and_broadcast, in_place=in_place)
    for result, copied, kept in ranks.run_calls(call, count, places, algorithm):
        assert kept
        assert result is None or np.array_equal(result, total)
        assert np.array_equal(copied, total if in_place else contribution(root, count))


def exchanged(world: un.Communicator, counts: list[int], places: list[tuple[str, str, int, int]]) -> bool:
    room = un.empty(1_000_000, np.int32)
    right = True
    for count in counts:
        where, where_out, offset, offset_out = places[world.rank]
        x, out = array_in(where, count, offset, room), array_in(where_out, count, offset_out, room.copy())
        x[:] = contribution(world.rank, count)
        if world.rank == 0:
            world.send(x, 1)
            world.recv(out, 1)
        elif world.rank == 1:
            world.recv(out, 0)
            world.send(x, 0)
        right &= world.rank > 1 or np.array_equal(out, contribution(1 - world.rank, count))
    return right


@given(counts=st.lists(COUNTS, max_size=4), places=st.lists(PLACE, min_size=3, max_size=3))
@bounded
def test_messages_arrive_from_and_into_arenas(
    ranks: Ranks, counts: list[int], places: list[tuple[str, str, int, int]]
) -> None:
    assert all(ranks.run_calls(exchanged, counts, places))


def called_often(world: un.Communicator) -> tuple[int, int, int]:
    def use() -> None:
        x = un.empty(50_000, "f4")
        x[:] = 1
        for _ in range(20):
            world.allreduce(x, "max", out=x)

    use()
    before = len(os.listdir("/proc/self/fd")), files()
    for _ in range(100):
        use()
    world.barrier()
    assert (len(os.listdir("/proc/self/fd")), files()) == before
    return mappings()


def test_calls_on_many_arenas_leave_few_mappings(ranks: Ranks) -> None:
    for mapped in ranks.run_calls(called_often):
        assert mapped < 20  # far fewer mappings than arrays


def sums_while_a_rank_dies(world: un.Communicator, say: Any) -> None:
    x = un.empty(4_000_000, "f4")
    x[:] = 1
    world.allreduce(x, "max", out=x)
    say(os.getpid())
    try:
        while True:
            world.allreduce(x, "max", out=x)
    except un.UnisonoError as error:
        say(type(error).__name__)


def test_death_of_a_rank_during_reads_of_its_arena_is_peer_lost(tmp_path: Path) -> None:
    with Job(sums_while_a_rank_dies, 2, tmp_path, transports="shm") as job:
        victim = job.hear(1)
        job.hear(0)
        os.kill(victim, signal.SIGKILL)
        assert job.hear(0) == "PeerLostError"
