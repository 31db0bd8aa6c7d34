"""Small messages run in the native core without a Python frame, and behave as all other messages do."""

from __future__ import annotations

import sys
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.ranks import Ranks, ranks_fixture

import unisono as un

pytestmark = pytest.mark.timeout(120)

DTYPES = ("bool", "int8", "uint16", "int64", "float16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, "complex128")


ranks = ranks_fixture((2, "shm"), (2, "tcp"))


def frames_of(call: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Return the result of a call, and the Python functions that the call entered."""
    entered: list[str] = []
    sys.setprofile(lambda frame, event, _: entered.append(frame.f_code.co_name) if event == "call" else None)
    try:
        return call(*args, **kwargs), entered
    finally:
        sys.setprofile(None)


def opened(world: un.Communicator) -> int:
    """Open the channels between the two ranks by a message in each direction; return the other rank."""
    peer = 1 - world.rank
    world.sendrecv(np.zeros(1), peer, np.zeros(1), peer)
    return peer


# --- Python frames ---------------------------------------------------------------------------------------------------


def enter(world: un.Communicator) -> list[list[str]]:
    peer, x, out = opened(world), np.arange(3.0), np.zeros(3)
    any_source, any_tag = un.ANY_SOURCE, un.ANY_TAG
    calls = [
        lambda: world.sendrecv(x, peer, out, peer, timeout_s=30.0),
        lambda: world.send(x, peer, 5) if world.rank == 0 else world.recv(out, peer, tag=5),
        lambda: world.recv(out, any_source, any_tag) if world.rank == 0 else world.send(x, dest=peer),
    ]
    entered = [frames_of(call)[1] for call in calls]
    assert out.tolist() == x.tolist()
    return entered


def test_array_message_runs_no_python_frame_on_an_open_channel(ranks: Ranks) -> None:
    assert ranks.run_calls(enter) == [[["<lambda>"]] * 3] * 2


def enter_without_waiting(world: un.Communicator) -> bool:
    peer, out = opened(world), np.zeros(3)
    receiving, entered = frames_of(world.recv, out, peer, 4, wait=False)
    sending, also = frames_of(world.send, np.arange(3.0), peer, 4, wait=False)
    assert sending.wait() is None
    assert receiving.wait() is out
    assert receiving.message() == un.Message(peer, 4, "float64", 3)
    assert out.tolist() == [0.0, 1.0, 2.0]
    return not {"source", "target", "_peer_of"} & {*entered, *also}


def test_nonblocking_array_message_skips_the_python_checks(ranks: Ranks) -> None:
    assert ranks.run_calls(enter_without_waiting) == [True, True]


# --- messages --------------------------------------------------------------------------------------------------------


def arrays(dtype: Any) -> list[Any]:
    values = np.arange(24).astype(dtype)
    return [
        values[:0],
        values[3:4].reshape(()),
        values,
        values.reshape(4, 6),
        values.reshape(4, 6, order="F"),
        values[::5],
    ]


def every_array(world: un.Communicator) -> int:
    peer, seen = opened(world), 0
    for dtype in DTYPES:
        for x in arrays(dtype):
            out = np.zeros(x.size, dtype)
            world.sendrecv(x, peer, out, peer)
            if world.rank == 0:
                world.send(x, peer, 1)
                world.recv(out, peer, 1)
            else:
                world.recv(out, peer, 1)
                world.send(out, peer, 1)
            assert (out.view("uint8") == np.ravel(x).copy().view("uint8")).all(), (dtype, x)
            seen += 1
    return seen


def test_arrays_of_every_dtype_and_layout_arrive(ranks: Ranks) -> None:
    assert ranks.run_calls(every_array) == [6 * len(DTYPES)] * 2


def other_kinds(world: un.Communicator) -> list[int]:
    peer, out = opened(world), bytearray(4)
    numbers = np.int64(peer), np.int32(7)
    world.sendrecv(b"\1\2\3\4", peer, out, peer)
    world.sendrecv(np.arange(2).view(np.matrix), numbers[0], np.zeros(2, int), numbers[0], numbers[1], timeout_s=60)
    return list(out)


def test_message_of_an_unusual_array_takes_the_python_path(ranks: Ranks) -> None:
    assert ranks.run_calls(other_kinds) == [[1, 2, 3, 4]] * 2


def large_and_small(world: un.Communicator) -> bool:
    """Large messages keep their order, and many small ones are in flight before the peer receives any."""
    peer = opened(world)
    works = [world.send(np.full(100 if i % 5 else 300_000, float(i)), peer, i % 3, wait=False) for i in range(40)]
    for tag in (2, 0, 1):
        for i in range(tag, 40, 3):
            out = np.zeros(100 if i % 5 else 300_000)
            assert (world.recv(out, peer, tag) == i).all()
    return all(work.wait() is None for work in works)


def test_unexpected_messages_wait_in_order(ranks: Ranks) -> None:
    assert ranks.run_calls(large_and_small) == [True, True]


def from_many_threads(world: un.Communicator) -> bool:
    peer, sums = opened(world), [0.0] * 4

    def exchange(tag: int) -> None:
        out = np.zeros(10)
        for i in range(50):
            sums[tag] += float(world.sendrecv(np.full(10, float(i)), peer, out, peer, tag)[9])

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return sums == [sum(range(50))] * 4


def test_threads_may_send_and_receive_at_the_same_time(ranks: Ranks) -> None:
    assert ranks.run_calls(from_many_threads) == [True, True]


# --- refusals and failures -------------------------------------------------------------------------------------------

X, OUT = np.zeros(4), np.zeros(4)
READ_ONLY = np.zeros(4)
READ_ONLY.flags.writeable = False
WRONG: dict[str, Any] = {
    "a tag below 0": lambda world, peer: world.send(X, peer, -1),
    "a reserved tag": lambda world, peer: world.send(X, peer, 1 << 31),
    "any tag to send with": lambda world, peer: world.send(X, peer, un.ANY_TAG),
    "any rank to send to": lambda world, peer: world.send(X, un.ANY_SOURCE),
    "a rank that there is not": lambda world, peer: world.recv(OUT, 2),
    "a huge rank": lambda world, peer: world.recv(OUT, 1 << 70),
    "no rank": lambda world, peer: world.sendrecv(X, None, OUT, peer),
    "a truth for a rank": lambda world, peer: world.send(X, bool(peer)),
    "no time": lambda world, peer: world.recv(OUT, peer, timeout_s=0.0),
    "a read-only out": lambda world, peer: world.recv(READ_ONLY, peer),
    "an out with gaps": lambda world, peer: world.recv(OUT[::2], peer),
    "a dtype of objects": lambda world, peer: world.send(np.array([None]), peer),
    "another byte order": lambda world, peer: world.send(X.astype(">f8"), peer),
    "out in the memory of x": lambda world, peer: world.sendrecv(X[:3], peer, X[2:], peer),
}


def refused(world: un.Communicator) -> list[str]:
    peer, refusals = opened(world), []
    for name, call in WRONG.items():
        try:
            call(world, peer)
        except un.UsageError:
            refusals.append(name)
    opened(world)  # opens the channels; no array has been sent before
    return refusals


def test_wrong_message_call_is_refused_and_later_calls_work(ranks: Ranks) -> None:
    assert ranks.run_calls(refused) == [list(WRONG)] * 2


def error_with_operation(call: Any) -> tuple[str, str]:
    try:
        call()
    except un.UnisonoError as error:
        return type(error).__name__, f"{error.operation} {error}"
    return "", ""


def disagree(world: un.Communicator) -> list[tuple[str, str]]:
    peer = opened(world)
    x = np.zeros(3) if world.rank == 0 else np.zeros(4)
    return [
        error_with_operation(lambda: world.sendrecv(x, peer, x.copy(), peer, 6)),
        error_with_operation(lambda: world.send(x, peer)),
    ]


def time_out(world: un.Communicator) -> list[tuple[str, str]]:
    peer = opened(world)
    if world.rank == 0:
        return [
            error_with_operation(lambda: world.recv(np.zeros(3), peer, 9, timeout_s=0.1)),
            error_with_operation(lambda: world.send(X, peer)),
        ]
    return [
        error_with_operation(lambda: world.recv(np.zeros(3), peer, 9)),
        error_with_operation(lambda: world.send(X, peer)),
    ]


def close_before(world: un.Communicator) -> list[tuple[str, str]]:
    peer = opened(world)
    world.barrier()
    world.close()
    return [error_with_operation(lambda: world.send(X, peer)), error_with_operation(lambda: world.recv(OUT, peer))]


def test_mismatched_message_error_shows_both_arrays() -> None:
    for first, then in un.launch(disagree, 2):
        assert first[0] in ("MismatchError", "AbortedError")
        assert then[0] == "AbortedError"
        assert "float64[3]" in first[1] or "float64[4]" in first[1]


def test_message_timeout_aborts_the_communicator() -> None:
    late, other = un.launch(time_out, 2)
    assert late[0][0] == "CollectiveTimeoutError"
    assert late[0][1].startswith("recv(float64[3], source=1, tag=9)")
    assert [kind for kind, _ in (late[1], other[1])] == ["AbortedError"] * 2
    assert other[0][0] == "CollectiveTimeoutError"


def test_closed_communicator_refuses_messages() -> None:
    for outcomes in un.launch(close_before, 2):
        assert [kind for kind, _ in outcomes] == ["UsageError"] * 2


def in_a_group(world: un.Communicator) -> list[float]:
    peer, out = opened(world), np.zeros(2)
    with world.group():
        works = [world.send(np.full(2, 3.0), peer), world.recv(out, peer)]
        assert not out.any()
    assert [work.result() is out for work in works] == [False, True]
    opened(world)
    return out.tolist()


def test_grouped_messages_run_when_the_group_ends(ranks: Ranks) -> None:
    assert ranks.run_calls(in_a_group) == [[3.0, 3.0]] * 2
