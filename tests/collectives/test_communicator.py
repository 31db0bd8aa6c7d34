"""The public calls on real ranks: their results and messages, and wrong calls, after which the ranks still work."""

from __future__ import annotations

import inspect
import os
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from support.covering import pairwise
from support.deadlines import DEADLINE_S
from support.harness import message_algorithms
from support.ranks import Ranks, ranks_fixture, start_ranks

import unisono as un

ALLREDUCES = message_algorithms("allreduce")
bounded = settings(max_examples=20, deadline=None, derandomize=True)


ranks = ranks_fixture((1, "shm"), (2, "shm"), (2, "tcp"), (4, "shm"), (4, "tcp"))


four = ranks_fixture((4, "shm"), (4, "tcp"))


# --- allreduce -----------------------------------------------------------------------------------------------------


def array_of(rank: int, shape: tuple[int, ...], dtype: str, layout: str) -> Any:
    """Return small whole numbers that differ by rank and position, in one of the memory layouts."""
    values = np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 7 + rank).astype(dtype)
    if layout == "F":
        return np.array(values, order="F")
    if layout == "strided":
        wide = np.zeros((*shape, 2), dtype)
        wide[..., 0] = values
        return wide[..., 0]
    return values


def sum_out_of_place(world: un.Communicator, shape: tuple[int, ...], dtype: str, layout: str) -> Any:
    x = array_of(world.rank, shape, dtype, layout)
    before = x.copy()
    y = world.allreduce(x)
    assert x.tobytes() == before.tobytes()
    assert y is not x
    assert isinstance(y, np.ndarray)
    return y, y.flags.f_contiguous


@bounded
@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(["int8", "uint64", "float16", "bfloat16", "float32", "float64"]),
    layout=st.sampled_from(["C", "F", "strided"]),
)
def test_allreduce_accepts_every_shape_and_layout(
    ranks: Ranks, shape: tuple[int, ...], dtype: str, layout: str
) -> None:
    expected = sum(array_of(rank, shape, "float64", "C") for rank in range(ranks.size))
    for result, is_f_contiguous in ranks.run_calls(sum_out_of_place, shape, dtype, layout):
        assert (result.shape, result.dtype) == (shape, np.dtype(dtype))
        assert np.array_equal(result.astype("float64"), expected)
        assert is_f_contiguous or layout != "F"


def sum_in_place(world: un.Communicator, order: Any) -> Any:
    x = np.full((3, 4), world.rank + 1.0, order=order)
    out = np.zeros((3, 4), order=order)
    assert world.allreduce(x, out=out) is out
    assert x[0, 0] == world.rank + 1.0
    assert world.allreduce(x, "max", out=x) is x
    return float(out[2, 3]), float(x[2, 3]), bool((out == out[0, 0]).all() and (x == x[0, 0]).all())


@pytest.mark.parametrize("order", ["C", "F"])
def test_allreduce_writes_to_out_and_in_place(ranks: Ranks, order: str) -> None:
    total = ranks.size * (ranks.size + 1) / 2
    assert ranks.run_calls(sum_in_place, order) == [(total, float(ranks.size), True)] * ranks.size


def every_op(world: un.Communicator, algorithm: str | None) -> list[float]:
    x = np.array([world.rank + 1], np.float32)
    return [float(world.allreduce(x, op, algorithm=algorithm)[0]) for op in ("sum", "prod", "min", "max", "avg")]


@pytest.mark.parametrize("algorithm", [None, *ALLREDUCES])
def test_allreduce_gives_every_op_by_every_algorithm(ranks: Ranks, algorithm: str | None) -> None:
    values = np.arange(ranks.size) + 1.0
    expected = [values.sum(), values.prod(), 1.0, float(ranks.size), values.mean()]
    assert ranks.run_calls(every_op, algorithm) == [expected] * ranks.size


def sum_of_many(world: un.Communicator, count: int) -> bool:
    x = np.full(count, 1, "float32")
    world.allreduce(x, out=x)
    return bool((x == world.size).all())


def test_sixteen_ranks_on_few_cores_give_right_sums() -> None:
    with start_ranks(16, "shm") as ranks:
        for count in (1, 256, 100_000):
            assert ranks.run_calls(sum_of_many, count) == [True] * 16


# --- broadcast and barrier -----------------------------------------------------------------------------------------


def broadcast_from(world: un.Communicator, root: int, dtype: str, count: int) -> tuple[Any, Any]:
    x = np.full(count, world.rank + 1).astype(dtype)
    before = x.copy()
    y = world.broadcast(x, root)
    assert x.tobytes() == before.tobytes()
    assert world.broadcast(x, root, out=x) is x
    return y, x


def test_broadcast_from_every_root(ranks: Ranks) -> None:
    dtypes = ["bool", "float8_e5m2", "complex128", "bfloat16", "int16"]
    for dtype, count, root in pairwise(dtypes, [0, 1, 70_001], range(ranks.size)):
        expected = np.full(count, root + 1).astype(dtype)
        for pair in ranks.run_calls(broadcast_from, root, dtype, count):
            assert [result.tobytes() for result in pair] == [expected.tobytes()] * 2


def broadcast_strided(world: un.Communicator) -> Any:
    x = np.arange(12.0).reshape(3, 4)[:, ::2] * (world.rank + 1)
    return world.broadcast(x, world.size - 1)


def test_broadcast_of_a_strided_view(ranks: Ranks) -> None:
    for result in ranks.run_calls(broadcast_strided):
        assert result.tolist() == (np.arange(12.0).reshape(3, 4)[:, ::2] * ranks.size).tolist()


def barrier_times(world: un.Communicator) -> tuple[float, float]:
    time.sleep(0.02 * world.rank)
    began = time.monotonic()
    world.barrier()
    return began, time.monotonic()


def test_no_rank_leaves_a_barrier_before_the_last_enters(ranks: Ranks) -> None:
    spans = ranks.run_calls(barrier_times)
    assert max(began for began, _ in spans) <= min(ended for _, ended in spans)


# --- messages ------------------------------------------------------------------------------------------------------


def out_of_order(world: un.Communicator) -> list[float]:
    last, results = world.size - 1, []
    if world.rank == 0:
        for tag, value in ((5, 1.0), (6, 2.0), (5, 3.0), (0, 4.0)):
            world.send(np.full(3, value), last, tag)
    elif world.rank == last:
        results = [float(world.recv(np.zeros(3), 0, tag)[2]) for tag in (6, 0, 5, 5)]
    return results


def test_messages_are_received_by_tag_and_in_order(four: Ranks) -> None:
    assert four.run_calls(out_of_order)[-1] == [2.0, 4.0, 1.0, 3.0]


def to_and_fro(world: un.Communicator, count: int) -> bool:
    """Even ranks send first, and odd ranks receive first. Then they do it the other way round."""
    other = world.rank ^ 1
    mine = np.full(count, world.rank, "uint8")
    theirs = np.full(count, 255, "uint8")
    if world.rank % 2 == 0:
        world.send(mine, other)
        world.recv(theirs, other)
    else:
        world.recv(theirs, other)
        world.send(mine, other)
    return bool((theirs == other).all())


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 8 << 20])
def test_messages_of_any_length_travel_in_both_directions(four: Ranks, count: int) -> None:
    assert four.run_calls(to_and_fro, count) == [True] * 4


def send_strided(world: un.Communicator) -> list[float]:
    if world.rank == 0:
        world.send(np.arange(10.0)[::3], 1)
    return world.recv(np.zeros((2, 2), order="F"), 0).ravel().tolist() if world.rank == 1 else []


def test_a_strided_array_is_packed_to_be_sent(four: Ranks) -> None:
    assert four.run_calls(send_strided)[1] == [0.0, 3.0, 6.0, 9.0]


def receive_while_reducing(world: un.Communicator) -> tuple[float, list[float]]:
    """One thread waits for a message of the next rank.

    That rank sends it only after many allreduces in its other threads.
    """
    received = np.zeros(4)
    thread = threading.Thread(target=lambda: world.recv(received, (world.rank + 1) % world.size, 9))
    thread.start()
    x = np.ones(1000)
    for _ in range(50):
        x = world.allreduce(x, "avg")
    world.send(np.full(4, float(world.rank)), (world.rank - 1) % world.size, 9)
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    return float(x.sum()), received.tolist()


def test_one_thread_may_receive_while_another_reduces(four: Ranks) -> None:
    results = four.run_calls(receive_while_reducing)
    assert results == [(1000.0, [float((rank + 1) % 4)] * 4) for rank in range(4)]


# --- traffic -------------------------------------------------------------------------------------------------------


# A round is short, so that the machine rarely interrupts a rank in it. There are many rounds, because at least one must
# be free of interruptions.
CALLS, MOST_ROUNDS = 5, 150


def traffic_of(world: un.Communicator, algorithm: str) -> tuple[list[tuple[int, int]], list[int], set[str]]:
    """Return the traffic of this rank in rounds of calls. In the last round, no rank sends a control frame.

    Returns:
        The messages and bytes of each round, the number of control frames of each round, and the transports.
    """
    x = np.ones(1000, np.float32)
    world.allreduce(x, algorithm=algorithm)
    control = world._executor._session.control  # type: ignore[attr-defined]
    sent: list[tuple[int, int]] = []
    frames: list[int] = []
    most = 1
    while most > 0 and len(frames) < MOST_ROUNDS:
        before, frames_before = totals(world), control.frames_sent()
        for _ in range(CALLS):
            world.allreduce(x, algorithm=algorithm)
        frames.append(control.frames_sent() - frames_before)
        after = totals(world)
        sent.append((after[0] - before[0], after[1] - before[1]))
        most = int(world.allreduce(np.array(frames[-1]), "max"))
    return sent, frames, {traffic.transport for traffic in world.stats().values()}


def totals(world: un.Communicator) -> tuple[int, int]:
    peers = world.stats().values()
    return sum(peer.sent_messages for peer in peers), sum(peer.sent_nbytes for peer in peers)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("algorithm", "messages", "nbytes"),
    [("ring", 2 * 3, 2 * 3 * 1000), ("recursive_doubling", 2, 2 * 4000), ("direct", 3, 3 * 4000)],
)
def test_traffic_of_allreduce_matches_its_plan(transport: str, algorithm: str, messages: int, nbytes: int) -> None:
    with start_ranks(4, transport) as ranks:
        reports = ranks.run_calls(traffic_of, algorithm)
    for sent, frames, transports in reports:
        assert sent == [(CALLS * messages, CALLS * nbytes)] * len(frames)
        assert transports == {transport}
        # A rank that the machine holds up for 10 ms sends a control frame. In at least one round, no rank may do so.
        assert min(frames) == 0, frames


# --- wrong calls ---------------------------------------------------------------------------------------------------


MEMORY = np.zeros(8)
X = np.ones(4)
READ_ONLY = np.frombuffer(bytes(32))


def neighbour(world: un.Communicator) -> int:
    return (world.rank + 1) % world.size


WRONG = {
    "a list": lambda world: world.allreduce([1.0]),
    "a number": lambda world: world.allreduce(1.0),
    "objects": lambda world: world.allreduce(np.array([None])),
    "a structure with objects": lambda world: world.broadcast(np.zeros(2, [("a", "i4"), ("b", object)])),
    "another byte order": lambda world: world.allreduce(np.ones(4, ">f8")),
    "a mask": lambda world: world.allreduce(np.ma.masked_array(X, [True] * 4)),
    "a read-only out": lambda world: world.allreduce(X, out=READ_ONLY),
    "a read-only array in place": lambda world: world.broadcast(READ_ONLY, out=READ_ONLY),
    "an out that is not contiguous": lambda world: world.allreduce(X, out=MEMORY[::2]),
    "an out of another dtype": lambda world: world.allreduce(X, out=np.zeros(4, "float32")),
    "an out of another shape": lambda world: world.allreduce(X, out=np.zeros((2, 2))),
    "an out of another order": lambda world: world.allreduce(np.ones((2, 3)), out=np.zeros((2, 3), order="F")),
    "an out that overlaps": lambda world: world.allreduce(MEMORY[:4], out=MEMORY[2:6]),
    "an operation that does not exist": lambda world: world.allreduce(X, "mean"),
    "an operation that is no name": lambda world: world.allreduce(X, 3),
    "an operation in a list": lambda world: world.allreduce(X, ["sum"]),
    "an algorithm in a list": lambda world: world.allreduce(X, algorithm=["ring"]),
    "an operation that is not defined for the type": lambda world: world.allreduce(np.ones(2, "complex64"), "min"),
    "a factor that is no integer": lambda world: world.allreduce(np.ones(2, int), un.Op.premul_sum(0.5)),
    "a factor out of range": lambda world: world.allreduce(np.ones(2, "int8"), un.Op.premul_sum(200)),
    "an algorithm that does not exist": lambda world: world.allreduce(X, algorithm="rign"),
    "a root that does not exist": lambda world: world.broadcast(X, world.size),
    "a negative root": lambda world: world.broadcast(X, -1),
    "a root that is no number": lambda world: world.broadcast(X, "0"),
    "a timeout of nothing": lambda world: world.allreduce(X, timeout_s=0),
    "a timeout that is no number": lambda world: world.barrier(timeout_s="soon"),
    "a timeout of NaN": lambda world: world.barrier(timeout_s=float("nan")),
    "a destination that does not exist": lambda world: world.send(X, world.size),
    "a negative tag": lambda world: world.send(X, neighbour(world), -1),
    "a tag that is too large": lambda world: world.recv(X, neighbour(world), 1 << 31),
    "a wrong timeout of a send": lambda world: world.send(X, neighbour(world), timeout_s=-1),
    "a wrong timeout of a receive": lambda world: world.recv(X, neighbour(world), timeout_s=-1),
    "a receive into memory that is not contiguous": lambda world: world.recv(MEMORY[::2], neighbour(world)),
}
OF_THE_TUNER = {"an algorithm that does not exist"}


def err_then_go_on(world: un.Communicator, what: str) -> tuple[str, int, float]:
    """The last rank makes a wrong call while the others reduce. Then it reduces as well, and all ranks get the sum."""
    kind, sent = "", totals(world)
    if world.rank == world.size - 1:
        try:
            WRONG[what](world)
        except un.UnisonoError as error:
            kind = type(error).__name__
    unsent = totals(world) == sent
    return kind, unsent, float(world.allreduce(np.ones(4, ml_dtypes.bfloat16))[3])


@pytest.mark.parametrize("what", WRONG)
def test_wrong_call_is_refused_locally_and_later_calls_work(four: Ranks, what: str) -> None:
    *others, last = four.run_calls(err_then_go_on, what)
    assert others == [("", True, 4.0)] * 3
    assert last == ("NoAlgorithmError" if what in OF_THE_TUNER else "UsageError", True, 4.0)


def use_when_closed(world: un.Communicator) -> list[str]:
    world.barrier()
    world.close()
    world.close()
    calls = [
        lambda: world.allreduce(X),
        lambda: world.broadcast(X),
        world.barrier,
        lambda: world.send(X, neighbour(world)),
        lambda: world.recv(X.copy(), neighbour(world)),
    ]
    errors = []
    for call in calls:
        with pytest.raises(un.UsageError) as caught:
            call()
        errors.append(caught.value.message)
    return errors


def test_a_closed_communicator_refuses_every_call() -> None:
    with start_ranks(2, "shm") as ranks:
        for errors in ranks.run_calls(use_when_closed):
            assert all("is closed" in text for text in errors)


def fork_and_go_on(world: un.Communicator) -> tuple[str, float]:
    """Fork a child of the last rank. A call of the child is refused and the child ends; then all ranks reduce."""
    output = ""
    if world.rank == world.size - 1:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                world.allreduce(X)
            except un.UsageError as error:
                os.write(writing, error.message.encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        with open(reading) as pipe:
            output = pipe.read()
    return output, float(world.allreduce(X)[0])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_call_in_a_forked_child_is_refused_and_the_job_goes_on(four: Ranks) -> None:
    *others, last = four.run_calls(fork_and_go_on)
    assert others == [("", 4.0)] * 3
    assert last[1] == 4.0
    assert "forked" in last[0]


def facts(world: un.Communicator) -> Any:
    explanation = world.explain("allreduce", 1 << 20)
    return world.rank, world.size, world.local_rank, world.hosts, repr(world), explanation.choice


def test_communicator_reports_rank_size_hosts_and_the_same_choice(four: Ranks) -> None:
    rows = four.run_calls(facts)
    assert [row[:3] for row in rows] == [(rank, 4, rank) for rank in range(4)]
    assert all(row[3] == ((0, 1, 2, 3),) for row in rows)
    assert rows[2][4] == "<unisono.Communicator rank 2 of 4>"
    assert len({row[5] for row in rows}) == 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ((np.ones(8, "float32"),), "nbytes must be an integer"),
        ((-1,), "nbytes must be an integer"),
        ((1e6,), "nbytes must be an integer"),
        ((8, "float23"), "dtype must be one of bool, .*not 'float23'"),
    ],
)
def test_explain_refuses_wrong_nbytes(asked: tuple[Any, ...], said: str) -> None:
    with un.init() as alone, pytest.raises(un.UsageError, match=said):
        alone.explain("allreduce", *asked)


def broadcast_from_a_numpy_integer(world: un.Communicator) -> float:
    return float(world.broadcast(np.full(3, world.rank, "float32"), np.int64(1))[0])


def test_a_root_may_be_an_integer_of_numpy() -> None:
    with start_ranks(2, "shm") as ranks:
        assert ranks.run_calls(broadcast_from_a_numpy_integer) == [1.0, 1.0]


def reduce_many_shapes(world: un.Communicator) -> bool:
    return all(world.allreduce(np.ones(n, "uint8"))[0] == world.size for n in range(1, 4200))


@pytest.mark.night
def test_calls_with_ever_new_shapes_keep_working() -> None:
    with start_ranks(2, "shm") as ranks:
        assert all(ranks.run_calls(reduce_many_shapes))


# --- methods that run in the core -----------------------------------------------------------------------------------


def call_in_many_ways(world: un.Communicator) -> list[float]:
    """Make one call twice, with its arguments passed in each way that Python has.

    The second call hits the call cache.
    """
    x, out = np.full(3, world.rank + 1.0), np.empty(3)
    by_class, bound = type(world).allreduce, world.allreduce
    ways: list[Any] = [
        lambda: world.allreduce(x, "max", out=out),
        lambda: world.allreduce(x, op="max", out=out),
        lambda: world.allreduce(out=out, op="max", x=x),
        lambda: world.allreduce(x, "max", out=out, wait=True, reproducible=False, accumulate=None, algorithm=None),
        lambda: world.allreduce(x, "max", out=out, timeout_s=30.0),
        lambda: world.allreduce(x, "max", out=out, timeout_s=30),
        lambda: world.allreduce(*(x, "max"), **{"out": out}),
        lambda: by_class(world, x, "max", out=out),
        lambda: bound(x, "max", out=out),
        lambda: world.allreduce(x, "max", out=out, wait=False).wait(),
        lambda: world.allreduce(x, "max", out=out, reproducible=True),
    ]
    results = []
    for way in ways * 2:
        out[:] = 0
        assert way() is out
        results.append(float(out[2]))
    return results


def test_cached_call_accepts_arguments_by_position_and_by_name(ranks: Ranks) -> None:
    assert ranks.run_calls(call_in_many_ways) == [[float(ranks.size)] * 22] * ranks.size


def refused(world: un.Communicator) -> list[str]:
    x = np.ones(3)
    world.allreduce(x, out=x)
    calls: list[Any] = [
        world.allreduce,
        lambda: world.allreduce(x, "sum", x),
        lambda: world.allreduce(x, output=x),
        lambda: world.allreduce(x, x=x),
        lambda: world.barrier(x),
        lambda: world.allreduce(x, out=x, timeout_s="soon"),
    ]
    texts = []
    for call in calls:
        with pytest.raises((TypeError, un.UsageError)) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def test_wrong_arguments_raise_the_errors_of_python(ranks: Ranks) -> None:
    for missing, many, unknown, twice, barrier, limit in ranks.run_calls(refused):
        assert "missing 1 required positional argument: 'x'" in missing
        assert "takes from 2 to 3 positional arguments" in many
        assert "has no argument 'output'; did you mean out?" in unknown
        assert "multiple values for argument 'x'" in twice
        assert "takes 1 positional argument" in barrier
        assert "timeout_s" in limit


def test_cached_methods_keep_signature_name_and_docstring() -> None:
    method = un.Communicator.allreduce
    assert list(inspect.signature(method).parameters)[:4] == ["self", "x", "op", "out"]
    assert method.__name__ == "allreduce"
    assert (method.__doc__ or "").startswith("Combine the arrays of all ranks")
    assert inspect.isroutine(method)
    assert not hasattr(method, "no_such_attribute")
