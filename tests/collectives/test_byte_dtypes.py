"""Dates, durations, texts and structures, which calls move as bytes: random dtypes, mismatches and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.deadlines import DEADLINE_S
from support.outcomes import error_of
from support.ranks import LocalRanks, Ranks, ranks_fixture

import unisono as un
from unisono.collectives.arrays import operands
from unisono.dtypes import DType, itemsize_of
from unisono.operations import OPERATIONS
from unisono.transports.contracts.byte_dtypes import byte_dtype, byte_dtype_of
from unisono.transports.contracts.call import Extent

SIZE = 3
BYTES_BIT = 1 << 30
three = ranks_fixture((SIZE, "shm"), (SIZE, "tcp"))
two = ranks_fixture((2, "generic"), (2, "shm"), (2, "tcp"), scope="function")
natives = ranks_fixture((2, "shm"), (2, "tcp"), scope="function")

DTYPES: dict[str, Any] = {
    "dates": "datetime64[s]",
    "dates of another unit": "datetime64[25us]",
    "dates without a unit": "datetime64",
    "durations": "timedelta64[ms]",
    "bytes": "S5",
    "one byte": "S1",
    "text": "U3",
    "void": "V11",
    "a packed structure": [("a", "i1"), ("b", "f8")],
    "an aligned structure": np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2")], align=True),
    "a nested structure": [("a", [("x", "datetime64[D]"), ("y", ">c16")], (2, 3)), ("größe in m", "U2")],
    "fields that overlap": {"names": ["a", "b"], "formats": ["u4", "u2"], "offsets": [0, 2], "itemsize": 9},
    "no fields but a size": {"names": [], "formats": [], "itemsize": 3},
    "a record": (np.record, [("a", "i4")]),
    "long": [(f"field_{number}", "f4") for number in range(50)],
}


def values(dtype: Any, shape: Any, seed: int) -> Any:
    """Return an array of random bytes."""
    element = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * element.itemsize
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).view(element).reshape(shape)


def joined(parts: Any) -> Any:
    """Return the arrays after each other, in their dtype; numpy would pack the fields of a structure."""
    result = np.empty((sum(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    at = 0
    for part in parts:
        result[at : at + len(part)] = part
        at += len(part)
    return result


def used(element: np.dtype[Any]) -> Any:
    """Return which bytes of an element are no padding, which numpy does not copy."""
    if element.subdtype is not None:
        base, shape = element.subdtype
        return np.tile(used(base), int(np.prod(shape)))
    if element.fields is None:
        return np.full(element.itemsize, element.names is None)
    mask = np.zeros(element.itemsize, bool)
    for field, offset, *_ in element.fields.values():
        mask[offset : offset + field.itemsize] |= used(field)
    return mask


def same(one: Any, other: Any) -> bool:
    """Return whether two arrays have one dtype and shape, and elements of equal bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows = [
        np.ascontiguousarray(each).reshape(-1).view(np.uint8).reshape(-1, one.dtype.itemsize) for each in (one, other)
    ]
    return np.array_equal(*(each[:, used(one.dtype)] for each in rows))


# --- all calls that move ---------------------------------------------------------------------------------------------


def move(world: un.Communicator, dtype: Any, rows: int, seed: int) -> None:
    """Make each call that moves arrays, with `rows` rows for each rank."""
    size, rank = world.size, world.rank
    parts = [values(dtype, (rows * size, 2), seed + each) for each in range(size)]
    x, everything = parts[rank], joined(parts)
    own, root = slice(rank * rows, (rank + 1) * rows), seed % size
    assert same(world.broadcast(x.copy(), root=root), parts[root])
    assert same(world.broadcast(np.asfortranarray(x), root=root), parts[root])
    assert same(world.allgather(x), everything)
    assert same(world.allgather(x, out=np.empty_like(everything)), everything)
    gathered = world.gather(x, root=root)
    assert same(gathered, everything) if rank == root else gathered is None
    assert same(world.scatter(x, root=root, out=np.empty_like(x[own])), parts[root][own])
    expected = joined([part[own] for part in parts])
    assert same(world.alltoall(x), expected)
    assert same(world.alltoall(np.repeat(x, 2, axis=1)[:, ::2]), expected)
    move_unequal(world, parts, rows)
    move_in_messages(world, parts)
    plan = world.plan("allgather", x)
    assert same(plan(), everything)
    assert same(plan(), everything)
    with world.group():
        both = [world.broadcast(x.copy(), root=each, wait=False) for each in range(2)]
    assert all(same(work.wait(), parts[each]) for each, work in enumerate(both))


def move_unequal(world: un.Communicator, parts: list[Any], rows: int) -> None:
    """Make the calls with counts: rank r has r + `rows` rows."""
    size, rank = world.size, world.rank
    counts = [each + rows for each in range(size)]
    wide = [joined([part] * 3 + [values(part.dtype, (size, 2), 1)]) for part in parts]
    shares = [part[:count] for part, count in zip(wide, counts, strict=True)]
    assert same(world.allgatherv(shares[rank], counts), joined(shares))
    gathered = world.gatherv(shares[rank], counts, root=0)
    assert same(gathered, joined(shares)) if rank == 0 else gathered is None
    scattered = world.scatterv(joined(shares), counts, root=0, out=np.empty_like(shares[rank]))
    assert same(scattered, joined(shares)[sum(counts[:rank]) :][: counts[rank]])
    received = world.alltoallv(wide[rank][: sum(counts)], counts, [counts[rank]] * size)
    first = sum(counts[:rank])
    assert same(received, joined([part[first : first + counts[rank]] for part in wide]))


def move_in_messages(world: un.Communicator, parts: list[Any]) -> None:
    size, rank = world.size, world.rank
    right, left = (rank + 1) % size, (rank - 1) % size
    x, out = parts[rank], np.empty_like(parts[rank])
    assert same(world.sendrecv(x, right, out, left), parts[left])
    sent = world.send(x[:, ::-1], right, tag=1, wait=False)
    assert same(world.recv(np.empty_like(x), left, tag=1), parts[left][:, ::-1])
    sent.wait()
    sent = world.send(x, right, tag=2, wait=False)
    taken = world.probe(left, tag=2, take=True)
    assert taken is not None
    assert (taken.count, taken.dtype) == (x.size, operands.source(x).dtype.name)
    assert same(taken.recv(np.empty_like(x)), parts[left])
    sent.wait()
    outs = [np.empty_like(x) for _ in range(size)]
    assert all(map(same, world.alltoallw([x] * size, outs), parts))


@pytest.mark.parametrize("name", DTYPES)
def test_every_call_that_moves_takes_such_dtypes(three: Ranks, name: str) -> None:
    for rows in (0, 1, 3):
        three.run_calls(move, DTYPES[name], rows, rows)


leaves = st.one_of(
    st.sampled_from(["i4", ">i4", "?", "f2", "c16", "datetime64[ns]", "timedelta64[3h]"]),
    st.tuples(st.sampled_from("SUV"), st.integers(1, 9)).map(lambda pair: f"{pair[0]}{pair[1]}"),
)


def structures(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    fields = st.lists(st.tuples(inner, shapes), min_size=1, max_size=4)
    named = fields.map(lambda each: [(f"f{number}", *field) for number, field in enumerate(each)])
    return st.tuples(named, st.booleans()).map(lambda pair: np.dtype(pair[0], align=pair[1]))


formats = st.recursive(leaves, structures, max_leaves=5)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(dtype=structures(formats), rows=st.integers(0, 3), seed=st.integers(0, 99))
def test_random_structures_are_moved_between_ranks_as_threads(dtype: Any, rows: int, seed: int) -> None:
    LocalRanks(2, 8).run_calls(move, dtype, rows, seed)


def move_to_neighbours(world: un.Communicator, dtype: Any) -> None:
    with world.grid([world.size], periodic=True) as grid:
        parts = [values(dtype, (2, 3), rank) for rank in range(world.size)]
        left, right = parts[grid.rank - 1], parts[(grid.rank + 1) % grid.size]
        assert same(grid.neighbor_allgather(parts[grid.rank]), joined([left, right]))
        assert same(grid.neighbor_alltoall(parts[grid.rank]), joined([left[1:], right[:1]]))
        assert same(grid.neighbor_alltoallv(parts[grid.rank], [1, 1], [1, 1]), joined([left[1:], right[:1]]))
        field = values(dtype, (5, 3), grid.rank)
        own = [values(dtype, (5, 3), rank)[1:-1] for rank in range(world.size)]
        grid.halo(field, 1).exchange()
        assert same(field[0], own[grid.rank - 1][-1])
        assert same(field[-1], own[(grid.rank + 1) % grid.size][0])


def put_and_get(world: un.Communicator, dtype: Any) -> None:
    size, rank = world.size, world.rank
    parts = [values(dtype, 8, each) for each in range(size)]
    right = (rank + 1) % size
    with world.window(8, dtype) as window:
        window.fence()
        window.put(parts[rank], right)
        window.fence()
        assert same(window.array, parts[rank - 1])
        assert same(window.get(right), parts[rank])
        assert same(window.get(right, slice(6, 0, -2)), parts[rank][6:0:-2])
        assert same(window.get(right, [7, 0, 7]), parts[rank][[7, 0, 7]])
        window.fence()
        window.put(parts[right][:2], right, [3, 1])
        window.fence()
        changed = parts[rank - 1].copy()
        changed[[3, 1]] = parts[rank][:2]
        assert same(window.array, changed)
        for call in (
            lambda: window.accumulate(parts[rank][:1], right),
            lambda: window.fetch_and_op(parts[rank][0], right),
            lambda: window.get_accumulate(parts[rank][:1], right, op="replace"),
            lambda: window.compare_and_swap(parts[rank][0], parts[rank][1], right),
        ):
            kind, text = error_of(call)
            assert (kind, "is atomic: use put and get" in text) == ("UsageError", True)
        assert error_of(lambda: window.put(np.zeros(1, "f8"), right))[0] == "UsageError"
        window.fence()


@pytest.mark.parametrize("name", DTYPES)
def test_neighbours_and_windows_take_such_dtypes(three: Ranks, name: str) -> None:
    three.run_calls(move_to_neighbours, DTYPES[name])
    three.run_calls(put_and_get, DTYPES[name])


# --- disagreements ---------------------------------------------------------------------------------------------------

FIRST = [("a", "i4"), ("b", "f4")]
DIFFERENT = {
    "the unit": ("datetime64[s]", "datetime64[ms]"),
    "dates and durations": ("datetime64[s]", "timedelta64[s]"),
    "dates and integers": ("datetime64[s]", "int64"),
    "the length": ("S4", "S8"),
    "the kind of text": ("S4", "U1"),
    "the name": (FIRST, [("a", "i4"), ("c", "f4")]),
    "the order": (FIRST, [("b", "f4"), ("a", "i4")]),
    "the format": (FIRST, [("a", "u4"), ("b", "f4")]),
    "the byte order": (FIRST, [("a", ">i4"), ("b", "f4")]),
    "the offsets": (FIRST, {"names": ["a", "b"], "formats": ["i4", "f4"], "offsets": [4, 0]}),
    "the size": (FIRST, {"names": ["a", "b"], "formats": ["i4", "f4"], "itemsize": 12}),
    "the fields": (FIRST, "V8"),
    "the end of a long name": (DTYPES["long"], [*DTYPES["long"][:-1], ("field_49", "i4")]),
}


def disagree(world: un.Communicator, dtypes: tuple[Any, Any], call: str) -> Any:
    x = np.zeros(24, dtypes[world.rank])

    def make() -> None:
        if call == "allgather":
            world.allgather(x[:12])
        elif call == "window":
            world.window(x)
        elif world.rank == 0:
            world.send(x, 1)
        else:
            world.recv(x, 0)
        world.barrier()

    return error_of(make)


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_dtypes_are_a_named_mismatch_on_all_ranks(two: Ranks, what: str) -> None:
    for (kind, text), dtype in zip(two.run_calls(disagree, DIFFERENT[what], "allgather"), DIFFERENT[what], strict=True):
        assert kind == "MismatchError"
        assert operands.source(np.zeros(1, dtype)).dtype.name in text


@pytest.mark.parametrize("what", ["the unit", "dates and integers", "the size", "the end of a long name"])
def test_messages_of_different_dtypes_are_a_mismatch(two: Ranks, what: str) -> None:
    errors = two.run_calls(disagree, DIFFERENT[what], "send")
    expected = operands.source(np.zeros(1, DIFFERENT[what][1])).dtype.name
    assert errors[1][0] == "MismatchError"
    assert expected in errors[1][1]
    assert errors[0][0] in ("MismatchError", "AbortedError")


def test_windows_of_different_dtypes_are_a_mismatch(three: Ranks) -> None:
    dtypes = (*DIFFERENT["the unit"], "datetime64[s]")
    for (kind, text), dtype in zip(three.run_calls(disagree, dtypes, "window"), dtypes, strict=True):
        assert kind == "MismatchError"
        assert dtype in text  # a rank knows the names of its own dtypes


def send_an_unknown_number(world: un.Communicator, used: Any, call: str) -> Any:
    """Rank 0 sends elements of a number of no dtype, as a hostile peer may; rank 1 gets a message of `used`."""
    x = np.zeros(24, used)
    known = operands.source(x).dtype
    number = (known.code if known.code >= BYTES_BIT else BYTES_BIT) ^ 0x2A5A5A5
    unknown = DType("unknown", number, 1, "structure", "")

    def make() -> None:
        if world.rank == 0:
            world._executor.send(x.view(np.uint8), unknown, 1, 5).wait(DEADLINE_S)
        elif call == "probe":
            message = world.probe(0, 5)
            assert f"{number:#x}" in message.dtype
            assert message.count == x.nbytes
            world.recv(x, 0, 5)
        elif call == "take":
            world.probe(0, 5, take=True).recv(x)
        else:
            world.recv(x, un.ANY_SOURCE, un.ANY_TAG)
        if call != "take":  # a message that does not fit the array can still be received by another one
            world.barrier()

    return error_of(make)


@pytest.mark.parametrize("call", ["recv", "probe", "take"])
@pytest.mark.parametrize("used", ["datetime64[s]", "float64"])
def test_number_of_no_dtype_from_a_peer_is_a_named_error(natives: Ranks, used: str, call: str) -> None:
    sender, receiver = natives.run_calls(send_an_unknown_number, used, call)
    assert receiver[0] == ("UsageError" if call == "take" else "MismatchError")
    assert used in receiver[1]
    assert "unknown" in receiver[1]
    assert call == "take" or sender[0] in ("MismatchError", "AbortedError")


# --- refusals --------------------------------------------------------------------------------------------------------


def reduce_in_vain(world: un.Communicator, dtype: Any) -> list[tuple[str, str]]:
    x = values(dtype, 2 * world.size, 0)
    calls: list[Callable[[], Any]] = [
        lambda: world.reduce(x),
        lambda: world.reduce_scatter(x),
        lambda: world.scan(x),
        lambda: world.exscan(x),
        lambda: world.allreduce(x, un.Op.from_function(np.maximum)),
        lambda: un.reduce_local(x, x.copy()),
        *(lambda op=op: world.allreduce(x, op) for op in OPERATIONS),  # type: ignore[misc]
    ]
    errors = [error_of(call) for call in calls]
    world.barrier()
    return errors


@pytest.mark.parametrize(
    ("name", "advice"),
    [("dates", "int64"), ("durations", "view('int64')"), ("text", "gather them"), ("a packed structure", "each field")],
)
def test_calls_that_compute_refuse_them_before_they_send(three: Ranks, name: str, advice: str) -> None:
    for errors in three.run_calls(reduce_in_vain, DTYPES[name]):
        for kind, text in errors:
            assert kind == "UsageError"
            assert "only moved" in text
            assert advice in text or "int64" in text


REFUSED = {
    "objects": (np.zeros(1, object), "Python objects"),
    "a field of objects": (np.zeros(1, [("a", "i4"), ("b", [("c", "O")], 2)]), "Python objects"),
    "no bytes": (np.zeros(3, []), "have no bytes"),
    "an extended float": (np.zeros(1, [("a", "g")]), "extended float"),
    "dates of another byte order": (np.zeros(1, ">M8[s]"), "byte order"),
    "text of another byte order": (np.zeros(1, ">U3"), "byte order"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_dtypes_without_a_meaning_elsewhere_are_refused(what: str) -> None:
    array, why = REFUSED[what]
    for take in (operands.source, operands.target):
        with pytest.raises(un.UsageError, match=why):
            take(array)


def test_an_out_of_another_dtype_is_refused() -> None:
    x = operands.source(np.zeros(2, "datetime64[s]"))
    for dtype in ("datetime64[ms]", "int64", "V8"):
        with pytest.raises(un.UsageError, match="must be the same"):
            operands.check_fit(operands.target(np.zeros(2, dtype)), x, ((2,),))


def test_more_bytes_than_an_address_space_are_refused() -> None:
    element = operands.source(np.zeros(1, "V99")).dtype
    assert Extent.of((2, 1), element, None).elements == (198, 99)
    with pytest.raises(un.UsageError, match="more than any memory"):
        Extent.of((0, 1 << 58), element, None)


# --- names -----------------------------------------------------------------------------------------------------------


def test_equal_dtypes_have_one_name_and_number() -> None:
    fields = [("a", "<i4"), ("b", "f4")]
    one = byte_dtype(np.dtype(fields))
    assert one is byte_dtype(np.dtype((np.record, fields)))
    assert one is byte_dtype(np.dtype([(("a title", "a"), "i4"), ("b", "f4")]))
    assert one is not None
    assert one.name == "void64{a:<i4@0,b:<f4@4}"
    assert byte_dtype_of(one.code) is one
    names = (one.name, "datetime64[s]", "str96", "float16", "complex128")
    assert [itemsize_of(name) for name in names] == [8, 8, 12, 2, 16]


def test_a_dtype_of_a_peer_may_be_unknown() -> None:
    unknown = byte_dtype_of((1 << 30) + 1)
    assert (unknown.itemsize, itemsize_of(unknown.name), unknown.kind) == (1, 1, "structure")
    with pytest.raises(un.UsageError, match="no elements"):
        itemsize_of("{}")
