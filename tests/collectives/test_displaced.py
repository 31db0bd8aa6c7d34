"""Shares at displacements, counts that only the root knows, and `alltoallw`."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un
from unisono.testing.device_arrays import DoubleArray, device_double, read
from unisono.testing.device_double import GpuDouble
from unisono.transports.cuda.device import Stream

SIZE = 3
bounded = settings(max_examples=8, deadline=None, derandomize=True)


three = ranks_fixture((SIZE, "shm"), (SIZE, "tcp"))


def text_of(call: Callable[[], object]) -> str:
    with pytest.raises(un.UsageError) as caught:
        call()
    return str(caught.value)


# --- displacements -------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[list[int]], int]:
    """Return counts[s][r], the rows from rank s to rank r, the displacements to read and to write, and the columns.

    Reads may overlap. Writes lie in a random order, with gaps.
    """
    counts = [[draw(st.integers(0, 3)) for _ in range(SIZE)] for _ in range(SIZE)]
    reads = [[draw(st.integers(0, 4)) for _ in range(SIZE)] for _ in range(SIZE)]
    writes = []
    for rank in range(SIZE):
        starts, at = [0] * SIZE, draw(st.integers(0, 2))
        for source in draw(st.permutations(range(SIZE))):
            starts[source] = at
            at += counts[source][rank] + draw(st.integers(0, 2))
        writes.append(starts)
    return counts, reads, writes, draw(st.integers(0, 2))


def rows_of(rank: int, columns: int) -> Any:
    """Return 8 rows that tell the rank and the row."""
    rows = 100 * rank + np.arange(8)
    return rows[:, None].repeat(columns, axis=1) if columns else rows


def displaced(world: un.Communicator, cases: list[Any]) -> None:
    for number, (counts, reads, writes, columns) in enumerate(cases):
        me, wait = world.rank, bool(number % 2)
        made = lambda result, wait=wait: result if wait else result.wait()  # noqa: E731
        arrays = [rows_of(rank, columns) for rank in range(SIZE)]
        empty = np.full_like(np.concatenate([arrays[0]] * 4), -1)
        sent = [[arrays[s][reads[s][r] : reads[s][r] + counts[s][r]] for r in range(SIZE)] for s in range(SIZE)]

        expected, out = empty.copy(), empty.copy()
        for s in range(SIZE):
            expected[writes[me][s] : writes[me][s] + counts[s][me]] = sent[s][me]
        options = {"send_displacements": reads[me], "recv_displacements": writes[me], "wait": wait}
        got = [counts[s][me] for s in range(SIZE)]
        assert made(world.alltoallv(arrays[me], counts[me], got, out=out, **options)) is out
        np.testing.assert_array_equal(out, expected)

        # The rows for each rank from rank 0, and back to it; with and without the knowledge of the other ranks.
        for at_root in (False, True):
            root = number % SIZE
            knows = me == root or not at_root
            expected_share = sent[root][me]
            share = np.full_like(expected_share, -1)
            made(
                world.scatterv(
                    arrays[me] if me == root else None,
                    counts[root] if knows else None,
                    root,
                    displacements=reads[root] if me == root else None,
                    counts_at_root=at_root,
                    out=share,
                    wait=wait,
                )
            )
            np.testing.assert_array_equal(share, expected_share)
            to_root = [counts[s][root] for s in range(SIZE)]
            out = empty.copy()
            result = made(
                world.gatherv(
                    sent[me][root],
                    to_root if knows else None,
                    root,
                    displacements=writes[root] if me == root else None,
                    counts_at_root=at_root,
                    out=out if me == root else None,
                    wait=wait,
                )
            )
            expected = empty.copy()
            if me == root:
                for s in range(SIZE):
                    expected[writes[me][s] : writes[me][s] + counts[s][me]] = sent[s][me]
                assert result is out
            else:
                assert result is None
            np.testing.assert_array_equal(out, expected)

        # Each rank has displacements of its own.
        to_all = [counts[s][0] for s in range(SIZE)]
        out, expected = empty.copy(), empty.copy()
        for s in range(SIZE):
            expected[writes[0][s] : writes[0][s] + to_all[s]] = sent[s][0]
        if me == 1:
            world.allgatherv(sent[me][0], to_all, wait=wait, out=None) if wait else world.allgatherv(
                sent[me][0], to_all, wait=False
            ).wait()
        else:
            made(world.allgatherv(sent[me][0], to_all, displacements=writes[0], out=out, wait=wait))
            np.testing.assert_array_equal(out, expected)


@bounded
@given(cases=st.lists(layouts(), min_size=2, max_size=6))
def test_shares_lie_at_their_displacements(three: Ranks, cases: list[Any]) -> None:
    three.run_calls(displaced, cases)


def planned(world: un.Communicator, cases: list[Any]) -> None:
    """Make the calls of `displaced` twice by persistent calls, with other elements in between."""
    for number, (counts, reads, writes, columns) in enumerate(cases):
        me, root, at_root = world.rank, number % SIZE, bool(number % 2)
        x, out = rows_of(me, columns), np.full_like(np.concatenate([rows_of(0, columns)] * 4), -1)
        got, to_root, knows = [counts[s][me] for s in range(SIZE)], [counts[s][root] for s in range(SIZE)], me == root
        mine = x[: counts[me][root]]
        share, whole, gathered = x[: counts[root][me]].copy(), out.copy(), out.copy()
        by_root = {"counts_at_root": at_root, "root": root}
        calls = [
            world.plan(
                "alltoallv",
                x,
                send_counts=counts[me],
                recv_counts=got,
                send_displacements=reads[me],
                recv_displacements=writes[me],
                out=out,
            ),
            world.plan(
                "scatterv",
                x,
                counts=counts[root] if knows or not at_root else None,
                displacements=reads[root],
                out=share,
                **by_root,
            ),
            world.plan(
                "gatherv",
                mine,
                counts=to_root if knows or not at_root else None,
                displacements=writes[root],
                out=gathered,
                **by_root,
            ),
            world.plan("allgatherv", mine, counts=to_root, displacements=writes[root], out=whole),
        ]
        for again in range(2):
            x += 1000 * again
            arrays = [rows_of(rank, columns) + 1000 * again for rank in range(SIZE)]
            for call in calls:
                call() if again else call(wait=False).wait()
            exchanged, collected = np.full_like(out, -1), np.full_like(out, -1)
            for s in range(SIZE):
                exchanged[writes[me][s] : writes[me][s] + got[s]] = arrays[s][reads[s][me] : reads[s][me] + got[s]]
                collected[writes[root][s] : writes[root][s] + to_root[s]] = arrays[s][: to_root[s]]
            np.testing.assert_array_equal(out, exchanged)
            np.testing.assert_array_equal(share, arrays[root][reads[root][me] : reads[root][me] + counts[root][me]])
            np.testing.assert_array_equal(whole, collected)
            np.testing.assert_array_equal(gathered, collected if knows else np.full_like(out, -1))


@bounded
@given(cases=st.lists(layouts(), min_size=2, max_size=4))
def test_persistent_calls_take_displacements_as_methods_do(three: Ranks, cases: list[Any]) -> None:
    three.run_calls(planned, cases)


def other_arrays(world: un.Communicator) -> None:
    """Displaced shares of buffers, strided arrays and torch, in place, and without an out where none is needed."""
    me, x = world.rank, np.arange(6)
    strided = np.full((12, 2), -1)[::2]
    world.allgatherv(np.full((1, 2), me), (1, 1, 1), displacements=(4, 2, 0), out=strided)
    assert strided[:, 0].tolist() == [2, -1, 1, -1, 0, -1]
    buffer = bytearray(b"......")
    world.allgatherv(np.full(1, ord("a") + me, np.uint8), (1, 1, 1), displacements=(3, 1, 2), out=buffer)
    assert buffer == b".bca.."
    # In place: the share of this rank is in its place of out.
    out = np.full(7, -1)
    out[1 + 2 * me : 3 + 2 * me] = me
    world.allgatherv(out[1 + 2 * me : 3 + 2 * me], (2, 2, 2), displacements=(1, 3, 5), out=out)
    assert out.tolist() == [-1, 0, 0, 1, 1, 2, 2]
    result = world.alltoallv(x, (1, 1, 1), (1, 1, 1), send_displacements=(5, 0, 5))
    assert result.tolist() == [[5, 0, 5][me]] * 3
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6.0).reshape(6, 1)
    result = world.alltoallv(tensor, (2, 0, 2), [(2, 2, 2), (0, 0, 0), (2, 2, 2)][me], send_displacements=(4, 0, 0))
    assert isinstance(result, torch.Tensor)
    assert result.flatten().tolist() == [[4.0, 5.0] * 3, [], [0.0, 1.0] * 3][me]
    target = torch.zeros(4, 1)
    assert world.allgatherv(tensor[me : me + 1], (1, 1, 1), displacements=(3, 0, 1), out=target) is target
    assert target.flatten().tolist() == [1.0, 2.0, 0.0, 0.0]


def test_displacements_work_on_arrays_of_every_kind(three: Ranks) -> None:
    three.run_calls(other_arrays)


def on_gpu(world: un.Communicator) -> list[Any]:
    """Displaced shares and messages of GPU arrays, on the double of a device; ranks 0 and 1 only."""
    if world.rank == 2:
        return []
    with device_double() as gpu:
        stream = gpu.device().new_stream()
        with world.subgroup([0, 1]) as comm:
            results = on_stream(comm, gpu, stream)
        gc.collect()
        gpu.device().end_stream(stream)
    return results


def on_stream(comm: un.Communicator, gpu: GpuDouble, stream: Stream) -> list[Any]:
    def array(values: Any) -> DoubleArray:
        return DoubleArray(gpu, np.asarray(values, np.int32), stream)

    me, out, table, part, own = comm.rank, array([-1] * 8), array([[-1, -1]] * 4), array([0, 0]), array([-1] * 4)
    x = array(np.arange(6) + 10 * me)
    comm.alltoallv(x, (1, 2), [(1, 1), (2, 2)][me], send_displacements=(5, 0), recv_displacements=(5, 2), out=out)
    comm.allgatherv(array([[me, me]]), (1, 1), displacements=(3, 1), out=table)
    comm.scatterv(x if me == 0 else None, (2, 2), displacements=(4, 1) if me == 0 else None, out=part)
    exchanged = [array([0]), array([0, 0])] if me == 0 else [array([0, 0]), array([0])]
    comm.alltoallw([array([7]), array([8, 9])] if me == 0 else [array([8, 9]), array([7])], exchanged)
    receiving = comm.recv(own, me, 1, wait=False)
    comm.send(array([1, 2, 3, 4]), me, 1)
    receiving.synchronize()
    assert comm.recv(own, un.NOBODY) is own
    assert comm.send(x, un.NOBODY) is None
    assert "host memory" in text_of(lambda: comm.gatherv(x, None if me else (6, 6), counts_at_root=True))
    options = {"counts": (6, 6), "displacements": (6, 0), "out": array([0] * 12)}
    assert "GPU arrays" in text_of(lambda: comm.plan("allgatherv", x, **options))
    return [read(gpu, each).tolist() for each in (out, table, part, *exchanged, own)]


def test_displacements_and_own_messages_work_on_gpu_arrays() -> None:
    with start_ranks(SIZE, "cuda_ipc,shm") as ranks:
        zero, one, _ = ranks.run_calls(on_gpu)
    assert zero[0] == [-1, -1, 15, -1, -1, 5, -1, -1]
    assert one[0] == [-1, -1, 10, 11, -1, 0, 1, -1]
    assert zero[1] == one[1] == [[-1, -1], [1, 1], [-1, -1], [0, 0]]
    assert (zero[2], one[2]) == ([4, 5], [1, 2])
    assert zero[3:5] == [[7], [8, 9]]
    assert one[3:5] == [[8, 9], [7]]
    assert zero[5] == one[5] == [1, 2, 3, 4]


WRONG: dict[str, tuple[str, Any]] = {
    "an overlap": (
        "the block of rank 1 (rows 1 to 2) overlaps that of rank 0 (rows 2 to 3)",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(2, 1, 4), out=np.zeros(8)),
    ),
    "a share behind out": (
        "displacements[2] is 4 and counts[2] is 2, but out has 5 rows",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(0, 2, 4), out=np.zeros(5)),
    ),
    "a share behind x": (
        "send_displacements[0] is 1 and send_counts[0] is 2, but x has 2 rows",
        lambda world, x: world.alltoallv(x, (2, 0, 0), (0, 0, 0), send_displacements=(1, 0, 0)),
    ),
    "a negative displacement": (
        "displacements must be numbers of rows",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(0, -2, 4), out=np.zeros(8)),
    ),
    "too few displacements": (
        "displacements must be 3 integers",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(0, 2), out=np.zeros(8)),
    ),
    "no out": ("need an out", lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(0, 2, 4))),
    "an out of another dtype": (
        "out has dtype float32",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(4, 2, 0), out=np.zeros(8, np.float32)),
    ),
    "a read-only out": (
        "read-only",
        lambda world, x: world.allgatherv(x, (2, 2, 2), displacements=(4, 2, 0), out=np.broadcast_to(x[:1], 8)),
    ),
    "no counts": ("counts are missing", lambda world, x: world.gatherv(x)),
    "no counts at the root": (
        "counts are missing on the root",
        lambda world, x: world.gatherv(x, root=world.rank, counts_at_root=True),
    ),
    "counts elsewhere": (
        "only the root passes counts",
        lambda world, x: world.scatterv(None, (2, 2, 2), (world.rank + 1) % SIZE, counts_at_root=True, out=x),
    ),
    "an algorithm that needs counts": (
        "needs the counts on all ranks",
        lambda world, x: world.gatherv(x, None, (world.rank + 1) % SIZE, counts_at_root=True, algorithm="binomial"),
    ),
    "displacements of another persistent call": (
        "gatherv takes no send_displacements",
        lambda world, x: world.plan("gatherv", x, counts=(2, 2, 2), send_displacements=(0, 2, 4)),
    ),
    "displacements of a persistent call without counts": (
        "allreduce takes no displacements",
        lambda world, x: world.plan("allreduce", x, displacements=(0, 2, 4)),
    ),
    "displacements of a persistent message": (
        "takes no displacements",
        lambda world, x: world.plan("send", x, dest=0, displacements=(0, 2, 4)),
    ),
    "counts at the root of a persistent call that has none": (
        "allgatherv takes no counts_at_root",
        lambda world, x: world.plan("allgatherv", x, counts_at_root=True),
    ),
    "no counts of a persistent call": (
        "counts are missing on the root",
        lambda world, x: world.plan("gatherv", x, root=world.rank, counts_at_root=True),
    ),
    "an overlap in a persistent call": (
        "overlaps that of rank 0",
        lambda world, x: world.plan("allgatherv", x, counts=(2, 2, 2), displacements=(2, 1, 4), out=np.zeros(8)),
    ),
    "too few arrays": ("x must be a list of 3", lambda world, x: world.alltoallw([x], [None] * 3)),
    "no list of outs": ("out must be a list of 3", lambda world, x: world.alltoallw([x] * 3, x)),
    "half of the own exchange": (
        "pass two arrays, or None twice",
        lambda world, x: world.alltoallw([x] * 3, [None] * 3),
    ),
    "outs in one memory": (
        "in the memory of another array",
        lambda world, x: world.alltoallw([x] * 3, [x, np.zeros(2), np.zeros(2)]),
    ),
    "an own array of another shape": (
        "same dtype and number of elements",
        lambda world, x: world.alltoallw([x] * 3, [np.zeros(3), np.zeros(3), np.zeros(3)]),
    ),
}


def refused(world: un.Communicator) -> list[str]:
    before = world.stats()
    texts = [text_of(lambda call=call: call(world, np.zeros(2))) for _, call in WRONG.values()]
    assert world.stats() == before, "nothing has been sent"
    with pytest.raises(un.UsageError, match="group"), world.group():
        world.allgatherv(np.zeros(2), (2, 2, 2), displacements=(4, 2, 0), out=np.zeros(8))
    world.barrier()
    return texts


def test_wrong_displacements_and_counts_are_refused_locally(three: Ranks) -> None:
    for text, (expected, _) in zip(three.run_calls(refused)[0], WRONG.values(), strict=True):
        assert expected in text


# --- alltoallw -----------------------------------------------------------------------------------------------------

KINDS: tuple[Any, ...] = (None, "float32", "int8", "complex128", "bool", "float64")


def array_of(source: int, dest: int, kind: str | None, shape: tuple[int, ...]) -> Any:
    if kind is None:
        return None
    return (np.arange(np.prod(shape, dtype=int)) * (source + 1) + dest).astype(kind).reshape(shape)


@st.composite
def matrices(draw: st.DrawFn) -> list[list[tuple[str | None, tuple[int, ...]]]]:
    shape = st.lists(st.sampled_from((0, 1, 2, 300)), max_size=3).map(tuple)
    return [[(draw(st.sampled_from(KINDS)), draw(shape)) for _ in range(SIZE)] for _ in range(SIZE)]


def exchanged(world: un.Communicator, cases: list[Any]) -> None:
    me, posted = world.rank, []
    for number, matrix in enumerate(cases):
        order = "F" if number % 3 == 2 else "C"
        x = [array_of(me, dest, *matrix[me][dest]) for dest in range(SIZE)]
        expected = [array_of(source, me, *matrix[source][me]) for source in range(SIZE)]
        out = [None if each is None else np.zeros(each.shape, each.dtype, order=order) for each in expected]
        posted.append((world.alltoallw(x, out, wait=False) if number % 2 else world.alltoallw(x, out), out, expected))
    for result, out, expected in posted:
        for array, mine, right in zip(
            result.wait() if isinstance(result, un.Work) else result, out, expected, strict=True
        ):
            assert array is mine
            if right is not None:
                np.testing.assert_array_equal(mine, right)


@bounded
@given(cases=st.lists(matrices(), min_size=2, max_size=6))
def test_alltoallw_moves_arrays_of_their_own_dtype_and_shape(three: Ranks, cases: list[Any]) -> None:
    three.run_calls(exchanged, cases)
